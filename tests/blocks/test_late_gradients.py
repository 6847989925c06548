"""Gradients that reach the host while the device goes on: nobody sees one before it is there, and sums keep their
order."""

import gc

import pytest
import torch
from torch import nn

import hydra_tune
from comparison import assert_as_in_plain_pytorch, left_by, made, train
from hydra_tune.blocks.root import use_no_cache
from hydra_tune.devices.device import Device
from hydra_tune.trials.residency import Residency
from late_arrivals import come_late
from models import TiedNet, batch, loss_on
from zoo import ZOO

BUDGET = 260 * 1024


@pytest.fixture(autouse=True)
def arrivals(monkeypatch):
    return come_late(monkeypatch)


@pytest.fixture
def late_ones(monkeypatch, arrivals):
    """How many blocks' gradients were still on their way when autograd had what their nodes return."""
    found = []
    spill = Residency.spill_gradients

    def noted(*arguments, **options):
        grads = spill(*arguments, **options)
        found.append(bool(arrivals and arrivals[-1].late))
        return grads

    monkeypatch.setattr(Residency, "spill_gradients", noted)
    return found


class _Untied(TiedNet):
    def __init__(self, **options):
        super().__init__(**options)
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())


def test_blocks_do_not_wait_for_their_gradients(late_ones):
    def scenario(prepare):
        torch.manual_seed(0)
        return train(*made(prepare, _Untied()))

    assert_as_in_plain_pytorch(scenario, num_bytes=BUDGET)
    assert any(late_ones), "else nothing here is tested"


@pytest.mark.parametrize("model", [TiedNet, _Untied])
def test_accumulated_batches(model):
    def scenario(prepare):
        torch.manual_seed(0)
        net, optimizer = made(prepare, model())
        for _ in range(3):
            for _ in range(3):
                loss_on(net, *batch()).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return left_by(net, optimizer)

    assert_as_in_plain_pytorch(scenario, num_bytes=BUDGET)


def test_weights_with_other_uses_add_up_in_order():
    """Penalties made before the forward and after it; sums of four terms."""

    def scenario(prepare):
        torch.manual_seed(0)
        net, optimizer = made(prepare, _Untied())
        for _ in range(2):
            before = sum((p * 1.7).square().sum() for p in net.parameters())
            loss = loss_on(net, *batch())
            loss = loss + before + sum(p.abs().sum() + p.square().sum() for p in net.parameters())
            loss.backward()
            optimizer.step()
        return left_by(net, optimizer)

    assert_as_in_plain_pytorch(scenario, num_bytes=BUDGET + 48 * 1024)


def test_a_use_that_is_added_in_a_later_step_is_refused_once():
    """A sum would read gradients that are still on their way."""
    torch.manual_seed(0)
    with hydra_tune.ShardPool(["cpu"], 2 * BUDGET) as pool:
        net = hydra_tune.prepare(_Untied(depth=8), pool=pool)

        def backward(penalty):
            net.zero_grad()
            (loss_on(net, *batch()) + penalty * sum(p.square().sum() for p in net.parameters())).backward()

        for _ in range(2):
            net.zero_grad()
            loss_on(net, *batch()).backward()
        with pytest.raises(hydra_tune.PrepareError, match="has another use in this backward, such as a penalty"):
            backward(1.0)
        backward(1.0)
        assert all(p.grad.isfinite().all() for p in net.parameters())
        hydra_tune.release(net)


def test_hooks_see_gradients():
    """On weights, before and after `prepare`, before and after they are added up."""

    def scenario(prepare):
        torch.manual_seed(0)
        net, seen = _Untied(), []
        weights = list(net.parameters())
        weights[2].register_hook(lambda grad: seen.append(grad.clone()))
        weights[3].register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        net, optimizer = made(prepare, net)
        weights[4].register_hook(lambda grad: seen.append(grad.clone()))
        for _ in range(2):
            loss = loss_on(net, *batch())
            weights[5].register_hook(lambda grad: seen.append(grad.clone()))
            loss.backward()
        return seen, left_by(net, optimizer)

    def scenario_in_order_of_weights(prepare):
        seen, left = scenario(prepare)
        return sorted((s.flatten() for s in seen), key=lambda s: (s.numel(), *s.tolist())), left

    assert_as_in_plain_pytorch(scenario_in_order_of_weights, num_bytes=BUDGET)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_weights_fire_as_soon_as_their_block_is_done(kind, late_ones):
    """So that an optimizer within the backward frees one block's gradients before the next one's come."""
    torch.manual_seed(0)
    net, blocks_done = _Untied(), []
    for p in net.parameters():
        getattr(p, kind)(lambda _: blocks_done.append(len(late_ones)))
    with hydra_tune.ShardPool(["cpu"], BUDGET) as pool:
        net = hydra_tune.prepare(net, pool=pool)
        late_ones.clear()
        loss_on(net, *batch()).backward()
        hydra_tune.release(net)
    assert not any(late_ones)
    assert set(blocks_done) >= set(range(1, len(late_ones) + 1))


def test_an_optimizer_that_steps_within_backward():
    def scenario(prepare):
        torch.manual_seed(0)
        net = prepare(_Untied())
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}

        def step(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in net.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            loss_on(net, *batch()).backward()
        return left_by(net)

    assert_as_in_plain_pytorch(scenario, num_bytes=BUDGET)


def test_gradients_of_some_weights():
    def scenario(prepare):
        torch.manual_seed(0)
        net = prepare(_Untied())
        weights = list(net.parameters())
        grads = torch.autograd.grad(loss_on(net, *batch()), [weights[1], weights[6]])
        loss_on(net, *batch()).backward(inputs=[weights[0], weights[5]])
        return grads, left_by(net)

    assert_as_in_plain_pytorch(scenario, num_bytes=BUDGET)


def test_a_graph_kept_for_two_backwards():
    def scenario(prepare):
        torch.manual_seed(0)
        net = prepare(_Untied())
        loss = loss_on(net, *batch())
        loss.backward(retain_graph=True)
        loss.backward()
        return left_by(net)

    assert_as_in_plain_pytorch(scenario, num_bytes=BUDGET)


def test_two_forwards_before_the_backward():
    def scenario(prepare):
        torch.manual_seed(0)
        net = prepare(_Untied(depth=8))
        (loss_on(net, *batch()) + loss_on(net, *batch())).backward()
        return left_by(net)

    assert_as_in_plain_pytorch(scenario, num_bytes=2 * BUDGET - 100 * 1024)


def test_anomaly_detection_reads_no_late_gradient():
    def scenario(prepare):
        torch.manual_seed(0)
        net = prepare(_Untied())
        with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly(check_nan=True):
            loss_on(net, *batch()).backward()
        return left_by(net)

    assert_as_in_plain_pytorch(scenario, num_bytes=BUDGET)


def test_a_backward_that_fails_leaves_no_gradient_on_its_way(arrivals):
    """The blocks above the failing one have run theirs."""
    with hydra_tune.ShardPool(["cpu"], BUDGET) as pool:
        net = hydra_tune.prepare(_Untied(), pool=pool)
        loss_on(net, *batch()).backward()
        net.zero_grad()
        fails = [True]

        def fail(grad):
            if fails:
                raise ValueError("as a user's hook does")

        hook = net.embedding.register_forward_hook(lambda *given: given[2].register_hook(fail) and None)
        loss = loss_on(net, *batch())
        with pytest.raises(ValueError, match="user's hook"):
            loss.backward()
        fails.clear()
        hook.remove()
        loss_on(net, *batch()).backward()
        gc.collect()
        assert not any(arrival.late or arrival.tensors for arrival in arrivals)
        assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())
        hydra_tune.release(net)
        assert pool.devices[0].used_bytes == 0


def test_one_blocks_gradients_are_on_their_way_at_a_time(arrivals, monkeypatch):
    """For more a plan has no room."""
    waiting = []
    spill = Device.spill

    def noted(device, tensors, like):
        waiting.append(sum(bool(arrival.tensors) for arrival in arrivals))
        return spill(device, tensors, like)

    with hydra_tune.ShardPool(["cpu"], BUDGET) as pool:
        net = hydra_tune.prepare(_Untied(), pool=pool)
        loss_on(net, *batch()).backward()
        net.zero_grad()
        monkeypatch.setattr(Device, "spill", noted)
        loss_on(net, *batch()).backward()
        monkeypatch.undo()
        hydra_tune.release(net)
    assert len(waiting) > 4
    assert not any(waiting), "a block's are awaited before the next one's begin"


def test_a_step_that_fails_waits_for_what_is_on_its_way_where_it_ends(arrivals):
    with hydra_tune.ShardPool(["cpu"], BUDGET) as pool:
        net = hydra_tune.prepare(_Untied(), pool=pool)

        def fail(grad):
            raise ValueError("as a user's hook does")

        hook = net.layers[1].register_forward_hook(lambda *given: given[2].register_hook(fail) and None)
        loss = loss_on(net, *batch())
        hook.remove()
        with pytest.raises(ValueError, match="user's hook"):
            loss.backward()
        del loss
        with torch.no_grad():
            net(batch()[0])
        assert not any(arrival.tensors for arrival in arrivals)
        hydra_tune.release(net)


def test_gradients_are_taken_not_copied(arrivals):
    """Autograd takes the host tensor for `p.grad`, if nobody else holds it."""
    with hydra_tune.ShardPool(["cpu"], BUDGET) as pool:
        net = hydra_tune.prepare(_Untied(), pool=pool)
        addresses = set()
        loss_on(net, *batch()).backward()
        spill = Device.spill

        def noted(device, tensors, like):
            hosts, arrival = spill(device, tensors, like)
            addresses.update(h.data_ptr() for h in hosts)
            return hosts, arrival

        net.zero_grad()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Device, "spill", noted)
            loss_on(net, *batch()).backward()
        in_blocks = [p for p in net.parameters() if p is not net.scale]
        assert {p.grad.data_ptr() for p in in_blocks} <= addresses
        hydra_tune.release(net)


def test_hooks_of_modules_see_gradients_where_plain_pytorch_has_them():
    """A backward hook reads a weight's gradient; forward hooks add penalties of it, before and after its block."""

    def scenario(prepare):
        torch.manual_seed(0)
        net, seen, penalties = _Untied(), [], []
        layer = net.layers[1]
        later = net.layers[3].up.weight
        net.layers[0].register_full_backward_hook(lambda *_: seen.append(later.grad.clone()) and None)
        layer.register_forward_pre_hook(lambda *_: penalties.append((layer.up.weight * 1.7).square().sum()) and None)
        layer.register_forward_hook(lambda *_: penalties.append(layer.up.weight.abs().sum()) and None)
        net = prepare(net)
        for _ in range(2):
            penalties.clear()
            loss = loss_on(net, *batch())
            (loss + penalties[-2] + penalties[-1]).backward()
        return seen, left_by(net)

    assert_as_in_plain_pytorch(scenario, num_bytes=BUDGET)


def test_accumulated_gradients_are_on_the_host_once(late_ones):
    """None comes late before autograd was seen to take it as it is; nor where there is one to add to."""
    torch.manual_seed(0)
    with hydra_tune.ShardPool(["cpu"], BUDGET) as pool:
        net = hydra_tune.prepare(_Untied(), pool=pool)
        for expected in (False, True, False):
            late_ones.clear()
            if expected:
                net.zero_grad()
            loss_on(net, *batch()).backward()
            assert any(late_ones) == expected
        net.zero_grad()
        late_ones.clear()
        loss_on(net, *batch()).backward()
        assert any(late_ones)
        hydra_tune.release(net)


def test_plans_have_room_for_late_gradients_once():
    """Spilled ones, and those that a first step has measured, alone or with others waiting for it."""
    import optuna

    found = {}
    for concurrency in (1, 4):

        def objective(trial):
            net = _Untied(depth=16)
            net, optimizer = hydra_tune.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            train(net, optimizer, steps=2)
            return 0.0

        with hydra_tune.ShardPool(["cpu"], 2 * BUDGET) as pool:
            study = optuna.create_study()
            hydra_tune.HydraTrialRunner(pool, concurrency).optimize(study, objective, n_trials=4)
            (plan,) = pool.plans.values()
        largest = max(block.weight_bytes for block in plan.blocks)
        found[concurrency] = plan.step_bytes
    assert found[4] <= found[1] + largest


@pytest.mark.parametrize(
    "name",
    ["gpt2", "unet", "repeated"]
    + [pytest.param(n, marks=pytest.mark.proof) for n in ("albert", "t5", "mixtral", "lstm", "llama_checkpointed")],
)
def test_architectures(name):
    """One backward of each, beside plain PyTorch's."""
    architecture = ZOO[name]

    def scenario(prepare):
        torch.manual_seed(0)
        model = architecture.build()
        use_no_cache(model)
        model = prepare(model)
        for _ in range(2):
            architecture.loss(model, architecture.batch()).backward()
        return left_by(model)

    weights = sum(p.numel() * p.element_size() for p in architecture.build().parameters())
    assert_as_in_plain_pytorch(scenario, num_bytes=2 * weights)
