"""Shards are promoted ahead of their tasks, in a thread of the device's, and nothing but time changes."""

import gc
import threading
import time

import pytest
import torch
from torch import nn

import hydra_tune
from comparison import Script, assert_trains_as_in_plain_pytorch, step
from hydra_tune.blocks.block import Block
from hydra_tune.blocks.device_copy import DeviceCopy
from hydra_tune.devices.device import Device
from hydra_tune.devices.host_weights import HostWeights
from hydra_tune.pool import long_leases
from hydra_tune.pool.copier import start_copier
from hydra_tune.process.interrupts import Stop
from hydra_tune.schedule.events import PromoteShard, Run
from hydra_tune.trials.context import current_context
from models import BUDGETS, WIDTH, Layer, Net
from waiting import wait_until

WAIT_S = 30.0  # for what a machine under load does late


def settle(model, pool):
    """A first step, and one by its plan."""
    step(model, pool).sum().backward()
    model(torch.randn(4, WIDTH)).sum().backward()


def copies_ahead(pool):
    """The shards of copies in the machine's instructions, by whether they were ahead."""
    said = [i for _, instructions in pool.events.machine._story for i in instructions]
    in_time = [i.task.shard for i in said if isinstance(i, Run) and i.num_bytes]
    return [i.task.shard for i in said if isinstance(i, PromoteShard)], in_time


def reads(copies, weight):
    """Whether the copies are of this host master, too."""
    return any(0 <= weight.data_ptr() - host.data_ptr() < host.nbytes for _, host in copies)


def test_a_shard_is_copied_while_another_computes(monkeypatch):
    """The copy of one shard waits for the forward of another: were it not under way meanwhile, nothing would go on."""
    computing, waited = threading.Event(), []
    promote = Device.promote

    def patient(device, copies):
        if threading.current_thread() is not threading.main_thread() and not waited:
            waited.append(computing.wait(WAIT_S))
        promote(device, copies)

    class Signals(Layer):
        def forward(self, x):
            if armed:
                computing.set()
            return super().forward(x)

    armed = []
    with hydra_tune.ShardPool(["cpu"], BUDGETS["few blocks"]) as pool:
        model = Net(Signals)
        settle(model, pool)
        monkeypatch.setattr(Device, "promote", patient)
        armed.append(True)
        model(torch.randn(4, WIDTH)).sum().backward()
        hydra_tune.release(model)
    assert waited == [True]


def test_a_step_promotes_its_bytes_once_whoever_copies_them(monkeypatch):
    moved = []
    for least in (None, 1):
        monkeypatch.setattr(Device, "least_ahead_bytes", least)
        with hydra_tune.ShardPool(["cpu"], BUDGETS["few blocks"]) as pool:
            model = Net()
            settle(model, pool)
            for _ in range(2):
                model(torch.randn(4, WIDTH)).sum().backward()
            ahead, in_time = copies_ahead(pool)
            assert bool(ahead) == (least is not None)
            moved.append((pool.report()["trials"][0]["promoted_bytes"], len(ahead) + len(in_time)))
            hydra_tune.release(model)
    assert moved[0] == moved[1]


def test_small_shards_are_left_to_their_tasks(monkeypatch):
    monkeypatch.undo()
    with hydra_tune.ShardPool(["cpu"], BUDGETS["few blocks"]) as pool:
        model = Net()
        for _ in range(2):
            (step if pool.events.machine.trials == {} else lambda m, _: m(torch.randn(4, WIDTH)))(
                model, pool
            ).sum().backward()
        assert not copies_ahead(pool)[0]
        hydra_tune.release(model)


class OtherOrderEachStep(Script):
    class Shuffling(Net):
        def forward(self, x):
            for i in torch.randperm(len(self.layers)).tolist():
                x = self.layers[i](x)
            return self.head(x)

    def model(self):
        return self.Shuffling()


class SkipsBackward(Script):
    """What was promised for the backward is not asked for."""

    def forward(self, model, x):
        model(x)
        return model(x)

    def after(self, model, optimizer):
        model(torch.randn(4, WIDTH))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.99)


class EndsAStepAnywhere(Script):
    """A forward that ends early leaves a copy on its way, and its weights change at once."""

    class Early(Net):
        ends = 0

        def forward(self, x):
            for i, layer in enumerate(self.layers):
                x = layer(x)
                if i == self.ends:
                    return self.head(x)
            return x

    def model(self):
        return self.Early()

    def forward(self, model, x):
        for model.ends in (4, 1, 0, 3):
            model(x).sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.01)
        return model(x)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    "script", [OtherOrderEachStep, SkipsBackward, EndsAStepAnywhere], ids=lambda script: script.__name__
)
def test_a_promise_that_proves_wrong_changes_no_number(script, budget):
    assert_trains_as_in_plain_pytorch(script, budget)


class HeldUp:
    """The first copy ahead of this weight, by a device's thread, until it may go on."""

    weight = None

    def __init__(self, monkeypatch):
        self.under_way, self.go_on, self.waited = threading.Event(), threading.Event(), []
        promote = Device.promote

        def slow(device, copies, **options):
            ahead = threading.current_thread() is not threading.main_thread()
            if ahead and not self.waited and self.weight is not None and reads(copies, self.weight):
                self.under_way.set()
                self.waited.append(self.go_on.wait(WAIT_S))
            promote(device, copies, **options)

        monkeypatch.setattr(Device, "promote", slow)


@pytest.mark.parametrize("end", ["release", "collected", "exception"])
def test_a_trial_ends_while_a_shard_of_its_is_on_its_way(end, monkeypatch):
    """Its host memory is read until then: it may not go before, nor may the room be another's."""
    held = HeldUp(monkeypatch)

    class Stops(Net):
        stops = False

        def forward(self, x):
            for i, layer in enumerate(self.layers):
                x = layer(x)
                if self.stops and i == 1:
                    assert held.under_way.wait(WAIT_S)
                    threading.Timer(0.05, held.go_on.set).start()
                    raise RuntimeError("stopped")
            return self.head(x)

    with hydra_tune.ShardPool(["cpu"], BUDGETS["few blocks"]) as pool:
        model = Stops()
        settle(model, pool)
        held.weight = model.layers[2].up.weight
        model.stops = 1
        with pytest.raises(RuntimeError, match="stopped"):
            model(torch.randn(4, WIDTH))
        if end == "release":
            hydra_tune.release(model)
        elif end == "collected":
            del model
            gc.collect()
        else:
            model.stops = 0
            model(torch.randn(4, WIDTH)).sum().backward()
            hydra_tune.release(model)
        while pool.events.promotions.under_way:
            time.sleep(0.001)
        assert held.waited == [True]
        gc.collect()  # the copy's thread had the trial
        assert pool.devices[0].used_bytes == 0


def test_a_trial_is_stopped_while_it_waits_for_a_shard_that_is_on_its_way(monkeypatch):
    """The copy would go on into what is another's by then."""
    held, free_slot, freed = HeldUp(monkeypatch), Device.free_slot, []

    def watched(device, offset, num_bytes):
        freed.extend(
            copy for each in pool.events.promotions.under_way.values() for copy in each if copy.offset == offset
        )
        free_slot(device, offset, num_bytes)

    def stop():
        assert held.under_way.wait(WAIT_S)
        (device,), (trial,) = pool.events.machine.devices, pool.events.table.live.values()
        wait_until(lambda: device.running is not None and not device.started, "its task waits for the copy")
        trial.stop("enough")
        time.sleep(0.05)
        held.go_on.set()

    monkeypatch.setattr(current_context(), "stop", Stop())
    monkeypatch.setattr(long_leases, "LOOK_AROUND_S", 0.01)
    with hydra_tune.ShardPool(["cpu"], BUDGETS["few blocks"]) as pool:
        model = Net()
        settle(model, pool)
        held.weight = model.layers[2].up.weight
        monkeypatch.setattr(Device, "free_slot", watched)
        thread = threading.Thread(target=stop)
        thread.start()
        with pytest.raises(hydra_tune.TrialStopped, match="enough"):
            model(torch.randn(4, WIDTH))
        thread.join()
        hydra_tune.release(model)
    assert held.waited == [True]
    assert not freed


def test_what_is_written_while_a_shard_is_copied_is_not_missed(monkeypatch):
    """A forward may write into weights of blocks that come later, after the copy thread has read them."""
    written, promote, x = [], Device.promote, torch.randn(4, WIDTH)
    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    weight = model.layers[4].up.weight

    def slow(device, copies, **options):
        promote(device, copies, **options)
        if reads(copies, weight) and not written and threading.current_thread() is not threading.main_thread():
            with torch.no_grad():
                weight.mul_(0.5)
            written.append(True)

    with hydra_tune.ShardPool(["cpu"], BUDGETS["few blocks"]) as pool:
        settle(model, pool)
        model.zero_grad()
        monkeypatch.setattr(Device, "promote", slow)
        model(x).sum().backward()
        hydra_tune.release(model)
    with torch.no_grad():
        plain.layers[4].up.weight.mul_(0.5)
    plain(x).sum().backward()
    assert written
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_a_copy_that_fails_is_made_again_by_its_task(monkeypatch):
    failed, promote = [], Device.promote

    def fails(device, copies):
        if threading.current_thread() is not threading.main_thread():
            failed.append(True)
            raise RuntimeError("a copy engine that is broken")
        promote(device, copies)

    plain, x = Net(), torch.randn(4, WIDTH)
    model = Net()
    model.load_state_dict(plain.state_dict())
    with hydra_tune.ShardPool(["cpu"], BUDGETS["few blocks"]) as pool:
        settle(model, pool)
        monkeypatch.setattr(Device, "promote", fails)
        model.zero_grad()
        model(x).sum().backward()
        hydra_tune.release(model)
    plain(x).sum().backward()
    assert failed
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_a_copy_that_ends_its_thread_neither_loses_the_others_nor_keeps_its_trial_waiting(monkeypatch):
    """The copies behind it were lost, and their trials waited for ever."""
    raised, promote, before = [], Device.promote, set(threading.enumerate())

    def fails(device, copies):
        if threading.current_thread() is not threading.main_thread() and len(raised) < 2:
            raised.append(True)
            raise SystemExit
        promote(device, copies)

    plain, x, model = Net(), torch.randn(4, WIDTH), Net()
    model.load_state_dict(plain.state_dict())
    with hydra_tune.ShardPool(["cpu"], BUDGETS["few blocks"]) as pool:
        (copier,) = set(threading.enumerate()) - before
        settle(model, pool)
        monkeypatch.setattr(Device, "promote", fails)
        model.zero_grad()
        model(x).sum().backward()
        assert raised and copier.is_alive()
        hydra_tune.release(model)
    plain(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_a_copy_thread_that_cannot_be_started_is_told_by_its_pool(monkeypatch):
    """Where a process may have no more threads: the pool was left in the middle of an event."""

    def none_left(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            hydra_tune.ShardPool(["cpu"], BUDGETS["few blocks"])
    with hydra_tune.ShardPool(["cpu"], BUDGETS["few blocks"]) as pool:
        model = Net()
        settle(model, pool)
        model(torch.randn(4, WIDTH)).sum().backward()
        hydra_tune.release(model)


def test_the_scheduler_knows_how_many_mini_batches_remain():
    """An evaluation is none; several forwards before one backward are one."""
    data = torch.utils.data.TensorDataset(torch.randn(12, WIDTH))
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"], policy="sharded-lrtf") as pool:
        model = Net()
        _, _, loader = hydra_tune.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            torch.utils.data.DataLoader(data, 4),
            pool=pool,
            epochs=2,
        )
        (trial,) = pool.events.machine.trials.values()
        for (x,) in loader:
            model(x).sum().backward()
            with torch.no_grad():
                model(x)
        (model(x) + model(x)).sum().backward()
        progress = trial.progress
        assert (progress.total_steps, progress.steps_done) == (6, 4)
        assert progress.remaining_s == 2 * progress.step_s > 0
        hydra_tune.release(model)
        hydra_tune.prepare(model, pool=pool, total_steps=7, epochs=2)
        assert [trial.progress.total_steps for trial in pool.events.machine.trials.values()] == [7]
        hydra_tune.release(model)
        hydra_tune.prepare(model, None, iter([]), pool=pool, epochs=2)
        assert [trial.progress.total_steps for trial in pool.events.machine.trials.values()] == [None]


@pytest.mark.parametrize(("name", "value"), [("total_steps", 0), ("epochs", 1.5), ("total_steps", True)])
def test_lengths_that_are_none_are_refused(name, value):
    with pytest.raises(hydra_tune.ConfigError, match=f"{name} is a whole number of at least 1"):
        hydra_tune.prepare(nn.Linear(2, 2), **{name: value})


def test_epochs_without_a_loader_are_refused():
    with pytest.raises(hydra_tune.ConfigError, match=r"no loader was given\. Write total_steps="):
        hydra_tune.prepare(nn.Linear(2, 2), epochs=2)


def test_an_unknown_policy_is_refused():
    with pytest.raises(hydra_tune.ConfigError, match="policy is a Policy or one of sharded-lrtf, fifo"):
        hydra_tune.ShardPool(["cpu"], "1MiB", policy="random")


def test_a_job_that_ends_a_copy_threads_work_leaves_nobody_waiting(caplog):
    """Its thread died with the jobs behind it, whose trials waited for ever."""
    caplog.set_level("DEBUG", "hydra_tune")
    owner, done = nn.Identity(), []
    copy = start_copier(owner, "cpu:0", 1)

    def ends():
        raise SystemExit

    copy(ends)
    copy(lambda: done.append("second"))
    wait_until(lambda: done == ["second"], "the other one is done")
    assert "a copy has failed; its task makes it" in caplog.text


def test_a_copy_that_is_made_while_a_weight_is_lent_is_not_taken_for_one_of_its_own(monkeypatch):
    """In the thread that promotes ahead, while a forward gives the weight its own memory back."""
    layer = nn.Linear(8, 8)
    block, device = Block("layer", layer), Device(0, 1 << 20)
    host, own = HostWeights(block.slot_parameters, device), layer.weight.data
    offset = HostWeights.offset

    def offset_while_given_back(self, parameter, *data):
        place = offset(self, parameter, *data)
        layer.weight.data = own
        return place

    layer.weight.data = 0.5 * own
    with monkeypatch.context() as patch:
        patch.setattr(HostWeights, "offset", offset_while_given_back)
        copy = DeviceCopy(device, device.slot(0, block.weight_bytes), [block], host)
    assert not copy.can_refill
    copy.fill()
    device.promote(copy.stale(block.slot_parameters), in_use=True)
    assert torch.equal(copy.leaves(block.slot_parameters)[0], own)
