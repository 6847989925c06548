"""`share`: one copy of a frozen base for all trials, in host memory and on a device; each one's numbers are its own."""

import gc
import weakref

import pytest
import torch
from torch import nn

import hydra_tune
from adapters import (
    BASE_BYTES,
    RANKS,
    Base,
    adapted,
    as_it_is,
    build,
    in_pool,
    plain_base,
    side_by_side,
    trained,
)
from comparison import assert_same
from hydra_tune.errors import ConfigError, PrepareError
from hydra_tune.schedule.ledger import SHARED

SPILLED, RESIDENT = BASE_BYTES // 3, 4 * BASE_BYTES


def pool_of(budget, **options):
    return hydra_tune.ShardPool(["cpu"], budget, seed=0, **options)


def plain(rank, number, **options):
    return trained(adapted(plain_base(), rank, number, **options), as_it_is)


def shared(pool, rank, number, **options):
    """A job that trains an adapter over the shared base."""
    return in_pool(
        pool, number, lambda: trained(adapted(hydra_tune.share(build), rank, number, **options), hydra_tune.prepare)
    )


# ---- what it returns ----------------------------------------------------------------------------------


def test_each_caller_has_a_module_of_its_own_over_one_memory():
    built = []

    def build(width, *, bias):
        built.append(width)
        return nn.Sequential(nn.Linear(width, width, bias=bias), nn.BatchNorm1d(width))

    one, two = (hydra_tune.share(build, 4, bias=True) for _ in range(2))
    assert built == [4]
    assert one is not two
    assert not any(p.requires_grad for p in one.parameters())
    assert [p.data_ptr() for p in one.parameters()] == [p.data_ptr() for p in two.parameters()]
    assert {id(p) for p in one.parameters()}.isdisjoint(map(id, two.parameters()))
    one[1].running_mean.fill_(3)
    assert two[1].running_mean.sum() == 0, "buffers are its own"
    assert hydra_tune.share(build, 5, bias=True)[0].in_features == 5
    assert built == [4, 5]


def test_functions_that_are_defined_anew_are_told_apart_by_what_they_do():
    def objective(width, wanted):
        return hydra_tune.share(lambda: nn.Linear(width, 2), key=wanted)

    assert objective(3, None).weight.data_ptr() == objective(3, None).weight.data_ptr()
    assert objective(3, None).in_features == 3
    assert objective(4, None).in_features == 4
    sizes = [3, 4]
    assert hydra_tune.share(lambda s: nn.Linear(*s), sizes).out_features == 4
    assert objective(5, "mine").weight.data_ptr() == objective(6, "mine").weight.data_ptr()
    with pytest.raises(ConfigError, match=r'Write share\(build, ..., key="a name of this base"\)'):
        hydra_tune.share(lambda sizes: nn.Linear(*sizes), {3, 4})
    with pytest.raises(PrepareError, match="it returned tuple"):
        hydra_tune.share(lambda: (nn.Linear(2, 2), None))


def test_a_base_lives_as_long_as_somebody_has_it():
    model = hydra_tune.share(nn.Linear, 3, 3)
    alive = weakref.ref(model.weight.untyped_storage())
    del model
    gc.collect()
    assert hydra_tune.share(nn.Linear, 3, 3).weight.untyped_storage() is alive(), "a cached build"
    hydra_tune.share(nn.Linear, 4, 4)
    gc.collect()
    assert alive() is None, "another was asked for since"


def test_building_draws_nothing_from_its_trial():
    with pool_of(RESIDENT) as pool:
        first, second = (in_pool(pool, 1, lambda: (hydra_tune.share(build), torch.rand(3)))() for _ in range(2))
    assert torch.equal(first[1], second[1])


def test_what_an_optimizer_steps_outside_of_a_pool_is_its_own():
    one, two = hydra_tune.share(nn.Linear, 3, 2), hydra_tune.share(nn.Linear, 3, 2)
    before = two.weight.clone()
    one.weight.requires_grad_(True)
    optimizer = torch.optim.SGD(one.parameters(), lr=1.0)
    one(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(two.weight, before)
    assert torch.equal(one.weight, before - 1)
    assert torch.equal(hydra_tune.share(nn.Linear, 3, 2).weight, before)


# ---- trials over it -----------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [SPILLED, RESIDENT], ids=["spilled", "resident"])
def test_trials_side_by_side_equal_plain_pytorch(budget):
    with pool_of(budget) as pool:
        found = side_by_side(*(shared(pool, rank, n) for n, rank in enumerate(RANKS)))
        assert [t["resident"] for t in pool.report()["trials"]] == [budget is RESIDENT] * len(RANKS)
        assert pool.devices[0].used_bytes == 0
        assert pool.devices[0].shared_slots == {}
        assert pool.host_used_bytes == 0
    for n, rank in enumerate(RANKS):
        assert_same(found[n], plain(rank, n))


def test_a_shard_is_promoted_once_for_all_trials():
    """Each makes its step in turn, shard by shard."""
    with pool_of(SPILLED) as pool:
        side_by_side(*(shared(pool, 1, n) for n in range(4)))
        report = pool.report()
        assert all(None not in t["shared_weights"] for t in report["trials"])
        alone = pool_of(SPILLED)
        shared(alone, 1, 0)()
        one = alone.report()["devices"][0]["promoted_bytes"]
        assert report["devices"][0]["promoted_bytes"] < 4 * one


def test_a_resident_base_is_on_the_device_once():
    with pool_of(RESIDENT) as pool:
        places, held = set(), []

        def job(number):
            model = adapted(hydra_tune.share(build), 1, number)
            found = trained(model, hydra_tune.prepare)
            places.add(model.layers[0].two.weight.data_ptr())
            held.append(pool.events.machine.devices[0].ledger.held_bytes)
            return found, model

        with_models = side_by_side(*(in_pool(pool, n, lambda n=n: job(n)) for n in range(3)))
        assert len(places) == 1
        assert BASE_BYTES < max(held) < 2 * BASE_BYTES
        ends = {model.layers[0].two.weight.data_ptr() for _, model in with_models}
        assert len(ends) == 1, "and back in host memory once"
        assert ends.isdisjoint(places)


def test_host_memory_has_the_base_once():
    with pool_of(SPILLED, host_memory=2 * BASE_BYTES) as pool:
        seen = []

        def job(number):
            model = adapted(hydra_tune.share(build), 1, number)
            places = [p.data_ptr() for p in model.parameters() if not p.requires_grad]
            found = trained(model, hydra_tune.prepare)
            assert places == [p.data_ptr() for p in model.parameters() if not p.requires_grad], (
                "they stay, as if mapped"
            )
            seen.append(pool.host_used_bytes)
            shared = pool.report()["shared"]
            assert shared["host_bytes"] == BASE_BYTES
            assert shared["device_bytes"][0] > 0
            assert number in [int(pool.report()["trials"][n]["name"].split()[-1]) for n in shared["trials"]]
            return found

        side_by_side(*(in_pool(pool, n, lambda n=n: job(n)) for n in range(4)))
        assert BASE_BYTES < max(seen) < 1.5 * BASE_BYTES
        assert pool.report()["shared"] == {"trials": [], "host_bytes": 0, "device_bytes": [0]}


@pytest.mark.parametrize("budget", [SPILLED, RESIDENT], ids=["spilled", "resident"])
def test_one_that_unfreezes_a_layer_or_fails_changes_no_other(budget):
    def unfrozen(base, number):
        model = adapted(base, 2, number)
        model.layers[3].requires_grad_(True)
        return model

    def fails():
        model = adapted(hydra_tune.share(build), 2, 1)
        model.layers[2].two.register_forward_hook(lambda *_: 1 / 0)
        trained(model, hydra_tune.prepare)

    with pool_of(budget) as pool:
        first = in_pool(pool, 9, lambda: hydra_tune.share(build))()
        before = [p.clone() for p in first.parameters()]

        def failing():
            with pytest.raises(ZeroDivisionError):
                in_pool(pool, 1, fails)()

        unfreezing = in_pool(pool, 0, lambda: trained(unfrozen(hydra_tune.share(build), 0), hydra_tune.prepare))
        found = side_by_side(unfreezing, failing, *(shared(pool, rank, n) for n, rank in ((2, 1), (3, 4))))
        assert_same(found[0], trained(unfrozen(plain_base(), 0), as_it_is))
        assert_same(found[2], plain(1, 2))
        assert_same(found[3], plain(4, 3))
        assert all(map(torch.equal, before, first.parameters()))
        assert pool.devices[0].used_bytes == 0
        assert pool.events.machine.slots.users == {}


def test_a_layer_that_is_unfrozen_between_steps_becomes_the_trials_own():
    def job(base, number, prepare):
        model = adapted(base, 2, number)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = prepare(model, optimizer)
        for step in range(4):
            if step == 2:
                model.layers[1].requires_grad_(True)
            model(torch.randn(2, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    with pool_of(SPILLED) as pool:
        other = shared(pool, 3, 5)
        found = side_by_side(in_pool(pool, 0, lambda: job(hydra_tune.share(build), 0, hydra_tune.prepare)), other)
    assert_same(found[0], job(plain_base(), 0, as_it_is))
    assert_same(found[1], plain(3, 5))


def test_models_whose_parameters_lie_in_the_same_memory_share_without_it():
    state = plain_base().state_dict()

    def model(number):
        base = Base()
        base.load_state_dict(state, assign=True)
        return adapted(base.requires_grad_(False), 1, number)

    with pool_of(SPILLED) as pool:
        jobs = [in_pool(pool, n, lambda n=n: trained(model(n), hydra_tune.prepare, steps=5)) for n in range(3)]
        found = side_by_side(*jobs)
        assert any(number is not None for t in pool.report()["trials"] for number in t["shared_weights"])
    for n in range(3):
        assert_same(found[n], trained(model(n), as_it_is, steps=5))


def test_evaluations_share_it_too():
    def job(base, number, prepare):
        model = adapted(base, 2, number)
        model = prepare(model).eval()
        with torch.no_grad():
            return [model(torch.randn(2, 64)) for _ in range(3)]

    with pool_of(SPILLED) as pool:
        found = side_by_side(
            *(in_pool(pool, n, lambda n=n: job(hydra_tune.share(build), n, hydra_tune.prepare)) for n in range(3))
        )
    for n in range(3):
        assert_same(found[n], job(plain_base(), n, as_it_is))


def written(model, how):
    """Writes into frozen weights of a model, as scripts do after some steps."""
    weight = model.layers[0].two.weight
    if how == "merge":  # as peft
        weight.data += torch.ones_like(weight) / 64
    elif how == "no_grad":
        with torch.no_grad():
            weight.mul_(1.5)
    elif how == "load":
        model.load_state_dict({name: value * 1.25 for name, value in model.state_dict().items()})
    else:
        weight.data = weight.data * 1.5


@pytest.mark.parametrize("how", ["merge", "no_grad", "load", "replaced"])
@pytest.mark.parametrize("budget", [SPILLED, RESIDENT], ids=["spilled", "resident"])
def test_a_weight_that_a_trial_writes_between_steps_is_its_own_from_there_on(budget, how):
    """peft's merge_and_unload at the end of a trial changed the base of all others, in silence; a whole state dict that
    was loaded was refused at the next step, if the trial was spilled."""

    def job(base, prepare, writes):
        model = adapted(base, 2, 0)
        torch.manual_seed(1)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        model, optimizer = prepare(model, optimizer)
        losses = []
        for step in range(4):
            loss = model(torch.randn(4, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if writes and step == 1:
                written(model, how)
        with torch.no_grad():
            return [*losses, model(torch.ones(4, 64))]

    with pool_of(budget) as pool:
        turns = [
            in_pool(pool, n, lambda writes=writes: job(hydra_tune.share(build), hydra_tune.prepare, writes))
            for n, writes in enumerate([True, False])
        ]
        found = [*side_by_side(*turns), in_pool(pool, 2, turns[1])()]
    for writes, one in zip([True, False, False], found, strict=True):
        assert_same(one, job(plain_base(), as_it_is, writes))


def test_a_model_in_place_of_a_function_is_refused_with_what_to_write():
    with pytest.raises(ConfigError, match=r"got Linear\. Write share\(make_model\)"):
        hydra_tune.share(nn.Linear(2, 2))


def test_a_base_for_each_trial_does_not_fill_host_memory(caplog):
    """`build` refers to an object that each objective makes: all bases were kept until the search had ended."""
    alive = []

    def job():
        config = object()
        model = hydra_tune.share(lambda: (config, nn.Linear(512, 512))[1])
        alive.append(weakref.ref(model.weight.untyped_storage()))

    with hydra_tune.ShardPool(["cpu"], RESIDENT, host_memory=5 << 20) as pool, pool.shared_weights.bases_kept():
        for number in range(8):
            in_pool(pool, number, job)()
        gc.collect()
        assert [base() is not None for base in alive] == [False] * 6 + [True] * 2
    assert [m for m in caplog.messages if "share has built" in m] == [
        "share has built 3 bases, more than half of host memory holds, and keeps only the last ones. If trials should "
        "have the same base, build refers to an object that each objective makes anew: give share a "
        'key="a name of this base".'
    ]


def test_slots_of_a_base_stay_from_step_to_step():
    with pool_of(SPILLED) as pool:

        def job():
            model, optimizer = hydra_tune.prepare(
                adapted(hydra_tune.share(build), 1, 0), torch.optim.SGD([torch.zeros(1)], 0.1)
            )
            return model, optimizer

        with pytest.raises(PrepareError):
            in_pool(pool, 0, job)()
        keys = []

        def train():
            model = adapted(hydra_tune.share(build), 1, 0)
            trained(model, hydra_tune.prepare)
            keys.extend(pool.events.machine.devices[0].ledger.slots)

        in_pool(pool, 0, train)()
        assert keys
        assert {trial for trial, _ in keys} == {SHARED}


@pytest.mark.parametrize("budget", [SPILLED, RESIDENT], ids=["spilled", "resident"])
def test_a_policy_and_its_reference_over_one_base_in_one_trial(budget):
    def job(make, prepare):
        policy, reference = adapted(make(), 2, 0), make().eval()
        optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.1)
        policy, optimizer = prepare(policy, optimizer)
        reference = prepare(reference)
        for _ in range(3):
            x = torch.randn(2, 64)
            with torch.no_grad():
                wanted = reference(x)
            nn.functional.mse_loss(policy(x), wanted + 1).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in policy.parameters()]

    with pool_of(budget) as pool:
        found = in_pool(pool, 0, lambda: job(lambda: hydra_tune.share(build), hydra_tune.prepare))()
        assert pool.devices[0].used_bytes == 0
    assert_same(found, job(plain_base, as_it_is))


def test_a_checkpoint_of_a_trained_layer_is_not_loaded_into_the_base(tmp_path):
    """A search that went on wrote the layer that its trial had trained into the base of all others."""
    optuna = pytest.importorskip("optuna")

    def search(stops_at):
        as_built = []

        def objective(trial):
            model = hydra_tune.share(plain_base)
            as_built.append(all(map(torch.equal, model.parameters(), plain_base().parameters())))
            model.layers[1].requires_grad_(True)
            model.head = nn.Linear(64, 8)
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
            model, optimizer = hydra_tune.prepare(model, optimizer)
            for step in range(hydra_tune.resume_step(), 5):
                if step == stops_at:
                    raise KeyboardInterrupt
                model(torch.randn(2, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return 0.0

        study = optuna.create_study(storage=f"sqlite:///{tmp_path}/s.db", study_name="s", load_if_exists=True)
        with pool_of(RESIDENT) as pool:
            runner = hydra_tune.HydraTrialRunner(pool, 1, checkpoint_dir=tmp_path / "c", checkpoint_every=1)
            runner.optimize(study, objective, n_trials=2)
        return as_built

    with pytest.raises(KeyboardInterrupt):
        search(stops_at=3)
    assert search(stops_at=None) == [True, True]
