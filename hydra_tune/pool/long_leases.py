"""Long leases, which last for many steps; at most one a device. Owns who has one, what the holder did, and its end.

A resident trial gains nothing from giving its device to others after each task, and each change costs the pool's lock.
So the machine gives the trial a long lease, and its thread goes from task to task without the lock (`lease.py`). The
pool reads what was done for a report, when the lease ends, and after a quantum.

    holder's thread   | task | task | task | task | ...            the holder counts; no lock, no machine
    a waiting thread        looks every LOOK_S:  is the holder idle?   ->  recall: the lease ends at once
                                                 is its quantum over?  ->  Expired: the machine decides
    the machine       one task, which began when the lease was given and ends with it

The methods here return events for the machine, in their order. `EventLoop` handles them. All methods are called under
the pool's lock.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra_tune.devices.device import Device
from hydra_tune.pool.lease import Lease
from hydra_tune.pool.report import Report
from hydra_tune.pool.trace import BETWEEN
from hydra_tune.pool.trial_table import TrialTable
from hydra_tune.schedule.events import Done, Event, Expired, Run, StepDone, Worked
from hydra_tune.schedule.machine import Machine

LOOK_S = 0.05  # how often a waiting thread looks at the holder; a look costs the holder a thread switch or two
# How often a waiting thread wakes if there is no holder to look at. It looks for models that were garbage collected:
# nothing wakes a thread for these.
LOOK_AROUND_S = 1.0


class LongLeases:
    """The long leases of one pool. `of_devices` has the one that lasts on each device, or None."""

    def __init__(self, devices: Sequence[Device], machine: Machine, table: TrialTable, report: Report) -> None:
        self.of_devices: list[Lease | None] = [None] * len(devices)
        self._devices = devices
        self._machine = machine
        self._table = table
        self._report = report

    def open(self, lease: Lease, run: Run) -> None:
        self.of_devices[run.device] = lease
        first = self._machine.ready.oldest(run.device)
        lease.open(run.task, self._devices[run.device], others_wait=first is not None)
        if first is not None:
            self._table.leases[first.task.trial].wake.notify_all()  # from here on it looks at the holder

    def look_at_holder(self, trial: int) -> tuple[float, list[Event]]:
        """Called by a waiting trial, which looks at the holder of its device's long lease. Only the trial that has
        waited longest does. Returns how many seconds the trial may wait before it calls again, and events."""
        state = self._machine.trials.get(trial)
        lease = None if state is None else self.of_devices[state.home]
        if state is None or lease is None or lease.trial == trial:
            return LOOK_AROUND_S, []
        if lease.revoked:
            return LOOK_AROUND_S, [] if lease.busy else self.end(lease)
        first = self._machine.ready.oldest(state.home)
        if first is None or first.task.trial != trial:
            return LOOK_AROUND_S, []
        happened = self.tasks_done(lease)
        lease.yields = lease.pauses
        now_s, quantum_s = self._report.trace.now_s(), self._machine.policy.quantum_s
        if lease.is_idle() or (lease.yields and not lease.in_step):
            happened += self.recall(lease)
        elif now_s - lease.since_s >= quantum_s:
            happened.append(Expired(state.home))
            lease.since_s = now_s
        return min(LOOK_S, max(quantum_s, 1e-3)), happened

    def recall(self, lease: Lease) -> list[Event]:
        """End the lease if it lasts: at once if its holder is between two tasks. Else the holder ends it after its
        task."""
        lease.revoked = True  # first: from here on the holder begins no task by itself
        return self.end(lease) if not lease.busy and lease.device is not None else []

    def end(self, lease: Lease) -> list[Event]:
        """End the lease, from any thread. Its holder must be between two tasks."""
        assert lease.device is not None
        task, in_step, clock = lease.task, lease.in_step, self._report.clocks[lease.device.number]
        happened = self.drop(lease)
        if not clock.cause:
            clock.idles(clock.since_s, BETWEEN)
        happened.append(Done(task))
        if not in_step:
            happened.append(StepDone(lease.trial, trained=False))  # training steps were told by Worked
        return happened

    def drop(self, lease: Lease) -> list[Event]:
        """End the lease if it lasts. The caller must tell the machine that the lease's task is over."""
        if lease.device is None:
            return []
        self.of_devices[lease.device.number] = None
        lease.revoked = True  # first: from here on the holder begins no task by itself
        happened = self.tasks_done(lease)
        lease.close()
        return happened

    def tasks_done(self, lease: Lease) -> list[Event]:
        """What the holder has done since the last call, as one event, or none."""
        tasks = lease.read()
        steps = lease.num_steps - lease.told_steps
        lease.told_steps += steps
        if lease.device is None or not (tasks or steps):
            return []
        clock = self._report.clocks[lease.device.number]
        since_s, seconds = clock.since_s, clock.ran(lease.trial, tasks)
        if steps:
            self._report.note_steps(lease.trial, steps, since_s, clock.since_s)
        return [Worked(lease.trial, seconds, steps)]
