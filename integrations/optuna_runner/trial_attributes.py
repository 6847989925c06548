"""Under which keys a trial's `user_attrs` say what the runner has done with it. Users read them; other processes of the
search act on some."""

from __future__ import annotations

from hydra_tune.integrations.frameworks.current_trial import RESUMED as RESUMED  # frameworks' callbacks set it, too

FIGURES = "hydra_tune"  # of its training: steps, times, bytes
PRUNED = "hydra_tune: pruned because"
INFEASIBLE = "hydra_tune: infeasible because"
LACK = "hydra_tune: lacks"  # memory, as a share of what there is
INTERRUPTED = "hydra_tune: interrupted"  # another trial may continue it
CONTINUES = "hydra_tune: continues trials"
CLONED = "hydra_tune: cloned from"
CLONE = "hydra_tune: starts from"  # the weights in this folder
