"""Trainers under Ray Tune: `hyperparameter_search` of ours, and the Trainer's own with a `HydraExecutor`."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
pytest.importorskip("ray")
pytest.importorskip("accelerate")

from transformers import Trainer

import hydra_tune
from hugging_face import DATA, SPILLED, arguments, gpt
from hydra_tune import HydraExecutor, tune
from ray_local import local_ray

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.proof]


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    with local_ray():
        yield


def space(_: Any) -> dict[str, Any]:
    return {"learning_rate": tune.grid_search([1e-4, 1e-2])}


def make(folder: Any, callbacks: Any = ()) -> Trainer:
    args = arguments(folder, eval_strategy="steps", eval_steps=2)
    model_init = gpt_for
    return Trainer(args=args, model_init=model_init, train_dataset=DATA, eval_dataset=DATA[:4], callbacks=[*callbacks])


def gpt_for() -> Any:
    return gpt()


def executor() -> HydraExecutor:
    return HydraExecutor(SPILLED, devices=["cpu"], concurrency=2)


def test_a_search_of_ours(tmp_path):
    best = hydra_tune.hyperparameter_search(partial(make, tmp_path / "out"), space, 1, backend="ray", verbose=0,
                                            resources=executor(), storage_path=str(tmp_path))  # fmt: skip
    assert best.run_summary.dataframe()["objective"].tolist().count(best.objective) == 1
    assert sorted(best.run_summary.dataframe()["training_iteration"]) == [2, 2]
    assert best.objective == min(best.run_summary.dataframe()["objective"])


def test_the_trainer_s_own_search(tmp_path):
    trainer = make(tmp_path / "out", [hydra_tune.HydraTrainerCallback()])
    best = trainer.hyperparameter_search(space, backend="ray", n_trials=1, resources_per_trial=executor(), verbose=0,
                                         storage_path=str(tmp_path), direction="minimize")  # fmt: skip
    assert sorted(best.run_summary.dataframe()["training_iteration"]) == [2, 2]
    assert best.objective == min(best.run_summary.dataframe()["objective"])


def test_an_evaluation_reports_all_metrics(tmp_path):
    """By the callback, in a function of the user's."""

    def train(config):
        args = arguments(tmp_path / "out", eval_strategy="steps", eval_steps=2, learning_rate=config["learning_rate"])
        callbacks = [hydra_tune.HydraTrainerCallback()]
        Trainer(gpt(), args, train_dataset=DATA, eval_dataset=DATA[:4], callbacks=callbacks).train()

    found = tune.run(train, config=space(None), resources=executor(), storage_path=str(tmp_path), verbose=0)
    frame = found.dataframe()
    assert list(frame["training_iteration"]) == [2, 2] and list(frame["step"]) == [4, 4]
    assert (frame["eval_loss"] > 3).all()


def test_a_search_on_ray_needs_an_executor():
    with pytest.raises(hydra_tune.ConfigError, match="HydraExecutor, got None"):
        hydra_tune.hyperparameter_search(make, space, 1, backend="ray")
