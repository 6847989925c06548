"""Who draws from Python's and NumPy's global random numbers, which all threads share."""

import random
import re
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import optuna
import pytest
import torch
from torch import nn

import hydra_tune
from hydra_tune.shared_random import SharedDraws

captured, imported = random.random, np.random.rand
DRAWS = {
    "random": random.random,
    "a name of its own": captured,
    "choice": lambda: random.choice("ab"),
    "shuffle": lambda: random.shuffle([1, 2, 3]),
    "gauss": lambda: random.gauss(0.0, 1.0),
    "numpy": lambda: np.random.rand(2),
    "numpy's randint": lambda: np.random.randint(9),
    "numpy's permutation": lambda: np.random.permutation(4),
}
NO_DRAWS = {
    "nothing": lambda: None,
    "torch": lambda: torch.rand(2),
    "Python's own": lambda: random.Random(0).random(),
    "NumPy's own": lambda: np.random.default_rng(0).random(),
}


@contextmanager
def somebody_draws():
    """All the time."""
    began, ends = threading.Event(), threading.Event()

    def draw():
        while not ends.is_set():
            random.random()
            np.random.rand()
            began.set()
            time.sleep(1e-4)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        assert began.wait(10)
        yield
    finally:
        ends.set()
        thread.join(10)


def until_both_have_changed():
    """By somebody else."""
    pythons, numpys = random.getstate(), np.random.get_state()[2]
    while random.getstate() == pythons or np.random.get_state()[2] == numpys:
        pass


@pytest.mark.parametrize("what", [*DRAWS, *NO_DRAWS])
@pytest.mark.parametrize("company", [False, True])
def test_a_thread_knows_its_own_draws(what, company):
    draw = (DRAWS | NO_DRAWS)[what]
    own = random.getstate(), np.random.get_state()
    if not company:
        with SharedDraws() as draws:
            draw()
        assert draws.are_some == draws.may_be == (what in DRAWS)
        draws.take_back()
        assert random.getstate() == own[0] and np.random.get_state()[2] == own[1][2]
        return
    with somebody_draws(), SharedDraws() as draws:
        draw()
        until_both_have_changed()
        assert draws.may_be
        assert draws.are_some == (what in DRAWS)


def test_those_within_are_those_around_too_and_nothing_is_left_behind():
    functions = dict(vars(np.random))
    with somebody_draws(), SharedDraws() as outer:
        with SharedDraws() as before:
            until_both_have_changed()
        with SharedDraws() as inner:
            np.random.rand()
        with SharedDraws() as after:
            until_both_have_changed()
        assert [each.are_some for each in (before, inner, after, outer)] == [False, True, False, True]
        assert vars(np.random)["rand"] is not functions["rand"]
    assert sys.getprofile() is None
    assert vars(np.random)["rand"] is functions["rand"]


def test_what_others_draw_stays_drawn():
    """Else their numbers would come again."""
    with somebody_draws():
        with SharedDraws() as draws:
            until_both_have_changed()
        before = random.getstate()
        draws.take_back()
        assert random.getstate() != draws._before[0]
        assert before != draws._before[0]


def test_another_profile_function_is_left_alone():
    """Then the states decide."""

    def profile(*_):
        return None

    sys.setprofile(profile)
    try:
        with somebody_draws(), SharedDraws() as draws:
            until_both_have_changed()
            assert sys.getprofile() is profile
        assert draws.are_some
    finally:
        sys.setprofile(None)


class Drops(nn.Module):
    """Draws in each forward, for what it computes."""

    def __init__(self, draw):
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.draw = draw

    def forward(self, x):
        return self.layer(x) * float(self.draw())


@pytest.mark.parametrize(
    ("draw", "reason"),
    [
        pytest.param(random.random, "draws from Python's or NumPy's random numbers", id="Python's"),
        pytest.param(lambda: np.random.rand(), "draws from Python's or NumPy's random numbers", id="NumPy's"),
        pytest.param(
            imported, "makes other values when it is repeated|changes draw", id="by a name that nobody watches"
        ),
    ],
)
def test_in_company_of_data_sets_that_draw_only_blocks_that_draw_keep_their_activations(draw, reason):
    with somebody_draws(), hydra_tune.ShardPool(["cpu"], "48KiB") as pool:

        def objective(trial):
            torch.manual_seed(0)
            third = Drops(draw) if trial.number else nn.Linear(32, 32)
            model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), third, *(nn.Linear(32, 32) for _ in range(5)))
            model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(2):
                model(torch.randn(4, 32)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        study = optuna.create_study()
        hydra_tune.HydraTrialRunner(pool, 2).optimize(study, lambda t: objective(t) or 0.0, n_trials=2)
        assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 2
        keeps = {trial["name"]: trial["keeps"] for trial in pool.report()["trials"]}
    assert keeps["trial 0"] == {} and [*keeps["trial 1"]] == ["2"]
    assert re.fullmatch(f"2 ({reason})", keeps["trial 1"]["2"])
