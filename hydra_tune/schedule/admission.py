"""Who gets bytes of a device: for life, for a step, for a pilot. Plain data, as the scheduler that asks it.

    admissions   trials that want what they hold for life, and pilots that want the device empty
    entries      steps and pilots

Both are served in the order in which they came. A pilot, whose bytes nobody knows yet, has the device to itself. Steps
come and go while a trial awaits its bytes for life; but where it awaits nothing else than that they end, only
`STEPS_LET_BY` more.
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
    """Of all trials to all devices."""

    def __init__(
        self,
        trials: Mapping[int, TrialState],
        slots: Slots,
        take_promise_back: Callable[[DeviceState], None],
    ) -> None:
        self._trials = trials
        self._slots = slots
        self._take_promise_back = take_promise_back

    def serve(self, device: DeviceState) -> list[Instruction]:
        """Whoever can have now what it wants there."""
        return [*self._admit(device), *self._enter(device)]

    # ---- for life ----

    def _admit(self, device: DeviceState) -> list[Instruction]:
        admitted: list[Instruction] = []
        while device.admissions and device.ledger.pilot is None and not self._keeps_empty(device):
            request = device.admissions[0]
            if isinstance(request, PilotReady):
                if device.ledger.held_bytes:
                    break
                device.entries.append(request)
            else:
                if not self.admissible(device, request.plan):
                    break
                admitted += self.admit_one(device, request)
            device.admissions.pop(0)
            device.steps_let_by = 0
        return admitted

    def _keeps_empty(self, device: DeviceState) -> bool:
        """For a pilot that wants all of it."""
        return any(isinstance(entry, PilotReady) and entry.empty for entry in device.entries)

    def admit_one(self, device: DeviceState, request: PlanReady) -> list[Instruction]:
        """Who is `admissible`."""
        self._trials[request.trial].plan = request.plan
        self._trials[request.trial].admitted = True
        dropped = self._slots.make_room(device, request.plan.held_bytes)
        device.ledger.hold(request.trial, request.plan.held_bytes)
        return [*dropped, Admit(request.trial)]

    def admissible(self, device: DeviceState, plan: TrialPlan) -> bool:
        """Would every admitted trial's step still fit alone, and those under way go on? And is there room now?"""
        fits = self._fits_without_steps(device, plan) and self.steps_fit(device, plan.held_bytes, None)
        return fits and self._slots.has_room(device, plan.held_bytes + self.yet_to_start(device))

    def _fits_without_steps(self, device: DeviceState, plan: TrialPlan) -> bool:
        """Beside what is held for life, and a step of any one trial."""
        plans = [self._trials[trial].plan for trial in device.ledger.held]
        most = max(p.step_bytes + p.task_bytes for p in [*plans, plan])
        return device.ledger.held_bytes + plan.held_bytes + most <= device.ledger.budget_bytes

    def _awaits_steps(self, device: DeviceState) -> bool:
        """Whether the first admission awaits that steps end, and nothing else."""
        if not device.admissions or self._keeps_empty(device):
            return False
        first = device.admissions[0]
        return not isinstance(first, PilotReady) and self._fits_without_steps(device, first.plan)

    # ---- for a step ----

    def steps_fit(self, device: DeviceState, more_held: int, entering: TrialPlan | None) -> bool:
        """Beside them, and so many more bytes held for life, the largest task of any of them."""
        ledger = device.ledger
        task_bytes, step_bytes = self._most_task_bytes(device), ledger.step_bytes
        if entering is not None:
            task_bytes = max(task_bytes, entering.task_bytes)
            step_bytes += entering.step_bytes
        return ledger.held_bytes + more_held + step_bytes + task_bytes <= ledger.budget_bytes

    def _most_task_bytes(self, device: DeviceState) -> int:
        """Of the steps that have entered there; pilots have no plan."""
        plans = (self._trials[trial].plan for trial in device.ledger.steps)
        return max((plan.task_bytes for plan in plans), default=0)

    def _enter(self, device: DeviceState) -> list[Instruction]:
        entered: list[Instruction] = []
        for request in list(device.entries):
            if device.ledger.pilot is not None:
                break
            overtakes = self._awaits_steps(device)
            if overtakes and device.steps_let_by >= STEPS_LET_BY:
                break
            if isinstance(request, PilotReady):
                made = self._start_pilot(device, request)
            else:
                made = self._enter_one(device, request)
            if not made:
                break
            entered += made
            device.steps_let_by += overtakes
            device.entries.remove(request)
        return entered

    def _start_pilot(self, device: DeviceState, request: PilotReady) -> list[Instruction]:
        """Once no task runs there, no copy is on its way, and no step has bytes."""
        if device.running is not None or device.in_flight or device.ledger.steps:
            return []
        self._take_promise_back(device)
        dropped = self._slots.drop(device, list(device.ledger.slots))
        return [*dropped, StartPilot(request.trial, device.ledger.start_pilot(request.trial))]

    def _enter_one(self, device: DeviceState, request: StepReady) -> list[Instruction]:
        plan = self._trials[request.trial].plan
        needs = plan.step_bytes + self.yet_to_start(device)
        if not self.steps_fit(device, 0, plan) or not self._slots.has_room(device, needs):
            return []
        dropped = self._slots.make_room(device, plan.step_bytes)
        device.ledger.enter_step(request.trial, plan.step_bytes)
        return [*dropped, Enter(request.trial)]

    def yet_to_start(self, device: DeviceState) -> int:
        """What the work of who has the lease, and awaits its shard, is to take: it may be away from its reservation."""
        task = device.running
        return 0 if task is None or device.started else self._trials[task.trial].work_bytes(task, device.index)
