"""Under which keys the `user_attrs` of an Optuna trial say what became of it. Users read them; other processes of the
search act on some. Figures of its training are under ``hydra/...``, one key each (`pool/snapshots.py`)."""

from __future__ import annotations

PRUNED = "hydra_tune: pruned because"
INFEASIBLE = "hydra_tune: infeasible because"
LACK = "hydra_tune: lacks"  # memory, as a share of what there is
RESUMED = "hydra_tune: resumed at step"  # the mini-batch, of a trial that goes on
INTERRUPTED = "hydra_tune: interrupted"  # another trial may continue it
CONTINUES = "hydra_tune: continues trials"
CLONED = "hydra_tune: cloned from"
CLONE = "hydra_tune: starts from"  # the weights in this folder
