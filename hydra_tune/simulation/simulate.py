"""`simulate`: what a sweep would take. The scheduler of real trials runs it, by a clock instead of devices.

The clock, the links and what happens at the same time are in `replay.py`; seconds and bytes of trials come from a
workload (`workload.py`), which `cost.py` computes for transformers.

simulate([{"steps": 100, "forward_s": [0.1, 0.1], "backward_s": [0.3, 0.3], "shard_bytes": [500, 500]}], devices=8)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from os import PathLike
from typing import Any

from hydra_tune.config import MOST_BYTES, format_bytes
from hydra_tune.errors import ConfigError, does_not_fit
from hydra_tune.schedule.plan import BlockProfile, Shard, TrialPlan
from hydra_tune.schedule.policy import Policy, policy_named
from hydra_tune.simulation.exact import lower_bound
from hydra_tune.simulation.replay import Replay, SimulatedDevice
from hydra_tune.simulation.workload import TrialWork, parse


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation. `busy_s` and `stalled_s` have an entry for each device, `ended_s` for each trial.

    At every moment a device computes or stalls: its `busy_s` and the sum of its `stalled_s` are the makespan. The
    causes in `stalled_s`:

        promotion        the shard of its next task is on its way
        move             a task away from home waits for its input, or its output is on its way home
        gradients        they are on their way to the host; a cause only without double buffering
        memory           trials wait for bytes of the device
        too few trials   fewer trials are live than there are devices
        no ready task    all live trials run elsewhere, or wait for their optimizers or loops on the host

    `timeline` has the spans that `show.timeline.save` draws, and is empty unless asked for.
    """

    makespan_s: float
    lower_bound_s: float
    busy_s: tuple[float, ...]
    stalled_s: tuple[dict[str, float], ...]
    ended_s: tuple[float, ...]
    promoted_bytes: int
    timeline: list[dict[str, Any]]

    @property
    def ratio(self) -> float:
        """The makespan over the lower bound."""
        return self.makespan_s / self.lower_bound_s

    @property
    def utilisation(self) -> tuple[float, ...]:
        """Of each device: the share of the makespan in which it computed."""
        return tuple(busy_s / self.makespan_s for busy_s in self.busy_s)

    def figures(self, baselines_s: Mapping[str, float]) -> dict[str, Any]:
        """The results and the makespans of the baselines as plain data, for programs."""
        return {
            "makespan_s": self.makespan_s,
            "lower_bound_s": self.lower_bound_s,
            "ratio": self.ratio,
            "promoted_bytes": self.promoted_bytes,
            "ended_s": self.ended_s,
            "devices": [
                {"busy_s": busy_s, "utilisation": share, "stalled_s": stalled_s}
                for busy_s, share, stalled_s in zip(self.busy_s, self.utilisation, self.stalled_s, strict=True)
            ],
            "baselines_s": baselines_s,
        }

    def table(self, baselines_s: Mapping[str, float]) -> str:
        """The results and the makespans of the baselines as text, for people."""
        seconds = {"simulated": self.makespan_s, "lower bound": self.lower_bound_s, **baselines_s}
        lines = [f"{'':42}{'makespan_s':>14}{'of simulated':>14}"]
        lines += [f"{name:42}{total_s:14.1f}{total_s / self.makespan_s:14.3f}" for name, total_s in seconds.items()]
        lines += ["", f"promoted to devices: {format_bytes(self.promoted_bytes)}"]
        causes = sorted({cause for stalled_s in self.stalled_s for cause in stalled_s})
        lines += ["", f"{'device':8}{'busy_s':>10}{'busy':>8}" + "".join(f"{cause:>16}" for cause in causes)]
        for number, (busy_s, stalled_s) in enumerate(zip(self.busy_s, self.stalled_s, strict=True)):
            stalls = "".join(f"{stalled_s.get(cause, 0.0):16.1f}" for cause in causes)
            lines.append(f"{number:<8}{busy_s:10.1f}{self.utilisation[number]:8.1%}{stalls}")
        return "\n".join(lines)


def simulate(
    workload: str | PathLike[str] | Sequence[TrialWork | Mapping[str, Any]],
    devices: int | Sequence[SimulatedDevice | Mapping[str, Any]] = 8,
    policy: Policy | str = "sharded-lrtf",
    *,
    memory: int | str | None = None,
    link_bytes_per_s: float = inf,
    d2h_bytes_per_s: float | None = None,
    double_buffering: bool = True,
    sharing: bool = True,
    timeline: bool = False,
) -> Simulation:
    """Schedule a sweep on paper.

    Args:
        workload: trials as in `hydra_tune.simulation.workload`, or a JSON file with them.
        devices: how many equal ones; or for each a dict, whose keys are memory, speed (1.0 unless given),
            link_bytes_per_s and d2h_bytes_per_s.
        policy: the order in which ready tasks get devices, an object or its name.
        memory: of each device without its own, ``"20GiB"`` or bytes; None for no limit.
        link_bytes_per_s: of the link to each device without its own, in each direction.
        d2h_bytes_per_s: of the direction to the host, if that differs.
        double_buffering: whether shards are promoted, and gradients sent to the host, while the device computes.
            Without it a device does one of these at a time.
        sharing: whether weights that trials share are promoted for all of them at once. Without it each trial promotes
            them for itself.
        timeline: whether to keep the spans for a timeline.

    Raises:
        ConfigError: what is wrong with the workload, the devices or the policy.
        BudgetError: a trial does not fit the smallest device. It must fit all, since it may run on any.
    """
    for name, value in (("double_buffering", double_buffering), ("sharing", sharing), ("timeline", timeline)):
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is True or False, got {value!r}.")
    works = parse(workload)
    defaults = {
        "memory": MOST_BYTES if memory is None else memory,
        "link_bytes_per_s": link_bytes_per_s,
        "d2h_bytes_per_s": d2h_bytes_per_s,
    }
    specs = _devices(devices, defaults)
    plans = [_plan(work) for work in works]
    _check_fit(works, plans, min(spec.memory for spec in specs))
    replay = Replay(
        works, plans, specs, policy_named(policy),
        double_buffering=double_buffering, sharing=sharing, timeline=timeline,
    )  # fmt: skip
    replay.run()
    return Simulation(
        makespan_s=replay.now_s,
        lower_bound_s=lower_bound(works, [spec.speed for spec in specs]),
        busy_s=tuple(device.busy_s for device in replay.devices),
        stalled_s=tuple(device.stalled_s for device in replay.devices),
        ended_s=tuple(trial.ended_s for trial in replay.trials),
        promoted_bytes=replay.promoted_bytes,
        timeline=sorted(replay.spans or [], key=lambda span: (span["start_s"], span["end_s"])),
    )


def _devices(given: Any, defaults: Mapping[str, Any]) -> list[SimulatedDevice]:
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return [_device({}, defaults)] * given
    if not isinstance(given, (list, tuple)) or not given:
        raise ConfigError(
            f"devices is how many, at least 1, or a list with an entry for each; got {given!r}. Write devices=8."
        )
    known = ("memory", "speed", "link_bytes_per_s", "d2h_bytes_per_s")
    for number, entry in enumerate(given):
        if not isinstance(entry, SimulatedDevice) and not (isinstance(entry, Mapping) and set(entry) <= set(known)):
            raise ConfigError(
                f"device {number} is a dict, got {entry!r}. Its keys are {', '.join(known)}; leave out what is usual."
            )
    return [entry if isinstance(entry, SimulatedDevice) else _device(entry, defaults) for entry in given]


def _device(entry: Mapping[str, Any], defaults: Mapping[str, Any]) -> SimulatedDevice:
    if "link_bytes_per_s" in entry:  # the other direction is as fast, unless the entry says otherwise
        defaults = {**defaults, "d2h_bytes_per_s": None}
    return SimulatedDevice(**{**defaults, **entry})


def _plan(work: TrialWork) -> TrialPlan:
    """The plan that a pilot would have led to; each shard is one block."""
    blocks = tuple(
        BlockProfile(f"shard {i}", work.shard_bytes[i], forward_s=work.forward_s[i], backward_s=work.backward_s[i])
        for i in range(work.num_shards)
    )
    shards = tuple(
        Shard((i,), slot_bytes, work_bytes, work_bytes, work.boundary_bytes)
        for i, (slot_bytes, work_bytes) in enumerate(zip(work.shard_bytes, work.shard_work_bytes, strict=True))
    )
    return TrialPlan(False, shards, blocks, work.held_bytes, work.step_bytes)


def _check_fit(works: Sequence[TrialWork], plans: Sequence[TrialPlan], least_bytes: int) -> None:
    for number, (work, plan) in enumerate(zip(works, plans, strict=True)):
        if plan.need_bytes > least_bytes:
            need, least = format_bytes(plan.need_bytes, up=True), format_bytes(least_bytes)
            name = f" ({work.name})" if work.name else ""
            helps = f'memory="{need}"', "more and smaller shards", "a smaller batch"
            raise does_not_fit(f"trial {number}{name}", need, f"the smallest device has {least}", helps)
