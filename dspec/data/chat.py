"""Text to tokens and back, and the chat template around a conversation.

The file formats live in `dspec.checkpoints`; this module receives plain lists and strings.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import hashlib
import itertools
import json
import re
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers

from dspec.errors import UserError

# Token types, numbered as in GGUF's `tokenizer.ggml.token_type`.
NORMAL = 1
UNKNOWN = 2
CONTROL = 3  # special: made by the template, never by text
USER_DEFINED = 4  # found in text before the merges
UNUSED = 5  # fills the embedding; nothing makes it

# What a template writes where a model that may think did not: it would never say that itself.
_EMPTY_THINKING = re.compile(r'<think>\s*</think>\s*')

Message = Mapping[str, str]
ROLES = ('system', 'user', 'assistant')
_TEXTS = ('content', 'reasoning_content')  # Of a message.


def _digits() -> pre_tokenizers.PreTokenizer:
  return pre_tokenizers.Sequence([
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
  ])


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
  """Cuts as in tiktoken's cl100k_base, with runs of numbers as given."""
  pattern = (
      r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits
      + r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
  )
  return pre_tokenizers.Sequence([
      pre_tokenizers.Split(tokenizers.Regex(pattern), 'isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
  ])


@dataclasses.dataclass(frozen=True)
class _Cut:
  """How text is prepared for the merges.

  Attributes:
    pre_tokenizer: what cuts it.
    whole_words: a piece that is a token as a whole needs no merges.
    normalized: Unicode composition (NFC) comes first.
  """

  pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
  whole_words: bool = False
  normalized: bool = False


# By the name that the model file gives.
_CUTS: dict[str, _Cut] = {
    'smollm': _Cut(_digits),
    'gpt-2': _Cut(lambda: pre_tokenizers.ByteLevel(add_prefix_space=False)),
    'llama-bpe': _Cut(lambda: _words(r'\p{N}{1,3}'), whole_words=True),
    'qwen2': _Cut(lambda: _words(r'\p{N}'), normalized=True),
}


def byte_level_bpe(
    *,
    tokens: Sequence[str],
    merges: Sequence[str],
    token_types: Sequence[int],
    pre_tokenizer: str,
    eos_ids: Sequence[int],
    bos_id: int | None = None,
    chat_template: str | None = None,
    thinking: bool = False,
    source: str = 'the tokenizer',
) -> 'Tokenizer':
  """A tokenizer from lists, byte-level as GPT-2's.

  A vocabulary may lack tokens for some bytes (SmolLM2: six control characters and the first bytes of unassigned
  planes); those bytes are dropped, as llama.cpp does.

  Args:
    tokens: token texts by id, in the byte-level alphabet of GPT-2.
    merges: the merge rules in order, each `'left right'`.
    token_types: one of GGUF's token types for each token.
    pre_tokenizer: how text is cut before the merges, by llama.cpp's name for it: smollm, qwen2, ...
    eos_ids: ids that end a sequence, the main one first.
    bos_id: the id that templates may write as `bos_token`.
    chat_template: Jinja source, as Hugging Face tokenizers carry it.
    thinking: see `Tokenizer`.
    source: where all this came from, for error messages.

  Raises:
    UserError: on an unsupported pre-tokenizer or inconsistent lists.
  """
  if pre_tokenizer not in _CUTS:
    raise UserError(
        f'{source}: pre-tokenizer {pre_tokenizer!r} is not supported; supported: {", ".join(_CUTS)}'
    )
  vocabulary = _vocabulary(tokens, token_types, source)
  pairs = [tuple(merge.split(' ')) for merge in merges]
  for pair in pairs:
    if len(pair) != 2 or not {*pair, ''.join(pair)} <= vocabulary.keys():
      raise UserError(f'{source}: merge {" ".join(pair)!r} does not fit the vocabulary')
  cut = _CUTS[pre_tokenizer]
  encoder = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=cut.whole_words))
  encoder.pre_tokenizer, encoder.decoder = cut.pre_tokenizer(), decoders.ByteLevel()
  if cut.normalized:
    encoder.normalizer = normalizers.NFC()
  parts = [tokens, merges, list(token_types), pre_tokenizer, eos_ids, bos_id, chat_template]
  return _from_lists(encoder, tokens, token_types, eos_ids, bos_id, chat_template, thinking, source, parts)


def scored_bpe(
    *,
    tokens: Sequence[str],
    scores: Sequence[float],
    token_types: Sequence[int],
    eos_ids: Sequence[int],
    bos_id: int | None = None,
    chat_template: str | None = None,
    thinking: bool = False,
    source: str = 'the tokenizer',
) -> 'Tokenizer':
  """A tokenizer from the lists of a SentencePiece BPE model that puts no space before the text, as Gemma's.

  Args:
    tokens: token texts by id, spaces written as U+2581, bytes as <0x0A>.
    scores: of the tokens; of two possible merges the one with the higher score comes first.
    token_types: as for `byte_level_bpe`, and so the rest.

  Raises:
    UserError: on inconsistent lists.
  """
  vocabulary = _vocabulary(tokens, token_types, source)
  if len(scores) != len(tokens):
    raise UserError(f'{source}: {len(tokens)} tokens but {len(scores)} scores')
  merges = []
  for token, i in vocabulary.items():
    if token_types[i] == NORMAL:
      halves = ((token[:n], token[n:]) for n in range(1, len(token)))
      pairs = [(left, right) for left, right in halves if left in vocabulary and right in vocabulary]
      merges += [(-scores[i], vocabulary[left], vocabulary[right], left, right) for left, right in pairs]
  merges.sort()
  unknown = next((token for token, i in vocabulary.items() if token_types[i] == UNKNOWN), None)
  encoder = tokenizers.Tokenizer(models.BPE(
      vocab=vocabulary, merges=[merge[3:] for merge in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True))
  encoder.normalizer = normalizers.Replace(' ', '\u2581')
  encoder.decoder = decoders.Sequence([decoders.Replace('\u2581', ' '), decoders.ByteFallback(), decoders.Fuse()])
  parts = [tokens, list(scores), list(token_types), eos_ids, bos_id, chat_template]
  return _from_lists(encoder, tokens, token_types, eos_ids, bos_id, chat_template, thinking, source, parts)


def _vocabulary(tokens, token_types, source) -> dict[str, int]:
  if len(token_types) != len(tokens):
    raise UserError(f'{source}: {len(tokens)} tokens but {len(token_types)} token types')
  vocabulary = {token: i for i, token in enumerate(tokens)}
  if len(vocabulary) != len(tokens):
    raise UserError(f'{source}: the vocabulary holds the same token twice')
  return vocabulary


def _from_lists(encoder, tokens, token_types, eos_ids, bos_id, chat_template, thinking, source, parts) -> 'Tokenizer':
  # Special tokens are not registered, so that no text is ever taken for one; no merge makes them.
  encoder.add_tokens([
      tokenizers.AddedToken(token, normalized=False)
      for token, kind in zip(tokens, token_types)
      if kind == USER_DEFINED
  ])
  return Tokenizer(
      encoder,
      special={tokens[i]: i for i, kind in enumerate(token_types) if kind == CONTROL},
      unused_ids=[i for i, kind in enumerate(token_types) if kind == UNUSED],
      vocab_size=len(tokens),
      eos_ids=eos_ids,
      bos_id=bos_id,
      chat_template=chat_template,
      thinking=thinking,
      source=source,
      fingerprint=hashlib.sha256(json.dumps(parts).encode()).hexdigest(),
  )


class Tokenizer:
  """Text to ids and back, with a chat template.

  Text never becomes a special token: `<|im_end|>` typed by a user is seven ordinary tokens. Only
  the template's own text makes special tokens. No beginning-of-sequence token is added beyond what
  the template writes.

  Attributes:
    eos_ids: ids that end a sequence, the model's main one first.
    special_ids: ids of the special (control) tokens.
    vocab_size: number of token ids, unused ones included.
    source: where the tokenizer came from, for error messages.
  """

  def __init__(
      self,
      encoder: tokenizers.Tokenizer,
      *,
      special: Mapping[str, int],
      vocab_size: int,
      eos_ids: Sequence[int],
      fingerprint: str,
      unused_ids: Iterable[int] = (),
      bos_id: int | None = None,
      chat_template: str | None = None,
      thinking: bool = False,
      source: str = 'the tokenizer',
  ):
    """Wraps an encoder.

    Args:
      encoder: encodes and decodes plain text; must not know the special tokens.
      special: ids of the special tokens by their text.
      vocab_size: number of token ids.
      eos_ids: ids that end a sequence, the main one first.
      fingerprint: a hash of all that decides a conversation's ids, but for `thinking`.
      unused_ids: that nothing makes.
      bos_id: the id that templates may write as `bos_token`.
      chat_template: Jinja source, as Hugging Face tokenizers carry it.
      thinking: what templates that ask for `enable_thinking` are told.
      source: where all this came from, for error messages.

    Raises:
      UserError: if no end of a sequence is named, or an id is outside the vocabulary.
    """
    if not eos_ids:
      raise UserError(f'{source}: no end-of-sequence token is named')
    for i in (*eos_ids, *(() if bos_id is None else (bos_id,))):
      if not 0 <= i < vocab_size:
        raise UserError(f'{source}: special token id {i} is outside the {vocab_size} tokens')
    self._encoder = encoder
    self._template = chat_template
    self._options = {'enable_thinking': thinking} if 'enable_thinking' in (chat_template or '') else {}
    self._bos_id = bos_id
    self.source = source
    self.vocab_size = vocab_size
    self.eos_ids = tuple(eos_ids)
    self._special_by_text = dict(special)
    self._special_by_id = {i: text for text, i in special.items()}
    self.special_ids = frozenset(self._special_by_id)
    self._unused_ids = frozenset(unused_ids)
    longest_first = sorted(self._special_by_text, key=len, reverse=True)
    # `(?!)` matches nothing, where there are no special tokens.
    self._special_pattern = re.compile(f'({"|".join(map(re.escape, longest_first)) or "(?!)"})')
    self._fingerprint = fingerprint

  def encode(self, text: str) -> list[int]:
    """Ids of plain text, without special tokens.

    Raises:
      UserError: if the text cannot be written as UTF-8 (it holds half of a surrogate pair).
    """
    try:
      text.encode()
    except UnicodeEncodeError as error:
      raise UserError(f'text that is not valid Unicode: {error}') from error
    return self._encoder.encode(text, add_special_tokens=False).ids

  def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
    """Text of ids; bytes that are not UTF-8 (a character cut in two) become U+FFFD.

    Args:
      ids: token ids.
      skip_special: whether special tokens are left out or written as their text.
    """
    parts = []
    for is_special, run in itertools.groupby(map(int, ids), self.special_ids.__contains__):
      if not is_special:
        parts.append(list(run))
      elif not skip_special:
        parts.append(''.join(self._special_by_id[i] for i in run))
    if skip_special:  # As one text, so that a character is whole whose bytes have a special token between.
      return self._encoder.decode([i for part in parts for i in part], skip_special_tokens=False)
    return ''.join(
        part if isinstance(part, str) else self._encoder.decode(part, skip_special_tokens=False) for part in parts
    )

  def token(self, token_id: int) -> str:
    """The vocabulary entry of one id, as the vocabulary writes it (for messages and tables)."""
    return self._special_by_id.get(token_id) or self._encoder.id_to_token(token_id) or f'<{token_id}>'

  def render_prompt(self, messages: Sequence[Message]) -> list[int]:
    """Ids of a conversation, up to and including the header of the assistant's next turn.

    Args:
      messages: mappings with a `role` (system, user, assistant) and a `content`, oldest first.

    Raises:
      UserError: on a malformed message, or if there is no template or it refuses the messages.
    """
    _check_messages(messages)
    messages, shown = self._hide_special(messages)
    return self._encode_template(self._render(messages, add_generation_prompt=True), shown)

  def render_conversation(self, messages: Sequence[Message]) -> list[tuple[list[int], list[bool]]]:
    """Ids of a conversation, and which of them the assistant says: its answers and the tokens that end them.

    What stands before an answer is rendered as for a prompt, so that nothing is supervised that the target would not
    say itself: neither headers nor a think block that the template leaves empty. Templates may write earlier turns in
    another way than the one being answered (Qwen 3 drops their reasoning); a turn that does not continue the text so
    far then starts a row of its own.

    Args:
      messages: as for `render_prompt`; an answer may have a `reasoning_content`, if the template knows it.

    Returns:
      One row, seldom more: (ids, supervised), of the same length. None without an answer.

    Raises:
      UserError: as `render_prompt`; or if the template does not write an answer behind its own generation prompt.
    """
    _check_messages(messages)
    messages, shown = self._hide_special(messages)
    rows, covered = [], ''
    for i, message in enumerate(messages):
      if message['role'] != 'assistant':
        continue
      before = self._render(messages[:i], add_generation_prompt=True)
      whole = self._render(messages[: i + 1], add_generation_prompt=False)
      if not whole.startswith(before):
        raise UserError(
            f'{self.source}: the chat template writes answer {i + 1} of a conversation in another way than its '
            'generation prompt begins it; does --config.target.thinking fit the data?'
        )
      empty = _EMPTY_THINKING.match(whole, len(before))
      before = whole[: empty.end()] if empty else before
      end = self._special_pattern.search(whole, len(before))
      said = whole[len(before) : end.end() if end else len(whole)]
      if not rows or not before.startswith(covered):
        rows.append(([], []))
        covered = ''
      for text, is_said in ((before[len(covered) :], False), (said, True)):
        ids = self._encode_template(text, shown)
        rows[-1][0].extend(ids)
        rows[-1][1].extend([is_said] * len(ids))
      covered = before + said
    return rows

  def _hide_special(self, messages: Sequence[Message]) -> tuple[list[dict[str, str]], dict[int, str]]:
    """Messages without special tokens, and what the characters stand for that took their place.

    A special token's text inside a content is hidden behind a character that occurs nowhere, so that every special
    token in a rendered text is the template's own. Around it the text is tokenised in one piece: merges may cross the
    border between template and content.
    """
    texts = [m[key] for m in messages for key in _TEXTS if key in m]
    spare = _spare_characters((self._template or '', *texts))
    hidden: dict[str, str] = {}

    def hide(match: re.Match[str]) -> str:
      if match.group() not in hidden:
        hidden[match.group()] = next(spare)
      return hidden[match.group()]

    clean = [
        {'role': m['role'], **{key: self._special_pattern.sub(hide, m[key]) for key in _TEXTS if key in m}}
        for m in messages
    ]
    return clean, {ord(mark): special for special, mark in hidden.items()}

  def user_prefix_ids(self) -> list[int]:
    """Ids of the template up to where a first user's content starts, default system turn included.

    An aligned model that continues from here writes a user's prompt (arXiv 2406.08464).

    Raises:
      UserError: if there is no template, or it does not write the user's content once.
    """
    return self._encode_template(self._around_user_content[0], {})

  @property
  def turn_end_ids(self) -> tuple[int, ...]:
    """Ids that end a turn: `eos_ids`, and the special token that the template puts after content.

    Raises:
      UserError: as `user_prefix_ids`.
    """
    match = self._special_pattern.search(self._around_user_content[1])
    end = (self._special_by_text[match.group()],) if match else ()
    return tuple(dict.fromkeys(self.eos_ids + end))

  @property
  def used_ids(self) -> frozenset[int]:
    """Ids that text, the template or the end of a sequence can make.

    Left out are unused entries and special tokens that neither the template nor `eos_ids` names: a
    drafter's mask token may be one of those (a target may still emit one: check the data).
    """
    named = {*self.eos_ids, self._bos_id}
    in_template = self._special_pattern.findall(self._template or '')
    named.update(self._special_by_text[text] for text in in_template)
    idle_special = self.special_ids - named
    return frozenset(range(self.vocab_size)) - self._unused_ids - idle_special

  def fingerprint(self) -> str:
    """SHA-256 over all that decides a conversation's ids: vocabulary, merges, template, ..."""
    if not self._options:
      return self._fingerprint
    options = json.dumps([self._fingerprint, self._options])
    return hashlib.sha256(options.encode()).hexdigest()

  def _encode_template(self, text: str, shown: Mapping[int, str]) -> list[int]:
    """Encodes rendered text; `shown` maps hiding characters back to what they stand for."""
    ids = []
    for i, piece in enumerate(self._special_pattern.split(text)):
      if i % 2:  # the pattern's group: a special token
        ids.append(self._special_by_text[piece])
      else:
        ids.extend(self.encode(piece.translate(shown)))
    return ids

  @functools.cached_property
  def _around_user_content(self) -> tuple[str, str]:
    """What the template writes before and after the content of a first user's turn."""
    mark = next(_spare_characters((self._template or '',)))
    text = self._render([{'role': 'user', 'content': mark}], add_generation_prompt=False)
    if text.count(mark) != 1:
      raise UserError(
          f'{self.source}: the chat template writes a user\'s content {text.count(mark)} times, '
          'not once; prompts cannot be self-synthesised (set --config.data.prompts to a file)'
      )
    before, _, after = text.partition(mark)
    return before, after

  @functools.cached_property
  def _compiled_template(self) -> jinja2.Template:
    if self._template is None:
      raise UserError(
          f'{self.source} has no chat template; take a chat model, or give a Jinja file with '
          '--config.target.chat_template='
      )
    # The settings of Hugging Face's tokenizers, except that strftime_now is not defined: the
    # prompts of a run must not depend on its date.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.globals['raise_exception'] = _raise_template_error
    environment.filters['tojson'] = _to_json
    try:
      return environment.from_string(self._template)
    except jinja2.TemplateError as error:
      raise UserError(f'{self.source}: the chat template does not parse: {error}') from error

  def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
    template = self._compiled_template
    try:
      return template.render(
          messages=messages,
          add_generation_prompt=add_generation_prompt,
          bos_token='' if self._bos_id is None else self.token(self._bos_id),
          eos_token=self.token(self.eos_ids[0]),
          **self._options,
      )
    except (jinja2.TemplateError, TypeError) as error:
      raise UserError(f'{self.source}: the chat template refuses the messages: {error}') from error


def _check_messages(messages: Sequence[Message]) -> None:
  if not messages:
    raise UserError('a conversation needs at least one message')
  for message in messages:
    texts = message.get('content'), message.get('reasoning_content', '')
    if message.get('role') not in ROLES or not all(isinstance(text, str) for text in texts):
      raise UserError(
          f'each message needs a role ({", ".join(ROLES)}) and a text content; got {message!r}'
      )


def _spare_characters(texts: Sequence[str]) -> Iterator[str]:
  """Private-use characters that occur in none of the texts."""
  taken = set().union(*texts)
  return (chr(c) for c in range(0xF0000, 0xFFFFE) if chr(c) not in taken)


def _raise_template_error(message: str) -> NoReturn:
  raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
  """Jinja's own `tojson` escapes HTML, which would change the prompt."""
  return json.dumps(value, ensure_ascii=False, indent=indent)
