"""Forwards without gradients: they repeat nothing, so they may do what training may not."""

import copy
import random

import pytest
import torch

import hydra_tune
from comparison import Script, assert_trains_as_in_plain_pytorch, at_each_budget, step
from models import BUDGETS, WIDTH, Layer, Net

transformers = pytest.importorskip("transformers")


class Attends(Layer):
    """With a cache of its own, a list that it fills."""

    def forward(self, x, cache=None):
        if cache is not None:
            cache.append(x)
            x = torch.stack(cache).mean(0)
        return super().forward(x)


class Decodes(Net):
    def forward(self, x, caches=None):
        for i, layer in enumerate(self.layers):
            x = layer(x, None if caches is None else caches[i])
        return self.head(x)


@pytest.mark.sample(2)
# with checks: without, see `test_a_first_step_that_ends_within_inference_mode`
@pytest.mark.parametrize("mode", [torch.no_grad, pytest.param(torch.inference_mode, marks=pytest.mark.checks)])
@pytest.mark.parametrize("trains_first", [False, True], ids=["evaluates first", "trains first"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_cache_that_is_given_is_filled_in_evaluation(budget, trains_first, mode):
    class Evaluates(Script):
        def model(self):
            self.outputs = []
            return Decodes(Attends)

        def forward(self, model, x):
            caches = [[] for _ in model.layers]
            if trains_first:
                model(x)
            with mode():
                first, second = x[:1] + 0, x[1:2] + 0
                self.outputs += [model(first, caches).sum().item(), model(second, caches).sum().item()]
            assert all(len(cache) == 2 for cache in caches)
            return model(x) + self.outputs[-1]

    assert_trains_as_in_plain_pytorch(Evaluates, budget)


class FillsCachesInTraining(Script):
    """After the first batch."""

    def model(self):
        self.caches = None
        return Decodes(Attends)

    def forward(self, model, x):
        if self.caches is None:
            self.caches = [[] for _ in model.layers]
            return model(x)
        y = model(x, self.caches)
        self.caches = [[entry.detach() for entry in cache] for cache in self.caches]
        return y


@pytest.mark.parametrize("budget", ["spilled", "resident"])
def test_a_cache_that_a_block_fills_in_training_after_the_first_batch(budget):
    assert_trains_as_in_plain_pytorch(FillsCachesInTraining, budget)


class WritesItsMemory(Script):
    """Into a tensor that it is given; a view of another, in the second step."""

    class Remembering(Net):
        def forward(self, x, memory=None):
            for i, layer in enumerate(self.layers):
                x = layer(x if memory is None else x + memory[i])
                if memory is not None:
                    memory[i] = x
            return self.head(x)

    def model(self):
        self.memory = torch.zeros(2, 6, 8, WIDTH, device=self.device)
        return self.Remembering()

    def forward(self, model, x):
        with torch.no_grad():
            model(x, self.memory[0])
        assert not self.memory.requires_grad
        self.memory = self.memory.flip(0)
        return model(x + self.memory[0].mean(0))


class CallsAPart(Script):
    def forward(self, model, x):
        with torch.no_grad():
            features = model.layers[1](model.layers[0](x))
        out = model(features)
        with torch.no_grad():  # while the backward is still to come
            head = model.head(features)
        return out + head


class AdaptsInEvaluation(Script):
    """One layer runs a backward within its forward."""

    class Adapting(Layer):
        def forward(self, x):
            if not self.training:
                with torch.enable_grad():
                    super().forward(x.detach()).square().mean().backward()
            return super().forward(x)

    def model(self):
        model = Net()
        model.layers[2] = self.Adapting()
        return model

    def forward(self, model, x):
        with torch.no_grad():
            target = model.eval()(x)
        return model.train()(x) + target


class CountsItsPositions(Script):
    """In a tensor of a cache, which says where the next entry goes."""

    class Cached(Net):
        def forward(self, x, cache=None):
            for i, layer in enumerate(self.layers):
                x = layer(x)
                if cache is not None:
                    x = self.remember(cache, i, x)
            return self.head(x)

        def remember(self, cache, i, x):
            cache["entries"].index_copy_(0, cache["next"], x[None])
            cache["next"] += 1
            return x + cache["entries"][: cache["next"].item()].mean(0)

    def model(self):
        return self.Cached()

    def forward(self, model, x):
        with torch.inference_mode():
            entries = torch.zeros(12, 8, WIDTH, device=x.device)
            cache = {"entries": entries, "next": torch.zeros(1, dtype=torch.long, device=x.device)}
            first, second = model(x + 0, cache).sum().item(), model(x + 1, cache).sum().item()
        return model(x) + first + second


class HandsOnAView(Script):
    """Of a buffer, in a dict that goes from layer to layer."""

    class Layer(Layer):
        def set_up(self):
            self.register_buffer("table", torch.randn(64 * WIDTH))

        def forward(self, x, shared=None):
            if shared is not None and "table" not in shared:
                shared["table"] = self.table[:WIDTH]
            return super().forward(x if shared is None else x * shared["table"])

    class Handing(Net):
        def forward(self, x, shares=False):
            shared = {} if shares else None
            for layer in self.layers:
                x = layer(x, shared)
            return self.head(x)

    def model(self):
        return self.Handing(self.Layer)

    def forward(self, model, x):
        with torch.no_grad():
            value = model(x, True)
        return model(x) + value


class TeachesItself(Script):
    """By a part, in inference mode within the forward."""

    class Teaching(Net):
        def forward(self, x):
            with torch.inference_mode():
                target = self.layers[0](x)
            return super().forward(x) + target.mean().item()

    def model(self):
        return self.Teaching()


class SeesALayerInEvaluationFirst(Script):
    """One that draws from Python's random numbers."""

    class Noisy(Layer):
        def forward(self, x):
            return super().forward(x * (1 + random.random()))

    class Dropping(Net):
        steps = 0

        def set_up(self):
            self.layers[3] = SeesALayerInEvaluationFirst.Noisy()

        def forward(self, x):
            for i, layer in enumerate(self.layers):
                if i != 3 or self.steps > 1 or not self.training:
                    x = layer(x)
            return self.head(x)

    def model(self):
        return self.Dropping()

    def forward(self, model, x):
        with torch.no_grad():
            model.eval()(x)
        return model.train()(x)

    def after(self, model, optimizer):
        model.steps += 1


class TakesForces(Script):
    """Gradients by the input, within a forward without gradients."""

    class Field(Net):
        def forward(self, x):
            if torch.is_grad_enabled():
                return super().forward(x)
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                (force,) = torch.autograd.grad(super().forward(x).sum(), x)
            return force[:, :8]

    def model(self):
        return self.Field()

    def forward(self, model, x):
        with torch.no_grad():
            force = model(x)
        return model(x) + force


SCRIPTS = [
    WritesItsMemory, CallsAPart, AdaptsInEvaluation, CountsItsPositions, HandsOnAView,
    TeachesItself, SeesALayerInEvaluationFirst, TakesForces,
]  # fmt: skip


@at_each_budget(SCRIPTS)
def test_it_trains_as_in_plain_pytorch(script, budget):
    assert_trains_as_in_plain_pytorch(script, budget)


def test_a_model_that_fits_in_evaluation_alone_is_spilled_in_training():
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    x, y = torch.randn(512, WIDTH), torch.randint(0, 8, (512,))
    expected = [plain(x).detach()]
    torch.nn.functional.cross_entropy(plain(x), y).backward()
    with hydra_tune.ShardPool(["cpu"], 2000 << 10) as pool:
        hydra_tune.prepare(model, pool=pool)
        with torch.no_grad():
            got = [model(x)]
        assert pool.report()["trials"][0]["resident"]
        torch.nn.functional.cross_entropy(model(x), y).backward()
        assert not pool.report()["trials"][0]["resident"]
        hydra_tune.release(model)
    expected += [p.grad for p in plain.parameters()]
    got += [p.grad for p in model.parameters()]
    assert all(map(torch.equal, expected, got))


class Digits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(1, 10, 5), torch.nn.Conv2d(10, 20, 5)
        self.head = torch.nn.Linear(320, 10)

    def forward(self, x):
        for layer in (self.first, self.second):
            x = torch.relu(torch.nn.functional.max_pool2d(layer(x), 2))
        return self.head(x.view(-1, 320))


def test_an_evaluation_on_a_larger_batch_is_planned_as_one():
    """It was refused, where the trial had trained: as a training step on its batch it would have needed 66 MiB."""
    model = Digits()
    optimizer = torch.optim.Adam(model.parameters())
    with hydra_tune.ShardPool("cpu", "20MiB") as pool:
        hydra_tune.prepare(model, optimizer, pool=pool)
        for _ in range(2):
            loss = torch.nn.functional.cross_entropy(model(torch.randn(64, 1, 28, 28)), torch.zeros(64).long())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                assert model.eval()(torch.randn(500, 1, 28, 28)).shape == (500, 10)
            model.train()
        hydra_tune.release(model)


def test_a_layer_that_adapts_in_evaluation_after_the_first_batch_only():
    class AdaptsLater(AdaptsInEvaluation):
        def forward(self, model, x):
            y = model(x)
            with torch.no_grad():
                target = model.eval()(x)
            model.train()
            return y + target

    for budget in ("three shards", "resident"):
        assert_trains_as_in_plain_pytorch(AdaptsLater, budget)


def test_batches_that_grow_up_to_those_of_an_evaluation_are_measured_in_training():
    def run(pool=None):
        torch.manual_seed(0)
        model = Net()
        if pool is not None:
            hydra_tune.prepare(model, pool=pool)
        with torch.no_grad():
            model(torch.randn(64, WIDTH))
        for rows in (4, 48):
            model(torch.randn(rows, WIDTH)).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = run()
    with hydra_tune.ShardPool(["cpu"], 180 << 10) as pool:
        assert all(map(torch.equal, plain, run(pool)))


class Interrupted(Net):
    stops = 0

    def forward(self, x):
        if self.stops:
            raise KeyboardInterrupt
        return super().forward(x)


def test_a_user_who_interrupts_a_later_pilot_may_go_on():
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        model = Interrupted()
        step(model, pool).sum().backward()
        model.stops = 1
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(6, WIDTH))
        model.stops = 0
        model(torch.randn(4, WIDTH)).sum().backward()
        hydra_tune.release(model)


def t5():
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=64, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=3, num_heads=4, decoder_start_token_id=0,
    ))  # fmt: skip


def mamba():
    return transformers.MambaForCausalLM(transformers.MambaConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=3, state_size=4, time_step_rank=4, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    ))  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("times_weights", [2.5, 40], ids=["spilled", "resident"])
@pytest.mark.parametrize("build", [t5, mamba])
def test_models_generate_between_steps(build, times_weights):
    def run(prepare):
        torch.manual_seed(0)
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepare(model, optimizer)
        left = []
        for _ in range(2):
            ids = torch.randint(3, 64, (2, 8))
            model.train()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            left += [loss.detach(), model.generate(ids, max_new_tokens=4, do_sample=True)]
        return left

    plain = run(lambda *_: None)
    num_bytes = sum(p.numel() * 4 for p in build().parameters())
    with hydra_tune.ShardPool(["cpu"], int(num_bytes * times_weights)) as pool:
        prepared = run(lambda *given: hydra_tune.prepare(*given, pool=pool))
    assert all(map(torch.equal, plain, prepared))


class Encodes(torch.nn.Module):
    """Padded batches, which PyTorch makes nested tensors of in evaluation."""

    def __init__(self):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 4)

    def forward(self, x, padding):
        return self.encoder(x, src_key_padding_mask=padding)


class Nests(Layer):
    """In training."""

    def forward(self, x):
        return torch.nested.as_nested_tensor(list(x)).mul(2).to_padded_tensor(0.0) + super().forward(x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("budget", ["few blocks", "resident"])
def test_nested_tensors_within_blocks(budget):
    torch.manual_seed(0)
    padding = torch.tensor([[False, False, False, True, True], [False] * 5])
    for model, inputs in [
        (Encodes().eval(), (torch.randn(2, 5, WIDTH), padding)),
        (Net(Nests), (torch.ones(2, 5, WIDTH),)),
    ]:
        trains = model.training
        with torch.set_grad_enabled(trains):
            expected = model(*inputs)
            with hydra_tune.ShardPool(["cpu"], BUDGETS[budget]) as pool:
                hydra_tune.prepare(model, pool=pool)
                for _ in range(2):
                    output = model(*inputs)
                    assert torch.equal(output, expected)
                    if trains:
                        output.sum().backward()
                hydra_tune.release(model)
