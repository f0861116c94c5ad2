"""Losses on draft slots: pure functions (logits, labels, valid, ...) -> (scalar, aux).

Each loss has two forms: on logits, jitted, for a notebook; and on `SlotScores` (`..._from_scores`,
`objective`), for training, where `score_slots_chunked` makes them without holding all logits.
"""

from dspec.losses.chain import (
    ChainAux, chain_from_scores, chain_loss, chain_per_token, chain_weights)
from dspec.losses.first_error import (
    FirstErrorAux, first_error_focal_loss, first_error_from_scores)
from dspec.losses.objective import Objective, ObjectiveAux, objective, objective_from_logits
from dspec.losses.positional_weighting import (
    CrossEntropyAux, cross_entropy_from_scores, positional_weighted_cross_entropy, slot_weights)
from dspec.losses.scores import SlotScores, score_slots, score_slots_chunked, valid_prefix

__all__ = (
    'ChainAux', 'CrossEntropyAux', 'FirstErrorAux', 'Objective', 'ObjectiveAux', 'SlotScores',
    'chain_from_scores', 'chain_loss', 'chain_per_token', 'chain_weights',
    'cross_entropy_from_scores', 'first_error_focal_loss', 'first_error_from_scores', 'objective',
    'objective_from_logits', 'positional_weighted_cross_entropy', 'score_slots',
    'score_slots_chunked', 'slot_weights', 'valid_prefix',
)
