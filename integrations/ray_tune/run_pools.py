"""The pools of this process's runs: begun, reported on and ended. Who makes them on nodes is
`ray_node/pool_keeper.py`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
import ray.util.client
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hydra_tune.errors import ConfigError
from hydra_tune.integrations.ray_node.pool_keeper import PoolKeeper, begin_on
from hydra_tune.integrations.ray_node.pool_spec import PoolSpec
from hydra_tune.integrations.ray_tune.executor import HydraExecutor, eligible_nodes, spec_of

LAST_REPORT_S = 10.0
_keepers: dict[tuple[str, str, str], Any] = {}  # see `_key`; an actor ends with its last handle in its owner
_begun: dict[tuple[str, str, str], list[Any]] = {}  # pools that this process has begun, likewise
_runs: list[tuple[str, PoolSpec]] = []  # under way: the trainable's name, and its pools
_last_reports: dict[PoolSpec, dict[str, Any]] = {}  # of pools that have ended
_lock = threading.Lock()


def _key(spec: PoolSpec) -> tuple[str, str, str]:
    """A job's number is the same again in another cluster; a node's is not."""
    context = ray.get_runtime_context()
    return spec.name, context.get_job_id(), context.get_node_id()


def keep_pools(spec: PoolSpec) -> None:
    """In the driver, which owns them: see that the pools of this job have a keeper."""
    context, key = ray.get_runtime_context(), _key(spec)
    with _lock:  # of two handles to one actor the first would end it
        for other in [other for other in _keepers if other[1:] != key[1:]]:  # of a cluster that this process has left
            del _keepers[other], _begun[other]
        if key not in _keepers:
            options = {
                "name": spec.name,
                "namespace": spec.namespace,
                "get_if_exists": True,
                "num_cpus": 0,
                "max_restarts": -1,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False),
            }
            kind: Any = ray.remote(PoolKeeper)
            _keepers[key] = kind.options(**options).remote(spec)
            _begun[key] = _begin_alone(spec)
        keeper = _keepers[key]
    if spec.shared is not None and (its := ray.get(keeper.its_spec.remote())) != spec:
        raise ConfigError(f"the pool {spec.shared!r} is shared as its first job made it, {its}, not {spec}.")


def _begin_alone(spec: PoolSpec) -> list[Any]:
    """The pool of a cluster's only node: its process starts beside those of the proxies that will come there."""
    nodes = list(eligible_nodes())
    with suppress(ConfigError):  # the first trial will be told
        return [begin_on(node, spec) for node in nodes] if len(nodes) == 1 and spec.shared is None else []
    return []


@contextmanager
def pools_for(spec: PoolSpec, name: str) -> Iterator[None]:
    """Around a run of the trainable with this name: when the last one that uses these pools is over they end, and give
    back their devices, unless other jobs share them.

    Raises:
        ConfigError: a run of the same name, with other pools, is under way.
    """
    with _lock:
        if any(other == name and its != spec for other, its in _runs):
            raise ConfigError(
                f"Tune knows what it runs by its name, and {name!r} is under way in this process with another "
                "HydraExecutor. Give one of the two functions another name, or run one after the other."
            )
        _runs.append((name, spec))
    try:
        if not ray.util.client.ray.is_connected():  # then Tune runs elsewhere, and its process keeps them
            keep_pools(spec)
        yield
    finally:
        with _lock:
            _runs.remove((name, spec))
            if not any(its.name == spec.name for _, its in _runs) and ray.is_initialized():
                keeper, begun = _keepers.pop(_key(spec), None), _begun.pop(_key(spec), [])
                if keeper is not None:
                    last = keeper.report if spec.shared else keeper.end
                    with suppress(RayError):
                        _last_reports[spec] = ray.get(last.remote(), timeout=LAST_REPORT_S)
                if keeper is not None and spec.shared is None:
                    for actor in (keeper, *begun):
                        ray.kill(actor)


def keeper_of(spec: PoolSpec) -> Any:
    """In the driver: who keeps these pools, None if they have not begun or have ended."""
    return _keepers.get(_key(spec)) if ray.is_initialized() else None


def report(executor: HydraExecutor) -> dict[str, Any]:
    """What the pools of an executor do, or have done in the last run of this process. Executors with the same settings
    have the same pools.

    Returns:
        `ShardPool.report` of each node's pool by the node's id, with `live`, how many trials live there, and
        `continued`, how many attempts have gone on from a state in the pool's memory or from a checkpoint. Empty if no
        run of this process had the executor.

    Raises:
        ConfigError: it is no `HydraExecutor`.
    """
    keeper = keeper_of(spec_of(executor))
    return _last_reports.get(executor.spec, {}) if keeper is None else dict(ray.get(keeper.report.remote()))
