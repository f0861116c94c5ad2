"""Answers a prompt with a trained drafter, as it is decoded: what each round accepted, and what that was worth.

  python -m dspec.main --config=experiments/chain_loss.py --mode=generate --prompt="Why is the sky blue?"
"""

from collections.abc import Iterator, Sequence
import dataclasses
import json
import pathlib
import sys
import time
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from dspec import config as config_lib
from dspec import evaluate
from dspec import experiment
from dspec import imported
from dspec import mechanisms
from dspec import sharding
from dspec import train
from dspec.checkpoints import targets
from dspec.data import prompts as prompts_lib
from dspec.decoding import sampling
from dspec.decoding import speculative
from dspec.errors import UserError
from dspec.models import drafter as drafter_lib
from dspec.models import target as target_lib

_ACCEPTED, _PLAIN = '\033[32m', '\033[0m'  # Green: drafted and accepted. The rest is the target's own.


def run(config: ml_collections.ConfigDict, workdir: str, prompt: str, prompts_file: str) -> None:
  """Answers a prompt, or those of a file, or whatever is typed.

  Args:
    config: validated; `config.generate` says how.
    workdir: of a finished run of this config; of its arms the last one is used.
    prompt: '' for none.
    prompts_file: a `.jsonl` file, see `prompts.read_jsonl`; '' for none. Without either, a chat on the terminal.

  Raises:
    UserError: what is wrong and what to do.
  """
  if prompt and prompts_file:
    raise UserError('--prompt and --prompts_file: give one of them')
  texts = [prompt] if prompt else prompts_lib.read_jsonl(prompts_file) if prompts_file else None
  speaker = Speaker(config, pathlib.Path(workdir))
  if texts is not None:
    for text in texts:
      print(f'> {text}')
      speaker.answer([{'role': 'user', 'content': text}])
    return
  messages = []
  for text in _typed():
    messages.append({'role': 'user', 'content': text})
    messages.append({'role': 'assistant', 'content': speaker.answer(messages)})


def _typed() -> Iterator[str]:
  """Lines from the terminal, until it ends."""
  print('An empty line or Ctrl-D ends the chat.')
  while True:
    try:
      text = input('> ').strip()
    except EOFError:
      return
    if not text:
      return
    yield text


class Speaker:
  """A target and its trained drafter, ready to answer."""

  def __init__(self, config: ml_collections.ConfigDict, workdir: pathlib.Path):
    name, arm = experiment.arms(config)[-1]
    if arm.train.steps and not (workdir / 'config.json').exists():
      raise UserError(f'--workdir={workdir}: no run here; train first: the same command without --mode=generate')
    experiment.check_workdir(config, workdir)
    g, drafter_params = config.generate, train.trained_params(arm, workdir / name)
    path = targets.locate(config, config_lib.cache_dir(config))
    target_config, params, self._tokenizer = targets.load(config, path, place=sharding.place)
    imported.check(arm, target_config, params, self._tokenizer)
    dtype = jnp.dtype(g.dtype)
    self._target = target_lib.Target(target_config, dtype)
    self._target_params, self._drafter_params = sharding.put(target_lib.cast((params, drafter_params), dtype))
    self._how = sampling.Sampling(g.temperature, g.top_k, g.top_p)
    self._drafting = mechanisms.drafting(g)
    self._max_new_tokens, self._key = g.max_new_tokens, jax.random.key(config.seed)
    self._drafter = drafter_lib.Drafter(train.make_drafter_config(arm, target_config), dtype)
    block_size = g.block_size or self._fastest(config, workdir, name, path, params)
    if block_size:
      self._drafter = drafter_lib.Drafter(dataclasses.replace(self._drafter.config, block_size=block_size), dtype)
    self._compiled = {}

  def _fastest(self, config, workdir: pathlib.Path, name: str, path: pathlib.Path, params) -> int:
    """The block size that costs and the arm's acceptance make fastest for one greedy draft; 0 if they are not known."""
    report = workdir / 'report.json'
    if self._drafting != speculative.Drafting() or not report.exists():
      return 0
    [sets] = [arm['sets'] for arm in json.loads(report.read_text())['arms'] if arm['name'] == name]
    if not sets:
      return 0
    costs = experiment.costs(
        config, targets.fingerprint(path), self._target, self._target_params, self._drafter, self._drafter_params,
        params)
    return costs.best_block_size(next(iter(sets.values()))['acceptance_by_slot'])

  def answer(self, messages: Sequence[dict[str, str]], out: TextIO | None = None) -> str:
    """Streams the answer to a conversation, then a line with its figures. Returns the answer's text.

    Raises:
      UserError: when the conversation leaves no room for an answer.
    """
    out = out or sys.stdout
    prompt = self._tokenizer.render_prompt(messages)
    room = self._target.config.max_length - self._max_new_tokens - self._drafter.config.block_size
    if len(prompt) > room:
      raise UserError(
          f'the conversation has {len(prompt)} tokens; the context of {self._target.config.max_length} leaves {room}: '
          'lower --config.generate.max_new_tokens, or begin anew')
    width = evaluate.prompt_width(len(prompt), room)
    start, advance, plain = self._programs(width)
    prompts_BxP = np.zeros((1, width), np.int32)
    prompts_BxP[0, : len(prompt)] = prompt
    lengths_B = np.array([len(prompt)], np.int32)
    params = self._target_params, self._drafter_params

    begin = time.perf_counter()
    state = start(*params, prompts_BxP, lengths_B, self._key)
    printer = _Printer(self._tokenizer, out, len(prompt))
    printer.show(state)
    while not state.rows.done_B[0]:
      state = advance(*params, state)
      printer.show(state)
    seconds = time.perf_counter() - begin

    begin = time.perf_counter()
    rows = jax.block_until_ready(plain(prompts_BxP, lengths_B, np.zeros(1, np.uint32)))
    plain_seconds = time.perf_counter() - begin
    tokens = np.asarray(state.rows.tokens_BxT)[0, len(prompt) : int(state.rows.lengths_B[0])]
    reference = np.asarray(rows.tokens_BxT)[0, len(prompt) : int(rows.lengths_B[0])]
    rounds = int(state.round)
    figures = [
        f'{len(tokens)} tokens', f'{rounds} rounds',
        f'accepted length {(len(tokens) - 1) / rounds:.2f}' if rounds else 'no round',
        f'{len(tokens) / seconds:.1f} tokens/s, plain {len(reference) / plain_seconds:.1f}',
    ]
    if self._how.temperature == 0 or not self._drafting.by_rejection:
      figures.append('same tokens' if np.array_equal(tokens, reference) else 'OTHER TOKENS than plain decoding')
    print(f'\n[{"; ".join(figures)}]\n', file=out)
    return self._tokenizer.decode(tokens.tolist())

  def _programs(self, width: int) -> tuple[Any, Any, Any]:
    """Prefill, one round and plain decoding, compiled for a width of prompts, so that no time holds a compilation."""
    if width not in self._compiled:
      prompts, lengths = jax.ShapeDtypeStruct((1, width), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
      start = jax.jit(
          lambda target, drafter, prompts, lengths, key: speculative.start(
              self._target, target, self._drafter, drafter, prompts, lengths, key,
              max_new_tokens=self._max_new_tokens, how=self._how)
      )
      args = self._target_params, self._drafter_params
      start = start.lower(*args, prompts, lengths, self._key)
      shapes, start = start.out_info, start.compile()
      advance = jax.jit(
          lambda target, drafter, state: speculative.advance(
              self._target, target, self._drafter, drafter, state, how=self._how, drafting=self._drafting),
          donate_argnums=2, out_shardings=start.output_shardings,
      ).lower(*args, jax.tree.map(
          lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes, start.output_shardings))
      plain = evaluate.compile_autoregressive(
          self._target, self._target_params, batch_size=1, max_new_tokens=self._max_new_tokens, how=self._how,
          key=self._key,
      )
      self._compiled[width] = start, advance.compile(), plain.compile(width)
    return self._compiled[width]


class _Printer:
  """Writes what each round has added; accepted drafts in green on a terminal, in brackets elsewhere."""

  def __init__(self, tokenizer, out: TextIO, start: int):
    self._tokenizer, self._out, self._start = tokenizer, out, start
    self._known, self._shown = start, ''
    self._open, self._close = (_ACCEPTED, _PLAIN) if out.isatty() else ('[', ']')

  def show(self, state: speculative.State) -> None:
    tokens, length = np.asarray(state.rows.tokens_BxT)[0], int(state.rows.lengths_B[0])
    rounds = int(state.round)
    accepted = min(int(state.trace.accepted_BxR[0, rounds - 1]), length - self._known) if rounds else 0
    drafted = self._text(tokens, self._known + accepted)
    if drafted:
      self._out.write(f'{self._open}{drafted}{self._close}')
    self._out.write(self._text(tokens, length))
    self._out.flush()
    self._known = length

  def _text(self, tokens: np.ndarray, end: int) -> str:
    """Text that the tokens up to `end` add; a character that is not yet whole waits for its rest."""
    text = self._tokenizer.decode(tokens[self._start : end].tolist()).rstrip('\ufffd')
    new, self._shown = text[len(self._shown) :], text if len(text) > len(self._shown) else self._shown
    return new
