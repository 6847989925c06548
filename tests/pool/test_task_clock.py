"""When tasks ran on a device that the host is ahead of, against times worked out by hand."""

import pytest

from hydra_tune.devices.device import Device
from hydra_tune.pool.lease import Lease
from hydra_tune.pool.trace import BETWEEN, LATE_HOST, TaskClock, Trace
from hydra_tune.schedule.plan import Direction, Task
from hydra_tune.schedule.state import NO_TRIAL

F0, F1, OTHER = Task(0, 1, 0, Direction.FORWARD), Task(0, 1, 1, Direction.FORWARD), Task(7, 1, 0, Direction.FORWARD)


class GPU:
    """Its marks are seconds of a clock that began at another time than the host's; it has got as far as `now`."""

    number, is_virtual = 0, False

    def __init__(self):
        self.now = 0.0
        self.marks = []

    def mark(self):
        return Mark(self, self.marks.pop(0))


class Mark:
    def __init__(self, gpu, at_s):
        self.gpu = gpu
        self.at_s = at_s

    def query(self):
        return self.at_s <= self.gpu.now

    def elapsed_time(self, later):
        return (later.at_s - self.at_s) * 1e3


@pytest.fixture
def gpu():
    return GPU()


def spans(trace):
    return [
        (s.kind, s.trial, s.shard, round(s.start_s, 6), round(s.end_s, 6), s.cause) for s in trace.spans
    ]  # fmt: skip


def launch(clock, task, host_s):
    clock.begin(host_s)
    return clock.end(task, host_s + 0.001)


def test_on_the_cpu_tasks_take_what_the_host_saw():
    trace = Trace()
    clock = TaskClock(trace, Device(0, 1024))
    clock.begin(1.0)
    assert clock.end(F0, 3.0) == 2.0
    clock.idles(3.0, "memory")
    clock.begin(4.0)
    clock.end(F1, 4.5)
    assert spans(trace) == [
        ("run", 0, 0, 1.0, 3.0, ""),
        ("stall", -1, -1, 3.0, 4.0, "memory"),
        ("run", 0, 1, 4.0, 4.5, ""),
    ]


def test_a_virtual_device_waits_for_the_thread_that_has_its_lease():
    """The timeline had gaps that were neither work nor stalls: the next trial's thread had not woken yet."""
    trace = Trace()
    clock = TaskClock(trace, Device(0, 1024))
    clock.begin(1.0)
    clock.end(F0, 2.0)
    clock.begin(2.25)
    clock.end(OTHER, 3.0)
    clock.begin(3.0005)  # the scheduler's own time
    assert [s[0] for s in spans(trace)] == ["run", "stall", "run"]
    assert spans(trace)[1] == ("stall", -1, -1, 2.0, 2.25, LATE_HOST)


def test_a_cause_gives_way_to_another():
    trace = Trace()
    clock = TaskClock(trace, Device(0, 1024))
    clock.idles(3.0, "no ready task")
    clock.idles(7.0, "promotion")
    assert clock.cause == "promotion"
    clock.begin(8.0)
    assert clock.cause == ""
    assert spans(trace) == [
        ("stall", -1, -1, 3.0, 7.0, "no ready task"),
        ("stall", -1, -1, 7.0, 8.0, "promotion"),
    ]


def test_without_a_trial_it_does_not_stall():
    trace = Trace()
    clock = TaskClock(trace, Device(0, 1024))
    clock.idles(3.0, NO_TRIAL)
    clock.idles(7.0, "pilot")
    clock.begin(8.0)
    assert spans(trace) == [("stall", -1, -1, 7.0, 8.0, "pilot")]


def test_of_causes_that_the_host_saw_a_gpu_had_most_of_the_longest(gpu):
    trace = Trace()
    clock = TaskClock(trace, gpu)
    gpu.now, gpu.marks = 200.0, [100.0, 101.0, 106.0, 107.0]
    launch(clock, F0, 10.0)
    clock.idles(10.1, "no ready task")
    clock.idles(15.9, "promotion")
    launch(clock, F1, 16.0)
    assert spans(trace)[1] == ("stall", -1, -1, 11.0, 16.0, "no ready task")


def test_tasks_run_one_after_another_though_they_were_launched_at_once(gpu):
    trace = Trace()
    clock = TaskClock(trace, gpu)
    gpu.marks = [100.0, 102.0, 102.0, 105.0]
    assert launch(clock, F0, 10.0) == 0.0, "nobody knows yet"
    gpu.now = 104.0
    assert launch(clock, F1, 10.1) == 2.0, "of the first"
    assert spans(trace) == [("run", 0, 0, 10.0, 12.0, "")]
    gpu.now = 105.0
    clock.settle()
    assert spans(trace)[1:] == [("run", 0, 1, 12.0, 15.0, "")]


def test_what_it_waited_for(gpu):
    """The scheduler's cause where it had one; else the host was late."""
    trace = Trace()
    clock = TaskClock(trace, gpu)
    gpu.now, gpu.marks = 200.0, [100.0, 101.0, 103.0, 104.0, 104.5, 105.0]
    launch(clock, F0, 10.0)
    clock.idles(10.1, "promotion")
    launch(clock, F1, 13.0)
    launch(clock, OTHER, 14.5)
    assert spans(trace) == [
        ("run", 0, 0, 10.0, 11.0, ""),
        ("stall", -1, -1, 11.0, 13.0, "promotion"),
        ("run", 0, 1, 13.0, 14.0, ""),
        ("stall", -1, -1, 14.0, 14.5, LATE_HOST),
        ("run", 7, 0, 14.5, 15.0, ""),
    ]
    assert trace.devices[0].busy_s == pytest.approx(2.5)
    assert trace.devices[0].stalled_s == pytest.approx(2.5)


def test_clocks_that_drift_apart_are_set_again_where_the_device_had_nothing_to_do(gpu):
    trace = Trace()
    clock = TaskClock(trace, gpu)
    gpu.now, gpu.marks = 10_000.0, [100.0, 101.0, 4100.0, 4101.0]
    launch(clock, F0, 10.0)
    launch(clock, F1, 4010.5)  # the host's clock has gone half a second further
    assert spans(trace)[-1] == ("run", 0, 1, 4010.5, 4011.5, "")


def test_copies_are_shown_when_they_were_made(gpu):
    trace = Trace()
    clock = TaskClock(trace, gpu)
    gpu.now, gpu.marks = 102.0, [100.0, 102.0]
    launch(clock, F0, 10.0)
    clock.spilled(F0, (Mark(gpu, 101.5), Mark(gpu, 103.0)))
    clock.settle()
    assert len(trace.spans) == 1, "it is under way"
    gpu.now = 103.0
    clock.settle()
    assert spans(trace)[1:] == [("spill", 0, 0, 11.5, 13.0, "")]


def test_tasks_of_a_turn_that_lasts_have_marks_of_their_own(gpu):
    """Taken by the trial's thread, but for the start of the first, which the pool has given it."""
    clock, lease = TaskClock(trace := Trace(), gpu), Lease(0, iter([9.0, 10.1, 12.0, 12.1]).__next__, None)
    gpu.now, gpu.marks = 200.0, [100.0, 101.0, 103.0, 103.5]
    mark = clock.begin(10.0)
    lease.open(F0, gpu, others_wait=False)
    lease.start(F0, 10.0, mark)
    assert lease.end() and lease.begin(1, Direction.BACKWARD) and lease.end()
    assert clock.ran(0, lease.ran) == 1.5
    assert spans(trace) == [
        ("run", 0, 0, 10.0, 11.0, ""),
        ("stall", -1, -1, 11.0, 13.0, BETWEEN),
        ("run", 0, 0, 13.0, 13.5, ""),
    ]


def test_each_trial_is_told_its_own_seconds_once(gpu):
    clock = TaskClock(Trace(), gpu)
    gpu.marks = [0.0, 1.0, 1.0, 3.0, 3.0, 7.0, 7.0, 8.0, 8.0, 8.5]
    assert launch(clock, F0, 0.0) == 0.0
    assert launch(clock, OTHER, 0.0) == 0.0
    gpu.now = 3.0
    assert launch(clock, F1, 0.0) == 1.0
    gpu.now = 8.0
    assert launch(clock, OTHER, 0.0) == 3.0
    assert launch(clock, F0, 0.0) == 4.0, "without the one that it was told before"
