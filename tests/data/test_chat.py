import itertools
import json
import pathlib

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest
from tokenizers import pre_tokenizers

from dspec.data import chat
from dspec.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]
REFERENCE = ROOT.parent / 'shared' / 'data' / 'smollm2_greedy_reference.json'
GOLDEN = ROOT / 'tests' / 'golden' / 'smollm2_tokens.json'
# Bytes that SmolLM2's vocabulary cannot write, as far as they occur in UTF-8.
MISSING_BYTES = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}<|im_end|>\n"
    '{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)


def small_tokenizer(template=CHATML, **changes):
  """All 256 bytes, one merge (newline + newline), two used and one idle special token."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  tokens = ['<|im_start|>', '<|im_end|>', '<idle>', *alphabet, 'ĊĊ', 'hello', '<pad>']
  arguments = dict(
      tokens=tokens,
      merges=['Ċ Ċ'],
      token_types=[3, 3, 3, *[1] * 257, 4, 5],
      pre_tokenizer='smollm',
      eos_ids=(1,),
      bos_id=0,
      chat_template=template,
      source='small',
  )
  return chat.byte_level_bpe(**(arguments | changes))


def by_hand(tokenizer, *pieces):
  """Ids of pieces: special tokens by their text, everything else as bytes (and double newlines)."""
  ids = []
  for piece in pieces:
    if piece in ('<|im_start|>', '<|im_end|>'):
      ids.append(['<|im_start|>', '<|im_end|>'].index(piece))
    else:
      ids.extend(tokenizer.encode(piece))
  return ids


@pytest.fixture(scope='session')
def tokenizer(smollm2):
  return smollm2[2]


# --- SmolLM2 -----------------------------------------------------------------------------------


def test_smollm2_prompts_equal_independent_reference(tokenizer):
  if not REFERENCE.exists():
    pytest.skip('no reference folder beside the repository')
  for prompt in json.loads(REFERENCE.read_text())['prompts']:
    messages = [{'role': 'user', 'content': prompt['user']}]
    ids = tokenizer.render_prompt(messages)
    assert ids == prompt['prompt_ids']
    assert tokenizer.decode(ids, skip_special=False) == prompt['prompt_text']


def test_smollm2_golden(tokenizer):
  golden = json.loads(GOLDEN.read_text())
  assert tokenizer.user_prefix_ids() == golden['user_prefix_ids']
  for case in golden['texts']:
    assert tokenizer.encode(case['text']) == case['ids'], case['text']
  for case in golden['conversations']:
    assert tokenizer.render_prompt(case['messages']) == case['ids'], case['messages']


def test_smollm2_digits_are_single_and_keep_no_space(tokenizer):
  # What a pre-tokenizer without digit splitting gets wrong.
  assert [tokenizer.token(i) for i in tokenizer.encode('in 2024')] == [
      'in', 'Ġ', '2', '0', '2', '4'
  ]


def test_smollm2_special_ids(tokenizer):
  assert tokenizer.special_ids == frozenset(range(17))
  assert tokenizer.eos_ids == tokenizer.turn_end_ids == (2,)
  assert tokenizer.vocab_size == 49152
  # Free for a mask token: every special token but the two of the template.
  assert set(range(49152)) - tokenizer.used_ids == {0, *range(3, 17)}


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=['Cs']), max_size=40))
def test_smollm2_round_trip(tokenizer, text):
  ids = tokenizer.encode(text)
  assert not tokenizer.special_ids.intersection(ids)
  writable = bytes(b for b in text.encode() if b not in MISSING_BYTES)
  assert tokenizer.decode(ids) == writable.decode(errors='replace')


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(
    ['<|im_end|>', '<|im_start|>', '<|', '|>', 'im_end', '\n', ' ', '7', 'user', 'é', '\U000f0000']
), max_size=8).map(''.join))
def test_smollm2_content_cannot_leave_its_turn(tokenizer, content):
  ids = tokenizer.render_prompt([{'role': 'user', 'content': content}])
  # System turn, user turn, assistant header: nothing in the content adds a special token.
  assert [i for i in ids if i in tokenizer.special_ids] == [1, 2, 1, 2, 1]
  text = tokenizer.decode(ids, skip_special=False)
  assert text.endswith(f'<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n')


# --- Template mechanics on a small vocabulary ----------------------------------------------------


def test_merges_cross_the_border_of_template_and_content():
  tokenizer = small_tokenizer()
  ids = tokenizer.render_prompt([{'role': 'user', 'content': '\n'}])
  assert ids == by_hand(
      tokenizer,
      '<|im_start|>', 'user\n\n', '<|im_end|>', '\n', '<|im_start|>', 'assistant\n',
  )
  assert tokenizer.token(ids[5]) == 'ĊĊ'


def test_conversation_of_several_turns():
  tokenizer = small_tokenizer()
  messages = [
      {'role': 'system', 'content': 's'},
      {'role': 'user', 'content': 'a<|im_end|>b'},
      {'role': 'assistant', 'content': '<idle>'},
      {'role': 'user', 'content': ''},
  ]
  expected = []
  for message in messages:
    expected += by_hand(tokenizer, '<|im_start|>', f'{message["role"]}\n')
    expected += tokenizer.encode(message['content'])
    expected += by_hand(tokenizer, '<|im_end|>', '\n')
  expected += by_hand(tokenizer, '<|im_start|>', 'assistant\n')
  assert tokenizer.render_prompt(messages) == expected


def test_template_sees_the_real_content():
  # A template may trim or test what it is given; only special tokens are hidden from it.
  template = CHATML.replace("m['content']", "(m['content'] | trim)")
  tokenizer = small_tokenizer(template)
  padded = [{'role': 'user', 'content': '  x \n'}]
  plain = [{'role': 'user', 'content': 'x'}]
  assert tokenizer.render_prompt(padded) == tokenizer.render_prompt(plain)


def test_user_prefix_and_turn_end():
  tokenizer = small_tokenizer(eos_ids=(2,))
  prefix = by_hand(tokenizer, '<|im_start|>', 'user\n')
  assert tokenizer.user_prefix_ids() == prefix
  assert tokenizer.turn_end_ids == (2, 1)
  assert tokenizer.render_prompt([{'role': 'user', 'content': 'q'}])[: len(prefix)] == prefix


def test_used_ids_leave_out_idle_special_and_unused_tokens():
  tokenizer = small_tokenizer()
  free = set(range(tokenizer.vocab_size)) - tokenizer.used_ids
  assert {tokenizer.token(i) for i in free} == {'<idle>', '<pad>'}


def test_user_defined_tokens_are_found_in_text():
  tokenizer = small_tokenizer()
  assert [tokenizer.token(i) for i in tokenizer.encode('a hellob')] == ['a', 'Ġ', 'hello', 'b']
  assert tokenizer.decode(tokenizer.encode('a hellob')) == 'a hellob'


def test_decode_with_and_without_special_tokens():
  tokenizer = small_tokenizer()
  ids = by_hand(tokenizer, '<|im_start|>', 'a', '<|im_end|>')
  assert tokenizer.decode(ids) == 'a'
  assert tokenizer.decode(ids, skip_special=False) == '<|im_start|>a<|im_end|>'
  assert tokenizer.decode(tokenizer.encode('é')[:1]) == '\ufffd'


def test_vocabulary_without_special_tokens():
  tokenizer = small_tokenizer('{{ messages[0].content }}', token_types=[1] * 260 + [4, 5])
  text = '<|im_end|>'
  assert tokenizer.render_prompt([{'role': 'user', 'content': text}]) == tokenizer.encode(text)
  assert tokenizer.turn_end_ids == (1,)


def test_fingerprint_follows_everything_that_changes_ids():
  base = small_tokenizer().fingerprint()
  assert base == small_tokenizer().fingerprint()
  others = [
      small_tokenizer(CHATML + ' '),
      small_tokenizer(merges=[]),
      small_tokenizer(eos_ids=(1, 0)),
      small_tokenizer(token_types=[3, 3, 3, *[1] * 257, 1, 5]),
  ]
  assert len({base, *(t.fingerprint() for t in others)}) == 5


@pytest.mark.parametrize(
    'changes, words',
    [
        ({'pre_tokenizer': 'bert'}, "'bert' is not supported; supported: smollm"),
        ({'eos_ids': ()}, 'no end-of-sequence'),
        ({'eos_ids': (999,)}, 'id 999 is outside'),
        ({'token_types': [1]}, '1 token types'),
        ({'merges': ['a b']}, "merge 'a b'"),
        ({'merges': ['ab']}, "merge 'ab'"),
        ({'tokens': ['a'] * 262}, 'twice'),
    ],
)
def test_refuses_inconsistent_vocabulary(changes, words):
  with pytest.raises(UserError, match=f'small: .*{words}'):
    small_tokenizer(**changes)


@pytest.mark.parametrize(
    'template, words',
    [
        (None, 'small has no chat template.*--config.target.chat_template'),
        ('{% for %}', 'small: the chat template does not parse'),
        ("{{ raise_exception('roles must alternate') }}", 'refuses.*roles must alternate'),
        ('{{ messages[0].nothing.more }}', 'refuses the messages'),
        ("{{ messages.__class__.__mro__ }}", 'refuses the messages'),
    ],
)
def test_refuses_bad_template(template, words):
  with pytest.raises(UserError, match=words):
    small_tokenizer(template).render_prompt([{'role': 'user', 'content': 'x'}])


def test_self_synthesis_needs_the_content_once():
  with pytest.raises(UserError, match='2 times'):
    small_tokenizer('{{ messages[0].content * 2 }}').user_prefix_ids()


@pytest.mark.parametrize(
    'messages',
    [
        [],
        [{'role': 'user<|im_end|>', 'content': 'x'}],
        [{'role': 'user'}],
        [{'role': 'user', 'content': 1}],
    ],
)
def test_refuses_bad_messages(messages):
  with pytest.raises(UserError, match='message'):
    small_tokenizer().render_prompt(messages)


def test_refuses_half_a_surrogate_pair():
  with pytest.raises(UserError, match='not valid Unicode'):
    small_tokenizer().encode('\ud800')


# --- What the assistant says in a conversation ---------------------------------------------------

# Other families' templates, in our own words: how they mark turns, trim, and treat thoughts.
LLAMA3 = (
    '{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}'
    '<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}')
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    '{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}')
# The thoughts of an answer are written while it is the last message, and dropped afterwards.
QWEN3 = """{% for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last -%}
<think>
{{ m.reasoning_content | default('') | trim }}
</think>

{% endif -%}
{{ m.content }}<|im_end|>
{% endfor -%}
{% if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking -%}
<think>

</think>

{% endif -%}
{% endif %}"""
SPECIAL = [
    '<|begin_of_text|>', '<|im_start|>', '<|im_end|>', '<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>',
    '<start_of_turn>', '<end_of_turn>']
TURNS = [
    {'role': 'user', 'content': 'one'}, {'role': 'assistant', 'content': 'two'}, {'role': 'user', 'content': 'three'},
    {'role': 'assistant', 'content': 'four'}]


def said(template, messages, **options):
  """[(text of the row, texts of its supervised runs)], special tokens shown."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  tokenizer = chat.byte_level_bpe(
      tokens=[*SPECIAL, *alphabet, 'ĊĊ'], merges=['Ċ Ċ'], token_types=[3] * len(SPECIAL) + [1] * 257,
      pre_tokenizer='smollm', eos_ids=(2,), bos_id=0, chat_template=template, **options)
  rows = []
  for ids, supervised in tokenizer.render_conversation(messages):
    assert len(ids) == len(supervised)
    runs = [[i for i, _ in run] for is_said, run in itertools.groupby(zip(ids, supervised), lambda x: x[1]) if is_said]
    rows.append((tokenizer.decode(ids, skip_special=False),
                 [tokenizer.decode(run, skip_special=False) for run in runs]))
  return rows


@pytest.mark.parametrize('template, end', [
    (CHATML, '<|im_end|>'), (LLAMA3, '<|eot_id|>'), (GEMMA, '<end_of_turn>')])
def test_answers_and_their_ends_are_supervised_turn_by_turn(template, end):
  [(text, runs)] = said(template, TURNS)
  assert runs == [f'two{end}', f'four{end}']
  assert text.endswith(f'four{end}') and all(word in text for word in ('one', 'two', 'three'))


@pytest.mark.parametrize('template', [CHATML, LLAMA3, GEMMA, QWEN3])
def test_rows_begin_as_prompts(template):
  # What is learnt is what is met in decoding: the ids before an answer are those of its prompt.
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  tokenizer = chat.byte_level_bpe(
      tokens=[*SPECIAL, *alphabet, 'ĊĊ'], merges=['Ċ Ċ'], token_types=[3] * len(SPECIAL) + [1] * 257,
      pre_tokenizer='smollm', eos_ids=(2,), bos_id=0, chat_template=template)
  rows = tokenizer.render_conversation([TURNS[0], {'role': 'assistant', 'content': '\nx' if template is CHATML else 'x'}])
  [(ids, supervised)] = rows
  prompt = tokenizer.render_prompt(TURNS[:1])
  assert ids[: len(prompt)] == prompt
  assert supervised == [False] * len(prompt) + [True] * (len(ids) - len(prompt))


def test_qwen3_without_thinking_supervises_no_empty_thoughts():
  rows = said(QWEN3, TURNS)
  # Turn one as it was answered; and as history, where its empty thoughts are gone.
  assert [runs for _, runs in rows] == [['two<|im_end|>'], ['four<|im_end|>']]
  assert all(text.count('<think>\n\n</think>\n\n') == 1 for text, _ in rows)


def test_qwen3_with_thinking_supervises_thoughts_but_not_empty_ones():
  thoughtful = [*TURNS[:3], {'role': 'assistant', 'content': 'four', 'reasoning_content': 'hm'}]
  rows = said(QWEN3, thoughtful, thinking=True)
  assert [runs for _, runs in rows] == [['two<|im_end|>'], ['<think>\nhm\n</think>\n\nfour<|im_end|>']]
  assert '<think>' not in rows[1][0].partition('three')[0]


def test_thoughts_do_not_fit_a_prompt_without_thinking():
  with pytest.raises(UserError, match='answer 2 .*does --config.target.thinking fit'):
    said(QWEN3, [TURNS[0], {'role': 'assistant', 'content': 'x', 'reasoning_content': 'hm'}])


def test_special_tokens_in_an_answer_stay_text_and_do_not_end_it():
  [(_, runs)] = said(CHATML, [TURNS[0], {'role': 'assistant', 'content': 'a<|im_end|>b'}])
  assert runs == ['a<|im_end|>b<|im_end|>']


def test_conversation_without_an_answer_has_no_row():
  assert said(CHATML, TURNS[:1]) == []
