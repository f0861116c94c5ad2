"""Drafts as a tree: many continuations of one anchor, verified together in one pass of the target.

Node 0 is the anchor, known; every other node is a drafted token that follows its parent. A chain is a tree, M drafts of
self-selection are a tree of M chains, and a draft tree (DDTree, arXiv 2604.12989) is the general one. The target reads
all nodes at once, each seeing only its ancestors; the walk then follows the tokens that the target takes itself, as
`verify.match` does along a chain. Whatever the tree is, it is drawn before the target's own random numbers are looked
at, so that what is put out are the target's tokens alone.
"""

import flax.struct
import jax
import jax.numpy as jnp

from dspec.decoding import sampling


@flax.struct.dataclass
class Tree:
  """N nodes a row; a parent comes before its children.

  Attributes:
    tokens_BxN: int32; node 0 is the anchor.
    parents_BxN: int32; that of node 0 is 0.
    depths_BxN: int32; 0 for node 0.
  """

  tokens_BxN: jax.Array
  parents_BxN: jax.Array
  depths_BxN: jax.Array


def ancestors(tree: Tree, max_depth: int) -> jax.Array:
  """Which nodes a node descends from, itself among them, bool `[B, N, N]`."""
  n = tree.tokens_BxN.shape[1]
  nodes = jnp.arange(n)[None, None, :]
  sees = jnp.broadcast_to(jnp.eye(n, dtype=bool)[None], (*tree.tokens_BxN.shape, n))

  def up(_, state):
    sees, at_BxN = state
    at_BxN = jnp.take_along_axis(tree.parents_BxN, at_BxN, 1)
    return sees | (nodes == at_BxN[:, :, None]), at_BxN

  at = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[None], tree.tokens_BxN.shape)
  return jax.lax.fori_loop(0, max_depth, up, (sees, at))[0]


def chains(anchor_B: jax.Array, drafts_BxMxS: jax.Array) -> Tree:
  """M drafts side by side, N = 1 + M * S: slot k of draft m is node 1 + m * S + k - 1."""
  b, m, s = drafts_BxMxS.shape
  depths = jnp.tile(jnp.arange(1, s + 1), m)
  parents = jnp.where(depths == 1, 0, jnp.arange(m * s))
  row = lambda x: jnp.broadcast_to(jnp.pad(x, (1, 0)).astype(jnp.int32)[None], (b, 1 + m * s))
  tokens = jnp.concatenate([anchor_B[:, None], drafts_BxMxS.reshape(b, m * s)], 1)
  return Tree(tokens, row(parents), row(depths))


def best_first(anchor_B: jax.Array, log_probs_BxSxV: jax.Array, budget: int) -> Tree:
  """The `budget` most probable prefixes under independent slots: the tree of the largest sum of path products.

  That sum is the expected accepted length if the drafter's probabilities are right. A prefix is never more probable
  than the one it extends, so taking the most probable candidate again and again gives whole paths (arXiv 2604.12989).

  Args:
    anchor_B: int32.
    log_probs_BxSxV: the drafter's, float32.
    budget: drafted nodes, at least 1; N = 1 + budget. No more than there are prefixes.

  Returns:
    The tree, its nodes in the order of their probability.
  """
  b, s, v = log_probs_BxSxV.shape
  width = min(budget, v)  # No node has a sibling of a higher rank than this.
  ranked, tokens = largest(log_probs_BxSxV, width)  # [B, S, W]
  rows = jnp.arange(b)
  n = 1 + budget
  # A taken node offers two candidates: its best child, and its next sibling. Row 2i and 2i+1 are those of node i.
  score = jnp.full((b, 2 * n), -jnp.inf).at[:, 0].set(ranked[:, 0, 0])
  rank, parent, depth = (jnp.zeros((b, 2 * n), jnp.int32) for _ in range(3))
  depth = depth.at[:, 0].set(1)
  tree = Tree(
      jnp.zeros((b, n), jnp.int32).at[:, 0].set(anchor_B), jnp.zeros((b, n), jnp.int32), jnp.zeros((b, n), jnp.int32)
  )

  def take(i, state):
    tree, score, rank, parent, depth = state
    best_B = jnp.argmax(score, axis=-1)
    pick = lambda x: x[rows, best_B]
    score_B, rank_B, parent_B, depth_B = pick(score), pick(rank), pick(parent), pick(depth)
    slot_B = depth_B - 1
    tree = Tree(
        tree.tokens_BxN.at[:, i].set(tokens[rows, slot_B, rank_B]),
        tree.parents_BxN.at[:, i].set(parent_B),
        tree.depths_BxN.at[:, i].set(depth_B),
    )
    score = score.at[rows, best_B].set(-jnp.inf)
    below_B = jnp.minimum(slot_B + 1, s - 1)
    child = jnp.where(depth_B < s, score_B + ranked[rows, below_B, 0], -jnp.inf)
    next_B = jnp.minimum(rank_B + 1, width - 1)
    sibling = score_B - ranked[rows, slot_B, rank_B] + ranked[rows, slot_B, next_B]
    sibling = jnp.where(rank_B + 1 < width, sibling, -jnp.inf)
    both = lambda x, child, sibling: x.at[:, 2 * i].set(child).at[:, 2 * i + 1].set(sibling)
    return (
        tree, both(score, child, sibling), both(rank, jnp.zeros(b, jnp.int32), rank_B + 1), both(parent, i, parent_B),
        both(depth, depth_B + 1, depth_B),
    )

  return jax.lax.fori_loop(1, n, take, (tree, score, rank, parent, depth))[0]


def largest(x_BxSxV: jax.Array, k: int, group: int = 64) -> tuple[jax.Array, jax.Array]:
  """`jax.lax.top_k` of long rows for small k, without ranking what cannot be among the k largest.

  The k largest lie in the k groups of the largest maxima; only those are ranked.

  Args:
    x_BxSxV: float.
    k: at most V.
    group: neighbours that share a maximum.

  Returns:
    Values and int32 indices, `[B, S, k]`, in descending order.
  """
  b, s, v = x_BxSxV.shape
  count = -(-v // group)
  if count < 2 * k:
    return jax.lax.top_k(x_BxSxV, k)
  padded = jnp.pad(x_BxSxV, ((0, 0), (0, 0), (0, count * group - v)), constant_values=-jnp.inf)
  grouped = padded.reshape(b, s, count, group)
  _, chosen_BxSxk = jax.lax.top_k(grouped.max(-1), k)
  candidates = jnp.take_along_axis(grouped, chosen_BxSxk[..., None], 2).reshape(b, s, k * group)
  values, places = jax.lax.top_k(candidates, k)
  return values, jnp.take_along_axis(chosen_BxSxk, places // group, 2) * group + places % group


def walk(tree: Tree, target_BxN: jax.Array, max_depth: int) -> tuple[jax.Array, jax.Array]:
  """Follows the target's own tokens from the anchor down, for as long as the tree has them.

  Args:
    tree: the nodes.
    target_BxN: int32, the token that the target takes after each node.
    max_depth: of the tree.

  Returns:
    path_BxK: int32, K = 1 + max_depth, the nodes of depth 0, 1, ... on the way; 0 behind its end.
    accepted_B: int32, drafted nodes on it. The bonus is the target's token after the last one.
  """
  b, n = tree.tokens_BxN.shape

  def down(depth, state):
    path, at_B, accepted_B = state
    wanted_B = jnp.take_along_axis(target_BxN, at_B[:, None], 1)
    # Node 0 is its own parent; it is nobody's child.
    fits = (tree.parents_BxN == at_B[:, None]) & (tree.tokens_BxN == wanted_B) & (jnp.arange(n)[None, :] > 0)
    found_B = fits.any(-1) & (accepted_B == depth - 1)
    next_B = jnp.where(found_B, jnp.argmax(fits, axis=-1), at_B).astype(jnp.int32)
    return path.at[:, depth].set(jnp.where(found_B, next_B, 0)), next_B, accepted_B + found_B

  zero = jnp.zeros(b, jnp.int32)
  path = jnp.zeros((b, max_depth + 1), jnp.int32)
  path, _, accepted_B = jax.lax.fori_loop(1, max_depth + 1, down, (path, zero, zero))
  return path, accepted_B


def expected_matches(drafts_BxMxS: jax.Array, target_probs_BxMxSxV: jax.Array) -> jax.Array:
  """Expected number of drafts that `verify.match` accepts of each chain, float32 `[B, M]`.

  sum_k prod_{j<=k} p(x_j | x_<j) under the target (arXiv 2511.00606): exact, as the target's tokens are drawn
  whatever the drafts are.

  Args:
    drafts_BxMxS: int32.
    target_probs_BxMxSxV: float32, what each slot's token is drawn from after the slots before it.
  """
  probs = jnp.take_along_axis(target_probs_BxMxSxV, drafts_BxMxS[..., None], -1)[..., 0]
  return jnp.cumprod(probs, axis=-1).sum(-1)


def best_chain(drafts_BxMxS: jax.Array, target_probs_BxNxV: jax.Array) -> jax.Array:
  """Nodes of the anchor and of the draft with the most expected matches, int32 `[B, K]`; the first one if they tie.

  Args:
    drafts_BxMxS: int32, as `chains` was given them.
    target_probs_BxNxV: float32, after each node.
  """
  b, m, s = drafts_BxMxS.shape
  slots = 1 + jnp.arange(m * s, dtype=jnp.int32).reshape(m, s)
  before = jnp.concatenate([jnp.zeros((m, 1), jnp.int32), slots[:, :-1]], 1)
  best_B = jnp.argmax(expected_matches(drafts_BxMxS, target_probs_BxNxV[:, before]), axis=-1)
  return jnp.concatenate([jnp.zeros((b, 1), jnp.int32), slots[best_B]], 1)


def draw_drafts(
    probs_BxSxV: jax.Array, key: jax.Array, seeds_B: jax.Array, positions_BxS: jax.Array, m: int
) -> jax.Array:
  """M drafts, each slot drawn on its own from the drafter's probabilities, int32 `[B, M, S]`."""
  draw = lambda i: sampling.draw(
      probs_BxSxV, sampling.uniforms(jax.random.fold_in(key, i), seeds_B, positions_BxS)
  )
  return jnp.stack([draw(i) for i in range(m)], 1)
