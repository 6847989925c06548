"""Optuna's ask-and-tell over a pool: a block runs, and ends, as an objective of `optimize` does."""

import copy
import gc
import threading
import weakref
from contextlib import suppress

import optuna
import pytest
import torch
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState
from torch import nn

import hydra_tune
from comparison import assert_same
from hydra_tune.integrations.frameworks.current_trial import current_trial
from hydra_tune.integrations.optuna_runner import ask_and_tell
from models import BUDGETS, WIDTH, Dropping, Net
from waiting import WAIT_S, wait_until

NAN = float("nan")
STEPS = 4
HAS_CONSTRAINTS = hasattr(optuna.Trial, "set_constraint")


class End(Exception):
    pass


def new_study(**options):
    return optuna.create_study(sampler=optuna.samplers.RandomSampler(0), **options)


def new_runner(budget="spilled", **options):
    return hydra_tune.HydraTrialRunner(hydra_tune.ShardPool(["cpu"], BUDGETS[budget], seed=0), 1, **options)


def train(trial):
    """Losses, and all that it has drawn, its weights among it."""
    model = Net(Dropping, depth=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.suggest_float("lr", 0.01, 0.1))
    model, optimizer = hydra_tune.prepare(model, optimizer)
    losses = []
    for step in range(STEPS):
        loss = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        trial.report(losses[-1], step)
    return losses, [p.detach().clone() for p in model.parameters()], torch.get_rng_state()


def optimized(n_trials, budget):
    study, found = new_study(), {}

    def objective(trial):
        found[trial.number] = train(trial)
        return found[trial.number][0][-1]

    new_runner(budget).optimize(study, objective, n_trials)
    return study, found


# ---- its numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["spilled", "resident"])
def test_a_block_gives_the_numbers_of_an_objective(budget):
    expected, losses = optimized(3, budget)
    runner, study = new_runner(budget), new_study()
    before = torch.get_rng_state()
    for number in range(3):
        with runner.trial(study) as trial:
            assert current_trial().optuna is trial
            assert trial.number == number
            found = train(trial)
            study.tell(trial, found[0][-1])
        assert_same(found, losses[number])
    assert torch.equal(torch.get_rng_state(), before), "the calling thread's own"
    for a, b in zip(study.trials, expected.trials, strict=True):
        assert (a.state, a.value, a.params, a.intermediate_values) == (
            b.state,
            b.value,
            b.params,
            b.intermediate_values,
        )
        assert a.user_attrs["hydra/steps"] == b.user_attrs["hydra/steps"] == STEPS
    assert runner.pool.devices[0].used_bytes == 0


def test_two_threads_side_by_side_give_the_numbers_of_an_objective():
    one_by_one, expected = optimized(2, "spilled")
    runner, study, found = new_runner(), new_study(), {}
    for trial in one_by_one.trials:  # whichever thread asks first
        study.enqueue_trial(trial.params)
    level = threading.Barrier(2, timeout=WAIT_S)

    def work():
        with runner.trial(study) as trial:
            level.wait()  # both live
            found[trial.number] = train(trial)
            study.tell(trial, found[trial.number][0][-1])
            level.wait()

    threads = [threading.Thread(target=work) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join(WAIT_S) for thread in threads]
    assert sorted(found) == [0, 1]
    for number, each in found.items():
        assert_same(each, expected[number])
    assert [t.state for t in study.trials] == [TrialState.COMPLETE] * 2
    assert runner.pool.devices[0].used_bytes == 0


# ---- its end -----------------------------------------------------------------------------------------


def one_step():
    hydra_tune.prepare(Net(depth=3))(torch.randn(4, WIDTH)).sum().backward()


def small(trial):
    trial.report(3.0, 1)
    one_step()
    return 1.0


def pruned(trial):
    small(trial)
    raise optuna.TrialPruned


def too_large(trial):
    hydra_tune.prepare(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 20_000)))(torch.randn(4, WIDTH))


def raises(error):
    def objective(trial):
        small(trial)
        raise error

    return objective


def constrained(objective):
    def noted(trial):
        hydra_tune.memory_constraint(trial)
        return objective(trial)

    return noted


def stopped(trial):
    trial.report(3.0, 1)
    current_runner[0].stop(trial)
    return small(trial)


def stopped_before_a_report(trial):
    current_runner[0].stop()
    trial.report(3.0, 1)


def closed(trial):
    current_runner[0].pool.close()
    return small(trial)


current_runner = []
ENDS = {
    "value": small,
    "NaN": lambda trial: small(trial) * NAN,
    "no number": lambda trial: [small(trial), "text"][1],
    "None": lambda trial: [small(trial), None][1],
    "too many values": lambda trial: [small(trial), 1.0],
    "pruned": pruned,
    "too large": too_large,
    "an error": raises(End()),
    "out of memory, unprepared": lambda trial: raise_out_of_memory(),
    "Ctrl-C": raises(KeyboardInterrupt()),
    "stopped": stopped,
    "all stopped": stopped_before_a_report,
    "closed": closed,
}
if HAS_CONSTRAINTS:
    ENDS |= {
        f"{name}, constrained": constrained(ENDS[name]) for name in ("value", "NaN", "pruned", "too large", "an error")
    }


def raise_out_of_memory():
    raise torch.OutOfMemoryError("of its own")


def in_optimize(runner, study, objective):
    runner.optimize(study, objective, 1)


def in_block(runner, study, objective):
    with runner.trial(study) as trial:
        study.tell(trial, objective(trial))


def run(way, objective):
    """The error that is raised, and all that the study knows."""
    runner, study, error = new_runner(), new_study(), None
    current_runner[:] = [runner]
    if objective in [ENDS.get(name) for name in ("NaN, constrained", "too large, constrained")]:
        study.add_trial(optuna.trial.create_trial(value=7.0))
    try:
        way(runner, study, objective)
    except BaseException as raised:
        error = raised
    trial = study.trials[-1]
    figures = trial.user_attrs.pop("hydra_tune", None) or {}
    untimed = {name: number for name, number in figures.items() if not name.endswith("_s")}
    told = (trial.state, trial.values, trial.user_attrs, trial.intermediate_values, getattr(trial, "constraints", None))
    assert current_trial() is None
    assert runner.pool.devices[0].used_bytes == 0
    assert not runner._searches
    return type(error), str(error), told, untimed


@pytest.mark.filterwarnings("ignore:The value ", "ignore:The number of the values")
@pytest.mark.parametrize("end", ENDS)
def test_a_block_ends_as_an_objective_does(end):
    error, message, told, figures = run(in_block, ENDS[end])
    expected_error, expected_message, expected_told, expected_figures = run(in_optimize, ENDS[end])
    assert (error, told) == (expected_error, expected_told)
    assert message == expected_message
    assert figures == expected_figures
    assert told[0] is not TrialState.RUNNING


def test_the_endings_are_what_they_are_called():
    """Of those above, by an end that is not as the other one only."""
    pruned_because = "hydra_tune: pruned because"
    for end, reason in (("NaN", "its value is nan"), ("stopped", "it was stopped by hand"), ("too large", "block 1")):
        error, _, (state, _, attrs, *_), _ = run(in_block, ENDS[end])
        assert (error, state) == (type(None), TrialState.PRUNED)
        assert reason in attrs[pruned_because]
    for end, kind in (("an error", End), ("Ctrl-C", KeyboardInterrupt), ("closed", hydra_tune.PoolClosedError)):
        error, _, (state, *_), _ = run(in_block, ENDS[end])
        assert (error, state) == (kind, TrialState.FAIL)
    if HAS_CONSTRAINTS:
        error, _, (state, values, attrs, _, constraints), _ = run(in_block, ENDS["too large, constrained"])
        assert (error, state, values) == (type(None), TrialState.COMPLETE, [7.0])
        assert constraints["hydra_tune: lacks"] > 0 and "block 1" in attrs["hydra_tune: infeasible because"]


def test_a_block_that_tells_nothing_is_told_as_failed_and_says_what_to_call():
    runner, study = new_runner(), new_study()
    says = r"that of trial 0 has ended without.* Call study\.tell\(trial, value\) in the block"
    with pytest.raises(RuntimeError, match=says), runner.trial(study) as trial:
        small(trial)
    assert study.trials[0].state is TrialState.FAIL
    assert study.trials[0].user_attrs["hydra/steps"] == 1


@pytest.mark.parametrize("state", [TrialState.PRUNED, TrialState.FAIL])
def test_a_block_may_tell_a_state_and_by_number(state):
    runner, study = new_runner(), new_study()
    with runner.trial(study) as trial:
        small(trial)
        told = study.tell(trial.number, state=state)
    assert told.state is study.trials[0].state is state
    assert told.value == (3.0 if state is TrialState.PRUNED else None)
    assert told.user_attrs["hydra/steps"] == 1
    assert "hydra_tune: pruned because" not in told.user_attrs


def test_several_values_one_of_which_is_nan_are_pruned():
    runner, study = new_runner(), optuna.create_study(directions=["minimize", "maximize"])
    for values in ([1.0, 2.0], [1.0, NAN]):
        with runner.trial(study) as trial:
            one_step()
            study.tell(trial, values, state=TrialState.COMPLETE)
    assert [t.state for t in study.trials] == [TrialState.COMPLETE, TrialState.PRUNED]
    assert study.trials[1].user_attrs["hydra_tune: pruned because"] == "its value is [1.0, nan]"


def test_a_block_that_runs_out_of_memory_is_pruned_for_it_cannot_run_again():
    runner, study, runs = new_runner(), new_study(), []
    with runner.trial(study) as trial:
        small(trial)
        runs.append(trial.number)
        raise_out_of_memory()
    assert runs == [0]
    assert study.trials[0].state is TrialState.PRUNED
    assert study.trials[0].user_attrs["hydra_tune: pruned because"] == "it ran out of memory: of its own"
    assert study.trials[0].user_attrs["hydra_tune: lacks"] == 1.0


@pytest.mark.parametrize(
    "error",
    [
        End(),
        hydra_tune.BudgetError("too large"),
        torch.OutOfMemoryError("too much"),
        KeyboardInterrupt(),
        SystemExit(3),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_raised_after_the_tell_is_raised_and_the_trial_stays_as_it_was_told(error):
    runner, study = new_runner(), new_study()

    def block():
        with runner.trial(study) as trial:
            study.tell(trial, small(trial))
            one_step()
            raise error

    with pytest.raises(type(error)) as raised:
        block()
    assert raised.value is error
    assert (study.trials[0].state, study.trials[0].value) == (TrialState.COMPLETE, 1.0)
    assert runner.pool.devices[0].used_bytes == 0


def test_a_block_that_is_stopped_after_the_tell_ends():
    runner, study, went_on = new_runner(), new_study(), []
    with runner.trial(study) as trial:
        study.tell(trial, small(trial))
        runner.stop(trial)
        one_step()
        went_on.append(True)
    assert not went_on
    assert study.trials[0].state is TrialState.COMPLETE


def test_a_block_that_tells_twice_is_refused_by_optuna():
    runner, study = new_runner(), new_study()
    with runner.trial(study) as trial:
        study.tell(trial, small(trial))
        with pytest.raises(ValueError, match="Cannot tell a COMPLETE trial"):
            study.tell(trial, NAN)
        assert study.tell(trial, NAN, skip_if_finished=True).value == 1.0
    assert study.trials[0].state is TrialState.COMPLETE
    assert "hydra_tune: pruned because" not in study.trials[0].user_attrs


def test_a_trial_that_another_study_object_of_the_storage_tells_is_told(tmp_path):
    """It has no figures: no attributes can be set after a tell that was not seen."""
    study = new_study(storage=f"sqlite:///{tmp_path}/study.db", study_name="search")
    other = optuna.load_study(study_name="search", storage=study._storage)
    with new_runner().trial(study) as trial:
        other.tell(trial, small(trial))
    assert (study.trials[0].state, study.trials[0].value) == (TrialState.COMPLETE, 1.0)
    assert "hydra_tune" not in study.trials[0].user_attrs


def test_an_error_that_optuna_raises_for_a_tell_goes_on_and_another_tell_may_follow():
    runner, study = new_runner(), new_study()
    with runner.trial(study) as trial:
        with pytest.raises(ValueError, match="Values were told"):
            study.tell(trial, small(trial), state=TrialState.FAIL)
        study.tell(trial, 2.0)
    assert (study.trials[0].state, study.trials[0].value) == (TrialState.COMPLETE, 2.0)
    with pytest.raises(ValueError, match="Values are required"), runner.trial(study) as trial:
        study.tell(trial, state=TrialState.COMPLETE)
    assert study.trials[1].state is TrialState.FAIL


# ---- beside it ---------------------------------------------------------------------------------------


def test_the_options_are_those_of_ask():
    runner, study = new_runner(), new_study()
    distributions = {"lr": FloatDistribution(0.01, 0.1)}
    with runner.trial(study, fixed_distributions=distributions) as trial:
        assert trial.params == new_study().ask(fixed_distributions=distributions).params
        study.tell(trial, 0.0)
    with pytest.raises(TypeError, match="distribution"), runner.trial(study, distribution={}):
        pass
    assert len(study.trials) == 1


def test_from_another_thread_a_block_is_paused_resumed_and_stopped():
    runner, study, steps = new_runner(), new_study(), []

    def work():
        with runner.trial(study) as trial:
            model = hydra_tune.prepare(Net(depth=3))
            while True:
                model(torch.randn(4, WIDTH)).sum().backward()
                steps.append(float(len(steps)))
                trial.report(steps[-1], len(steps))
        after.append(threading.current_thread())

    after = []
    thread = threading.Thread(target=work)
    thread.start()
    wait_until(lambda: len(steps) >= 2)
    runner.pause(0)
    wait_until(lambda: runner.pool.report()["trials"][0]["state"] == "paused")
    made = len(steps)
    runner.resume(0)
    wait_until(lambda: len(steps) > made)
    runner.stop(study.trials[0])
    thread.join(WAIT_S)
    assert after == [thread], "it goes on after the block"
    assert study.trials[0].state is TrialState.PRUNED
    assert study.trials[0].user_attrs["hydra_tune: pruned because"] == "it was stopped by hand"
    assert study.trials[0].value == steps[study.trials[0].last_step - 1]
    with pytest.raises(hydra_tune.ConfigError, match=r"but 0 is not among those that do, \[\]"):
        runner.stop(0)


def test_a_waiting_trial_that_two_threads_get_is_in_one_block(monkeypatch):
    """As SQLite gives it: the second one asks again."""
    runner, study = new_runner(), new_study()
    first = study.ask()
    given = iter([first, first, study.ask()])
    monkeypatch.setattr(study, "ask", lambda: next(given))
    numbers = []

    def work():
        with runner.trial(study) as other:
            numbers.append(other.number)
            study.tell(other, 0.0)

    with runner.trial(study) as trial:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(WAIT_S)
        numbers.append(trial.number)
        study.tell(trial, 0.0)
    assert numbers == [1, 0]


def test_a_model_is_plain_after_its_block_with_the_weights_that_it_has_trained():
    runner, study = new_runner(), new_study()
    with runner.trial(study) as trial:
        model = Net(depth=3)
        model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        before = copy.deepcopy(model.state_dict())
        loss = model(torch.ones(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        study.tell(trial, loss.item())
    after = model(torch.ones(4, WIDTH)).square().mean()
    assert after.item() < loss.item()
    assert not torch.equal(before["head.weight"], model.state_dict()["head.weight"])
    del model, optimizer, loss, after, before
    gc.collect()
    device = runner.pool.devices[0]
    assert (device.used_bytes, device.live_bytes) == (0, 0)


@pytest.mark.parametrize("error", [None, optuna.TrialPruned(), End()], ids=["value", "pruned", "an error"])
def test_nothing_of_what_a_block_calls_stays_reachable(error):
    runner, study, weights = new_runner(), new_study(), []

    def fit(trial):
        model = hydra_tune.prepare(Net(depth=3))
        weights.extend(map(weakref.ref, model.parameters()))
        loss = model(torch.randn(4, WIDTH)).sum()
        if error is not None:
            raise error
        loss.backward()
        return loss.item()

    with suppress(End), runner.trial(study) as trial:
        study.tell(trial, fit(trial))
    gc.collect()
    assert weights and not [each for each in weights if each() is not None]
    assert not ask_and_tell._open
    device = runner.pool.devices[0]
    assert (device.used_bytes, device.live_bytes) == (0, 0)


def test_a_study_is_the_users_within_a_block():
    runner, study = new_runner(), new_study()
    attributes = set(vars(study))
    with runner.trial(study) as trial:
        assert set(vars(study)) == attributes and type(study) is optuna.Study
        assert len(copy.deepcopy(study).trials) == 1
        other = study.ask()
        assert study.tell(other, 5.0).value == 5.0, "one that is nobody's block"
        study.tell(trial, 1.0)
    assert [t.value for t in study.trials] == [1.0, 5.0]
    assert "report" not in vars(trial)


def test_what_cannot_be_is_refused_before_the_study_is_asked(tmp_path):
    study, runner = new_study(), new_runner()
    keeps_checkpoints = new_runner(checkpoint_dir=tmp_path)
    with pytest.raises(hydra_tune.ConfigError, match=r"with checkpoint_dir\. Call its optimize, or make a HydraTrial"):
        keeps_checkpoints.trial(study).__enter__()
    with pytest.raises(hydra_tune.ConfigError, match=r"study is an optuna\.Study, got str"):
        runner.trial("study").__enter__()
    runner.pool.close()
    with pytest.raises(hydra_tune.PoolClosedError):
        runner.trial(study).__enter__()
    assert not study.trials


def test_a_block_in_a_trial_is_refused_which_could_wait_for_each_other():
    runner, study, other = new_runner(), new_study(), new_study()
    with pytest.raises(RuntimeError, match="a thread runs one trial at a time"), runner.trial(study):
        runner.trial(other).__enter__()
    with pytest.raises(RuntimeError, match="a thread runs one trial at a time"):
        runner.optimize(study, lambda trial: runner.trial(other).__enter__(), 1)
    assert not other.trials
    assert [t.state for t in study.trials] == [TrialState.FAIL] * 2
