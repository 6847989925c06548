"""Drives the scheduler's machine by a simulated clock. Its instructions take the time that the workload says.

    trial    arrives -> gets a home -> is admitted -> step -> step -> ... -> ends
    step     enters -> task -> task -> ... -> gradients arrive on the host -> host optimizer -> the trial's own loop
    task     [its shard is promoted] -> [its input moves] -> computes -> [its output moves] -> done

What happens at the same time:

    device   computes     | task | task | ...         one task at a time
             link down    | shard | shard | ...       one copy at a time; copies from the host
             link up      | gradients | ...           one copy at a time; copies to the host
    host     optimizers   | step | step | ...         one at a time, since all are bound by its memory's bandwidth

Without double buffering a device does one of these at a time: promotion, task, gradients up.

Left out: links of several devices share the host's bandwidth; kernels slow down beside copies; gradients take room
while they go up. The input and output of a task away from home use the link of its device alone.
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
    `d2h_bytes_per_s` to the host (None: the same rate).

    Raises:
        ConfigError: one of them is not a positive number.
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
        """Bytes a second of the stream "promote" or "spill"."""
        d2h_bytes_per_s = self.d2h_bytes_per_s
        return self.link_bytes_per_s if d2h_bytes_per_s is None or stream == "promote" else d2h_bytes_per_s


@dataclass
class ReplayedTrial:
    work: TrialWork
    plan: TrialPlan
    visits: list[tuple[int, Direction]]  # of each step: (shard, direction)
    step: int = 0
    position: int = 0  # in `visits`
    gradients_s: float = 0.0  # when the last gradients reach the host
    ended_s: float = 0.0


@dataclass
class ReplayedDevice:
    spec: SimulatedDevice
    free_s: dict[str, float] = field(default_factory=lambda: {"promote": 0.0, "spill": 0.0})  # when each link is free
    busy_s: float = 0.0
    stalled_s: dict[str, float] = field(default_factory=dict)  # by cause
    copying: str = ""  # what its task waits for beside the shard: "move" or "gradients"; empty for nothing
    cause: str = ""  # of the stall under way
    since_s: float = 0.0  # when that stall began


class Replay:
    """One simulation: a heap of actions, each at its time, and the machine that they send events to."""

    def __init__(
        self,
        works: Sequence[TrialWork],
        plans: Sequence[TrialPlan],
        devices: Sequence[SimulatedDevice],
        policy: Policy,
        *,
        double_buffering: bool,
        sharing: bool,
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
        self._sharing = sharing
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []  # (time, order, action, args)
        self._count = 0
        self._in_flight: dict[tuple[int, int, int], e.PromoteShard] = {}  # the latest by its slot and device
        self._num_left = len(works)
        self._idle = set(range(len(devices)))
        self._optimizer_free_s = 0.0

    def run(self) -> None:
        """Simulate until the last trial ends; then `now_s` is the makespan."""
        for number, trial in enumerate(self.trials):
            self._at(trial.work.arrival_s, self._send, e.TrialAdded(number, trial.work.steps, travels=True))
        while self._num_left:
            assert self._heap, f"deadlock: {self.machine.devices}"
            time_s, _, action, arguments = heappop(self._heap)
            if time_s > self.now_s:
                self._note_idle()
                self.now_s = time_s
            action(*arguments)
        for index in self._idle:
            self._note_stall(index)

    def _at(self, time_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Let the action happen at this time; of several at one time the one that was added first."""
        self._count += 1
        heappush(self._heap, (time_s, self._count, action, arguments))

    # ---- events and instructions ----

    def _send(self, event: e.Event) -> None:
        """Send the machine an event, and carry out its instructions."""
        for instruction in self.machine.handle(event):
            if isinstance(instruction, e.Run):
                self._run_task(instruction.task, instruction.device)
            elif isinstance(instruction, e.PromoteShard):
                self._promote(instruction)
            elif isinstance(instruction, e.Drop):
                self._in_flight.pop((instruction.trial, instruction.shard, instruction.device), None)
            elif isinstance(instruction, e.Enter):
                self._enter(instruction.trial)
            elif isinstance(instruction, e.Place):
                plan_ready = e.PlanReady(instruction.trial, self.trials[instruction.trial].plan)
                self._at(self.now_s, self._send, plan_ready)
            elif isinstance(instruction, e.Admit):
                self._at(self.now_s, self._begin, instruction.trial)
            else:
                assert isinstance(instruction, e.Move), f"nobody asked for {instruction}"

    def _promote(self, promote: e.PromoteShard) -> None:
        task = promote.task
        key = (*self.machine.slots.key(task), promote.device)
        self._in_flight[key] = promote
        self.promoted_bytes += promote.num_bytes
        self._at(self._copy("promote", task, promote.device, promote.num_bytes), self._promoted, promote, key)

    def _promoted(self, promote: e.PromoteShard, key: tuple[int, int, int]) -> None:
        """The shard has arrived, unless it was dropped on its way."""
        if self._in_flight.get(key) is promote:
            del self._in_flight[key]
            self._send(e.Promoted(promote.task, promote.device))

    # ---- a step ----

    def _begin(self, number: int) -> None:
        """The trial was admitted: it makes its first step."""
        if self._sharing and (weights := self.trials[number].work.shared_weights):
            self._send(e.Shared(number, weights))
        self._send(e.StepReady(number))

    def _enter(self, number: int) -> None:
        trial = self.trials[number]
        trial.step, trial.position = trial.step + 1, 0
        self._at(self.now_s, self._send, e.TaskReady(Task(number, trial.step, *trial.visits[0])))

    def _step_done(self, number: int) -> None:
        self._send(e.StepDone(number))
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
        self._send(e.Invalidated(number))
        self._send(e.StepReady(number))

    def _end(self, number: int) -> None:
        self.trials[number].ended_s = self.now_s
        self._num_left -= 1
        self._send(e.TrialEnded(number))

    # ---- a task ----

    def _is_away(self, task: Task, index: int) -> bool:
        """Whether this device is not the home of the task's trial."""
        return self.machine.trials[task.trial].home != index

    def _run_task(self, task: Task, index: int) -> None:
        """Move the task's input if it is away from home, then compute."""
        if not self._is_away(task, index):
            return self._compute(task, index)
        self.devices[index].copying = "move"
        moved_s = self._copy("promote", task, index, self.trials[task.trial].work.boundary_bytes, "its input")
        return self._at(moved_s, self._compute, task, index)

    def _compute(self, task: Task, index: int) -> None:
        self._note_stall(index)
        self._idle.remove(index)
        seconds = self.trials[task.trial].work.task_s(task.direction, task.shard) / self.devices[index].spec.speed
        self._at(self.now_s + seconds, self._computed, task, index, self.now_s)

    def _computed(self, task: Task, index: int, start_s: float) -> None:
        """Send the task's output and gradients. The task is done when its output has arrived at home; without double
        buffering, when its gradients have arrived on the host."""
        device, trial = self.devices[index], self.trials[task.trial]
        seconds = self.now_s - start_s
        device.busy_s += seconds
        self._note_span("run", task, index, start_s, self.now_s)
        self._idle.add(index)
        device.since_s = done_s = self.now_s
        if self._is_away(task, index):
            device.copying = "move"
            done_s = self._copy("spill", task, index, trial.work.boundary_bytes, "its output")
        if task.direction is Direction.BACKWARD:
            gradients_s = self._copy("spill", task, index, trial.work.shard_gradient_bytes[task.shard])
            trial.gradients_s = max(trial.gradients_s, gradients_s)  # others may be on their way from another device
            if not self._double_buffering:
                device.copying, done_s = "gradients", gradients_s
        if done_s > self.now_s:
            self._at(done_s, self._done, task, index, seconds)
        else:
            self._done(task, index, seconds)

    def _done(self, task: Task, index: int, seconds: float) -> None:
        trial, self.devices[index].copying = self.trials[task.trial], ""
        trial.position += 1
        if trial.position < len(trial.visits):
            self._send(e.Done(task, seconds, e.TaskReady(Task(task.trial, task.step, *trial.visits[trial.position]))))
        else:
            self._send(e.Done(task, seconds))
            self._step_done(task.trial)

    def _copy(self, stream: str, task: Task, index: int, num_bytes: int, cause: str = "") -> float:
        """Start a copy once the link is free; returns when it arrives."""
        device = self.devices[index]
        start_s = max(self.now_s, device.free_s[stream])
        end_s = device.free_s[stream] = start_s + num_bytes / device.spec.rate(stream)
        if end_s > start_s:
            self._note_span(stream, task, index, start_s, end_s, cause)
        return end_s

    # ---- records ----

    def _note_idle(self) -> None:
        """Before the clock moves on, note why devices idle: until then nothing changes."""
        for index in self._idle:
            device = self.devices[index]
            cause = device.copying or self.machine.idle_cause(index)
            if cause in (NO_TRIAL, "no ready task"):
                cause = "too few trials" if len(self.machine.trials) < len(self.devices) else "no ready task"
            if cause != device.cause:
                self._note_stall(index)
                device.cause = cause

    def _note_stall(self, index: int) -> None:
        """Add the stall under way to the device's sums, and begin a new one."""
        device = self.devices[index]
        if self.now_s > device.since_s:
            device.stalled_s[device.cause] = device.stalled_s.get(device.cause, 0.0) + self.now_s - device.since_s
            self._note_span("stall", None, index, device.since_s, self.now_s, device.cause)
        device.since_s = self.now_s

    def _note_span(
        self, kind: str, task: Task | None, device: int, start_s: float, end_s: float, cause: str = ""
    ) -> None:
        if self.spans is None:
            return
        trial, step, shard, direction = (
            (-1, 0, -1, "") if task is None else (task.trial, task.step, task.shard, task.direction.value)
        )
        visit = {"trial": trial, "step": step, "shard": shard, "direction": direction}
        self.spans.append({"kind": kind, "device": device, **visit, "start_s": start_s, "end_s": end_s, "cause": cause})
