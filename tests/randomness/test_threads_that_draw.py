"""Other threads draw random numbers all the time; what a trial has drawn is drawn again in its backward."""

import threading

import torch
from torch import nn

import hydra_tune
from hydra_tune.planning import measurement
from hydra_tune.planning.measurement import Measurement
from hydra_tune.trials.context import trial_context
from waiting import repeating

WIDTH, STEPS = 48, 12
BUDGET = 72 << 10  # in double precision, some of six layers


class Layer(nn.Module):
    """Linear in its weight: its gradient times itself is what comes of it, if the mask is the forward's."""

    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH, bias=False), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.linear(self.drop(x)))


def train(pool=None, steps=STEPS):
    """Losses, and how far from exact the worst gradient was."""
    model = nn.Sequential(*(Layer() for _ in range(6))).double()
    if pool is not None:
        hydra_tune.prepare(model, pool=pool)
    losses, worst = [], 0.0
    for _ in range(steps):
        loss = model(torch.rand(4, WIDTH, dtype=torch.float64)).sum()
        loss.backward()
        losses.append(loss.item())
        for layer in model:
            weight = layer.linear.weight
            worst = max(worst, abs((weight.detach() * weight.grad).sum().item() - loss.item()) / abs(loss.item()))
            weight.grad = None
    if pool is not None:
        assert not pool.report()["trials"][-1]["resident"]
        hydra_tune.release(model)
    return losses, worst


def somebody_draws():
    """As one that fetches batches does."""
    return repeating(lambda: torch.rand(1000))


def test_a_script_beside_a_thread_that_draws():
    """Not with checkpoints of the script's own, whose repetitions draw otherwise in plain PyTorch, too."""
    with hydra_tune.ShardPool(["cpu"], BUDGET) as pool, somebody_draws():
        _, worst = train(pool, 4 * STEPS)
    assert worst < 1e-9


def test_scripts_in_threads_that_share_a_pool():
    found = []
    with hydra_tune.ShardPool(["cpu", "cpu"], BUDGET) as pool:
        threads = [threading.Thread(target=lambda: found.append(train(pool))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 4
    assert max(worst for _, worst in found) < 1e-9
    assert len({tuple(losses) for losses, _ in found}) == 4, "none draws what another does"


def test_what_other_threads_draw_while_a_block_is_measured_stays_drawn(monkeypatch):
    """The default generator was put back with the devices' own: others drew the same numbers twice."""
    run, drawn = Measurement.run, []

    def beside(*given, **options):
        found = run(*given, **options)
        drawn.append(torch.rand(1).item())
        return found

    def measured(*given):
        thread = threading.Thread(target=lambda: drawn.append(torch.rand(1).item()))
        thread.start(), thread.join()
        return repeat(*given)

    repeat = measurement.try_repetition
    monkeypatch.setattr(Measurement, "run", beside)
    monkeypatch.setattr(measurement, "try_repetition", measured)
    with hydra_tune.ShardPool(["cpu"], BUDGET) as pool:
        train(pool, 1)
    assert len(set(drawn)) == len(drawn) > 1


def test_a_script_alone_draws_what_plain_pytorch_draws():
    torch.manual_seed(3)
    expected, after = train(), torch.rand(2)
    torch.manual_seed(3)
    with hydra_tune.ShardPool(["cpu"], BUDGET) as pool:
        assert train(pool)[0] == expected[0]
    assert torch.equal(torch.rand(2), after)


def test_a_runners_trial_beside_a_thread_that_draws():
    def run():
        with hydra_tune.ShardPool(["cpu"], BUDGET, seed=5) as pool, trial_context(pool, 0):
            return train(pool)

    quiet = run()
    with somebody_draws():
        loud = run()
    assert loud[0] == quiet[0]
    assert max(loud[1], quiet[1]) < 1e-9


class Meanwhile(nn.Linear):
    """Draws nothing, but while it runs another thread may: once something is in the list."""

    def __init__(self, drawn):
        super().__init__(WIDTH, WIDTH)
        self.drawn = drawn

    def forward(self, x):
        if self.drawn:
            thread = threading.Thread(target=lambda: self.drawn.append(torch.rand(2)))
            thread.start()
            thread.join()
        return super().forward(x).tanh().sin()  # which a repetition must make again


def test_what_a_thread_draws_while_a_block_is_repeated_that_draws_nothing():
    """Batches, perhaps, each of which comes once."""
    drawn = []
    model = nn.Sequential(*(Meanwhile(drawn if i == 2 else []) for i in range(8)))
    x = torch.ones(4, WIDTH)
    with hydra_tune.ShardPool(["cpu"], BUDGET // 2) as pool:
        hydra_tune.prepare(model, pool=pool)
        model(x).sum().backward()
        assert len(pool.report()["trials"][0]["shards"]) > 2
        loss = model(x).sum()
        torch.manual_seed(0)
        drawn.append(torch.rand(2))
        loss.backward()
        drawn.append(torch.rand(2))
    torch.manual_seed(0)
    assert torch.equal(torch.stack(drawn), torch.stack([torch.rand(2) for _ in range(3)]))
