"""The rounds of speculative decoding on the way to an answer that is known already, for a fraction of its cost.

Matched drafts change no token, so that what is verified in a round is known before it: the target's own answer. It is
read once, for the features of its positions; then every round drafts a block and looks how far the answer goes along.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from dspec.decoding import autoregressive
from dspec.decoding import sampling
from dspec.decoding import speculative
from dspec.decoding import verify
from dspec.models import drafter as drafter_lib
from dspec.models import target as target_lib


@functools.partial(jax.jit, static_argnames=('target', 'drafter'))
def generate(
    target: target_lib.Target,
    target_params: Any,
    drafter: drafter_lib.Drafter,
    drafter_params: Any,
    prompts_BxP: jax.Array,
    lengths_B: jax.Array,
    answers_BxM: jax.Array,
    answer_lengths_B: jax.Array,
) -> tuple[autoregressive.Rows, speculative.Trace]:
  """What `speculative.generate` does, with one draft a round of the drafter's most probable tokens, to say these answers.

  At any temperature that the answers were drawn at. The rounds differ from those of decoding only where rounding does,
  since the target reads positions in other groups.

  Args:
    target: the target.
    target_params: its parameters.
    drafter: the drafter; `drafter.config.block_size` is the decode-time K.
    drafter_params: its parameters.
    prompts_BxP: int32, right-padded.
    lengths_B: int32, at least 1.
    answers_BxM: int32, what `autoregressive.generate` says to them, right-padded.
    answer_lengths_B: int32, at least 1; the token of an EOS included.

  Returns:
    The finished rows and the trace of their rounds.

  Raises:
    UserError: as `speculative.generate`.
  """
  (b, p), m, k = prompts_BxP.shape, answers_BxM.shape[1], drafter.config.block_size
  speculative.check_pair(target.config, drafter.config)
  autoregressive.check_length(target.config, p, m, k)
  size, eos_ids = p + m, target.config.eos_ids
  limits_B = lengths_B + answer_lengths_B
  at_BxT = jnp.arange(size)[None, :] - lengths_B[:, None]
  said_BxT = jnp.take_along_axis(answers_BxM, jnp.clip(at_BxT, 0, m - 1), 1)
  texts_BxT = jnp.where(at_BxT < 0, jnp.pad(prompts_BxP, ((0, 0), (0, m))), said_BxT)

  # What lies at or above a round's anchor is not seen in it: all features may be there from the start.
  _, _, drafter_cache = autoregressive.prefill(
      target, target_params, target_lib.init_cache(target.config, b, size), texts_BxT, limits_B,
      drafter.config.target_layers, functools.partial(speculative.write_context, drafter, drafter_params),
      drafter_lib.init_cache(drafter.config, b, size + k))
  rows = autoregressive.start_rows(prompts_BxP, lengths_B, limits_B, None, size)
  rows = autoregressive.append(rows, answers_BxM[:, 0], eos_ids)
  state = speculative.State(
      jnp.zeros((), jnp.int32), rows, (), drafter_cache, speculative.empty_trace(b, m, k),
      speculative.draft_head(target_params, drafter, drafter_params), jax.random.key(0))

  def advance(state: speculative.State) -> speculative.State:
    logits_BxSxV = speculative.propose(target_params, drafter, drafter_params, state)
    new_BxK = state.rows.lengths_B[:, None] + jnp.arange(k)[None, :]
    drafts = sampling.next_tokens(logits_BxSxV, sampling.GREEDY, state.key, state.rows.seeds_B, new_BxK[:, :-1])
    drafts = drafter_lib.token_ids(drafter_params, drafts)
    tokens = jnp.take_along_axis(texts_BxT, jnp.minimum(new_BxK, size - 1), 1)
    tokens = jnp.where(new_BxK < limits_B[:, None], tokens, -1)  # Behind the end, no draft is right.
    return speculative.end_round(state, drafts, tokens, verify.match(drafts, tokens), eos_ids)

  state = jax.lax.while_loop(lambda state: ~state.rows.done_B.all(), advance, state)
  return state.rows, state.trace
