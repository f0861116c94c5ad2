"""Text to tokens and back, and the chat template around a conversation.

The file formats live in `dspec.checkpoints`; this module receives plain lists and strings.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import functools
import hashlib
import json
import re
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers

from dspec.errors import UserError

# Token types, numbered as in GGUF's `tokenizer.ggml.token_type`.
CONTROL = 3  # special: made by the template, never by text
USER_DEFINED = 4  # found in text before the merges
UNUSED = 5  # fills the embedding; nothing makes it

Message = Mapping[str, str]
ROLES = ('system', 'user', 'assistant')


def _smollm() -> pre_tokenizers.PreTokenizer:
  return pre_tokenizers.Sequence([
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
  ])


# How text is cut before the merges, by the name that the model file gives.
PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {'smollm': _smollm}


class Tokenizer:
  """Byte-level BPE with a chat template.

  Text never becomes a special token: `<|im_end|>` typed by a user is seven ordinary tokens. Only
  the template's own text makes special tokens. No beginning-of-sequence token is added beyond what
  the template writes. A vocabulary may lack tokens for some bytes (SmolLM2: six control characters
  and the first bytes of unassigned planes); `encode` drops those bytes, as llama.cpp does.

  Attributes:
    eos_ids: ids that end a sequence, the model's main one first.
    special_ids: ids of the special (control) tokens.
    vocab_size: number of token ids, unused ones included.
    source: where the tokenizer came from, for error messages.
  """

  def __init__(
      self,
      *,
      tokens: Sequence[str],
      merges: Sequence[str],
      token_types: Sequence[int],
      pre_tokenizer: str,
      eos_ids: Sequence[int],
      bos_id: int | None = None,
      chat_template: str | None = None,
      source: str = 'the tokenizer',
  ):
    """Builds the tokenizer.

    Args:
      tokens: token texts by id, in the byte-level alphabet of GPT-2.
      merges: the merge rules in order, each `'left right'`.
      token_types: one of GGUF's token types for each token.
      pre_tokenizer: a key of `PRE_TOKENIZERS`.
      eos_ids: ids that end a sequence, the main one first.
      bos_id: the id that templates may write as `bos_token`.
      chat_template: Jinja source, as Hugging Face tokenizers carry it.
      source: where all this came from, for error messages.

    Raises:
      UserError: on an unsupported pre-tokenizer or inconsistent lists.
    """
    if pre_tokenizer not in PRE_TOKENIZERS:
      raise UserError(
          f'{source}: pre-tokenizer {pre_tokenizer!r} is not supported; supported: '
          f'{", ".join(PRE_TOKENIZERS)}'
      )
    if len(token_types) != len(tokens):
      raise UserError(f'{source}: {len(tokens)} tokens but {len(token_types)} token types')
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
      raise UserError(f'{source}: the vocabulary holds the same token twice')
    if not eos_ids:
      raise UserError(f'{source}: no end-of-sequence token is named')
    for i in (*eos_ids, *(() if bos_id is None else (bos_id,))):
      if not 0 <= i < len(tokens):
        raise UserError(f'{source}: special token id {i} is outside the {len(tokens)} tokens')

    pairs = [tuple(merge.split(' ')) for merge in merges]
    for pair in pairs:
      if len(pair) != 2 or not {*pair, ''.join(pair)} <= vocabulary.keys():
        raise UserError(f'{source}: merge {" ".join(pair)!r} does not fit the vocabulary')
    self._tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    self._tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre_tokenizer]()
    self._tokenizer.decoder = decoders.ByteLevel()
    # Special tokens are not registered, so that no text is ever taken for one; no merge makes them.
    self._tokenizer.add_tokens([
        tokenizers.AddedToken(token, normalized=False)
        for token, kind in zip(tokens, token_types)
        if kind == USER_DEFINED
    ])

    self._tokens = tuple(tokens)
    self._template = chat_template
    self._bos_id = bos_id
    self.source = source
    self.vocab_size = len(tokens)
    self.eos_ids = tuple(eos_ids)
    self.special_ids = frozenset(i for i, kind in enumerate(token_types) if kind == CONTROL)
    self._unused_ids = frozenset(i for i, kind in enumerate(token_types) if kind == UNUSED)
    self._special_by_text = {tokens[i]: i for i in sorted(self.special_ids)}
    longest_first = sorted(self._special_by_text, key=len, reverse=True)
    # `(?!)` matches nothing, where there are no special tokens.
    self._special_pattern = re.compile(f'({"|".join(map(re.escape, longest_first)) or "(?!)"})')
    self._fingerprint = hashlib.sha256(
        json.dumps(
            [tokens, merges, list(token_types), pre_tokenizer, eos_ids, bos_id, chat_template]
        ).encode()
    ).hexdigest()

  def encode(self, text: str) -> list[int]:
    """Ids of plain text, without special tokens.

    Raises:
      UserError: if the text cannot be written as UTF-8 (it holds half of a surrogate pair).
    """
    try:
      text.encode()
    except UnicodeEncodeError as error:
      raise UserError(f'text that is not valid Unicode: {error}') from error
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
    """Text of ids; bytes that are not UTF-8 (a character cut in two) become U+FFFD.

    Args:
      ids: token ids.
      skip_special: whether special tokens are left out or written as their text.
    """
    kept = [int(i) for i in ids if not (skip_special and int(i) in self.special_ids)]
    return self._tokenizer.decode(kept, skip_special_tokens=False)

  def token(self, token_id: int) -> str:
    """The vocabulary entry of one id, in the byte-level alphabet (for messages and tables)."""
    return self._tokens[token_id]

  def render_prompt(self, messages: Sequence[Message]) -> list[int]:
    """Ids of a conversation, up to and including the header of the assistant's next turn.

    Args:
      messages: mappings with a `role` (system, user, assistant) and a `content`, oldest first.

    Raises:
      UserError: on a malformed message, or if there is no template or it refuses the messages.
    """
    if not messages:
      raise UserError('a conversation needs at least one message')
    for message in messages:
      if message.get('role') not in ROLES or not isinstance(message.get('content'), str):
        raise UserError(
            f'each message needs a role ({", ".join(ROLES)}) and a text content; got {message!r}'
        )
    # A special token's text inside a content is hidden behind a character that occurs nowhere, so
    # that every special token in the rendered text is the template's own. Around it the text is
    # tokenised in one piece: merges may cross the border between template and content.
    spare = _spare_characters((self._template or '', *(m['content'] for m in messages)))
    hidden: dict[str, str] = {}

    def hide(match: re.Match[str]) -> str:
      if match.group() not in hidden:
        hidden[match.group()] = next(spare)
      return hidden[match.group()]

    text = self._render(
        [
            {'role': m['role'], 'content': self._special_pattern.sub(hide, m['content'])}
            for m in messages
        ],
        add_generation_prompt=True,
    )
    return self._encode_template(text, {ord(mark): special for special, mark in hidden.items()})

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
    return self._fingerprint

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
          f'{self.source} has no chat template; use a chat model\'s file, one that carries '
          'tokenizer.chat_template'
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
          bos_token='' if self._bos_id is None else self._tokens[self._bos_id],
          eos_token=self._tokens[self.eos_ids[0]],
      )
    except (jinja2.TemplateError, TypeError) as error:
      raise UserError(f'{self.source}: the chat template refuses the messages: {error}') from error


def _spare_characters(texts: Sequence[str]) -> Iterator[str]:
  """Private-use characters that occur in none of the texts."""
  taken = set().union(*texts)
  return (chr(c) for c in range(0xF0000, 0xFFFFE) if chr(c) not in taken)


def _raise_template_error(message: str) -> NoReturn:
  raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
  """Jinja's own `tojson` escapes HTML, which would change the prompt."""
  return json.dumps(value, ensure_ascii=False, indent=indent)
