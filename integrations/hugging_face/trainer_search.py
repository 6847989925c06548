"""`Trainer.hyperparameter_search` with trials side by side: by Optuna over a pool, by Ray Tune over a pool a node.

Each trial has a trainer of its own. What it does with the trial is transformers' own: sets the hyperparameters in its
arguments, reports the objective at each evaluation and asks whether to go on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_utils import (
    PREFIX_CHECKPOINT_DIR,
    BestRun,
    HPSearchBackend,
    default_compute_objective,
    default_hp_space_optuna,
    default_hp_space_ray,
)

from hydra_tune.errors import ConfigError
from hydra_tune.integrations.hugging_face.trainer_callback import PooledTrainer, pooled_trainers
from hydra_tune.pool.shard_pool import ShardPool

if TYPE_CHECKING:
    from transformers import Trainer


def hyperparameter_search(
    make_trainer: Callable[..., Trainer],
    hp_space: Callable[[Any], dict[str, Any]] | None = None,
    n_trials: int = 20,
    *,
    pool: ShardPool | None = None,
    backend: str = "optuna",
    direction: str | Sequence[str] = "minimize",
    compute_objective: Callable[[dict[str, float]], Any] | None = None,
    **backend_options: Any,
) -> Any:
    """`transformers.Trainer.hyperparameter_search`, whose trials train side by side, however large each is.

    Args:
        make_trainer: makes a trainer, of the trial if it asks for an argument (an `optuna.Trial`, or the config of Ray
            Tune). Its `callbacks` need not have `HydraTrainerCallback`.
        hp_space: a trial's values for attributes of `TrainingArguments`, or Ray Tune's search space; by default
            transformers' own for the backend.
        n_trials: trials to run.
        pool: where they run, of Optuna's; the default pool if None.
        backend: ``"optuna"`` or ``"ray"``.
        direction: ``"minimize"`` or ``"maximize"``; with Optuna, one for each of several objectives.
        compute_objective: from the metrics of an evaluation; by default the loss if there is no other metric, else
            the sum of the others.
        backend_options: with Optuna those of `optuna.create_study`, `HydraTrialRunner` (``concurrency=``,
            ``checkpoint_dir=``) and its `optimize` (``timeout=``, ``catch=``); with Ray those of `tune.run`, among
            them ``resources=HydraExecutor(...)``.

    Returns:
        `transformers.trainer_utils.BestRun`, or with several objectives a list of them.

    Raises:
        ConfigError: `make_trainer` makes none, an unknown backend, or Ray's without a `HydraExecutor`.
        RuntimeError: no trial has completed; says why.
    """
    if not callable(make_trainer):
        raise ConfigError(
            f"make_trainer is a function that makes a trainer for each trial, got a {type(make_trainer).__name__}. "
            "Write lambda: Trainer(...)."
        )
    objective_of = compute_objective or default_compute_objective
    if backend == "optuna":
        return _with_optuna(make_trainer, hp_space, n_trials, pool, direction, objective_of, backend_options)
    if backend != "ray":
        raise ConfigError(f'backend is "optuna" or "ray", got {backend!r}.')
    if pool is not None:
        raise ConfigError('pool is of Optuna\'s trials. With backend="ray" write resources=HydraExecutor(memory=...).')
    return _with_ray(make_trainer, hp_space, n_trials, direction, objective_of, backend_options)


def _made(make_trainer: Callable[..., Trainer], trial: Any) -> Any:
    takes = inspect.signature(make_trainer).parameters.values()
    asks = any(each.default is each.empty and each.kind <= each.POSITIONAL_OR_KEYWORD for each in takes)
    with pooled_trainers():
        trainer = make_trainer(trial) if asks else make_trainer()
    if not isinstance(trainer, PooledTrainer) or trainer.hp_search_backend is not None:
        raise ConfigError(
            f"make_trainer makes a trainer for each trial, with a model of its own, but this {type(trainer).__name__} "
            "was made before. Write Trainer(...) within make_trainer."
        )
    return trainer


def _of_search(trainer: Any, backend: HPSearchBackend, hp_space: Any, objective_of: Callable[..., Any]) -> None:
    trainer.hp_search_backend, trainer.hp_space, trainer.compute_objective = backend, hp_space, objective_of
    trainer.hp_name = trainer.objective = None


def _with_optuna(
    make_trainer: Callable[..., Trainer],
    hp_space: Any,
    n_trials: int,
    pool: ShardPool | None,
    direction: str | Sequence[str],
    objective_of: Callable[..., Any],
    options: dict[str, Any],
) -> Any:
    import optuna

    from hydra_tune.integrations.frameworks.trial_attributes import PRUNED
    from hydra_tune.integrations.optuna_runner.runner import HydraTrialRunner, optimize

    def objective(trial: optuna.Trial) -> Any:
        trainer = _made(make_trainer, trial)
        _of_search(trainer, HPSearchBackend.OPTUNA, hp_space or default_hp_space_optuna, objective_of)
        trainer.train(trial=trial)
        if trainer.objective is None:  # nothing was evaluated while it trained
            return objective_of(trainer.evaluate())
        return trainer.objective

    names = {*inspect.signature(optimize).parameters, *inspect.signature(HydraTrialRunner.optimize).parameters}
    of_runner = {name: options.pop(name) for name in list(options) if name in names}
    which = {"direction": direction} if isinstance(direction, str) else {"directions": list(direction)}
    study = optuna.create_study(**which, **options)
    optimize(study, objective, n_trials, pool=pool, **of_runner)
    if not study.best_trials:
        reasons = [trial.user_attrs.get(PRUNED) for trial in study.trials]
        first = next((reason for reason in reasons if reason), "see the log")
        raise RuntimeError(f"the best of the trials that complete is returned, but of {len(reasons)} none did: {first}")
    if isinstance(direction, str):
        return BestRun(str(study.best_trial.number), study.best_value, study.best_params)
    return [BestRun(str(best.number), best.values, best.params) for best in study.best_trials]


def _with_ray(
    make_trainer: Callable[..., Trainer],
    hp_space: Any,
    n_trials: int,
    direction: str | Sequence[str],
    objective_of: Callable[..., Any],
    options: dict[str, Any],
) -> Any:
    from hydra_tune.integrations.ray_tune import tune
    from hydra_tune.integrations.ray_tune.executor import HydraExecutor

    if not isinstance(options.get("resources"), HydraExecutor):
        raise ConfigError(
            f'with backend="ray" resources is a HydraExecutor, got {options.get("resources")!r}. Write '
            'resources=hydra_tune.HydraExecutor(memory="20GiB").'
        )
    if not isinstance(direction, str):
        raise ConfigError(f"Ray Tune's trials have one objective, got {direction!r}. Give one direction.")

    def train(config: dict[str, Any]) -> None:
        trainer = _made(make_trainer, config)
        _of_search(trainer, HPSearchBackend.RAY, hp_space, objective_of)
        checkpoint = tune.get_checkpoint()
        if checkpoint is None:
            trainer.train(trial=config)
        else:
            with checkpoint.as_directory() as folder:
                path = next(Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}*"))
                trainer.train(resume_from_checkpoint=str(path), trial=config)
        if trainer.objective is None:
            metrics = trainer.evaluate()
            tune.report({**metrics, "objective": objective_of(metrics)})

    space = (hp_space or default_hp_space_ray)(None)
    analysis = tune.run(train, config=space, num_samples=n_trials, **options)
    best = analysis.get_best_trial(metric="objective", mode=direction[:3])
    return BestRun(best.trial_id, best.last_result["objective"], best.config, analysis)
