"""`HydraExecutor`, given where a trial's resources are: trials share the devices of their node."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import floor
from typing import Any

import ray
from ray.tune import PlacementGroupFactory

from hydra_tune.config import parse_bytes
from hydra_tune.errors import ConfigError
from hydra_tune.integrations.ray_node.pool_spec import PoolSpec
from hydra_tune.integrations.ray_tune import trainer_backend
from hydra_tune.schedule.policy import policy_named

_SMALLEST_CPU = 1e-4  # that Ray tells from nothing: it keeps a proxy off nodes that have none
trainer_backend.install()


class HydraExecutor(PlacementGroupFactory):
    """Trials of a Tune run share the devices of their node, instead of owning fractions of them.

    ``tune.run(fn, config=..., resources=HydraExecutor(memory="20GiB"))`` with `hydra_tune.tune`, or
    ``ray.tune.run(hydra_tune.trainable(fn, HydraExecutor()), ...)``.

    Args:
        memory: bytes a device, as in `ShardPool`, of the pool that each node gets; `devices`, `host_memory` and
            `policy` likewise.
        concurrency: trials that live at a time on a node; if None, one a CPU of the node, at least two and one a
            device, at most eight a device. Those that host memory has no room for wait.
        trial_memory: bytes of host memory that a trial takes: it starts on a node of which Ray has given that much to
            nobody yet. If None, on any with a free slot.
        pool: the name of a pool that several Ray jobs of one cluster share. The job that made it owns it. If None,
            a job has its own.

    It is a placement group factory: a slot for a trial's proxy, so many on a node as trials live there.

    Raises:
        ConfigError: memory that is not bytes, an unknown device or policy, or a concurrency below 1.
    """

    def __init__(
        self,
        memory: int | str | Sequence[int | str] = "auto",
        *,
        devices: str | Sequence[str] = "auto",
        concurrency: int | None = None,
        host_memory: int | str = "auto",
        policy: Any = "sharded-lrtf",
        trial_memory: int | str | None = None,
        pool: str | None = None,
    ) -> None:
        whole = isinstance(concurrency, int) and not isinstance(concurrency, bool)
        if concurrency is not None and (not whole or concurrency < 1):
            raise ConfigError(
                f"concurrency is how many trials live at a time on a node, a whole number from 1; got {concurrency!r}."
            )
        if pool is not None and (not isinstance(pool, str) or not pool):
            raise ConfigError(f"pool is the name of a pool that jobs share, or None; got {pool!r}.")
        for key, value, kinds in (("memory", memory, (int, str)), ("devices", devices, (str,))):
            listed = isinstance(value, (list, tuple)) and value and all(isinstance(each, kinds) for each in value)
            if not listed and (isinstance(value, bool) or not isinstance(value, kinds)):
                raise ConfigError(f"{key} is one for all devices, or a list with at least one, got {value!r}.")
        for budget in [memory] if isinstance(memory, (int, str)) else memory:
            if budget != "auto":
                parse_bytes(budget)
        for name in [devices] if isinstance(devices, str) else devices:
            if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
                raise ConfigError(f'a device is "cpu" (virtual), "cuda" or "cuda:0" and so on, got {name!r}.')
        if host_memory != "auto":
            parse_bytes(host_memory, "host_memory")
        policy_named(policy)
        self.spec = PoolSpec(
            memory if isinstance(memory, (int, str)) else tuple(memory),
            devices if isinstance(devices, str) else tuple(map(str, devices)),
            concurrency,
            host_memory,
            policy,
            pool,
            None if trial_memory is None else parse_bytes(trial_memory, "trial_memory"),
        )
        self._is_slot = False
        super().__init__([{"CPU": 1}])

    @classmethod
    def slot(cls, spec: PoolSpec) -> HydraExecutor:
        """What the proxy of one trial asks of Ray: a share of the smallest node's memory. Of what each node has and a
        placement group knows, that alone leaves the CPUs to tasks that trials start, for which trials wait. Half a
        share stays for those, too: too little for one more proxy."""
        shares = [node["memory"] / (spec.places(node) + 0.5) for node in eligible_nodes().values()]
        slot = object.__new__(cls)
        slot.spec = spec
        slot._is_slot = True
        memory = max(floor(min(shares, default=1.0)), spec.trial_memory or 0)
        PlacementGroupFactory.__init__(slot, [{"CPU": _SMALLEST_CPU, "memory": memory}])
        return slot

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, HydraExecutor)
            and (self.spec, self.spec.trial_memory, self._is_slot)
            == (other.spec, other.spec.trial_memory, other._is_slot)
            and bool(super().__eq__(other))
        )

    def __hash__(self) -> int:
        return hash((self.spec, self._is_slot))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if not self._is_slot and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None:
            raise ConfigError(  # in the trial's own process
                "a HydraExecutor tells hydra_tune.tune, or hydra_tune.trainable, where trials train; as resources of "
                "stock ray.tune this trial would train in its own process, past the pool. Write `from hydra_tune "
                "import tune` and tune.run(fn, resources=HydraExecutor(...)), or "
                "ray.tune.run(hydra_tune.trainable(fn, HydraExecutor(...)))."
            )

    def __repr__(self) -> str:
        spec = self.spec
        given = {
            **spec.arguments,
            "concurrency": spec.concurrency,
            "trial_memory": spec.trial_memory,
            "pool": spec.shared,
        }
        return f"HydraExecutor({', '.join(f'{name}={value!r}' for name, value in given.items())})"


def spec_of(executor: Any) -> PoolSpec:
    """What a user's argument says of its pools.

    Raises:
        ConfigError: it is no `HydraExecutor`.
    """
    if not isinstance(executor, HydraExecutor):
        raise ConfigError(f"executor is a HydraExecutor, got {executor!r}.")
    return executor.spec


def eligible_nodes() -> dict[str, dict[str, float]]:
    """By id, the resources of each node that takes trials' proxies: one without CPUs, as a cluster's head may be, does
    not."""
    alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    return {node: resources for node, resources in alive.items() if resources.get("CPU") and resources.get("memory")}
