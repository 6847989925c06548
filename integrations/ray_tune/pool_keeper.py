"""The pools of one Ray job: made on a node when its first trial comes there, ended with the job.

driver --owns--> PoolKeeper --makes, when a trial comes to a node--> PoolActor, one a node --> a thread a trial
                                                                          ^
Tune's trial = proxy: orders an attempt, hears what it says --------------'
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
import ray.util.client
from ray.exceptions import ActorUnschedulableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hydra_tune.errors import ConfigError
from hydra_tune.integrations.ray_node.pool_actor import PoolActor
from hydra_tune.integrations.ray_node.pool_spec import PoolSpec
from hydra_tune.integrations.ray_tune.executor import HydraExecutor, eligible_nodes
from hydra_tune.show.snapshot import PoolSnapshot

START_S = 60.0  # a pool whose GPUs are not to be had by then does not start
SLOW_START_S = 300.0  # one without any has only the node to wait for, where Ray's workers have the lowest priority
LAST_REPORT_S = 10.0
_keepers: dict[tuple[str, str, str], Any] = {}  # see `_key`; an actor ends with its last handle in its owner
_begun: dict[tuple[str, str, str], list[Any]] = {}  # pools that this process has begun, likewise
_runs: list[tuple[str, PoolSpec]] = []  # under way: the trainable's name, and its pools
_last_reports: dict[PoolSpec, dict[str, Any]] = {}  # of pools that have ended
_lock = threading.Lock()


class PoolKeeper:
    """Makes a pool on the node of the first trial that comes there."""

    def __init__(self, spec: PoolSpec) -> None:
        self._spec = spec
        self._pools: dict[str, Any] = {}
        self._making: dict[str, asyncio.Lock] = {}

    async def its_spec(self) -> PoolSpec:
        return self._spec

    async def address_on(self, node_id: str) -> tuple[Any, bytes]:
        """Where a proxy finds the node's pool, and by which key; of its new process, if the former one has died.

        Raises:
            ConfigError: its devices are not to be had, or it could not be made.
        """
        async with self._making.setdefault(node_id, asyncio.Lock()):
            if node_id not in self._pools:
                self._pools[node_id] = await self._made_on(node_id)
        address: tuple[Any, bytes] = await self._pools[node_id].address.remote()
        return address

    async def _made_on(self, node_id: str) -> Any:
        pool = _begin_on(node_id, self._spec)
        gpus = int(_resources_of(node_id).get("GPU", 0))
        wanted = self._spec.num_gpus(gpus)
        limit_s = START_S if wanted else SLOW_START_S
        try:
            await asyncio.wait_for(asyncio.shield(pool.address.remote()), limit_s)
        except (asyncio.TimeoutError, ActorUnschedulableError):
            ray.kill(pool)
            raise ConfigError(_late(wanted, gpus, limit_s)) from None
        return pool

    async def report(self) -> dict[str, Any]:
        """Of each pool, by its node."""
        return {node: await pool.report.remote() for node, pool in self._pools.items()}

    async def end(self) -> dict[str, Any]:
        """The last report of each, before they are killed."""
        return {node: await pool.end.remote() for node, pool in self._pools.items()}

    async def snapshots(self) -> dict[str, PoolSnapshot]:
        """What each pool does now, by its node's address."""
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        return {addresses[node]: await pool.snapshot.remote() for node, pool in self._pools.items()}


def _resources_of(node_id: str) -> dict[str, float]:
    return next(node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id)


def _begin_on(node_id: str, spec: PoolSpec) -> Any:
    """The node's pool, whose process starts unless it has.

    Raises:
        ConfigError: it would own more GPUs than the node has.
    """
    resources = _resources_of(node_id)
    gpus = int(resources.get("GPU", 0))
    wanted = spec.num_gpus(gpus)
    if wanted > gpus:
        raise ConfigError(
            f"a pool owns the GPUs that it names, {wanted}, but Ray knows of {gpus} on this node. "
            "Name others (HydraExecutor(devices=...)), or start the node with num_gpus=."
        )
    options = {
        "name": f"{spec.name} on {node_id}",
        "namespace": spec.namespace,
        "get_if_exists": True,
        "num_cpus": 0,
        "num_gpus": wanted,
        "max_restarts": -1,
        "max_task_retries": -1,  # its methods only tell
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
    }
    job = ray.get_runtime_context().get_job_id()
    threads = spec.num_threads(int(resources.get("CPU", 1)), gpus)
    actor: Any = ray.remote(**options)(PoolActor)
    return actor.remote(spec, job, spec.places(resources), threads)


def _late(wanted: int, gpus: int, limit_s: float) -> str:
    if not wanted:
        return (
            f"a pool's process starts within {limit_s:.0f} s, but this one has not. Ray's log of the node says why; if "
            "the node was busy with other work, start the run again."
        )
    return (
        f"a pool owns its node's devices, {wanted} GPUs here, but it could not have them within {limit_s:.0f} s: of "
        f"the node's {gpus}, others of this cluster hold some. End those, or name fewer (HydraExecutor(devices=...))."
    )


# ---- in the driver ----


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
        return [_begin_on(node, spec) for node in nodes] if len(nodes) == 1 and spec.shared is None else []
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
    """
    keeper = keeper_of(executor.spec)
    return _last_reports.get(executor.spec, {}) if keeper is None else dict(ray.get(keeper.report.remote()))
