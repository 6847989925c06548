"""A pool's figures reach TensorBoard, MLflow or a function, beside the user's own."""

import threading
from types import SimpleNamespace

import optuna
import pytest
import torch

import hydra_tune
from models import BUDGETS, WIDTH, Net
from waiting import wait_until


@pytest.fixture
def pool():
    pool = hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"])
    model = Net()
    model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), pool=pool)
    for _ in range(3):
        model(torch.randn(4, WIDTH)).sum().backward()
        optimizer.step()
    yield pool
    hydra_tune.release(model)


def test_a_function_gets_numbers_of_devices_and_trials_also_a_last_time(pool):
    logged = []
    with hydra_tune.log_figures(pool, lambda figures, second: logged.append((figures, second)), every_s=0.001):
        wait_until(lambda: len(logged) >= 2)
    figures, second = logged[-1]
    name = pool.devices[0].name
    assert {f"hydra/{name}/used_mib", f"hydra/{name}/busy_pct", "hydra/trial 0/steps"} <= set(figures)
    assert figures["hydra/trial 0/steps"] == 3 and isinstance(second, int)
    assert all(type(value) is float for value in figures.values())
    assert logged[0][0][f"hydra/{name}/busy_pct"] > 0 == figures[f"hydra/{name}/busy_pct"], "since the time before"
    assert not [t for t in threading.enumerate() if t.name == "hydra_tune figures"]


def test_first_steps_and_ends_are_logged_when_they_come():
    """Of runs that were shorter than `every_s` nothing was logged but devices."""
    pool, logged = hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]), []

    def steps(name):
        return [figures[key] for figures in logged if (key := f"hydra/{name}/steps") in figures]

    def objective(trial):
        model = Net()
        model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            model(torch.randn(4, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and trial.number == 0:
                wait_until(lambda: steps("trial 0"))  # by now a forward has ended the first step
        trial.report(0.5, 3)
        return 0.5

    with hydra_tune.log_figures(pool, lambda figures, _: logged.append(figures), every_s=3600):
        hydra_tune.HydraTrialRunner(pool, 1).optimize(optuna.create_study(), objective, 2)
    assert steps("trial 0")[0] < steps("trial 0")[-1] == steps("trial 1")[-1] == 3
    assert {figures.get("hydra/trial 1/value") for figures in logged} == {None, 0.5}
    assert len(logged) <= 5, "not more often than that"


def test_a_summary_writer_gets_scalars(pool):
    scalars = []
    writer = SimpleNamespace(add_scalar=lambda *scalar: scalars.append(scalar))
    with hydra_tune.log_figures(pool, writer):
        pass
    assert ("hydra/trial 0/steps", 3.0) in [scalar[:2] for scalar in scalars]


def test_mlflow_gets_metrics_of_the_run_that_was_active(pool):
    """In MLflow the active run is a thread's: another thread would begin a new run."""
    got = []
    run = SimpleNamespace(info=SimpleNamespace(run_id="abc"))
    mlflow = SimpleNamespace(active_run=lambda: run, log_metrics=lambda figures, **to: got.append((figures, to)))
    with hydra_tune.log_figures(pool, mlflow):
        pass
    ((figures, to),) = got
    assert to["run_id"] == "abc" and not any(":" in name for name in figures), "a character that MLflow refuses"
    mlflow.active_run = lambda: None
    with pytest.raises(hydra_tune.ConfigError, match="there is none"), hydra_tune.log_figures(pool, mlflow):
        pass


def test_a_logger_that_fails_costs_the_figures_alone(pool, caplog):
    def fail(*_):
        raise OSError("No space left on device")

    with hydra_tune.log_figures(pool, fail):
        pass
    assert caplog.messages == ["figures of the pool are no longer logged (No space left on device)"]


@pytest.mark.parametrize("arguments", [{"to": 3}, {"to": print, "every_s": 0}])
def test_what_means_nothing_is_refused(pool, arguments):
    with pytest.raises(hydra_tune.ConfigError), hydra_tune.log_figures(pool, **arguments):
        pass
