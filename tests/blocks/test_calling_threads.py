"""One thread at a time calls a prepared model; which one is the script's own affair."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import hydra_tune
from comparison import Script, assert_same
from models import BUDGETS, WIDTH, Layer, Net


class Stops(Layer):
    """Once, where it is told to, until it may go on."""

    def set_up(self):
        self.at, self.reached, self.go_on = None, threading.Event(), threading.Event()

    def stop(self, at):
        if self.at == at:
            self.at = None
            self.reached.set()
            assert self.go_on.wait(60)

    def forward(self, x):
        self.stop("forward")
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.stop("backward"))
        return y


def gradients(model, x):
    model.zero_grad()
    model(x).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("budget", ["spilled", "resident"])
@pytest.mark.parametrize("at", ["forward", "backward"])
def test_a_thread_that_calls_a_model_while_another_does_is_refused_and_the_other_goes_on(at, budget):
    torch.manual_seed(0)
    model, x = Net(Stops), torch.randn(4, WIDTH)
    expected, layer = gradients(model, x), model.layers[2]
    with hydra_tune.ShardPool(["cpu"], BUDGETS[budget]) as pool, ThreadPoolExecutor(1) as trainer:
        hydra_tune.prepare(model, pool=pool)
        gradients(model, x)
        layer.at = at
        training = trainer.submit(gradients, model, x)
        assert layer.reached.wait(60)
        with pytest.raises(hydra_tune.PrepareError, match=r"MainThread called that of .* while ThreadPoolExecutor"):
            model(x)
        layer.go_on.set()
        assert all(map(torch.equal, training.result(), expected))
        assert all(map(torch.equal, gradients(model, x), expected))
        hydra_tune.release(model)


def test_whose_backward_has_raised_does_not_have_the_model_any_more():
    class Raises(Layer):
        broken = False

        def forward(self, x):
            y = super().forward(x)
            if y.requires_grad and self.broken:
                y.register_hook(self.fail)
            return y

        def fail(self, _):
            raise FloatingPointError

    torch.manual_seed(0)
    model, x = Net(Raises), torch.randn(4, WIDTH)
    expected = gradients(model, x)
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool, ThreadPoolExecutor(1) as trainer:
        hydra_tune.prepare(model, pool=pool)
        trainer.submit(gradients, model, x).result()
        model.layers[2].broken = True
        with pytest.raises(FloatingPointError):
            trainer.submit(gradients, model, x).result()
        model.layers[2].broken = False
        assert all(map(torch.equal, gradients(model, x), expected))
        hydra_tune.release(model)


def test_a_thread_in_the_backward_of_something_else_does_not_have_the_model():
    """Nor where its last call of the model was a forward that raised."""
    inside, go_on = threading.Event(), threading.Event()
    model, x = Net(), torch.randn(4, WIDTH)

    def stay(_):
        inside.set()
        assert go_on.wait(60)

    def elsewhere():
        with pytest.raises(RuntimeError):
            model(torch.randn(4, WIDTH - 1))
        other = torch.ones(2, requires_grad=True) * 1
        other.register_hook(stay)
        other.sum().backward()

    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool, ThreadPoolExecutor(1) as thread:
        hydra_tune.prepare(model, pool=pool)
        gradients(model, x)
        done = thread.submit(elsewhere)
        assert inside.wait(60)
        gradients(model, x)
        go_on.set()
        done.result()
        hydra_tune.release(model)


class Validates(Script):
    """In a thread of its own, which holds a lock that training holds, too."""

    def __init__(self):
        self.lock, self.scores = threading.Lock(), []

    def forward(self, model, x):
        self.lock.acquire()
        return model(x)

    def after(self, model, optimizer):
        self.lock.release()
        validation = threading.Thread(target=self.validate, args=(model,))
        validation.start()
        validation.join()

    def validate(self, model):
        with self.lock, torch.no_grad():
            self.scores.append(model(torch.ones(4, WIDTH)).sum().item())


def test_threads_that_take_turns_get_the_numbers_of_plain_pytorch():
    plain, prepared = Validates(), Validates()
    expected = plain.run()
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        assert_same(prepared.run(pool), expected)
    assert prepared.scores == plain.scores and len(plain.scores) == 3


class TwoThreads(Script):
    """A forward's own, one for each branch: their blocks take turns."""

    def model(self):
        class Branches(Net):
            def forward(self, x):
                def branch(layers):
                    out = x
                    for layer in layers:
                        out = layer(out)
                    return out

                with ThreadPoolExecutor(2) as threads:
                    first, second = threads.map(branch, (self.layers[:3], self.layers[3:]))
                return self.head(first + second)

        return Branches(Layer)


@pytest.mark.parametrize("budget", ["few blocks", "three shards"])
def test_blocks_that_several_threads_of_a_forward_call_are_refused(budget):
    """What they raised varied: an impossible transition, or budgets too small."""
    refused = pytest.raises(hydra_tune.PrepareError, match="one after another, without threads")
    with hydra_tune.ShardPool(["cpu"], BUDGETS[budget]) as pool, refused:
        TwoThreads().run(pool)


class StartsThreads(torch.nn.Module):
    """Which call a block of the model's."""

    def __init__(self, shared):
        super().__init__()
        self.shared, self.own = shared, Layer()

    def forward(self, x):
        with ThreadPoolExecutor(1) as pool:
            return self.own(sum(pool.map(self.shared, (x, x * 2))))


def test_a_block_whose_threads_call_another_block_is_refused():
    """They waited for each other, for ever."""
    shared, x = Layer(), torch.randn(4, WIDTH)
    model = torch.nn.Sequential(shared, *(StartsThreads(shared) for _ in range(3)))
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        hydra_tune.prepare(model, pool=pool)
        with pytest.raises(hydra_tune.PrepareError, match="one after another, without threads"):
            model(x)
        hydra_tune.release(model)
