"""Finds the least budget in which a trial trains and evaluates, and the least one in which it is resident.

The planner's arithmetic proposes, a rehearsal decides. The arithmetic alone may be too low, as a first step may need
more than later ones. It may be too high, as a small budget makes the planner cut the model finer. So a budget counts
only if no rehearsal in it was refused, and the search for the least ends where one that is a hundredth smaller was.
"""

from __future__ import annotations

import math
import time

from hydra_tune.preview.rehearsal import Rehearsal, Script

_STEP = 0.99
_MOST_TRIES = 14
_MOST_RESIDENT_TRIES = 5


def least_rehearsal(script: Script, enough: Rehearsal, until_s: float = math.inf) -> Rehearsal:
    """The rehearsal in the least budget that was found, beginning from one in a budget that is `enough`. By
    `time.monotonic` the last one begins before `until_s`."""
    best, refused_bytes, guess = enough, 0, _proposed(enough)
    less, more = 1 - _STEP, 0.03  # how far to go from a budget that fits, and from one that does not
    for _ in range(_MOST_TRIES):
        if time.monotonic() > until_s:
            break
        tried, others = script.at(guess), []
        if tried.refusal is None:
            # what a first step finds depends on what the step before has left: so on how many evaluations there were
            others = [script.at(guess, evaluations=1)] if script.has_both else []
        fits = tried.refusal is None and all(other.refusal is None for other in others)
        proposed = min((_proposed(r) for r in (tried, *others) if r.refusal is None), default=guess)
        best = tried if fits else best
        if refused_bytes < proposed < guess * _STEP:
            guess = proposed  # a finer cut needs less, also where the cut of this budget was refused
            continue
        refused_bytes = refused_bytes if fits else max(refused_bytes, guess)
        if refused_bytes >= best.budget_bytes * _STEP - 1:
            break
        if refused_bytes == 0:
            guess, less = int(best.budget_bytes * (1 - less)), 2 * less
        elif best is enough:  # mostly a little more is enough
            guess, more = min(int(refused_bytes * (1 + more)), best.budget_bytes), 2 * more
        else:
            guess = (refused_bytes + best.budget_bytes) // 2
    return best


def resident_rehearsal(script: Script, enough: Rehearsal) -> Rehearsal:
    """The rehearsal in the least budget in which a trial is resident, whatever the order of its first steps; `enough`
    itself if none was found."""
    assert enough.needs is not None
    guess = enough.needs.resident_bytes
    for _ in range(_MOST_RESIDENT_TRIES):
        if guess >= enough.budget_bytes:
            break
        tried = [script.at(guess), *([script.at(guess, evaluations=1)] if script.has_both else [])]
        if all(each.is_resident for each in tried):
            return tried[0]
        needed = [each.needs.resident_bytes for each in tried if each.needs is not None]
        guess = max(guess + guess // 200, *needed, 0)
    return enough


def _proposed(rehearsal: Rehearsal) -> int:
    assert rehearsal.needs is not None
    return rehearsal.needs.least_bytes
