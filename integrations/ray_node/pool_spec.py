"""What a `HydraExecutor` says of the pools that its trials share. Plain data, which travels to every process."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra_tune.config import MOST_TRIALS_A_DEVICE


@dataclass(frozen=True)
class PoolSpec:
    """Of one pool a node; `shared` is the name under which several jobs of a cluster know it."""

    memory: int | str | Sequence[int | str] = "auto"
    devices: str | Sequence[str] = "auto"
    concurrency: int | None = None
    host_memory: int | str = "auto"
    policy: Any = "sharded-lrtf"
    shared: str | None = None
    trial_memory: int | None = field(default=None, compare=False)  # of the trials, not of the pools

    @property
    def arguments(self) -> dict[str, Any]:
        """Of a node's `ShardPool`."""
        return {
            "devices": self.devices,
            "memory": self.memory,
            "host_memory": self.host_memory,
            "policy": self.policy,
        }

    @property
    def name(self) -> str:
        """Of who keeps its pools, as an actor."""
        if self.shared is not None:
            return f"hydra_tune pools {self.shared}"
        digest = hashlib.blake2b(repr((self.arguments, self.concurrency)).encode(), digest_size=8).hexdigest()
        return f"hydra_tune pools of this job {digest}"

    @property
    def namespace(self) -> str | None:
        """Of that name: a job has one of its own, if None."""
        return None if self.shared is None else "hydra_tune"

    def num_gpus(self, of_node: int) -> int:
        """Those of a node with so many that its pool owns."""
        if isinstance(self.devices, str):
            return of_node if self.devices in ("auto", "cuda") else int(self.devices.startswith("cuda"))
        return sum(name.startswith("cuda") for name in self.devices)

    def num_devices(self, node_gpus: int) -> int:
        """Virtual ones included."""
        return max(1, self.num_gpus(node_gpus)) if isinstance(self.devices, str) else len(self.devices)

    def places(self, node: Mapping[str, float]) -> int:
        """Trials that live at a time on a node with these resources. A proxy takes seconds of a CPU to start, and a
        trial some for its Python: more trials than CPUs gain little, and two fill each other's gaps."""
        devices = self.num_devices(int(node.get("GPU", 0)))
        return self.concurrency or max(2, devices, min(MOST_TRIALS_A_DEVICE * devices, int(node.get("CPU", 1))))

    def num_threads(self, node_cpus: int, node_gpus: int) -> int:
        """For the operators of one trial: virtual devices compute side by side, on the node's CPUs."""
        at_a_time = 1 if self.num_gpus(node_gpus) else self.num_devices(node_gpus)
        return max(1, node_cpus // at_a_time)
