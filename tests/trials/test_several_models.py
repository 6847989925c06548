"""Several models in one trial: each prepared by itself, trained together, with the numbers of plain PyTorch."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hydra_tune
from comparison import assert_same

BUDGETS = {"resident": 64 << 20, "spilled": 100 << 10, "few blocks": 70 << 10}


def mlp(*widths):
    layers = [x for a, b in pairwise(widths) for x in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def left_by(*models):
    return [
        None if t is None else t.detach().clone()
        for m in models
        for p in (*m.parameters(), *m.buffers())
        for t in (p, p.grad)
    ]


def gan(prepare, release):
    """Two optimizers; the generator trains through the discriminator, whose weights get gradients that are dropped."""
    generator, judge = mlp(8, 64, 64, 64, 16), mlp(16, 64, 64, 64, 1)
    optimizers = [torch.optim.Adam(m.parameters()) for m in (generator, judge)]
    for model, optimizer in zip((generator, judge), optimizers, strict=True):
        prepare(model, optimizer)
    loss, left = nn.BCEWithLogitsLoss(), []
    for _ in range(4):
        fake, real = generator(torch.randn(6, 8)), torch.randn(6, 16)
        optimizers[1].zero_grad()
        of_judge = loss(judge(real), torch.ones(6, 1)) + loss(judge(fake.detach()), torch.zeros(6, 1))
        of_judge.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        of_generator = loss(judge(fake), torch.ones(6, 1))
        of_generator.backward()
        optimizers[0].step()
        with torch.no_grad():
            left.append(generator(torch.randn(3, 8)))
        left += [of_judge.detach(), of_generator.detach()]
    left += left_by(generator, judge)
    return left


def teacher_and_student(prepare, release):
    teacher, student = mlp(8, 64, 64, 64, 4), mlp(8, 64, 64, 4)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    prepare(teacher), prepare(student, optimizer)
    left = []
    for _ in range(4):
        x = torch.randn(6, 8)
        with torch.no_grad():
            wanted = teacher(x).softmax(-1)
        loss = F.cross_entropy(student(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        left.append(loss.detach())
    return left + left_by(teacher, student)


def policy_and_reference(prepare, release):
    """A copy of the policy, which is frozen and averaged into."""
    policy = mlp(8, 64, 64, 64, 4)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    prepare(policy, optimizer), prepare(reference)
    left = []
    for _ in range(4):
        x, action = torch.randn(6, 8), torch.randint(4, (6, 1))
        ratio = policy(x).log_softmax(-1).gather(1, action) - reference(x).log_softmax(-1).gather(1, action)
        loss = -F.logsigmoid(ratio).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(reference.parameters(), policy.parameters(), strict=True):
                old.lerp_(new, 0.1)
        left.append(loss.detach())
    return left + left_by(policy, reference)


def folds(prepare, release):
    """One after another; the first stays, for an average at the end."""
    models, left = [], []
    for fold in range(2):
        torch.manual_seed(fold)
        model = mlp(8, 64, 64, 64, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepare(model, optimizer)
        models.append(model)
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(torch.randn(6, 8)), torch.randint(4, (6,)))
            loss.backward()
            optimizer.step()
            left.append(loss.detach())
    with torch.no_grad():
        x = torch.randn(6, 8)
        left.append(sum(model(x) for model in models))
    return left + left_by(*models)


def one_optimizer_over_two(prepare, release):
    encoder, decoder = mlp(8, 64, 64, 16), mlp(16, 64, 64, 8)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
    prepare(encoder, optimizer), prepare(decoder, optimizer)
    left = []
    for _ in range(4):
        x = torch.randn(6, 8)
        loss = F.mse_loss(decoder(encoder(x)), x)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*encoder.parameters(), *decoder.parameters()], 0.5)
        optimizer.step()
        left.append(loss.detach())
    return left + left_by(encoder, decoder)


def release_of_one(prepare, release):
    """The other goes on."""
    models = [mlp(8, 64, 64, 64, 4) for _ in range(2)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        prepare(model, optimizer)
    left = []
    for step in range(4):
        x, y = torch.randn(6, 8), torch.randint(4, (6,))
        if step == 2:
            release(models[0])
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            left.append(loss.detach())
    return left + left_by(*models)


def backwards_out_of_order(prepare, release):
    """Forwards of both before a backward of either, that of the first coming first."""
    models = [mlp(8, 64, 64, 64, 4) for _ in range(2)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        prepare(model, optimizer)
    left = []
    for _ in range(3):
        losses = [F.cross_entropy(m(torch.randn(6, 8)), torch.randint(4, (6,))) for m in models]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        left += [loss.detach() for loss in losses]
    return left + left_by(*models)


SCENARIOS = [
    gan, teacher_and_student, policy_and_reference, folds, one_optimizer_over_two, release_of_one,
    backwards_out_of_order,
]  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("budget", BUDGETS)
def test_they_train_as_in_plain_pytorch(scenario, budget):
    torch.manual_seed(0)
    plain, random_state = scenario(lambda *_: None, lambda _: None), torch.get_rng_state()
    torch.manual_seed(0)
    prepared = []
    with hydra_tune.ShardPool(["cpu"], BUDGETS[budget]) as pool:

        def prepare(model, *rest):
            hydra_tune.prepare(model, *rest, pool=pool)
            prepared.append(model)

        def release(model):
            hydra_tune.release(model)
            prepared.remove(model)

        got = scenario(prepare, release)
        (trial,) = pool.report()["trials"]
        assert trial["resident"] == (budget == "resident")
        for model in list(prepared):
            release(model)
        assert pool.devices[0].used_bytes == 0
    assert_same(got, plain)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_the_second_models_weights_may_not_be_the_firsts():
    """A weight is in one prepared model; a refused second one leaves the first as it was."""
    model = mlp(8, 16, 4)
    other = nn.Sequential(model[0], nn.Linear(16, 2))
    with hydra_tune.ShardPool(["cpu"], "1MiB") as pool:
        hydra_tune.prepare(model, pool=pool)
        with pytest.raises(hydra_tune.PrepareError, match="a weight may be in one prepared model only"):
            hydra_tune.prepare(other, pool=pool)
        assert "forward" not in vars(other)
        model(torch.randn(2, 8)).sum().backward()
        assert model[0].weight.grad is not None
        hydra_tune.release(model)


def test_they_reserve_jointly():
    """Two models that each fit, but not together, are spilled both; released, the one that is left fits again."""
    with hydra_tune.ShardPool(["cpu"], "260KiB") as pool:
        models = [mlp(16, 64, 64, 64, 16) for _ in range(2)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]

        def step(model, optimizer):
            optimizer.zero_grad()
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()

        hydra_tune.prepare(models[0], optimizers[0], pool=pool)
        step(models[0], optimizers[0]), step(models[0], optimizers[0])
        assert pool.report()["trials"][0]["resident"]
        hydra_tune.prepare(models[1], optimizers[1], pool=pool)
        for _ in range(2):
            for model, optimizer in zip(models, optimizers, strict=True):
                step(model, optimizer)
        assert not pool.report()["trials"][0]["resident"]
        hydra_tune.release(models[1])
        step(models[0], optimizers[0]), step(models[0], optimizers[0])
        assert len(pool.report()["trials"]) == 1
        hydra_tune.release(models[0])
        assert pool.devices[0].used_bytes == 0
