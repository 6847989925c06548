"""The pools of one Ray job: made on a node when its first trial comes there, ended with the job.

driver --owns--> PoolKeeper --makes, when a trial comes to a node--> PoolActor, one a node --> a thread a trial
                                                                          ^
Tune's trial = proxy: orders an attempt, hears what it says --------------'

An actor's process starts sooner without Tune and torch.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hydra_tune.errors import ConfigError
from hydra_tune.integrations.ray_node.pool_actor import PoolActor
from hydra_tune.integrations.ray_node.pool_spec import PoolSpec
from hydra_tune.show.snapshot import PoolSnapshot

START_S = 60.0  # a pool whose GPUs are not to be had by then does not start
SLOW_START_S = 300.0  # one without any has only the node to wait for, where Ray's workers have the lowest priority


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
        pool = begin_on(node_id, self._spec)
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


def begin_on(node_id: str, spec: PoolSpec) -> Any:
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
