"""Pruning and sampling where trials run together: who stops whom, and what is said of settings that cannot."""

import logging
import threading
import warnings

import numpy as np
import optuna
import pytest
import torch
from optuna.trial import TrialState, create_trial

import hydra_tune
from hydra_tune.integrations.optuna_runner.search_warnings import warn_of_pruner, warn_of_sampler
from waiting import WAIT_S

STEPS = 30


def study_with(pruner=None, direction="minimize", sampler=None):
    return optuna.create_study(direction=direction, pruner=pruner, sampler=sampler or optuna.samplers.RandomSampler(0))


def run_level(study, costs, steps=STEPS):
    """The steps that each of these trials makes, all level with each other; each reports one value."""
    trials = {study.ask(): cost for cost in costs}
    made = dict.fromkeys(costs, 0)
    for step in range(1, steps + 1):
        for trial, cost in list(trials.items()):
            trial.report(cost, step)
            made[cost] = step
            if trial.should_prune():
                study.tell(trial, state=TrialState.PRUNED)
                del trials[trial]
    for trial, cost in trials.items():
        study.tell(trial, cost)
    return made


# ---- RungPruner ----------------------------------------------------------------------------------------


def test_who_is_not_among_the_best_of_those_that_have_come_so_far_is_stopped():
    """Of three, one goes on: the first two meet fewer, the third is worse than both. None is left to judge them by."""
    made = run_level(study_with(hydra_tune.RungPruner(min_resource=2, reduction_factor=3)), range(9))
    assert made == {0: 30, 1: 30, **dict.fromkeys(range(2, 9), 2)}


def test_who_comes_first_is_stopped_after_better_ones_and_rungs_lie_a_factor_apart():
    made = run_level(
        study_with(hydra_tune.RungPruner(min_resource=2, reduction_factor=3, min_trials=2)), range(8, -1, -1)
    )
    assert made[0] == 30
    assert {made[cost] for cost in (3, 4, 5, 6, 7, 8)} == {3}, "at the report after, all have come"
    assert {made[1], made[2]} == {7}


def test_the_largest_go_on_where_a_study_maximizes():
    made = run_level(study_with(hydra_tune.RungPruner(2), "maximize"), range(9))
    assert [cost for cost, steps in made.items() if steps == STEPS] == [8]


def test_one_that_was_early_is_stopped_once_better_ones_have_come():
    """Nobody is to wait for others, so the first at a rung goes on; that it was first shall not save it."""
    study = study_with(hydra_tune.RungPruner(1, 2, min_trials=2))
    early, late = study.ask(), study.ask()
    for step in (1, 2, 3):
        early.report(5.0, step)
        assert not early.should_prune()
    late.report(4.0, 1)
    assert not late.should_prune()
    early.report(5.0, 4)
    assert not early.should_prune(), "it is alone on its rung"
    late.report(4.0, 2)
    late.report(4.0, 4)
    early.report(1.0, 5)
    assert early.should_prune(), "what counts is the value at the rung"
    assert not late.should_prune()


def test_finished_and_pruned_trials_count_failed_ones_do_not():
    study = study_with(hydra_tune.RungPruner(1, 2))
    for state, value, reported in (
        (TrialState.COMPLETE, 1.0, 1.0),
        (TrialState.FAIL, None, 0.0),
        (TrialState.PRUNED, None, 3.0),
    ):
        study.add_trial(create_trial(state=state, value=value, intermediate_values={1: reported}))
    trial = study.ask()
    trial.report(2.0, 1)
    assert not trial.should_prune(), "second of three"
    trial = study.ask()
    trial.report(2.5, 1)
    assert trial.should_prune(), "third of four"


def test_a_rung_counts_the_first_report_at_or_beyond_it_and_nan_is_stopped():
    study = study_with(hydra_tune.RungPruner(3, 2))
    a, b, c = study.ask(), study.ask(), study.ask()
    a.report(0.0, 2)
    assert not a.should_prune(), "below the first rung"
    a.report(1.0, 4)
    b.report(2.0, 5)
    assert b.should_prune()
    assert not a.should_prune()
    c.report(float("nan"), 3)
    assert c.should_prune()
    assert not a.should_prune(), "nan is worse than any"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_resource": 0}, "min_resource of a RungPruner is a whole number of at least 1, got 0"),
        ({"reduction_factor": 1}, "reduction_factor .* at least 2, got 1"),
        ({"min_trials": 1.5}, "min_trials .* got 1.5"),
    ],
)
def test_a_pruner_that_cannot_be_says_so(arguments, message):
    with pytest.raises(hydra_tune.ConfigError, match=message):
        hydra_tune.RungPruner(**arguments)


def test_trials_of_a_runner_are_stopped_while_all_of_them_run():
    """Each waits at every step for the others that still run: none has finished when the first is stopped."""
    level = threading.Barrier(8, timeout=WAIT_S)
    made = {}

    def objective(trial):
        for step in range(1, 10):
            level.wait() if step == 1 else None
            trial.report(trial.number, step)
            made[trial.number] = step
            if step == 1:
                level.wait()
            if trial.should_prune():
                raise optuna.TrialPruned
        return float(trial.number)

    study = study_with(hydra_tune.RungPruner(1, 4))
    hydra_tune.HydraTrialRunner(hydra_tune.ShardPool(["cpu"], "1MiB"), 8).optimize(study, objective, n_trials=8)
    assert {n for n, steps in made.items() if steps == 1} == set(range(2, 8))


# ---- warnings ------------------------------------------------------------------------------------------

with warnings.catch_warnings():
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    NEW = {
        "wilcoxon": optuna.pruners.WilcoxonPruner(),
        "patient": optuna.pruners.PatientPruner(optuna.pruners.MedianPruner(), 0),
    }
CANNOT = {
    **NEW,
    "median": optuna.pruners.MedianPruner(),
    "median without startup": optuna.pruners.MedianPruner(n_startup_trials=0),
    "hyperband": optuna.pruners.HyperbandPruner(),
    "successive halving": optuna.pruners.SuccessiveHalvingPruner(),
}
CAN = {
    "successive halving": optuna.pruners.SuccessiveHalvingPruner(min_resource=1),
    "hyperband": optuna.pruners.HyperbandPruner(max_resource=STEPS),
    "rungs": hydra_tune.RungPruner(1),
    "nothing": optuna.pruners.NopPruner(),
    "threshold": optuna.pruners.ThresholdPruner(upper=1e9),
    "successive halving, late": optuna.pruners.SuccessiveHalvingPruner(min_resource=500),
    "hyperband, late": optuna.pruners.HyperbandPruner(min_resource=200, max_resource=5000),
}


def warnings_of(caplog, warn, *arguments):
    with caplog.at_level(logging.WARNING, "hydra_tune"):
        warn(*arguments)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("name", CANNOT)
def test_optunas_defaults_stop_none_of_eight_that_run_together_and_a_warning_says_so(name, caplog):
    made = run_level(study_with(CANNOT[name]), range(8))
    assert set(made.values()) == {STEPS}
    (message,) = warnings_of(caplog, warn_of_pruner, study_with(CANNOT[name]), 8)
    assert f"{type(CANNOT[name]).__name__} would stop none of 8 trials" in message
    assert "hydra_tune.RungPruner(min_resource=1)" in message


@pytest.mark.parametrize("name", CAN)
def test_those_that_the_warning_names_can_and_others_are_not_warned_of(name, caplog):
    if name in ("successive halving", "hyperband", "rungs"):
        assert min(run_level(study_with(CAN[name]), range(8)).values()) < STEPS
    assert warnings_of(caplog, warn_of_pruner, study_with(CAN[name]), 8) == []


@pytest.mark.filterwarnings("ignore:PatientPruner is experimental")
def test_a_patient_pruner_is_as_the_one_within_it(caplog):
    def warned(within):
        pruner = optuna.pruners.PatientPruner(within, 2)
        return bool(warnings_of(caplog, warn_of_pruner, study_with(pruner), 8))

    assert not warned(None), "it goes by each trial's own values"
    assert not warned(optuna.pruners.SuccessiveHalvingPruner(1))
    assert warned(optuna.pruners.MedianPruner())


def test_a_pruner_that_decides_late_beside_finished_trials_is_not_warned_of(caplog):
    """At the steps that these have reported."""
    study = study_with(optuna.pruners.MedianPruner(n_warmup_steps=200))
    for cost in range(6):
        values = {step: float(cost) for step in range(1, 1000, 20)}
        study.add_trial(optuna.create_trial(value=float(cost), intermediate_values=values))
    assert warnings_of(caplog, warn_of_pruner, study, 4) == []


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_a_study_with_finished_trials_is_not_warned_of(direction, caplog):
    study = study_with(optuna.pruners.MedianPruner(), direction)
    run_level(study, range(8))
    assert warnings_of(caplog, warn_of_pruner, study, 8) == []
    assert len(study.trials) == 8, "it was a rehearsal"


def test_one_trial_at_a_time_and_several_objectives_are_not_warned_of(caplog):
    assert warnings_of(caplog, warn_of_pruner, study_with(optuna.pruners.MedianPruner()), 1) == []
    assert warnings_of(caplog, warn_of_pruner, optuna.create_study(directions=["minimize", "maximize"]), 8) == []


@pytest.mark.parametrize(
    ("n_trials", "finished", "warned"), [(17, 0, True), (18, 0, False), (8, 9, True), (8, 10, False)]
)
def test_a_search_that_stays_random_is_warned_of(n_trials, finished, warned, caplog):
    study = study_with(sampler=optuna.samplers.TPESampler(seed=0))
    for number in range(finished):
        study.tell(study.ask(), float(number))
    messages = warnings_of(caplog, warn_of_sampler, study, 8, n_trials)
    assert [("the whole search is random" in message) for message in messages] == [True] * warned


def test_a_runner_warns_once_when_its_objective_reports(caplog):
    def objective(trial):
        for step in range(1, 4):
            if reports:
                trial.report(1.0, step)
        return 0.0

    reports = False
    runner = hydra_tune.HydraTrialRunner(hydra_tune.ShardPool(["cpu"], "1MiB"), 2)
    with caplog.at_level(logging.WARNING, "hydra_tune"):
        runner.optimize(study_with(), objective, n_trials=2)
        assert not of_the_pruner(caplog)
        reports = True
        runner.optimize(study_with(), objective, n_trials=2)
    (message,) = of_the_pruner(caplog)
    assert "MedianPruner would stop none of 2" in message


def of_the_pruner(caplog):
    """Not that these objectives prepare no model."""
    return [record.getMessage() for record in caplog.records if "Pruner" in record.getMessage()]


def test_of_trials_that_report_first_at_once_one_warns_and_optunas_verbosity_stays(caplog):
    """Each rehearsed, with Optuna silenced, and put back what it had found: silence, where another one was at it."""
    level = threading.Barrier(8, timeout=WAIT_S)

    def objective(trial):
        level.wait()
        trial.report(1.0, 1)
        level.wait()  # nobody has finished while it is rehearsed
        return 0.0

    before = optuna.logging.get_verbosity()
    with caplog.at_level(logging.WARNING, "hydra_tune"):
        hydra_tune.HydraTrialRunner(hydra_tune.ShardPool(["cpu"], "1MiB"), 8).optimize(
            study_with(), objective, n_trials=8
        )
    assert len(of_the_pruner(caplog)) == 1
    assert optuna.logging.get_verbosity() == before


NAN = float("nan")


@pytest.mark.parametrize("value", [NAN, np.float32(NAN), torch.tensor(NAN), [NAN]], ids=repr)
def test_a_trial_that_diverges_is_pruned_and_says_so(value):
    assert states_of(["minimize"], value) == ["PRUNED", "COMPLETE"]


@pytest.mark.parametrize(
    "sampler",
    [optuna.samplers.TPESampler(seed=0, n_startup_trials=4), optuna.samplers.NSGAIISampler(seed=0, population_size=4)],
    ids=["TPE", "NSGA-II"],
)
def test_one_of_several_objectives_that_diverges_is_enough(sampler):
    """The search goes on: samplers are asked for more trials after it than they draw at random."""
    states = states_of(["minimize", "maximize"], (1.0, NAN), sampler, 16)
    assert states == ["PRUNED", "COMPLETE"] * 8


def states_of(directions, value, sampler=None, n_trials=2):
    """Of trials of which every other one has this value."""

    def objective(trial):
        x = trial.suggest_float("x", 0, 1)
        return ((x,) * len(directions) if len(directions) > 1 else x) if trial.number % 2 else value

    study = optuna.create_study(directions=directions, sampler=sampler)
    with hydra_tune.ShardPool(["cpu"], "1MiB") as pool:
        hydra_tune.HydraTrialRunner(pool, concurrency=1).optimize(study, objective, n_trials=n_trials)
    for trial in study.trials[::2]:
        assert "nan" in trial.user_attrs["hydra_tune: pruned because"]
    return [trial.state.name for trial in study.trials]


@pytest.mark.skipif(not hasattr(optuna.Trial, "set_constraint"), reason="trials have constraints from Optuna 5 on")
def test_a_sampler_with_the_constraint_learns_what_diverges():
    """And GPSampler, which learns nothing of pruned trials, goes elsewhere."""

    def objective(trial):
        hydra_tune.memory_constraint(trial)
        x = trial.suggest_float("x", 0, 1)
        return NAN if x > 0.8 else 1 - x

    study = study_with(sampler=optuna.samplers.GPSampler(seed=0, n_startup_trials=4))
    with hydra_tune.ShardPool(["cpu"], "1MiB") as pool:
        hydra_tune.HydraTrialRunner(pool, concurrency=1).optimize(study, objective, n_trials=14)
    last = study.trials[7:]
    assert sum(trial.params["x"] > 0.8 for trial in last) < len(last) / 2
    diverged = [trial for trial in study.trials if "hydra_tune: infeasible because" in trial.user_attrs]
    assert diverged and {trial.state for trial in diverged} == {TrialState.COMPLETE}
    for trial in diverged:
        before = study.trials[: trial.number]
        assert trial.value == max(each.value for each in before if each.state is TrialState.COMPLETE)
    assert study.best_params["x"] <= 0.8


@pytest.mark.filterwarnings("ignore:GPSampler is experimental")
@pytest.mark.parametrize("sampler", [optuna.samplers.GPSampler, optuna.samplers.CmaEsSampler])
def test_a_sampler_that_learns_nothing_of_pruned_trials_is_warned_of_once(sampler, caplog):
    study = study_with(sampler=sampler(seed=0))
    with hydra_tune.ShardPool(["cpu"], "1MiB") as pool, caplog.at_level(logging.WARNING, "hydra_tune"):
        hydra_tune.HydraTrialRunner(pool, concurrency=1).optimize(study, lambda trial: NAN, n_trials=3)
    warned = [record for record in caplog.records if "learns nothing of pruned trials" in record.getMessage()]
    assert len(warned) == 1


def test_an_objective_that_is_none_is_refused():
    runner = hydra_tune.HydraTrialRunner(hydra_tune.ShardPool(["cpu"], "1MiB"), 1)
    with pytest.raises(hydra_tune.ConfigError, match="objective is a function of a trial, got NoneType"):
        runner.optimize(optuna.create_study(), None, n_trials=1)
