"""What the scheduler would do with a sweep: the same machine that schedules real trials, driven by a clock and a cost
model instead of devices.

    trial    arrives -> places -> is admitted -> step -> step -> ... -> ends
    step     enters -> task -> task -> ... -> gradients reach the host -> the host's optimizer -> the next one
    device   one task at a time; a link down for promotions, one up for gradients, each one copy at a time
    host     one optimizer at a time, for all are bound by its memory's bandwidth

Known slack: links of several devices do not share the host's bandwidth; kernels do not slow down beside copies.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from os import PathLike
from typing import Any

from hydra_tune import events as e
from hydra_tune.baselines import lower_bound
from hydra_tune.config import parse_bytes
from hydra_tune.errors import BudgetError, ConfigError
from hydra_tune.policy import Policy, policy_named
from hydra_tune.schedule import Machine
from hydra_tune.shard import BlockProfile, Direction, Shard, Task, TrialPlan
from hydra_tune.workload import TrialWork, parse

_UNLIMITED_BYTES = 1 << 62


@dataclass(frozen=True)
class SimulatedDevice:
    """`speed` divides the workload's seconds; the link is as fast each way."""

    memory: int = _UNLIMITED_BYTES
    speed: float = 1.0
    link_bytes_per_s: float = inf


@dataclass(frozen=True)
class Simulation:
    """What came of it. `stalled_s` tells for each device by cause how long it computed nothing while trials lived;
    `timeline` has the spans of `ShardPool.timeline`, if it was asked for."""

    makespan_s: float
    lower_bound_s: float
    busy_s: tuple[float, ...]
    stalled_s: tuple[dict[str, float], ...]
    ended_s: tuple[float, ...]  # each trial's end
    promoted_bytes: int
    timeline: list[dict[str, Any]]

    @property
    def ratio(self) -> float:
        """Of the makespan to the lower bound."""
        return self.makespan_s / self.lower_bound_s

    @property
    def utilisation(self) -> tuple[float, ...]:
        """The share of the makespan for which each device computed."""
        return tuple(busy / self.makespan_s for busy in self.busy_s)


def simulate(
    workload: str | PathLike[str] | Sequence[TrialWork | Mapping[str, Any]],
    devices: int | Sequence[SimulatedDevice | Mapping[str, Any]] = 8,
    policy: Policy | str = "sharded-lrtf",
    *,
    memory: int | str | None = None,
    link_bytes_per_s: float = inf,
    double_buffering: bool = True,
    timeline: bool = False,
) -> Simulation:
    """Schedule a sweep on paper.

    Args:
        workload: trials as in `hydra_tune.workload`, or a JSON file with them.
        devices: how many equal ones; or each as a dict of memory, speed (1.0) and link_bytes_per_s.
        policy: the order in which ready tasks get devices, an object or its name.
        memory: of each of so many equal devices, ``"20GiB"`` or bytes; unlimited if None.
        link_bytes_per_s: between the host and each of them, each way; infinitely fast unless said.
        double_buffering: whether the next shard is promoted while a task computes.
        timeline: whether spans of time are kept.

    Raises:
        ConfigError: what is wrong with the workload, the devices or the policy.
        BudgetError: a trial fits no device.
    """
    trials = parse(workload)
    run = _Run(trials, _devices(devices, memory, link_bytes_per_s), policy_named(policy), double_buffering, timeline)
    return run.result()


def _devices(given: Any, memory: int | str | None, link_bytes_per_s: float) -> list[SimulatedDevice]:
    memory_bytes = _UNLIMITED_BYTES if memory is None else parse_bytes(memory)
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        _check_positive("link_bytes_per_s", link_bytes_per_s)
        return [SimulatedDevice(memory_bytes, 1.0, link_bytes_per_s)] * given
    if not isinstance(given, (list, tuple)) or not given:
        raise ConfigError(f"devices is how many, at least 1, or a list with one entry each; got {given!r}.")
    return [
        entry if isinstance(entry, SimulatedDevice) else _device(entry, number) for number, entry in enumerate(given)
    ]


def _device(entry: Any, number: int) -> SimulatedDevice:
    known = ("memory", "speed", "link_bytes_per_s")
    if not isinstance(entry, Mapping) or not set(entry) <= set(known):
        raise ConfigError(f"device {number} is a dict with the keys {', '.join(known)}; got {entry!r}.")
    options = dict(entry)
    if "memory" in options:
        options["memory"] = parse_bytes(options["memory"])
    for key in ("speed", "link_bytes_per_s"):
        if key in options:
            _check_positive(key, options[key])
    return SimulatedDevice(**options)


def _check_positive(key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(f"{key} is a positive number, got {value!r}.")


def plan_of(trial: TrialWork) -> TrialPlan:
    """As the pilot would have measured it."""
    sizes = zip(trial.shard_bytes, trial.shard_work_bytes, strict=True)
    shards = tuple(Shard((i,), size, work, work, trial.boundary_bytes) for i, (size, work) in enumerate(sizes))
    seconds = zip(trial.forward_s, trial.backward_s, strict=True)
    blocks = tuple(
        BlockProfile(f"shard {i}", trial.shard_bytes[i], forward_s=forward, backward_s=backward)
        for i, (forward, backward) in enumerate(seconds)
    )
    return TrialPlan(False, shards, blocks, trial.held_bytes, trial.step_bytes)


@dataclass
class _Stream:
    """Does one thing after another."""

    free_s: float = 0.0

    def book(self, ready_s: float, seconds: float) -> tuple[float, float]:
        start = max(ready_s, self.free_s)
        self.free_s = start + seconds
        return start, self.free_s


@dataclass
class _Trial:
    work: TrialWork
    places: list[tuple[int, Direction]]
    step: int = 0
    at: int = 0  # which of the step's tasks
    gradients_s: float = 0.0  # when the last of the step's has reached the host

    def task(self, number: int, at: int) -> Task | None:
        return Task(number, self.step, *self.places[at]) if at < len(self.places) else None


@dataclass
class _Device:
    spec: SimulatedDevice
    down: _Stream = field(default_factory=_Stream)
    up: _Stream = field(default_factory=_Stream)
    busy_s: float = 0.0
    idle_since_s: float | None = 0.0
    cause: str = ""
    stalled_s: dict[str, float] = field(default_factory=dict)


class _Run:
    """One simulation: a heap of what is to happen, and the machine that is told."""

    def __init__(
        self,
        trials: Sequence[TrialWork],
        devices: Sequence[SimulatedDevice],
        policy: Policy,
        double_buffering: bool,
        timeline: bool,
    ) -> None:
        least = min(device.memory for device in devices)
        plans = [plan_of(work) for work in trials]
        for work, plan in zip(trials, plans, strict=True):
            if plan.need_bytes > least:
                raise BudgetError(
                    f"a trial needs room on every device: {work.name or 'one'} needs {plan.need_bytes} bytes, but the "
                    f"smallest device has {least}. Cut it into smaller shards."
                )
        self.works = trials
        self.plans = plans
        self.trials = [_Trial(work, [(shard, direction) for direction, shard in work.tasks()]) for work in trials]
        self.devices = [_Device(spec) for spec in devices]
        self.machine = Machine(
            [device.memory for device in devices],
            policy,
            least_ahead_bytes=0 if double_buffering else None,
            moves_worth=self._moves_worth,
        )
        self.host = _Stream()
        self.now_s = 0.0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._copies: dict[tuple[int, int, int], int] = {}  # (trial, shard, device): which promotion of it
        self.ended_s = [0.0] * len(trials)
        self.promoted_bytes = 0
        self.spans: list[dict[str, Any]] | None = [] if timeline else None

    def result(self) -> Simulation:
        for number, trial in enumerate(self.trials):
            self._at(trial.work.arrival_s, self._arrive, number)
        while self.heap:
            self.now_s, _, happen, arguments = heapq.heappop(self.heap)
            happen(*arguments)
        assert not self.machine.trials, f"deadlock: {self.machine.devices}"
        return Simulation(
            makespan_s=max(self.ended_s),
            lower_bound_s=lower_bound(self.works, [device.spec.speed for device in self.devices]),
            busy_s=tuple(device.busy_s for device in self.devices),
            stalled_s=tuple(device.stalled_s for device in self.devices),
            ended_s=tuple(self.ended_s),
            promoted_bytes=self.promoted_bytes,
            timeline=sorted(self.spans or [], key=lambda span: span["end_s"]),
        )

    def _at(self, time_s: float, happen: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self.heap, (time_s, self._count, happen, arguments))

    def _moves_worth(self, task: Task, num_bytes: int) -> bool:
        """A move that takes longer than the task is not."""
        link = min(device.spec.link_bytes_per_s for device in self.devices)
        return num_bytes / link <= self.works[task.trial].task_s(task.direction, task.shard)

    # ---- what happens ----

    def _arrive(self, number: int) -> None:
        work = self.works[number]
        self._tell(e.TrialAdded(number, work.steps, travels=True))

    def _promoted(self, promote: e.Promote, copy: int) -> None:
        key = (promote.task.trial, promote.task.shard, promote.device)
        if self._copies.get(key) == copy:
            del self._copies[key]
            self._tell(e.Promoted(promote.task, promote.device))

    def _computed(self, task: Task, device_number: int, start_s: float) -> None:
        trial, device = self.trials[task.trial], self.devices[device_number]
        device.busy_s += self.now_s - start_s
        device.idle_since_s, device.cause = self.now_s, ""
        self._span("run", task, device_number, start_s, self.now_s)
        if task.direction is Direction.BACKWARD:
            num_bytes = trial.work.shard_gradient_bytes[task.shard]
            start, end = device.up.book(self.now_s, num_bytes / device.spec.link_bytes_per_s)
            trial.gradients_s = max(trial.gradients_s, end)
            if end > start:
                self._span("spill", task, device_number, start, end)
        trial.at += 1
        then = trial.task(task.trial, trial.at)
        self._tell(e.Done(task, self.now_s - start_s, then))
        if then is None:
            self._tell(e.StepDone(task.trial))
            self._at(max(self.now_s, trial.gradients_s), self._optimize, task.trial)

    def _optimize(self, number: int) -> None:
        _, end_s = self.host.book(self.now_s, self.works[number].optimizer_s)
        self._at(end_s, self._next_step, number)

    def _next_step(self, number: int) -> None:
        trial = self.trials[number]
        self._tell(e.Invalidated(number))
        if trial.step >= trial.work.steps_run:
            self.ended_s[number] = self.now_s
            self._tell(e.TrialEnded(number))
        else:
            self._tell(e.StepReady(number))

    # ---- what the machine says ----

    def _tell(self, event: e.Event) -> None:
        for instruction in self.machine.handle(event):
            self._follow(instruction)
        self._note_idle(event)

    def _follow(self, instruction: e.Instruction) -> None:
        if isinstance(instruction, e.Run):
            self._run(instruction)
        elif isinstance(instruction, e.Promote):
            self._promote(instruction)
        elif isinstance(instruction, e.Drop):
            self._copies.pop((instruction.trial, instruction.shard, instruction.device), None)
        elif isinstance(instruction, e.Enter):
            self._enter(instruction)
        elif isinstance(instruction, e.Place):
            self._at(self.now_s, self._tell, e.PlanReady(instruction.trial, self.plans[instruction.trial]))
        elif isinstance(instruction, e.Admit):
            self._at(self.now_s, self._tell, e.StepReady(instruction.trial))

    def _enter(self, enter: e.Enter) -> None:
        trial = self.trials[enter.trial]
        trial.step, trial.at = trial.step + 1, 0
        first = trial.task(enter.trial, 0)
        assert first is not None
        self._at(self.now_s, self._tell, e.TaskReady(first))

    def _promote(self, promote: e.Promote) -> None:
        device = self.devices[promote.device]
        start_s, end_s = device.down.book(self.now_s, promote.num_bytes / device.spec.link_bytes_per_s)
        self.promoted_bytes += promote.num_bytes
        self._count += 1
        self._copies[promote.task.trial, promote.task.shard, promote.device] = self._count
        self._at(end_s, self._promoted, promote, self._count)
        if end_s > start_s:
            self._span("promote", promote.task, promote.device, start_s, end_s)

    def _run(self, run: e.Run) -> None:
        device, work = self.devices[run.device], self.works[run.task.trial]
        away = self.machine.trials[run.task.trial].home != run.device
        moved_s = 2 * work.boundary_bytes / device.spec.link_bytes_per_s if away else 0.0
        self._end_stall(run.device)
        seconds = work.task_s(run.task.direction, run.task.shard) / device.spec.speed
        self._at(self.now_s + moved_s + seconds, self._computed, run.task, run.device, self.now_s + moved_s)

    # ---- why a device was idle ----

    def _note_idle(self, event: e.Event) -> None:
        for number, device in enumerate(self.devices) if isinstance(event, (e.Done, e.Promoted, e.StepDone)) else ():
            if device.idle_since_s is not None and (cause := self.machine.idle_cause(number)):
                device.cause = device.cause or cause

    def _end_stall(self, number: int) -> None:
        device, cause = self.devices[number], self.machine.idle_cause(number)
        if device.idle_since_s is not None and self.now_s > device.idle_since_s:
            cause = device.cause or cause or "no ready task"
            device.stalled_s[cause] = device.stalled_s.get(cause, 0.0) + self.now_s - device.idle_since_s
            self._span("stall", Task(-1, 0, -1, Direction.FORWARD), number, device.idle_since_s, self.now_s, cause)
        device.idle_since_s = None

    def _span(self, kind: str, task: Task, device: int, start_s: float, end_s: float, cause: str = "") -> None:
        if self.spans is not None:
            self.spans.append(
                {
                    "kind": kind, "device": device, "trial": task.trial, "shard": task.shard,
                    "direction": task.direction.value, "start_s": start_s, "end_s": end_s, "cause": cause,
                }
            )  # fmt: skip
