"""`hydra_tune.hyperparameter_search`: what `Trainer.hyperparameter_search` finds, with trials side by side."""

import optuna
import pytest
import torch

import hydra_tune

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer  # noqa: E402

from hugging_face import DATA, SPILLED, arguments, gpt  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make(tmp_path):
    def make(**options):
        args = arguments(tmp_path, **{"eval_strategy": "steps", "eval_steps": 2, **options})
        return Trainer(args=args, model_init=lambda: gpt(), train_dataset=DATA, eval_dataset=DATA[:4])

    return make


def space(trial):
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-5, 1e-2, log=True),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [2, 4]),
    }


def sampler():
    return optuna.samplers.RandomSampler(seed=1)


def test_the_best_run_is_that_of_the_trainer_s_own_search(make):
    stock = make().hyperparameter_search(space, n_trials=3, backend="optuna", sampler=sampler())
    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool:
        found = hydra_tune.hyperparameter_search(lambda: make(), space, 3, pool=pool, sampler=sampler(), concurrency=1)
    assert found == stock


def test_trials_train_side_by_side_in_folders_of_their_own(make, tmp_path):
    trainers, both = [], []

    class Meets(transformers.TrainerCallback):
        def on_train_begin(self, *_, **__):
            both.append(sum(device.used_bytes > 0 for device in pool.devices))

    def make_for(trial):
        trainer = make(save_strategy="steps", save_steps=4)
        trainer.add_callback(Meets())
        trainers.append((trial.number, trainer.args.output_dir))
        return trainer

    study = {"storage": f"sqlite:///{tmp_path}/study.db", "study_name": "s"}
    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool:
        best = hydra_tune.hyperparameter_search(
            make_for, space, 2, pool=pool, direction="maximize", concurrency=2, timeout=240, sampler=sampler(),
            compute_objective=lambda metrics: -metrics["eval_loss"], **study,
        )  # fmt: skip
    trials = optuna.load_study(**study).trials
    assert best.objective == max(trial.value for trial in trials) < 0
    assert [list(trial.intermediate_values) for trial in trials] == [[2, 4], [2, 4]]
    assert dict(trainers) == {number: str(tmp_path / f"run-{number}") for number in range(2)}
    assert all((tmp_path / f"run-{number}" / "checkpoint-4").is_dir() for number in range(2))


def test_several_objectives(make):
    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool:
        runs = hydra_tune.hyperparameter_search(
            lambda: make(), space, 2, pool=pool, direction=["minimize", "maximize"], sampler=sampler(),
            compute_objective=lambda metrics: (metrics["eval_loss"], metrics["epoch"]),
        )  # fmt: skip
    assert runs and all(len(run.objective) == 2 for run in runs)


def test_what_is_no_search_is_refused(make):
    with pytest.raises(hydra_tune.ConfigError, match='"optuna" or "ray", got \'sigopt\''):
        hydra_tune.hyperparameter_search(make, space, 1, backend="sigopt")
    with pytest.raises(hydra_tune.ConfigError, match="concurrency"):
        hydra_tune.hyperparameter_search(make, space, 1, n_jobs=4)


def test_where_no_trial_completes_the_reason_is_said(make):
    with hydra_tune.ShardPool(["cpu"], 20_000) as pool, pytest.raises(RuntimeError, match=r"of 2 none did: The pool"):
        hydra_tune.hyperparameter_search(lambda: make(), space, 2, pool=pool)


def test_one_trainer_for_all_trials_is_refused(make):
    """Trials side by side would train one model."""
    trainer = make()
    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool, pytest.raises(hydra_tune.ConfigError, match="within make_tra"):
        hydra_tune.hyperparameter_search(lambda: trainer, space, 2, pool=pool)


def test_a_trainer_is_no_function_that_makes_one(make):
    with pytest.raises(hydra_tune.ConfigError, match=r"got a Trainer. Write lambda"):
        hydra_tune.hyperparameter_search(make(), space, 2)
