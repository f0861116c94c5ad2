"""Trees of drafts: what they hold, what the target says of them, and that the text stays the target's."""

import collections
import functools
import heapq
import itertools

from hypothesis import given, settings, strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspec.decoding import autoregressive
from dspec.decoding import sampling
from dspec.decoding import speculative
from dspec.decoding import trees
from dspec.decoding import verify
from dspec.errors import UserError
from dspec.models import target as target_lib

few = settings(max_examples=8, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)


def random_tree(rng, rows, nodes, vocab, max_depth):
  """Siblings have different tokens, as the best prefixes do."""
  tokens, parents, depths = (np.zeros((rows, nodes), np.int32) for _ in range(3))
  tokens[:, 0] = rng.integers(0, vocab, rows)
  for row in range(rows):
    used = collections.defaultdict(set)
    for node in range(1, nodes):
      free = [p for p in range(node) if depths[row, p] < max_depth and len(used[p]) < vocab]
      parent = int(rng.choice(free))
      token = int(rng.choice([t for t in range(vocab) if t not in used[parent]]))
      used[parent].add(token)
      tokens[row, node], parents[row, node], depths[row, node] = token, parent, depths[row, parent] + 1
  return trees.Tree(*map(jnp.asarray, (tokens, parents, depths)))


def lineage(tree, row, node):
  """Nodes from the anchor to this one."""
  path = [node]
  while path[0]:
    path.insert(0, int(tree.parents_BxN[row, path[0]]))
  return path


@few
@given(seed=seeds, vocab=st.sampled_from([7, 640, 1000]), k=st.sampled_from([1, 3, 7]))
def test_largest_by_sorting(seed, vocab, k):
  # Few different values, so that there are ties, and rows whose largest values are neighbours.
  x = np.random.default_rng(seed).integers(-40, 40, (2, 3, vocab)).astype(np.float32)
  x[0, 0] = np.sort(x[0, 0])
  x[1, 1, : vocab // 2] = -np.inf
  values, indices = trees.largest(jnp.asarray(x), k, group=16)
  np.testing.assert_array_equal(values, -np.sort(-x, -1)[..., :k])
  np.testing.assert_array_equal(np.take_along_axis(x, np.asarray(indices), -1), values)
  assert all(len(set(row)) == k for row in np.asarray(indices).reshape(-1, k).tolist())


# ---- What a tree holds -----------------------------------------------------------------------------


@few
@given(seed=seeds, nodes=st.sampled_from([1, 6, 13]))
def test_ancestors_by_loops(seed, nodes):
  tree = random_tree(np.random.default_rng(seed), 2, nodes, 4, 5)
  sees = np.asarray(trees.ancestors(tree, 5))
  for row in range(2):
    for node in range(nodes):
      np.testing.assert_array_equal(np.flatnonzero(sees[row, node]), sorted(lineage(tree, row, node)))


def test_chains_drawn():
  drafts = jnp.array([[[5, 6, 7], [8, 9, 10]]])
  tree = trees.chains(jnp.array([4]), drafts)
  np.testing.assert_array_equal(tree.tokens_BxN[0], [4, 5, 6, 7, 8, 9, 10])
  np.testing.assert_array_equal(tree.parents_BxN[0], [0, 0, 1, 2, 0, 4, 5])
  np.testing.assert_array_equal(tree.depths_BxN[0], [0, 1, 2, 3, 1, 2, 3])


def best_prefixes(log_probs, budget):
  """By a heap over all prefixes, as arXiv 2604.12989 has it, float64."""
  slots, vocab = log_probs.shape
  heap = [(-log_probs[0, t], (t,)) for t in range(vocab)]
  heapq.heapify(heap)
  found = {}
  while len(found) < budget:
    cost, prefix = heapq.heappop(heap)
    found[prefix] = -cost
    if len(prefix) < slots:
      for t in range(vocab):
        heapq.heappush(heap, (cost - log_probs[len(prefix), t], (*prefix, t)))
  return found


@few
@given(seed=seeds, budget=st.sampled_from([1, 5, 20, 84]))
def test_best_first_by_a_heap(seed, budget):
  rng = np.random.default_rng(seed)
  logits = 2 * rng.normal(size=(2, 3, 4))
  log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  tree = jax.jit(trees.best_first, static_argnums=2)(
      jnp.array([7, 8]), jnp.asarray(log_probs, jnp.float32), budget)
  assert tree.tokens_BxN.shape == (2, 1 + budget)
  for row in range(2):
    assert tree.tokens_BxN[row, 0] == 7 + row
    prefix_of = lambda node: tuple(int(tree.tokens_BxN[row, n]) for n in lineage(tree, row, node)[1:])
    found = [prefix_of(node) for node in range(1, 1 + budget)]
    assert [len(prefix) for prefix in found] == tree.depths_BxN[row, 1:].tolist()
    want = best_prefixes(log_probs[row], budget)
    assert set(found) == set(want) and len(set(found)) == budget
    scores = [want[prefix] for prefix in found]
    assert all(a >= b - 1e-5 for a, b in zip(scores, scores[1:]))


def test_no_other_tree_of_its_size_has_a_larger_sum():
  """By enumeration of all trees of five nodes: the sum of path products is the expected accepted length."""
  rng = np.random.default_rng(0)
  probs = rng.dirichlet(np.ones(3), size=3)
  product = lambda prefix: np.prod([probs[slot, token] for slot, token in enumerate(prefix)])
  everything = [p for n in (1, 2, 3) for p in itertools.product(range(3), repeat=n)]
  best = max(
      sum(map(product, chosen)) for chosen in itertools.combinations(everything, 5)
      if all(len(p) == 1 or p[:-1] in chosen for p in chosen))
  tree = trees.best_first(jnp.array([0]), jnp.asarray(np.log(probs), jnp.float32)[None], 5)
  found = sum(
      product([int(tree.tokens_BxN[0, n]) for n in lineage(tree, 0, node)[1:]]) for node in range(1, 6))
  assert found == pytest.approx(best, rel=1e-6)


@few
@given(seed=seeds)
def test_walk_by_loops(seed):
  rng = np.random.default_rng(seed)
  tree = random_tree(rng, 4, 12, 3, 4)
  wanted = rng.integers(0, 3, (4, 12))
  path, accepted = jax.jit(trees.walk, static_argnums=2)(tree, jnp.asarray(wanted, jnp.int32), 4)
  assert path.shape == (4, 5)
  for row in range(4):
    at, want = 0, [0]
    while True:
      children = [
          n for n in range(1, 12)
          if tree.parents_BxN[row, n] == at and tree.tokens_BxN[row, n] == wanted[row, at]]
      if not children:
        break
      at = children[0]
      want.append(at)
    assert accepted[row] == len(want) - 1
    np.testing.assert_array_equal(path[row], want + [0] * (5 - len(want)))


def test_expected_matches_by_enumeration():
  """Of every text that the target may say, how long a draft matches it."""
  rng = np.random.default_rng(1)
  vocab, slots = 3, 3
  tables = [rng.dirichlet(np.ones(vocab), size=vocab**i).reshape((vocab,) * (i + 1)) for i in range(slots)]
  drafts = rng.integers(0, vocab, (1, 4, slots))
  probs = np.stack([[tables[i][tuple(draft[:i])] for i in range(slots)] for draft in drafts[0]])[None]
  got = trees.expected_matches(jnp.asarray(drafts), jnp.asarray(probs, jnp.float32))
  for m, draft in enumerate(drafts[0].tolist()):
    want = 0.0
    for text in itertools.product(range(vocab), repeat=slots):
      probability = np.prod([tables[i][text[:i + 1]] for i in range(slots)])
      matched = next((i for i in range(slots) if text[i] != draft[i]), slots)
      want += probability * matched
    assert got[0, m] == pytest.approx(want, rel=1e-5)


def test_best_chain_by_loops():
  rng = np.random.default_rng(2)
  drafts = rng.integers(0, 4, (5, 3, 2))
  probs = rng.dirichlet(np.ones(4), size=(5, 7))
  path = np.asarray(trees.best_chain(jnp.asarray(drafts), jnp.asarray(probs, jnp.float32)))
  for row in range(5):
    first = probs[row, 0][drafts[row, :, 0]]
    second = [probs[row, 1 + 2 * m][drafts[row, m, 1]] for m in range(3)]
    m = int(np.argmax(first * (1 + np.array(second))))
    np.testing.assert_array_equal(path[row], [0, 1 + 2 * m, 2 + 2 * m])


# ---- What the target says of it --------------------------------------------------------------------


def test_the_target_reads_every_path_as_if_alone(make_target, uncached):
  """Logits and features of each node are those of its own text, though the cache holds rubbish from the anchor on."""
  module, params = make_target(40, 3)
  rng = np.random.default_rng(3)
  starts = np.array([9, 70])  # In the first and in a later view of the cache.
  tree = random_tree(rng, 2, 11, 40, 4)
  texts = rng.integers(6, 40, (2, 70))
  size = 96
  fill = jax.jit(lambda tokens, positions, cache: module.apply({'params': params}, tokens, positions, cache)[2])
  cache = jax.tree.map(
      lambda x: jnp.asarray(50 * rng.normal(size=x.shape), jnp.float32), target_lib.init_cache(module.config, 2, size))
  positions = np.tile(np.arange(70), (2, 1))
  positions[0, 9:] = size
  cache = fill(jnp.asarray(texts), jnp.asarray(positions), cache)
  sees = trees.ancestors(tree, 4)
  run = jax.jit(lambda tree, cache: module.apply(
      {'params': params}, tree.tokens_BxN, jnp.asarray(starts)[:, None] + tree.depths_BxN, cache, (0,),
      (jnp.asarray(starts), sees)))
  hidden, features, nodes = run(tree, cache)
  logits = target_lib.logits(params, hidden, jnp.float32)
  assert len(nodes) == module.config.num_layers and nodes[0][0].shape == (2, 11, 2, 6)
  for row, start in enumerate(starts):
    for node in range(11):
      path = [int(tree.tokens_BxN[row, n]) for n in lineage(tree, row, node)]
      text = np.zeros((1, 80), int)
      text[0, : start + len(path)] = [*texts[row, :start], *path]
      want_logits, want_features = uncached(module, params, text, (0,))
      np.testing.assert_allclose(logits[row, node], want_logits[0, start + len(path) - 1], atol=2e-4)
      np.testing.assert_allclose(features[row, node], want_features[0, start + len(path) - 1], atol=2e-4)


# ---- The text --------------------------------------------------------------------------------------

LENGTHS, LIMIT = (7, 3, 1, 5), 14
MANY = {
    'two drafts': speculative.Drafting(sampling.Sampling(1.5), num_drafts=2),
    'five drafts': speculative.Drafting(sampling.Sampling(2.0, top_k=3), num_drafts=5),
    'tree of one': speculative.Drafting(tree_size=1),
    'tree': speculative.Drafting(tree_size=12),
}


def decode(generate, make_target, make_drafter, seed, how, drafting, block_size=4, limit=LIMIT, **shape):
  """(speculative rows, trace, plain rows) of five tokens, so that drafts are often right."""
  module, params = make_target(5, seed, **shape)
  drafter, drafter_params = make_drafter(module.config, block_size, seed + 1)
  rng = np.random.default_rng(seed)
  prompts = jnp.asarray(rng.integers(3, 5, (4, 7)), jnp.int32)
  lengths, key = jnp.asarray(LENGTHS), jax.random.key(seed)
  want = autoregressive.generate(module, params, prompts, lengths, key, max_new_tokens=limit, how=how)
  got, trace = generate(
      module, params, drafter, drafter_params, prompts, lengths, key, max_new_tokens=limit, how=how, drafting=drafting)
  return got, trace, want


def assert_same(got, want):
  np.testing.assert_array_equal(got.lengths_B, want.lengths_B)
  np.testing.assert_array_equal(got.tokens_BxT, want.tokens_BxT)
  assert got.done_B.all()


@few
@given(seed=seeds, kind=st.sampled_from(list(MANY)), how=st.sampled_from([
    sampling.GREEDY, sampling.Sampling(1.0), sampling.Sampling(0.7, top_k=3, top_p=0.9)]))
def test_many_drafts_say_what_the_target_says(make_target, make_drafter, seed, kind, how):
  got, trace, want = decode(speculative.generate, make_target, make_drafter, seed, how, MANY[kind])
  assert_same(got, want)
  new = np.asarray(want.lengths_B) - LENGTHS
  np.testing.assert_array_equal(1 + np.asarray(trace.gained_BxR).sum(1), new)


OTHERS = {
    'qwen2': {}, 'qwen3': {},
    # The window is shorter than a block, and than the distance from a node to its anchor.
    'gemma3': {'num_layers': 3, 'local_layers': (0, 2), 'sliding_window': 3, 'local_rope_theta': 10.0,
               'attention_scale': 0.3, 'rope_divisors': (1.0, 2.0, 4.0)},
}


@pytest.mark.parametrize('kind', ['one draft', 'two drafts', 'tree'])
@pytest.mark.parametrize('family', OTHERS)
def test_other_families_say_what_the_target_says(make_target, make_drafter, family, kind):
  drafting, accepted = MANY.get(kind, speculative.Drafting()), 0
  for seed in range(4):
    got, trace, want = decode(
        speculative.generate, make_target, make_drafter, seed, sampling.GREEDY, drafting, block_size=6, family=family,
        **OTHERS[family])
    assert_same(got, want)
    accepted += np.asarray(trace.accepted_BxR).sum()
  assert accepted > 0


@pytest.mark.parametrize('limit', [0, 1, 2])
@pytest.mark.parametrize('kind', ['two drafts', 'tree'])
def test_short_limits(make_target, make_drafter, kind, limit):
  got, _, want = decode(
      speculative.generate, make_target, make_drafter, 11, sampling.GREEDY, MANY[kind], limit=limit)
  assert_same(got, want)


def gained(make_target, make_drafter, how, drafting):
  total = rounds = 0
  for seed in range(8):
    _, trace, _ = decode(speculative.generate, make_target, make_drafter, seed, how, drafting)
    total += np.asarray(trace.gained_BxR).sum()
    rounds += (np.asarray(trace.starts_BxR) >= 0).sum()
  return total / rounds


def test_more_drafts_are_worth_more(make_target, make_drafter):
  """On random models, at temperature 0: the accepted length grows with M and with the tree."""
  drafts = [
      gained(make_target, make_drafter, sampling.GREEDY, drafting) for drafting in (
          speculative.Drafting(sampling.Sampling(1.0)), speculative.Drafting(sampling.Sampling(1.0), num_drafts=8))]
  assert drafts[0] + 0.2 < drafts[1]
  tree = [
      gained(make_target, make_drafter, sampling.GREEDY, speculative.Drafting(tree_size=n)) for n in (1, 4, 30)]
  assert tree[0] + 0.1 < tree[1] < tree[2] - 0.1


def unlike(generate, make_target, make_drafter, how, drafting):
  """Whether some of a few random models' texts differ from plain decoding's."""
  for seed in range(6):
    got, _, want = decode(generate, make_target, make_drafter, seed, how, drafting)
    if not np.array_equal(got.tokens_BxT, want.tokens_BxT):
      return True
  return False


@pytest.mark.parametrize('name,bug', [
    ('ancestors', lambda honest, tree, depth: jnp.ones_like(honest(tree, depth))),
    ('walk', lambda honest, *args: (honest(*args)[0], jnp.minimum(honest(*args)[1] + 1, 3))),
])
def test_planted_bugs_are_caught(make_target, make_drafter, monkeypatch, name, bug):
  monkeypatch.setattr(trees, name, functools.partial(bug, getattr(trees, name)))

  def generate(*args, **options):  # Another function, so that nothing compiled before is used.
    return speculative.generate.__wrapped__(*args, **options)

  generate = jax.jit(generate, static_argnums=(0, 2), static_argnames=('max_new_tokens', 'how', 'drafting'))
  assert unlike(generate, make_target, make_drafter, sampling.GREEDY, MANY['tree'])


def test_selection_must_not_be_combined_with_rejection():
  """The kept draft is no draw from q: accepting it with min(1, p/q) gives another distribution than the target's."""
  rng = np.random.default_rng(4)
  draws, vocab = 40_000, 4
  p, q = rng.dirichlet(np.ones(vocab)), rng.dirichlet(np.ones(vocab))
  drafts = rng.choice(vocab, (draws, 4), p=q)
  kept = drafts[np.arange(draws), p[drafts].argmax(1)]
  tile = lambda x, n: jnp.tile(jnp.asarray(x, jnp.float32)[None, None], (draws, n, 1))
  uniform = lambda: jnp.asarray(rng.random((draws, 2), np.float32))
  for chosen, right in ((drafts[:, 0], True), (kept, False)):
    accepted, bonus = verify.rejection(jnp.asarray(chosen)[:, None], tile(q, 1), tile(p, 2), uniform(), uniform())
    tokens = np.where(np.asarray(accepted) > 0, chosen, np.asarray(bonus))
    share = np.bincount(tokens, minlength=vocab) / draws
    assert (np.abs(share - p) < 5 * np.sqrt(p * (1 - p) / draws)).all() == right


@pytest.mark.parametrize('options,word', [
    ({'num_drafts': 0}, 'num_drafts is 0'), ({'num_drafts': 2}, 'temperature 0'),
    ({'tree_size': -1}, 'tree_size is -1'),
    ({'tree_size': 4, 'num_drafts': 2, 'how': sampling.Sampling(1.0)}, 'choose one'),
    ({'tree_size': 4, 'how': sampling.Sampling(1.0)}, 'not drawn')])
def test_values_that_make_no_sense(options, word):
  with pytest.raises(UserError, match=word):
    speculative.Drafting(**options)
