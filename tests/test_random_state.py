"""Each trial draws as if it were alone, in threads that take turns at random."""

import threading

import torch
from torch.utils.checkpoint import checkpoint

from hydra_tune.mode import TrialMode
from hydra_tune.random_state import RandomState, random_state_kept


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
    state = RandomState(seed)
    with TrialMode(state):
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
    assert torch.random.default_generator is torch.default_generator, "no proxy stays behind"


def test_checkpoint_gets_the_mask_of_its_forward():
    state, results = RandomState(0), {}
    with TrialMode(state):
        x = torch.ones(64, requires_grad=True)
        y = checkpoint(lambda t: torch.nn.functional.dropout(t, 0.5), x, use_reentrant=False)
        torch.rand(5)
        y.sum().backward()
        results = (x.grad != 0), (y != 0)
    assert torch.equal(*results)


def test_what_is_drawn_inside_is_as_if_it_had_not_been():
    before = torch.get_rng_state()
    with random_state_kept([torch.default_generator]):
        torch.rand(9)
    assert torch.equal(torch.get_rng_state(), before)
