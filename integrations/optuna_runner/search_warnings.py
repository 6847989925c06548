"""Warns of what a study's pruner and sampler cannot do while so many trials run together."""

from __future__ import annotations

import copy
import logging
import threading

import optuna
from optuna.pruners import (
    HyperbandPruner,
    PatientPruner,
    PercentilePruner,
    SuccessiveHalvingPruner,
    WilcoxonPruner,
)
from optuna.study import StudyDirection
from optuna.trial import TrialState

logger = logging.getLogger("hydra_tune")
STEPS = (*range(1, 101), *(2**n for n in range(7, 25)))  # at which each trial reports
_MOST_FINISHED = 100  # the last ones, at whose steps they report, too
_one_is_quiet = threading.Lock()  # Optuna's verbosity is the process's
_COMPARE = (PercentilePruner, SuccessiveHalvingPruner, HyperbandPruner, WilcoxonPruner)
_NEVER_PRUNED = (optuna.samplers.GPSampler, optuna.samplers.CmaEsSampler)  # samplers that learn of complete trials


def warn_of_pruner(study: optuna.Study, concurrency: int) -> None:
    """If it is one of Optuna's that compare trials, and would stop none of so many that run level with each other."""
    pruner = _comparing(study.pruner)
    if concurrency < 2 or len(study.directions) > 1 or not isinstance(pruner, _COMPARE):
        return
    if _prunes(study, pruner, concurrency):
        return
    logger.warning(
        "%s would stop none of %d trials that run together while none has finished: it compares them with finished "
        "ones, or waits for one to tell how many steps there are. These can: hydra_tune.RungPruner(min_resource=1), "
        "optuna.pruners.SuccessiveHalvingPruner(min_resource=1), optuna.pruners.HyperbandPruner(max_resource=STEPS).",
        type(study.pruner).__name__,
        concurrency,
    )


def _comparing(pruner: optuna.pruners.BasePruner) -> optuna.pruners.BasePruner | None:
    """A patient one lets another decide, or goes by each trial's own values."""
    if isinstance(pruner, PatientPruner):
        inner: optuna.pruners.BasePruner | None = pruner._wrapped_pruner  # no public way to ask
        return None if inner is None else _comparing(inner)
    return pruner


def _prunes(study: optuna.Study, pruner: optuna.pruners.BasePruner, concurrency: int) -> bool:
    """Whether any of so many trials is stopped that report one value each, all apart, step by step; beside those that
    have finished in this study."""
    with _one_is_quiet:
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        try:
            rehearsal = optuna.create_study(
                direction=study.direction, pruner=copy.deepcopy(pruner), sampler=optuna.samplers.RandomSampler(0)
            )
        finally:
            optuna.logging.set_verbosity(verbosity)
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
    rehearsal.add_trials(finished)
    best = [t.value for t in finished if t.value is not None and t.state is TrialState.COMPLETE]
    worse = -1.0 if study.direction is StudyDirection.MAXIMIZE else 1.0
    start = 0.0 if not best else (max(best) if worse > 0 else min(best))
    trials = [rehearsal.ask() for _ in range(concurrency)]
    reported = {step for trial in finished[-_MOST_FINISHED:] for step in trial.intermediate_values}
    for step in sorted(reported.union(STEPS)):
        for i, trial in enumerate(trials):
            trial.report(start + worse * (1 + i), step)
            if trial.should_prune():
                return True
    return False


def warn_of_sampler(study: optuna.Study, concurrency: int, n_trials: int | None) -> None:
    """If it draws at random until so many trials have finished, and the last one of this search begins before."""
    sampler = study.sampler
    startup = getattr(sampler, "_n_startup_trials", None)  # no public way to ask
    if not isinstance(sampler, optuna.samplers.TPESampler) or startup is None or n_trials is None or n_trials < 2:
        return
    finished = len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)))
    before_last = finished + n_trials - min(concurrency, n_trials)
    if before_last < startup:
        logger.warning(
            "TPESampler draws at random until %d trials have finished, but when the last of these %d trials begins, %d "
            "will have, with %d at a time: the whole search is random. Lower n_startup_trials or the concurrency, or "
            "raise n_trials.",
            startup,
            n_trials,
            before_last,
            concurrency,
        )


def warn_of_unlearned(study: optuna.Study) -> None:
    """If its sampler learns nothing of a trial that was pruned for it could not fit, or has diverged."""
    considers = getattr(study.sampler, "_consider_pruned_trials", False)  # no public way to ask
    if isinstance(study.sampler, _NEVER_PRUNED) and not considers:
        logger.warning(
            "%s learns nothing of pruned trials and may suggest what did not fit, or has diverged, for ever. From "
            "Optuna 5 on call hydra_tune.memory_constraint(trial) in the objective; before, return a bad value "
            "instead of nan, or use TPESampler.",
            type(study.sampler).__name__,
        )
