"""`ray.tune`, whose `run`, `Tuner` and `with_resources` understand a `HydraExecutor`; all else is its own.

from hydra_tune import HydraExecutor, tune

tune.run(train, config=space, resources=HydraExecutor(memory="20GiB"))
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import ray
import ray.tune

from hydra_tune.errors import ConfigError
from hydra_tune.integrations.executor import HydraExecutor, eligible_nodes
from hydra_tune.integrations.pool_keeper import pools_for
from hydra_tune.integrations.ray_trainable import trainable


def __getattr__(name: str) -> Any:
    return getattr(ray.tune, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(ray.tune)})


def with_resources(train: Any, resources: Any) -> Any:
    """`ray.tune.with_resources`; with a `HydraExecutor`, a trainable whose trials run in its pools."""
    if isinstance(resources, HydraExecutor):
        return trainable(train, resources)
    return ray.tune.with_resources(train, resources)


def run(run_or_experiment: Any, *, resources: HydraExecutor | None = None, **options: Any) -> Any:
    """`ray.tune.run`, each argument with the meaning it has there; with `resources`, over a pool a node.

    Raises:
        ConfigError: `resources` is no `HydraExecutor`, or the trial's resources are given twice.
    """
    if resources is None:
        return ray.tune.run(run_or_experiment, **options)
    train = _wrapped(run_or_experiment, resources, options.get("resources_per_trial"))
    if options.get("max_concurrent_trials") is None and _needs_limit(options.get("search_alg")):
        options["max_concurrent_trials"] = _places(resources)
    with pools_for(resources.spec, train.__name__):
        return ray.tune.run(train, **options)


class Tuner(ray.tune.Tuner):
    """`ray.tune.Tuner`, each argument with the meaning it has there; with `resources`, over a pool a node."""

    def __init__(self, train: Any = None, *, resources: HydraExecutor | None = None, **options: Any) -> None:
        train = options.pop("trainable", train)
        if resources is not None:
            train = _wrapped(train, resources)
            tune_config = options.get("tune_config") or ray.tune.TuneConfig()
            if tune_config.max_concurrent_trials is None and _needs_limit(tune_config.search_alg):
                tune_config = dataclasses.replace(tune_config, max_concurrent_trials=_places(resources))
                options["tune_config"] = tune_config
        super().__init__(train, **options)
        self._pools = None if resources is None else (resources.spec, train.__name__)

    @classmethod
    def restore(  # type: ignore[override]
        cls, path: str, train: Any = None, *, resources: HydraExecutor | None = None, **options: Any
    ) -> ray.tune.Tuner:
        """`ray.tune.Tuner.restore`, likewise."""
        train = options.pop("trainable", train)
        if resources is not None:
            train = _wrapped(train, resources)
        tuner = object.__new__(cls)
        pools = None if resources is None else (resources.spec, train.__name__)
        tuner.__dict__ = {**vars(ray.tune.Tuner.restore(path, train, **options)), "_pools": pools}
        return tuner

    def fit(self) -> ray.tune.ResultGrid:
        """`ray.tune.Tuner.fit`; afterwards the pools give back their devices."""
        with nullcontext() if self._pools is None else pools_for(*self._pools):
            return super().fit()


def _wrapped(train: Any, resources: Any, per_trial: Any = None) -> type:
    """What Tune runs in its place, once Ray runs."""
    if not isinstance(resources, HydraExecutor):
        raise ConfigError(
            f"resources is a HydraExecutor, got {resources!r}. Plain resources are given by resources_per_trial=, or "
            "tune.with_resources."
        )
    if per_trial is not None:
        raise ConfigError("trials of a pool own nothing of their node: leave resources_per_trial= out.")
    proxy: type = trainable(train, resources)
    if not ray.is_initialized():
        ray.init()
    return proxy


def _needs_limit(search_alg: Any) -> bool:
    """Tune asks a searcher for one trial at a time, if nobody says how many there are."""
    if isinstance(search_alg, str):
        return search_alg not in ("random", "variant_generator")
    return isinstance(search_alg, ray.tune.search.Searcher) and not isinstance(
        search_alg, ray.tune.search.ConcurrencyLimiter
    )


def _places(executor: HydraExecutor) -> int:
    """On all nodes."""
    places: int = max(1, sum(executor.spec.places(int(node.get("GPU", 0))) for node in eligible_nodes()))
    return places
