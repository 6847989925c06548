"""`ray.tune`, whose `run`, `Tuner`, `Experiment`, `run_experiments` and `with_resources` understand a `HydraExecutor`;
all else is its own.

    from hydra_tune import HydraExecutor, tune

    tune.run(train, config=space, resources=HydraExecutor(memory="20GiB"))
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import ray
import ray.tune

from hydra_tune.errors import ConfigError
from hydra_tune.integrations.ray_tune import trainable as ray_trainable
from hydra_tune.integrations.ray_tune.executor import HydraExecutor, eligible_nodes
from hydra_tune.integrations.ray_tune.pool_figures import PoolLines
from hydra_tune.integrations.ray_tune.pool_table import seen_pools

__all__ = ["Experiment", "PoolLines", "Tuner", "run", "run_experiments", "with_resources"]


def __getattr__(name: str) -> Any:
    return getattr(ray.tune, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(ray.tune)})


def with_resources(trainable: Any, resources: Any) -> Any:
    """`ray.tune.with_resources`; with a `HydraExecutor`, a trainable whose trials run in its pools."""
    if isinstance(resources, HydraExecutor):
        return ray_trainable.trainable(trainable, resources)
    return ray.tune.with_resources(trainable, resources)


def run(
    run_or_experiment: Any,
    config: dict[str, Any] | None = None,
    *,
    resources: HydraExecutor | None = None,
    **options: Any,
) -> Any:
    """`ray.tune.run`, each argument with the meaning it has there; with `resources`, over a pool a node.

    Raises:
        ConfigError: `resources` is no `HydraExecutor`, or the trial's resources are given twice.
    """
    _refuse_executor(options.get("resources_per_trial"))
    with ExitStack() as pools:
        several = isinstance(run_or_experiment, list)
        given = run_or_experiment if several else [run_or_experiment]
        experiments: Any = [_over_pools(each, resources, pools, options.get("resources_per_trial")) for each in given]
        executor = resources or getattr(experiments[0], "executor", None)
        unlimited = options.get("max_concurrent_trials") is None and _needs_limit(options.get("search_alg"))
        if executor is not None and unlimited:
            options["max_concurrent_trials"] = _places(executor)
        return ray.tune.run(experiments if several else experiments[0], config=config, **options)


class Experiment(ray.tune.Experiment):
    """`ray.tune.Experiment`, each argument with the meaning it has there; with `resources`, over a pool a node."""

    def __init__(self, name: str, run: Any, *, resources: HydraExecutor | None = None, **options: Any) -> None:
        _refuse_executor(options.get("resources_per_trial"))
        self._given = {"name": name, "run": run, **options}
        self.executor = resources
        if resources is not None:
            run = _wrapped(run, resources, options.get("resources_per_trial"))
        super().__init__(name, run, **options)

    def over(self, resources: HydraExecutor) -> Experiment:
        """The same over pools, unless it has its own."""
        return Experiment(**self._given, resources=resources) if self.executor is None else self


def run_experiments(
    experiments: Any, *arguments: Any, resources: HydraExecutor | None = None, **options: Any
) -> list[Any]:
    """`ray.tune.run_experiments`, likewise."""
    with ExitStack() as pools:
        over = [_over_pools(each, resources, pools) for each in _listed(experiments)]
        trials: list[Any] = ray.tune.run_experiments(over, *arguments, **options)
        return trials


def _listed(experiments: Any) -> list[Any]:
    """Specifications by name are experiments, too."""
    if isinstance(experiments, dict):
        return [Experiment.from_json(name, spec) for name, spec in experiments.items()]
    return experiments if isinstance(experiments, list) else [experiments]


def _over_pools(experiment: Any, resources: HydraExecutor | None, pools: ExitStack, per_trial: Any = None) -> Any:
    """What Tune runs in its place; its pools stay until `pools` is closed.

    Raises:
        ConfigError: an experiment of `ray.tune`, which has made something else of its function.
    """
    if isinstance(experiment, Experiment):
        over = experiment if resources is None else experiment.over(resources)
        if over.executor is not None:
            pools.enter_context(seen_pools(over.executor.spec, over.run_identifier))
        return over
    if resources is None:
        return experiment
    if isinstance(experiment, ray.tune.Experiment):
        raise ConfigError(
            "an experiment over pools is made by tune.Experiment of `from hydra_tune import tune`, but that of "
            f"{experiment.run_identifier!r} was made by ray.tune.Experiment. Make it so."
        )
    proxy = _wrapped(experiment, resources, per_trial)
    pools.enter_context(seen_pools(resources.spec, proxy.__name__))
    return proxy


class Tuner(ray.tune.Tuner):
    """`ray.tune.Tuner`, each argument with the meaning it has there; with `resources`, over a pool a node."""

    def __init__(self, train: Any = None, *, resources: HydraExecutor | None = None, **options: Any) -> None:
        train = options.pop("trainable", train)
        if resources is not None:
            train = _wrapped(train, resources)
            tune_config: Any = dataclasses.replace(options.get("tune_config") or ray.tune.TuneConfig())
            if tune_config.max_concurrent_trials is None and _needs_limit(tune_config.search_alg):
                tune_config.max_concurrent_trials = _places(resources)
            tune_config.hydra_executor = resources  # which Tune keeps, for `restore`
            options["tune_config"] = tune_config
        super().__init__(train, **options)
        self._pools = None if resources is None else (resources.spec, train.__name__)

    @classmethod
    def restore(  # type: ignore[override]
        cls, path: str, train: Any = None, *arguments: Any, resources: HydraExecutor | None = None, **options: Any
    ) -> ray.tune.Tuner:
        """`ray.tune.Tuner.restore`, likewise; without `resources`, over the pools that the experiment had."""
        train = options.pop("trainable", train)
        stock = partial(ray.tune.Tuner.restore, path)
        if resources is None and not hasattr(train, "its_pools"):
            resources = _executor_of(stock(train, *arguments, **options))
        if resources is not None:
            train = _wrapped(train, resources)
        tuner = object.__new__(cls)
        pools = None if resources is None else (resources.spec, train.__name__)
        tuner.__dict__ = {**vars(stock(train, *arguments, **options)), "_pools": pools}
        return tuner

    def fit(self) -> ray.tune.ResultGrid:
        """`ray.tune.Tuner.fit`; afterwards the pools give back their devices."""
        with nullcontext() if self._pools is None else seen_pools(*self._pools):
            return super().fit()


def _executor_of(tuner: Any) -> HydraExecutor | None:
    """That of the experiment which it has restored; None in a client's driver, where Tune runs elsewhere."""
    return getattr(getattr(tuner._local_tuner, "_tune_config", None), "hydra_executor", None)


def _wrapped(train: Any, resources: Any, per_trial: Any = None) -> type:
    """What Tune runs in its place, once Ray runs."""
    if not isinstance(resources, HydraExecutor):
        raise ConfigError(
            f"resources is a HydraExecutor, got {resources!r}. Plain resources are given by resources_per_trial=, or "
            "tune.with_resources."
        )
    if per_trial is not None:
        raise ConfigError("trials of a pool own nothing of their node: leave resources_per_trial= out.")
    proxy: type = ray_trainable.trainable(train, resources)
    if not ray.is_initialized():
        ray.init()
    return proxy


def _refuse_executor(per_trial: Any) -> None:
    if isinstance(per_trial, HydraExecutor):
        raise ConfigError(
            "a HydraExecutor is given as resources=, got it as resources_per_trial=, which is for resources that a "
            "trial owns. Write resources=HydraExecutor(...)."
        )


def _needs_limit(search_alg: Any) -> bool:
    """Tune asks a searcher for one trial at a time, if nobody says how many there are."""
    if isinstance(search_alg, str):
        return search_alg not in ("random", "variant_generator")
    return isinstance(search_alg, ray.tune.search.Searcher) and not isinstance(
        search_alg, ray.tune.search.ConcurrencyLimiter
    )


def _places(executor: HydraExecutor) -> int:
    """On all nodes."""
    places: int = max(1, sum(executor.spec.places(node) for node in eligible_nodes().values()))
    return places
