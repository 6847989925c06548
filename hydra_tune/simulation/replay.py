"""Drives the scheduler's machine by a clock: what it orders takes the time that the workload says.

    trial    arrives -> places -> is admitted -> step -> step -> ... -> ends
    step     enters -> task -> task -> ... -> its gradients are on the host -> the host's optimizer -> the trial's own
             loop -> the next one
    task     [its shard is promoted] -> [its input moves] -> computes -> [its output moves] -> done
    device   one task at a time; a link down and one up, each one copy at a time
    host     one optimizer at a time, for all are bound by its memory's bandwidth

Without double buffering a device does one of these at a time: promotion, task, gradients up.
Known slack: links of several devices do not share the host's bandwidth; kernels do not slow down beside copies;
gradients take no room while they go up; a task that is away moves its input and output over that device's link alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Any

from hydra_tune.config import MOST_BYTES, parse_bytes
from hydra_tune.errors import ConfigError
from hydra_tune.schedule import events as e
from hydra_tune.schedule.machine import Machine
from hydra_tune.schedule.plan import Direction, Task, TrialPlan
from hydra_tune.schedule.policy import Policy
from hydra_tune.schedule.state import NO_TRIAL
from hydra_tune.simulation.workload import TrialWork


@dataclass(frozen=True)
class SimulatedDevice:
    """`speed` divides the workload's seconds. The link carries `link_bytes_per_s` from the host and, at the same time,
    `d2h_bytes_per_s` to it; as many, if that is None.

    Raises:
        ConfigError: not positive numbers.
    """

    memory: int = MOST_BYTES
    speed: float = 1.0
    link_bytes_per_s: float = inf
    d2h_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", parse_bytes(self.memory))
        if self.d2h_bytes_per_s is None:
            object.__setattr__(self, "d2h_bytes_per_s", self.link_bytes_per_s)
        for key in ("speed", "link_bytes_per_s", "d2h_bytes_per_s"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ConfigError(
                    f"{key} of a device is a positive number, got {value!r}. Leave it out if it is usual."
                )
        if self.speed == inf:
            raise ConfigError("a device's speed is finite, got inf. Write 1.0 for a usual one.")

    def rate(self, stream: str) -> float:
        """Bytes a second of `promote` or `spill`."""
        back = self.d2h_bytes_per_s
        return self.link_bytes_per_s if back is None or stream == "promote" else back


@dataclass
class ReplayedTrial:
    work: TrialWork
    plan: TrialPlan
    places: list[tuple[int, Direction]]  # that each step visits
    step: int = 0
    at: int = 0  # which of the step's places
    gradients_s: float = 0.0  # when the last gradients have reached the host
    ended_s: float = 0.0


@dataclass
class ReplayedDevice:
    """While it does not compute, `copying` says what its task waits for, if its shard is there; the stall that is
    under way began at `since_s`, for `cause`."""

    spec: SimulatedDevice
    free_s: dict[str, float] = field(default_factory=lambda: {"promote": 0.0, "spill": 0.0})  # each link
    busy_s: float = 0.0
    stalled_s: dict[str, float] = field(default_factory=dict)
    copying: str = ""
    cause: str = ""
    since_s: float = 0.0


class Replay:
    """One simulation: a heap of what is to happen, and the machine that is told."""

    def __init__(
        self,
        works: Sequence[TrialWork],
        plans: Sequence[TrialPlan],
        devices: Sequence[SimulatedDevice],
        policy: Policy,
        *,
        double_buffering: bool,
        timeline: bool,
    ) -> None:
        self.trials = [
            ReplayedTrial(work, plan, [(shard, direction) for direction, shard in work.tasks()])
            for work, plan in zip(works, plans, strict=True)
        ]
        self.devices = [ReplayedDevice(spec) for spec in devices]
        self.machine = Machine(
            [spec.memory for spec in devices],
            policy,
            least_ahead_bytes=0 if double_buffering else None,
            links_bytes_per_s=[spec.link_bytes_per_s for spec in devices],
            speeds=[spec.speed for spec in devices],
        )
        self.now_s = 0.0
        self.promoted_bytes = 0
        self.spans: list[dict[str, Any]] | None = [] if timeline else None
        self._double_buffering = double_buffering
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._arriving: dict[tuple[int, int, int], e.PromoteShard] = {}  # the latest by (trial, shard, device)
        self._left = len(works)
        self._idle = set(range(len(devices)))
        self._optimizer_free_s = 0.0

    def run(self) -> None:
        """To the last trial's end, which `now_s` is then."""
        for number, trial in enumerate(self.trials):
            self._at(trial.work.arrival_s, self._tell, e.TrialAdded(number, trial.work.steps, travels=True))
        while self._left:
            assert self._heap, f"deadlock: {self.machine.devices}"
            time_s, _, happen, arguments = heappop(self._heap)
            if time_s > self.now_s:
                self._note_idle()
                self.now_s = time_s
            happen(*arguments)
        for number in self._idle:
            self._note_stall(number)

    def _at(self, time_s: float, happen: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heappush(self._heap, (time_s, self._count, happen, arguments))

    # ---- what the machine orders ----

    def _tell(self, event: e.Event) -> None:
        for instruction in self.machine.handle(event):
            if isinstance(instruction, e.Run):
                self._begin(instruction.task, instruction.device)
            elif isinstance(instruction, e.PromoteShard):
                self._promote(instruction)
            elif isinstance(instruction, e.Drop):
                self._arriving.pop((instruction.trial, instruction.shard, instruction.device), None)
            elif isinstance(instruction, e.Enter):
                self._enter(instruction.trial)
            elif isinstance(instruction, e.Place):
                plan_ready = e.PlanReady(instruction.trial, self.trials[instruction.trial].plan)
                self._at(self.now_s, self._tell, plan_ready)
            elif isinstance(instruction, e.Admit):
                self._at(self.now_s, self._tell, e.StepReady(instruction.trial))
            else:
                assert isinstance(instruction, e.Move), f"nobody asked for {instruction}"

    def _promote(self, promote: e.PromoteShard) -> None:
        task = promote.task
        self._arriving[task.trial, task.shard, promote.device] = promote
        self.promoted_bytes += promote.num_bytes
        self._at(self._copy("promote", task, promote.device, promote.num_bytes), self._promoted, promote)

    def _promoted(self, promote: e.PromoteShard) -> None:
        """Unless it was dropped on its way."""
        key = (promote.task.trial, promote.task.shard, promote.device)
        if self._arriving.get(key) is promote:
            del self._arriving[key]
            self._tell(e.Promoted(promote.task, promote.device))

    # ---- a step ----

    def _enter(self, number: int) -> None:
        trial = self.trials[number]
        trial.step, trial.at = trial.step + 1, 0
        self._at(self.now_s, self._tell, e.TaskReady(Task(number, trial.step, *trial.places[0])))

    def _step_done(self, number: int) -> None:
        self._tell(e.StepDone(number))
        self._at(max(self.now_s, self.trials[number].gradients_s), self._optimize, number)

    def _optimize(self, number: int) -> None:
        trial, done_s = self.trials[number], self.now_s
        if trial.work.optimizer_s:
            self._optimizer_free_s = done_s = max(self.now_s, self._optimizer_free_s) + trial.work.optimizer_s
        if trial.step == trial.work.steps_run:
            self._at(done_s, self._end, number)
        else:
            self._at(done_s + trial.work.loop_s, self._next_step, number)

    def _next_step(self, number: int) -> None:
        self._tell(e.Invalidated(number))
        self._tell(e.StepReady(number))

    def _end(self, number: int) -> None:
        self.trials[number].ended_s = self.now_s
        self._left -= 1
        self._tell(e.TrialEnded(number))

    # ---- a task ----

    def _is_away(self, task: Task, number: int) -> bool:
        return self.machine.trials[task.trial].home != number

    def _begin(self, task: Task, number: int) -> None:
        if not self._is_away(task, number):
            return self._compute(task, number)
        self.devices[number].copying = "move"
        moved_s = self._copy("promote", task, number, self.trials[task.trial].work.boundary_bytes, "its input")
        return self._at(moved_s, self._compute, task, number)

    def _compute(self, task: Task, number: int) -> None:
        self._note_stall(number)
        self._idle.remove(number)
        seconds = self.trials[task.trial].work.task_s(task.direction, task.shard) / self.devices[number].spec.speed
        self._at(self.now_s + seconds, self._computed, task, number, self.now_s)

    def _computed(self, task: Task, number: int, start_s: float) -> None:
        device, trial = self.devices[number], self.trials[task.trial]
        seconds = self.now_s - start_s
        device.busy_s += seconds
        self._note_span("run", task, number, start_s, self.now_s)
        self._idle.add(number)
        device.since_s = done_s = self.now_s
        if self._is_away(task, number):
            device.copying = "move"
            done_s = self._copy("spill", task, number, trial.work.boundary_bytes, "its output")
        if task.direction is Direction.BACKWARD:
            gradients_s = self._copy("spill", task, number, trial.work.shard_gradient_bytes[task.shard])
            trial.gradients_s = max(trial.gradients_s, gradients_s)  # others may be on their way from another device
            if not self._double_buffering:
                device.copying, done_s = "gradients", gradients_s
        if done_s > self.now_s:
            self._at(done_s, self._done, task, number, seconds)
        else:
            self._done(task, number, seconds)

    def _done(self, task: Task, number: int, seconds: float) -> None:
        trial, self.devices[number].copying = self.trials[task.trial], ""
        trial.at += 1
        if trial.at < len(trial.places):
            self._tell(e.Done(task, seconds, e.TaskReady(Task(task.trial, task.step, *trial.places[trial.at]))))
        else:
            self._tell(e.Done(task, seconds))
            self._step_done(task.trial)

    def _copy(self, stream: str, task: Task, number: int, num_bytes: int, cause: str = "") -> float:
        """When it has arrived."""
        device = self.devices[number]
        start_s = max(self.now_s, device.free_s[stream])
        end_s = device.free_s[stream] = start_s + num_bytes / device.spec.rate(stream)
        if end_s > start_s:
            self._note_span(stream, task, number, start_s, end_s, cause)
        return end_s

    # ---- what is noted ----

    def _note_idle(self) -> None:
        """Why devices idle from now on: nothing changes until something happens."""
        for number in self._idle:
            device = self.devices[number]
            cause = device.copying or self.machine.idle_cause(number)
            if cause in (NO_TRIAL, "no ready task"):
                cause = "too few trials" if len(self.machine.trials) < len(self.devices) else "no ready task"
            if cause != device.cause:
                self._note_stall(number)
                device.cause = cause

    def _note_stall(self, number: int) -> None:
        device = self.devices[number]
        if self.now_s > device.since_s:
            device.stalled_s[device.cause] = device.stalled_s.get(device.cause, 0.0) + self.now_s - device.since_s
            self._note_span("stall", None, number, device.since_s, self.now_s, device.cause)
        device.since_s = self.now_s

    def _note_span(
        self, kind: str, task: Task | None, device: int, start_s: float, end_s: float, cause: str = ""
    ) -> None:
        if self.spans is None:
            return
        trial, step, shard, way = (
            (-1, 0, -1, "") if task is None else (task.trial, task.step, task.shard, task.direction.value)
        )
        whose = {"trial": trial, "step": step, "shard": shard, "direction": way}
        self.spans.append({"kind": kind, "device": device, **whose, "start_s": start_s, "end_s": end_s, "cause": cause})
