"""Settings of the whole process, that cannot be a trial's own.

A trial that sets one changes the trials beside it, in silence. So each is warned of by name, once, where a trial sets
it beside others.
"""

from __future__ import annotations

import functools
import logging
import random
import sys
from typing import Any

import wrapt

from hydra_tune.integrations.frameworks.current_trial import runs_beside_others

logger = logging.getLogger("hydra_tune")
_OWN_GENERATORS = {"random": "random.Random(seed)", "numpy.random": "numpy.random.default_rng(seed)"}
# Trainers seed all that there is. A script that calls Lightning's `seed_everything` is warned of that.
_SEED_BY_THEMSELVES = {"transformers", "accelerate", "lightning", "lightning_fabric"}
_warned: dict[str, object] = {}


def warn_of(name: str, advice: str) -> None:
    """Once a process."""
    mine = object()
    if _warned.setdefault(name, mine) is mine:
        logger.warning(
            "a trial calls %s, which is for the whole process, while other trials run in it: they are changed, too. "
            "%s; or let trials run one at a time: concurrency=1.",
            name,
            advice,
        )


def install() -> None:
    """Now, or once the library is imported."""
    _watch_seed(random)
    wrapt.register_post_import_hook(_watch_seed, "numpy.random")
    wrapt.register_post_import_hook(_watch_wandb, "wandb")
    for package in ("lightning.fabric", "lightning_fabric"):
        wrapt.register_post_import_hook(_watch_seeding, package + ".utilities.seed")


def _watch_seed(module: Any) -> None:
    stock = module.seed

    @functools.wraps(stock)
    def seed(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        if caller not in _SEED_BY_THEMSELVES and runs_beside_others():
            advice = f"Make a generator of the trial's own: {_OWN_GENERATORS[module.__name__]}"
            warn_of(f"{module.__name__}.seed", advice)
        return stock(*args, **kwargs)

    module.seed = seed


def _watch_wandb(module: Any) -> None:
    stock = module.init

    @functools.wraps(stock)
    def init(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("reinit") != "create_new" and runs_beside_others():
            advice = 'Write wandb.init(reinit="create_new") and log to the run that it returns, with report_to=[]'
            warn_of("wandb.init", advice)
        return stock(*args, **kwargs)

    module.init = init


def _watch_seeding(module: Any) -> None:
    """PyTorch's numbers are each trial's own; Python's, NumPy's and the seeding of loaders' workers are not."""
    stock = module.seed_everything

    @functools.wraps(stock)
    def seed_everything(*args: Any, **kwargs: Any) -> Any:
        if runs_beside_others():
            warn_of("seed_everything", "Call it once, before the search, and torch.manual_seed in the objective")
        return stock(*args, **kwargs)

    module.seed_everything = seed_everything
    for name, other in list(sys.modules.items()):  # those that have it already
        if "lightning" in name and getattr(other, "seed_everything", None) is stock:
            other.seed_everything = seed_everything  # type: ignore[attr-defined]
