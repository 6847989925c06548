"""Under which keys the `user_attrs` of an Optuna trial say what became of it. Users read them; other processes of the
search act on some. Figures of its training are under ``hydra/...``, one key each (`pool/snapshots.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra_tune.trials.trial import Trial

PRUNED = "hydra_tune: pruned because"
INFEASIBLE = "hydra_tune: infeasible because"
LACK = "hydra_tune: lacks"  # memory, as a share of what there is
RESUMED = "hydra_tune: resumed at step"  # the mini-batch, of a trial that goes on
INTERRUPTED = "hydra_tune: interrupted"  # another trial may continue it
CONTINUES = "hydra_tune: continues trials"
CLONED = "hydra_tune: cloned from"
CLONE = "hydra_tune: starts from"  # the weights in this folder


def figures_of(trials: Sequence[Trial]) -> dict[str, Any]:
    """Of the model that has made the most steps, the last of such: others were prepared to evaluate it. Under flat keys
    such as ``hydra/state``."""
    longest = max(reversed(trials), key=lambda each: each.summary["steps"])
    return longest.pool.figures(longest)
