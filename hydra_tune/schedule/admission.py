"""Who gets bytes of a device: for a trial's life, for a step, for a pilot. Plain data, as the machine that asks it.

Each device has two queues, both first come, first served:

    admissions   trials that want the bytes they hold for life, and pilots that want the device empty
    entries      steps, and pilots

Nobody knows how many bytes a pilot needs, so it has the device to itself. While an admission waits, steps go on
entering and ending. One that waits for nothing but their end could wait for ever, so only `STEPS_LET_BY` more enter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hydra_tune.schedule.events import (
    Admit,
    Enter,
    Instruction,
    PilotReady,
    PlanReady,
    StartPilot,
    StepReady,
)
from hydra_tune.schedule.plan import TrialPlan
from hydra_tune.schedule.slots import Slots
from hydra_tune.schedule.state import DeviceState, TrialState

STEPS_LET_BY = 16


class Admission:
    """Serves the requests of all trials, on all devices."""

    def __init__(
        self,
        trials: Mapping[int, TrialState],
        slots: Slots,
        withdraw_promise: Callable[[DeviceState], None],
    ) -> None:
        self._trials = trials
        self._slots = slots
        self._withdraw_promise = withdraw_promise

    def serve(self, device: DeviceState) -> list[Instruction]:
        """Grant what can be granted on this device now."""
        return [*self._serve_admissions(device), *self._serve_entries(device)]

    # ---- for life ----

    def _serve_admissions(self, device: DeviceState) -> list[Instruction]:
        admitted: list[Instruction] = []
        while device.admissions and device.ledger.pilot is None and not self._is_kept_empty(device):
            request = device.admissions[0]
            if isinstance(request, PilotReady):
                if device.ledger.held_bytes:
                    break
                device.entries.append(request)
            else:
                if not self.admissible(device, request.plan):
                    break
                admitted += self.admit(device, request)
            device.admissions.pop(0)
            device.steps_let_by = 0
        return admitted

    def _is_kept_empty(self, device: DeviceState) -> bool:
        """Whether a pilot that wants the whole device is in `entries`: until it has ended, no trial is admitted."""
        return any(isinstance(entry, PilotReady) and entry.empty for entry in device.entries)

    def admit(self, device: DeviceState, request: PlanReady) -> list[Instruction]:
        """Reserve what the plan holds for life. The plan must be `admissible`."""
        plan, ledger = request.plan, device.ledger
        dropped = self._slots.share(request.trial, ())
        self._trials[request.trial].plan = plan
        self._trials[request.trial].admitted = True
        dropped += self._slots.make_room(device, ledger.more_bytes(plan.held_bytes, plan.held_weights))
        ledger.hold(request.trial, plan.held_bytes, plan.held_weights)
        return [*dropped, Admit(request.trial)]

    def admissible(self, device: DeviceState, plan: TrialPlan) -> bool:
        """Whether the plan's bytes for life fit now. Beside them each admitted trial must still be able to make a step
        alone, and the steps under way must be able to go on."""
        held_bytes = device.ledger.more_bytes(plan.held_bytes, plan.held_weights)
        fits = self._fits_without_steps(device, plan) and self.steps_fit(device, held_bytes, None)
        return fits and self._slots.has_room(device, held_bytes + self.unstarted_work_bytes(device))

    def _fits_without_steps(self, device: DeviceState, plan: TrialPlan) -> bool:
        """Whether it fits beside what is held for life and a step of any one trial."""
        plans = [self._trials[trial].plan for trial in device.ledger.held]
        largest_step_bytes = max(p.step_bytes + p.task_bytes for p in [*plans, plan])
        held_bytes = device.ledger.held_bytes + device.ledger.more_bytes(plan.held_bytes, plan.held_weights)
        return held_bytes + largest_step_bytes <= device.ledger.budget_bytes

    def _waits_only_for_steps(self, device: DeviceState) -> bool:
        """Whether the first admission would be granted if the steps under way ended."""
        if not device.admissions or self._is_kept_empty(device):
            return False
        first = device.admissions[0]
        return not isinstance(first, PilotReady) and self._fits_without_steps(device, first.plan)

    # ---- for a step ----

    def steps_fit(self, device: DeviceState, more_held_bytes: int, entering: TrialPlan | None) -> bool:
        """Whether the steps under way and the entering one can all be reserved, with room for the largest task of any
        of them, beside what is held for life and `more_held_bytes`."""
        ledger = device.ledger
        task_bytes, step_bytes = self._largest_task_bytes(device), ledger.step_bytes
        if entering is not None:
            task_bytes = max(task_bytes, entering.task_bytes)
            step_bytes += entering.step_bytes
        return ledger.held_bytes + more_held_bytes + step_bytes + task_bytes <= ledger.budget_bytes

    def _largest_task_bytes(self, device: DeviceState) -> int:
        """Of the steps under way there. The plan of a pilot is empty."""
        plans = (self._trials[trial].plan for trial in device.ledger.steps)
        return max((plan.task_bytes for plan in plans), default=0)

    def _serve_entries(self, device: DeviceState) -> list[Instruction]:
        entered: list[Instruction] = []
        for request in list(device.entries):
            if device.ledger.pilot is not None:
                break
            overtakes = self._waits_only_for_steps(device)
            if overtakes and device.steps_let_by >= STEPS_LET_BY:
                break
            if isinstance(request, PilotReady):
                instructions = self._start_pilot(device, request)
            else:
                instructions = self._enter_step(device, request)
            if not instructions:
                break
            entered += instructions
            device.steps_let_by += overtakes
            device.entries.remove(request)
        return entered

    def _start_pilot(self, device: DeviceState, request: PilotReady) -> list[Instruction]:
        """Unless a task runs there, a copy is on its way, or a step has bytes."""
        if device.running is not None or device.in_flight or device.ledger.steps:
            return []
        self._withdraw_promise(device)
        dropped = self._slots.drop(device, list(device.ledger.slots))
        return [*dropped, StartPilot(request.trial, device.ledger.start_pilot(request.trial))]

    def _enter_step(self, device: DeviceState, request: StepReady) -> list[Instruction]:
        """Unless it does not fit yet."""
        plan = self._trials[request.trial].plan
        needed_bytes = plan.step_bytes + self.unstarted_work_bytes(device)
        if not self.steps_fit(device, 0, plan) or not self._slots.has_room(device, needed_bytes):
            return []
        dropped = self._slots.make_room(device, plan.step_bytes)
        device.ledger.enter_step(request.trial, plan.step_bytes)
        return [*dropped, Enter(request.trial)]

    def unstarted_work_bytes(self, device: DeviceState) -> int:
        """Scratch of the running task while it waits for its shard: not in the ledger yet, and not a part of any
        reservation here if the task is away from home."""
        task = device.running
        return 0 if task is None or device.started else self._trials[task.trial].work_bytes(task, device.index)
