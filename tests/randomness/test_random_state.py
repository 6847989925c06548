"""Each trial draws as if it were alone, in threads that take turns at random."""

import copy
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hydra_tune.randomness import RandomState, drawing_from, hold, random_state
from hydra_tune.randomness.random_state import generator_states, set_generator_states


def draws():
    """Everything that reaches a default generator, seeded, restored, forked."""
    out = [torch.rand(3), torch.randperm(9), torch.nn.functional.dropout(torch.ones(32), 0.5)]
    torch.manual_seed(7)
    out += [torch.randn(2), torch.tensor(torch.initial_seed()), torch.multinomial(torch.ones(8), 4)]
    state = torch.get_rng_state()
    out.append(torch.rand(2))
    torch.set_rng_state(state)
    out.append(torch.rand(2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        out.append(torch.bernoulli(torch.full((16,), 0.5)))
    x = torch.ones(64, requires_grad=True)
    checkpoint(lambda t: torch.nn.functional.dropout(t, 0.5), x, use_reentrant=False).sum().backward()
    out += [x.grad, torch.rand(1), torch.rand(2, generator=torch.Generator().manual_seed(3))]
    out.append(torch.rand(2, generator=torch.default_generator))
    return out


def in_trial(seed, results):
    with drawing_from(RandomState(seed)):
        results[seed] = draws()


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_eight_threads_draw_as_each_alone_and_as_plain_pytorch():
    alone, together = {}, {}
    for seed in range(8):
        in_trial(seed, alone)
        torch.manual_seed(seed)
        assert same(alone[seed], draws()), "as in plain PyTorch"
    threads = [threading.Thread(target=in_trial, args=(seed, together)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(alone[seed], together[seed]) for seed in range(8))


def test_the_process_keeps_its_own_state_beside_the_trials():
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    in_trial(5, {})
    assert torch.equal(torch.rand(4), expected)
    assert torch.equal(torch.get_rng_state(), torch.default_generator.get_state())


def test_a_trials_states_are_put_back_by_a_checkpoint():
    state = RandomState(5)
    with drawing_from(state):
        torch.rand(3)
        states = state.states()
        expected = torch.rand(3)
        state.set_states(states)
        assert torch.equal(torch.rand(3), expected)


def test_a_copy_of_what_stands_for_the_default_generator():
    in_trial(0, {})
    torch.manual_seed(4)
    copied = copy.deepcopy(torch.random.default_generator)
    assert torch.equal(torch.rand(2, generator=copied), torch.rand(2))


# ---- generators of GPUs, for which others stand here --------------------------------------------------


@pytest.fixture
def devices(monkeypatch):
    """Two that operators draw from, whoever calls them."""
    own = torch.Generator().manual_seed(11), torch.Generator().manual_seed(22)
    monkeypatch.setattr(random_state, "_holders", {})
    monkeypatch.setattr(random_state, "_process_state", RandomState(0))
    monkeypatch.setattr(random_state, "_gpu_generators", own)
    yield own
    assert set(random_state._holders.values()) <= {random_state._process_state}


def numbers(generator):
    return torch.rand(3, generator=generator)


def alone(seed, count):
    generator = torch.Generator().manual_seed(seed)
    return [numbers(generator) for _ in range(count)]


def test_who_holds_a_generator_draws_as_if_alone(devices):
    one, other, process = RandomState(1), RandomState(2), alone(11, 2)
    assert torch.equal(numbers(devices[0]), process[0])
    found = {one: [], other: []}
    with drawing_from(one), drawing_from(other):
        for state in (one, one, other, one, other):
            hold(devices, state)
            found[state].append(numbers(devices[0]))
    assert same(found[one], alone(1, 3)) and same(found[other], alone(2, 2))
    assert torch.equal(numbers(devices[0]), process[1]), "the process's goes on"


def test_one_that_a_trial_holds_is_not_taken_at_the_beginning_of_another(devices):
    with drawing_from(RandomState(1)):
        with drawing_from(RandomState(2)):
            assert torch.equal(numbers(devices[1]), alone(1, 1)[0])
        assert torch.equal(numbers(devices[1]), alone(1, 2)[1])


def test_states_are_those_of_the_calling_trial_whoever_holds_the_generator(devices):
    one, other = RandomState(1), RandomState(2)
    with drawing_from(other), drawing_from(one):
        before = generator_states(devices)
        set_generator_states(devices, [g.get_state() for g in (torch.Generator().manual_seed(5), devices[1])])
        assert torch.equal(numbers(devices[0]), alone(2, 1)[0]), "the other one's is as it was"
        hold(devices, one)
        assert torch.equal(numbers(devices[0]), alone(5, 1)[0])
        assert torch.equal(before[0], torch.Generator().manual_seed(1).get_state())
        assert torch.equal(one.states()[1], devices[0].get_state())


def test_pytorchs_functions_seed_and_read_what_the_calling_trial_draws_from(devices, monkeypatch):
    monkeypatch.setattr(random_state, "_gpu_generators", ())
    monkeypatch.setattr(torch.cuda, "default_generators", devices)
    other = RandomState(2)
    with drawing_from(other):
        with drawing_from(RandomState(1)):
            torch.cuda.default_generators[0].manual_seed(5)
            assert torch.equal(numbers(devices[0]), alone(2, 1)[0]), "the other one's is as it was"
            assert torch.equal(
                torch.cuda.default_generators[0].get_state(), torch.Generator().manual_seed(5).get_state()
            )
        torch.cuda.default_generators[1].manual_seed(6)
        assert torch.equal(numbers(devices[1]), alone(6, 1)[0])
    assert torch.cuda.default_generators[1].initial_seed() == 22, "of the process again"
    torch.cuda.default_generators[0].manual_seed(7)
    assert torch.equal(numbers(devices[0]), alone(7, 1)[0])
