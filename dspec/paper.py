"""Numbers of "Teaching Diffusion to Speculate Left-to-Right" (arXiv 2606.11552v1), to stand beside ours.

Its targets, data, harness and budget are not ours: what may be compared is the order of the arms, not the values. Its
accepted lengths count the bonus token; one seed, no intervals, decoding temperature not stated.
"""

from collections.abc import Mapping
from typing import Any

SETS = ('mt_bench', 'gsm8k', 'humaneval', 'aime', 'mbpp', 'livecodebench')
_DEFAULT_TARGET = 'llama3_8b'
_TARGET_NAMES = {
    'llama3_8b': 'Llama-3-8B', 'llama3_2_3b': 'Llama-3.2-3B', 'qwen3_4b': 'Qwen3-4B', 'qwen3_8b': 'Qwen3-8B',
}
_Loss = tuple[float | None, float, float]  # gamma, alpha_f, alpha_c.
_UNIFORM, _WEIGHTED, _FIRST_ERROR, _ALL = (None, 0.0, 0.0), (10.0, 0.0, 0.0), (10.0, 0.3, 0.0), (10.0, 0.3, 40.0)

# Accepted lengths at block size 16 and learning rate 1e-3, in the order of `SETS`: Tables 2 and 3.
ACCEPTED_LENGTHS: dict[str, dict[_Loss, tuple[float, ...]]] = {
    'llama3_8b': {
        _UNIFORM: (1.931, 2.279, 2.803, 2.705, 2.298, 2.241),
        (7.0, 0.0, 0.0): (2.050, 2.289, 2.949, 3.017, 2.239, 2.232),
        _WEIGHTED: (2.105, 2.382, 3.126, 3.152, 2.412, 2.317),
        (20.0, 0.0, 0.0): (2.017, 2.218, 2.921, 2.812, 2.318, 2.219),
        _FIRST_ERROR: (2.222, 2.753, 3.521, 3.465, 2.720, 2.668),
        (10.0, 0.5, 0.0): (2.056, 2.650, 3.519, 3.678, 2.637, 2.551),
        (10.0, 1.0, 0.0): (2.204, 2.650, 3.401, 3.648, 2.606, 2.487),
        (10.0, 0.3, 5.0): (2.222, 2.703, 3.724, 3.833, 2.664, 2.691),
        (10.0, 0.3, 10.0): (2.185, 2.762, 3.957, 4.278, 2.904, 2.769),
        (10.0, 0.3, 20.0): (2.214, 2.940, 3.944, 4.201, 2.753, 2.825),
        (10.0, 0.3, 30.0): (2.391, 2.970, 4.223, 4.734, 3.032, 2.843),
        _ALL: (2.341, 3.074, 4.336, 4.757, 3.088, 2.922),
        (10.0, 0.3, 50.0): (2.349, 3.044, 4.192, 4.607, 3.023, 2.934),
    },
    'llama3_2_3b': {
        _UNIFORM: (2.351, 2.875, 3.778, 3.003, 3.110, 2.546),
        _WEIGHTED: (2.454, 3.040, 4.096, 3.356, 3.300, 2.636),
        _FIRST_ERROR: (2.542, 3.110, 4.347, 3.455, 3.382, 2.681),
        _ALL: (2.717, 3.507, 5.196, 4.197, 3.933, 2.975),
    },
    'qwen3_4b': {
        _UNIFORM: (1.875, 2.397, 2.738, 2.133, 2.396, 2.265),
        _WEIGHTED: (1.959, 2.502, 3.002, 2.253, 2.596, 2.387),
        _FIRST_ERROR: (2.000, 2.598, 3.126, 2.357, 2.618, 2.481),
        _ALL: (2.123, 2.833, 3.507, 2.554, 2.958, 2.713),
    },
    'qwen3_8b': {
        _UNIFORM: (1.836, 2.248, 2.480, 2.030, 2.032, 2.144),
        _WEIGHTED: (1.901, 2.517, 2.779, 2.233, 2.241, 2.315),
        _FIRST_ERROR: (1.961, 2.608, 2.969, 2.351, 2.306, 2.420),
        _ALL: (2.055, 2.795, 3.384, 2.558, 2.466, 2.665),
    },
}
# Means over the six, as printed there: Table 4, each term alone, Llama-3-8B.
_MEANS_ALONE = {(None, 0.3, 0.0): 2.736, (None, 0.0, 40.0): 2.919}
# Accepted lengths on AIME of drafters trained at block size 16, by that of decoding: Table 6, Llama-3-8B.
_BY_BLOCK_SIZE = {
    _UNIFORM: {2: 1.725, 4: 2.462, 8: 2.654, 16: 2.705, 32: 2.656},
    _ALL: {2: 1.876, 4: 3.238, 8: 4.309, 16: 4.757, 32: 4.577},
}
# Share of right draft tokens behind a wrong one, uniform training: Table 1, Llama-3-8B.
_WASTE = {'gsm8k': 0.469, 'mt_bench': 0.429, 'humaneval': 0.526, 'aime': 0.474, 'mbpp': 0.445, 'mean': 0.469}


def column(target: str) -> str:
  """The head of a column of the paper's numbers, for a target of `dspec.config.TARGETS` or any other."""
  return f'paper ({_TARGET_NAMES.get(target, _TARGET_NAMES[_DEFAULT_TARGET])})'


def accepted_length(target: str, loss: Mapping[str, Any], set_name: str, block_size: int = 16) -> float | None:
  """The paper's accepted length where one of its tables has that cell.

  Args:
    target: a key of `dspec.config.TARGETS`; of any other one, the paper's main target, Llama-3-8B, stands in.
    loss: {gamma, first_error, chain}, as in a config.
    set_name: a benchmark, or 'mean' for the mean of the six.
    block_size: of decoding.
  """
  target = target if target in ACCEPTED_LENGTHS else _DEFAULT_TARGET
  terms = (loss['gamma'], loss['first_error'], loss['chain'])
  if block_size != 16:
    found = _BY_BLOCK_SIZE.get(terms, {}).get(block_size)
    return found if set_name == 'aime' and target == _DEFAULT_TARGET else None
  row = ACCEPTED_LENGTHS[target].get(terms)
  if set_name == 'mean':
    if row is None:
      return _MEANS_ALONE.get(terms) if target == _DEFAULT_TARGET else None
    return round(sum(row) / len(row), 3)
  return row[SETS.index(set_name)] if row and set_name in SETS else None


def waste(loss: Mapping[str, Any], set_name: str) -> float | None:
  """The paper's waste of uniform training, Llama-3-8B, where its Table 1 has it."""
  return _WASTE.get(set_name) if (loss['gamma'], loss['first_error'], loss['chain']) == _UNIFORM else None
