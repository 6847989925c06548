"""Who draws from Python's and NumPy's global random numbers, which all threads share."""

import random
import time

import numpy as np
import optuna
import pytest
import torch
from torch import nn

import hydra_tune
from hydra_tune.randomness.python_and_numpy import PythonAndNumpyStates
from waiting import repeating

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


def somebody_draws():
    def draw():
        random.random()
        np.random.rand()
        time.sleep(0.05)  # as one a batch

    return repeating(draw)


def states():
    return random.getstate(), np.random.get_state()[2], tuple(np.random.get_state()[1])


@pytest.mark.parametrize("what", [*DRAWS, *NO_DRAWS])
def test_what_draws_is_found_and_put_back(what):
    before, shared = states(), PythonAndNumpyStates()
    (DRAWS | NO_DRAWS)[what]()
    assert shared.have_moved() == (what in DRAWS)
    shared.put_back()
    assert states() == before and not shared.have_moved()


class Drops(nn.Module):
    """Draws in each forward, for what it computes."""

    def __init__(self, draw):
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.draw = draw

    def forward(self, x):
        return self.layer(x) * float(self.draw())


@pytest.mark.parametrize(
    "draw", [lambda: random.random(), lambda: np.random.rand(), captured, imported],
    ids=["Python's", "NumPy's", "Python's in an attribute", "NumPy's in an attribute"],
)  # fmt: skip
def test_in_company_of_data_sets_that_draw_only_blocks_that_draw_keep_their_activations(draw):
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
    assert keeps["trial 1"]["2"] == "2 draws from Python's or NumPy's random numbers"
