"""The parts that target and drafter are built from: projections, norms, rotary positions, gated MLP.

Matrix products take operands in `compute_dtype` and always accumulate and return float32; norms, softmax
and the residual stream stay in float32.
"""

from collections.abc import Callable, Sequence
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x, kernel, dtype):
  """`x @ kernel`, operands in `dtype`, float32 result, and the gradient in the same way."""
  x, kernel = x.astype(dtype), kernel.astype(dtype)
  if x.size == x.shape[-1] and dtype == jnp.bfloat16:
    # XLA's CPU backend takes ten times as long for one row in bfloat16 as for two.
    two = jnp.matmul(jnp.concatenate([x, x], -2), kernel, preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(two)[..., :1, :]  # Or the compiler drops the second row again.
  return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)


def _matmul_forward(x, kernel, dtype):
  return matmul(x, kernel, dtype), (x.astype(dtype), kernel)


def _matmul_backward(dtype, residuals, cotangent):
  # The default transpose multiplies a float32 cotangent with a bfloat16 operand: float32 speed on CPUs.
  x, kernel = residuals
  cotangent = cotangent.astype(dtype)
  dx = jnp.matmul(cotangent, kernel.astype(dtype).T, preferred_element_type=jnp.float32)
  dkernel = jnp.matmul(
      x.reshape(-1, x.shape[-1]).T, cotangent.reshape(-1, cotangent.shape[-1]),
      preferred_element_type=jnp.float32,
  )
  return dx, dkernel.astype(kernel.dtype)


matmul.defvjp(_matmul_forward, _matmul_backward)


def _dot_general(x, kernel, dimension_numbers, precision=None, *, dtype):
  """`dot_general` of `linen.Dense`, for `x` and results in float32."""
  del precision
  contracting, batch = dimension_numbers
  if contracting != ((x.ndim - 1,), (0,)) or batch != ((), ()) or kernel.ndim != 2:
    raise NotImplementedError(f'only (..., in) @ (in, out) is needed here, not {dimension_numbers}')
  return matmul(x.astype(jnp.float32), kernel, dtype)


def linear(features: int, dtype: jnp.dtype, name: str | None, bias: bool = False) -> nn.Dense:
  """A projection, `(..., in) -> (..., features)` float32.

  Both operands are cast to `dtype` inside the product, so that a float32 kernel gets a float32 gradient; sums are
  float32, forward and backward.
  """
  return nn.Dense(
      features, use_bias=bias, name=name,
      dot_general=functools.partial(_dot_general, dtype=dtype),
      promote_dtype=lambda *arrays, dtype: arrays,
  )


def rms_norm(eps: float, name: str | None) -> nn.RMSNorm:
  """Root-mean-square norm with a learned scale, in float32."""
  return nn.RMSNorm(epsilon=eps, dtype=jnp.float32, name=name)


def rotary(
    x_BxTxHxd: jax.Array, positions_BxT: jax.Array, theta: float, divisors: Sequence[float] = ()
) -> jax.Array:
  """Rotates the two halves of every head by its absolute position (half-split layout, arXiv 2104.09864).

  Args:
    x_BxTxHxd: queries or keys.
    positions_BxT: int32.
    theta: base of the frequencies, theta ** (-i / (d / 2)).
    divisors: of the frequencies, d / 2 numbers; () for none.
  """
  half = x_BxTxHxd.shape[-1] // 2
  frequencies = _frequencies(half, theta) / (np.array(divisors, np.float32) if divisors else np.float32(1))
  angles = positions_BxT[..., None, None].astype(jnp.float32) * frequencies[None, None, None, :]
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  left, right = x_BxTxHxd[..., :half], x_BxTxHxd[..., half:]
  return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def _frequencies(half: int, theta: float) -> np.ndarray:
  # In the order of operations, and the precision, in which models were trained: far positions multiply each rounding.
  exponents = np.arange(0, 2 * half, 2, dtype=np.float32) / np.float32(2 * half)
  return np.float32(1) / np.float32(theta) ** exponents


def llama3_divisors(
    half: int, theta: float, *, factor: float, low_frequency_factor: float, high_frequency_factor: float,
    original_length: int,
) -> tuple[float, ...]:
  """What Llama 3.1 and later divide rotary frequencies by (arXiv 2407.21783; rope_type `llama3` of Hugging Face).

  Waves that fit the original context more than `high_frequency_factor` times stay, those that fit it less than
  `low_frequency_factor` times become `factor` times as long, and frequencies between are blended.

  Args:
    half: half of a head's size, as many numbers are returned.
    theta: base of the frequencies.
    factor: above 1.
    low_frequency_factor: above 0.
    high_frequency_factor: above the former.
    original_length: positions of the original context.
  """
  divisors = []
  for frequency in _frequencies(half, theta).astype(np.float64):
    fits = original_length * frequency / (2 * math.pi)
    kept = (fits - low_frequency_factor) / (high_frequency_factor - low_frequency_factor)
    kept = min(max(kept, 0.0), 1.0)
    divisors.append(float(1 / (kept + (1 - kept) / factor)))
  return tuple(divisors)


class GatedMLP(nn.Module):
  """`down(activation(gate(x)) * up(x))`: SwiGLU with SiLU, as in Llama and Qwen (arXiv 2002.05202)."""

  width: int
  dtype: jnp.dtype
  activation: Callable[[jax.Array], jax.Array] = nn.silu

  @nn.compact
  def __call__(self, x):
    gate = linear(self.width, self.dtype, 'gate_proj')(x)
    up = linear(self.width, self.dtype, 'up_proj')(x)
    return linear(x.shape[-1], self.dtype, 'down_proj')(self.activation(gate) * up)


def group_queries(q_BxTxHxd: jax.Array, num_kv_heads: int) -> jax.Array:
  """`[B, T, H, d] -> [B, Hkv, G*T, d]`: the queries that share a key head become rows of one matrix."""
  b, t, h, d = q_BxTxHxd.shape
  groups = h // num_kv_heads
  q = q_BxTxHxd.reshape(b, t, num_kv_heads, groups, d).transpose(0, 2, 3, 1, 4)
  return q.reshape(b, num_kv_heads, groups * t, d)


def ungroup_queries(x_BxHkvxGTxd: jax.Array, num_heads: int) -> jax.Array:
  """Inverse of `group_queries`, with the heads flattened: `[B, Hkv, G*T, d] -> [B, T, H*d]`."""
  b, kv, rows, d = x_BxHkvxGTxd.shape
  groups = num_heads // kv
  t = rows // groups
  x = x_BxHkvxGTxd.reshape(b, kv, groups, t, d).transpose(0, 3, 1, 2, 4)
  return x.reshape(b, t, num_heads * d)
