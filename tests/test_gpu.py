"""What only a GPU shows. Deterministic mode; the optimizer of a spilled trial steps on the host."""

import pytest
import torch

import hydra_tune
from models import bytes_batch, gpt, loss_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
TOLERANCE = 2e-5  # AdamW on the host and on the device round differently; relative, after 6 steps


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def train(pool, steps=6, dropout=0.1):
    torch.manual_seed(0)
    model = gpt(dropout)
    if pool is None:
        model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if pool is not None:
        model, optimizer = hydra_tune.prepare(model, optimizer, pool=pool)
    losses = []
    for _ in range(steps):
        x, y = (t.cuda() for t in bytes_batch())
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if pool is not None:
        hydra_tune.release(model)
    return losses, [p.detach().cpu() for p in model.parameters()]


def test_resident_equals_plain_cuda_bit_for_bit():
    with hydra_tune.ShardPool("cuda:0", "1GiB") as pool:
        losses, weights = train(pool)
        assert pool.report()["trials"][0]["resident"]
    plain_losses, plain_weights = train(None)
    assert losses == plain_losses
    assert all(torch.equal(a, b) for a, b in zip(weights, plain_weights, strict=True))


def test_spilled_equals_plain_cuda_within_tolerance_and_itself_bit_for_bit():
    runs = []
    for _ in range(2):
        with hydra_tune.ShardPool("cuda:0", "3MiB") as pool:
            runs.append(train(pool))
            assert not pool.report()["trials"][0]["resident"]
            assert pool.devices[0].used_bytes == 0
    (losses, weights), (losses_again, weights_again) = runs
    assert losses == losses_again
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_again, strict=True))
    plain_losses, plain_weights = train(None)
    assert losses[0] == plain_losses[0], "before the first step of an optimizer nothing differs"
    torch.testing.assert_close(losses, plain_losses, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(weights, plain_weights, rtol=TOLERANCE, atol=TOLERANCE)


def test_company_equals_alone():
    import optuna

    def run(concurrency):
        results = {}

        def objective(trial):
            torch.manual_seed(trial.number)
            model = gpt(0.2)
            optimizer = torch.optim.AdamW(model.parameters())
            model, optimizer = hydra_tune.prepare(model, optimizer)
            for _ in range(10):
                x, y = (t.cuda() for t in bytes_batch())
                loss = loss_of(model, x, y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            results[trial.number] = loss.item()
            return results[trial.number]

        with hydra_tune.ShardPool("cuda:0", "6MiB") as pool:
            hydra_tune.HydraTrialRunner(pool, concurrency).optimize(optuna.create_study(), objective, n_trials=4)
        return results

    assert run(4) == run(1)


def test_auto_memory_leaves_a_margin():
    budget = hydra_tune.ShardPool().devices[0].budget_bytes
    assert 0 < budget < torch.cuda.mem_get_info()[0]
