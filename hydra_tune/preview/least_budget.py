"""Finds the least budget in which a trial trains and evaluates: the planner's arithmetic proposes, a rehearsal decides.

The arithmetic alone may be too low, as a first step may need more than later ones. It may be too high, as a small
budget makes the planner cut the model finer. So a budget counts only if the rehearsal in it was not refused, and the
search ends where one that is a hundredth smaller was.
"""

from __future__ import annotations

from hydra_tune.preview.rehearsal import Rehearsal, Script

_STEP = 0.99
_MOST_TRIES = 14


def least_rehearsal(script: Script, enough: Rehearsal) -> Rehearsal:
    """The rehearsal in the least budget that was found, beginning from one in a budget that is `enough`."""
    best, refused_bytes = enough, 0
    guess = _proposed(enough)
    for _ in range(_MOST_TRIES):
        if refused_bytes >= best.budget_bytes * _STEP - 1:
            break
        tried = _in_all_orders(script, guess)
        if tried.refusal is None:
            best, proposed = tried, _proposed(tried)
            guess = proposed if refused_bytes < proposed < guess else int(guess * _STEP)
            if guess <= refused_bytes:
                guess = (refused_bytes + best.budget_bytes) // 2
        else:
            refused_bytes = max(refused_bytes, guess)
            # mostly a little more is enough; else half of the way to what is known to be enough
            guess = min(int(guess * 1.03), (refused_bytes + best.budget_bytes) // 2)
            if best is not enough:
                guess = (refused_bytes + best.budget_bytes) // 2
    return best


def _in_all_orders(script: Script, budget_bytes: int) -> Rehearsal:
    """A rehearsal that was refused, if one was. What a first step finds depends on what the step before has left, so
    the number of evaluations between training steps matters."""
    tried = script.at(budget_bytes)
    if tried.refusal is None and script.batch is not None and script.eval_batch is not None:
        other = script.at(budget_bytes, evaluations=1)
        return tried if other.refusal is None else other
    return tried


def _proposed(rehearsal: Rehearsal) -> int:
    assert rehearsal.needs is not None
    return rehearsal.needs.least_bytes
