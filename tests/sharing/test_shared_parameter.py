"""Whatever a script does with a shared module, the base stays as it was built."""

import copy
import io

import pytest
import torch
from torch import nn

import hydra_tune
from adapters import as_it_is, in_pool, side_by_side
from comparison import assert_same
from hydra_tune.sharing.shared_parameter import SharedParameter


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4)))


def xavier(model):
    nn.init.xavier_uniform_(model[1][0].weight)


def unfreezes_and_resets(model):
    model[1].requires_grad_(True)
    model[1][0].reset_parameters()


def resets_and_unfreezes(model):
    model[1][0].reset_parameters()
    model[1].requires_grad_(True)


def writes_through_data(model):
    model[1][0].weight.data.normal_()
    model[2][0].weight.data += 1
    model[2][0].bias.data[2:].fill_(3)


def writes_without_gradients(model):
    with torch.no_grad():
        model[1][0].weight.mul_(2)
        model[2][0].weight[0] = 1
        model[2][0].bias.view(4, 4)[1].zero_()
        torch.add(model[3][0].bias, 1, out=model[3][0].bias)
        torch._foreach_mul_([model[3][0].weight], 2)


def loads_other_values(model):
    model.load_state_dict({name: torch.ones_like(t) for name, t in model.state_dict().items()})


def orthogonal(model):
    nn.init.orthogonal_(model[1][0].weight)


WRITES = [
    xavier, unfreezes_and_resets, resets_and_unfreezes, writes_through_data, writes_without_gradients,
    loads_other_values, orthogonal,
]  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
def test_a_write_gives_the_trial_memory_of_its_own(write):
    with torch.random.fork_rng():
        plain = build().requires_grad_(False)
        shared, other = (hydra_tune.share(build) for _ in range(2))
        torch.manual_seed(1)
        write(plain)
        torch.manual_seed(1)
        write(shared)
        assert_same([*shared.parameters()], [*plain.parameters()])
        before = build()
    assert all(map(torch.equal, before.parameters(), other.parameters()))
    assert not all(map(torch.equal, before.parameters(), shared.parameters()))


def test_what_reads_or_loads_what_it_has_goes_on_sharing():
    model, other = (hydra_tune.share(build) for _ in range(2))
    state = copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    model(torch.randn(2, 16)).sum()
    assert model[0][0].weight.data.norm() > 0
    assert [p.data_ptr() for p in model.parameters()] == [p.data_ptr() for p in other.parameters()]


def test_it_is_saved_and_copied_as_a_plain_one():
    model = hydra_tune.share(build)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)  # plain tensors only, by default
    assert all(type(t) is torch.Tensor for t in loaded.values())
    copied = copy.deepcopy(model)
    assert all(type(p) is nn.Parameter for p in copied.parameters())
    assert all(map(torch.equal, copied.parameters(), model.parameters()))
    assert copied[0][0].weight.data_ptr() != model[0][0].weight.data_ptr()
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    assert all(map(torch.equal, torch.load(saved, weights_only=False).parameters(), model.parameters()))


def test_parameters_are_plain_while_a_prepared_model_computes():
    """Shared ones see each operator, which takes time; between forwards they guard the base."""
    with hydra_tune.ShardPool(["cpu"], 1 << 20, seed=0) as pool:
        model = hydra_tune.share(build)
        hydra_tune.prepare(model, pool=pool)
        seen = []
        model[0].register_forward_pre_hook(lambda *_: seen.append({type(p) for p in model.parameters()}))
        model(torch.randn(2, 16))
        assert seen == [{nn.Parameter}]
        assert all(type(p) is SharedParameter for p in model.parameters())
        hydra_tune.release(model)
        model[0][0].weight.data.zero_()
    assert hydra_tune.share(build)[0][0].weight.norm() > 0


def steps(model, prepare, number, unfreezes):
    torch.manual_seed(number)
    model.append(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model[-1].parameters(), lr=0.1)
    model, optimizer = prepare(model, optimizer)
    losses = []
    for step in range(6):
        if step == 3 and unfreezes:
            model[2].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[2].parameters())})
        loss = (model(torch.randn(8, 16)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("budget", [8_000, 1 << 20], ids=["spilled", "resident"])
def test_a_layer_unfrozen_between_two_steps_changes_no_live_trial(budget):
    """A resident trial's call was covered by its plan, and trained the device's copy of all trials."""
    with hydra_tune.ShardPool(["cpu"], budget, seed=0) as pool:
        found = side_by_side(
            *(
                in_pool(pool, n, lambda n=n: steps(hydra_tune.share(build), hydra_tune.prepare, n, n == 0))
                for n in range(4)
            )
        )
        after = in_pool(pool, 9, lambda: [p.clone() for p in hydra_tune.share(build).parameters()])()
    for n in range(4):
        with torch.random.fork_rng():
            plain = build().requires_grad_(False)
            assert_same(found[n], steps(plain, as_it_is, n, n == 0))
    with torch.random.fork_rng():
        assert all(map(torch.equal, after, build().parameters()))
