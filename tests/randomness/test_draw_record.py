"""What was drawn is drawn again from its record, whatever was drawn since and by whom."""

import os
import threading
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hydra_tune.randomness import DrawRecord, RandomState, drawing_again, drawing_from
from hydra_tune.randomness.operators import DEFAULT, thread
from waiting import repeating


@pytest.fixture(params=["a script", "a trial"], autouse=True)
def thread_of(request):
    with drawing_from(RandomState(3)) if request.param == "a trial" else nullcontext():
        torch.manual_seed(3)
        yield request.param


def some():
    return torch.cat([torch.randn(3), functional.dropout(torch.ones(20)), torch.multinomial(torch.ones(9), 4)])


def test_nothing_is_noted_where_nothing_is_drawn():
    with DrawRecord() as record:
        torch.ones(3).add(1).sum()
    assert not record.states


def test_what_was_drawn_is_drawn_again_and_nothing_else_changes():
    torch.rand(5)
    before = torch.get_rng_state()
    with DrawRecord() as record:
        torch.ones(3)
        first = some()
    assert torch.equal(record.states[0], before)
    torch.rand(7)
    state = torch.get_rng_state()
    for _ in range(2):
        with drawing_again(record):
            assert torch.equal(some(), first)
        assert torch.equal(torch.get_rng_state(), state)


def test_records_within_each_other_note_each_its_own_first_draw():
    outer, inner, last = DrawRecord(), DrawRecord(), DrawRecord()
    with outer:
        with DrawRecord() as none:
            pass
        with inner:
            torch.rand(2)
        with last:
            torch.rand(1)
    assert not none.states
    assert torch.equal(outer.states[0], inner.states[0])
    assert not torch.equal(outer.states[0], last.states[0])
    with drawing_again(outer):
        torch.rand(2)
        expected = torch.rand(1)
    with drawing_again(last):
        assert torch.equal(torch.rand(1), expected)


def test_a_record_within_a_repetition_notes_what_that_draws():
    with DrawRecord() as record:
        torch.rand(2)
        expected = torch.rand(3)
    torch.rand(4)
    with DrawRecord() as around, drawing_again(record):
        torch.rand(2)
        with DrawRecord() as within:
            assert torch.equal(torch.rand(3), expected)
    assert not around.states, "of the thread's own generator nothing was drawn"
    with drawing_again(within):
        assert torch.equal(torch.rand(3), expected)


def test_a_repetition_that_draws_though_the_first_run_did_not():
    with DrawRecord() as record:
        pass
    state = torch.get_rng_state()
    with DrawRecord() as around, drawing_again(record):
        some()
        torch.manual_seed(0)
    assert not around.states
    assert torch.equal(torch.get_rng_state(), state)


def seeds_itself():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        seeded = torch.rand(3)
    return torch.cat([seeded, torch.rand(3)])


def has_checkpoint():
    x = torch.ones(30, requires_grad=True)
    y = checkpoint(functional.dropout, x, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    return torch.cat([x.grad, torch.rand(2)])


def seeds_the_rest():
    torch.manual_seed(5)
    return torch.cat([torch.rand(2), torch.tensor([torch.initial_seed()])])


@pytest.mark.parametrize("code", [seeds_itself, has_checkpoint, seeds_the_rest])
def test_code_that_reads_seeds_and_sets_the_generator(code):
    torch.rand(1)
    with DrawRecord() as record:
        first = code()
    torch.rand(1)
    state, seed = torch.get_rng_state(), torch.initial_seed()
    with drawing_again(record):
        assert torch.equal(code(), first)
    assert torch.equal(torch.get_rng_state(), state) and torch.initial_seed() == seed


def test_code_that_failed_runs_once_more():
    record = DrawRecord()
    with record:
        first = some()
    record.rewind()
    with record:
        torch.ones(2)
    assert not record.states, "it begins anew"
    assert torch.equal(some(), first)


def somebody_draws():
    return repeating(lambda: torch.rand(50))


def test_others_may_draw_between_two_draws(thread_of):
    found = []
    with somebody_draws():
        for _ in range(200):
            record = DrawRecord()
            with record:
                drawn = [some() for _ in range(4)]
            with drawing_again(record):
                assert all(torch.equal(some(), each) for each in drawn)
            found.append(record)
    if thread_of == "a trial":
        assert all(len(record.states) == 1 for record in found)


def test_another_draws_in_between_for_certain(thread_of):
    def other():
        thread = threading.Thread(target=torch.rand, args=(4,))
        thread.start()
        thread.join()

    with DrawRecord() as record:
        first = torch.rand(2)
        other()
        second = torch.multinomial(torch.ones(9), 4)
        other()
        third = torch.rand(2)
    assert len(record.states) == (3 if thread_of == "a script" else 1)
    with drawing_again(record):
        assert torch.equal(torch.rand(2), first)
        assert torch.equal(torch.multinomial(torch.ones(9), 4), second)
        assert torch.equal(torch.rand(2), third)
    if thread_of == "a script":  # where nobody is kept from drawing what comes next, as in plain PyTorch
        torch.manual_seed(3)
        expected = [torch.rand(2), torch.rand(4), torch.multinomial(torch.ones(9), 4), torch.rand(4), torch.rand(2)]
        assert all(map(torch.equal, [first, second, third], expected[::2]))


def test_a_forked_child_draws_from_the_process_generator():
    def states(with_record):
        read, write = os.pipe()
        with DrawRecord() if with_record else drawing_again(DrawRecord()):
            torch.rand(1)
            child = os.fork()
            if child == 0:
                try:
                    same = torch.equal(torch.get_rng_state(), torch.default_generator.get_state())
                    os.write(write, b"%d%d" % (thread.generator is not DEFAULT, same))
                finally:
                    os._exit(0)
        os.waitpid(child, 0)
        told = os.read(read, 9)
        os.close(read), os.close(write)
        return told

    assert states(True) == states(False) == b"01"


def test_a_fork_waits_for_the_draw_under_way_of_another_thread():
    """The child would inherit the generator's own lock, taken."""
    large, begins = torch.empty(5_000_000), threading.Event()

    def work():
        begins.set()
        for _ in range(4):
            large.normal_()

    thread = threading.Thread(target=work)
    thread.start()
    assert begins.wait(10)
    for _ in range(5):
        child = os.fork()
        if child == 0:
            torch.rand(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    thread.join(10)
