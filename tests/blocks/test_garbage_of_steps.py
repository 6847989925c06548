"""What steps leave for Python's garbage collector to look through: its full collections stop every trial."""

import gc
import weakref

import torch
from torch import nn

import hydra_tune
from hydra_tune.blocks.ambient_settings import AmbientSettings, ModuleStates


class Training:
    def __init__(self, pool):
        self.pool = pool
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self.optimizer = hydra_tune.prepare(model, optimizer, pool=pool)

    def steps(self, number):
        for _ in range(number):
            self.optimizer.zero_grad()
            self.model(torch.ones(4, 64)).square().mean().backward()
            self.optimizer.step()

    def tracked(self):
        gc.collect()
        return len(gc.get_objects())


def test_it_does_not_look_at_what_a_pool_remembers_of_the_past():
    """After many steps it tracks as many objects as after a few; the machine's story of a search is short."""
    with hydra_tune.ShardPool(["cpu"], "60KiB") as pool:
        training = Training(pool)
        training.steps(20)
        before, spans = training.tracked(), len(pool.timeline())
        training.steps(60)
        assert len(pool.timeline()) > spans + 1000
        assert training.tracked() - before < 100
        hydra_tune.release(training.model)


def test_calls_share_what_they_note_of_plain_attributes():
    module = nn.Dropout(0.5)
    states = ModuleStates([module])
    first, again = AmbientSettings.now(states), AmbientSettings.now(states)
    assert first is again
    module.p = 0.25
    changed = AmbientSettings.now(states)
    assert changed.state.attributes[0]["p"] == 0.25
    assert first.state.attributes[0]["p"] == 0.5, "the earlier call's is as it was"


def test_a_tensor_lives_no_longer_than_in_its_module():
    module, thing = nn.Dropout(0.5), torch.ones(1)
    module.thing, gone = (thing,), weakref.ref(thing)
    states = ModuleStates([module])
    found = AmbientSettings.now(states)
    assert found.state.attributes[0]["thing"][0] is thing
    del module.thing, thing, found
    gc.collect()
    assert gone() is None


def test_a_report_is_the_callers_own():
    with hydra_tune.ShardPool(["cpu"], "60KiB") as pool:
        training = Training(pool)
        training.steps(2)
        pool.report()["trials"][0]["shards"].clear()
        assert pool.report()["trials"][0]["shards"]
        hydra_tune.release(training.model)
