"""What libraries keep for the whole process, where trials run side by side in it: accelerate's states, what
transformers patches while it loads a model, the default dtype."""

import logging
import random
import sys
import threading
import types

import numpy
import optuna
import pytest
import torch
from torch import nn

import hydra_tune
from hydra_tune.integrations.frameworks import process_settings

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")


def side_by_side(*objectives, **options):
    """One objective a trial, all of them alive at once; what each has returned."""
    returned = {}

    def objective(trial):
        trial.set_user_attr("alive", True)
        returned[trial.number] = objectives[trial.number](trial)
        return 0.0

    with hydra_tune.ShardPool(["cpu"], "8MiB") as pool:
        runner = hydra_tune.HydraTrialRunner(pool, len(objectives))
        runner.optimize(optuna.create_study(), objective, n_trials=len(objectives), **options)
    return [returned.get(number) for number in range(len(objectives))]


def test_accelerate_states_are_a_trial_s_own():
    """They were in one dict: while one trial accumulated gradients, the steps of all others did nothing."""
    from accelerate import Accelerator
    from accelerate.state import GradientState

    of_process = dict(GradientState._shared_state)
    ready, done = threading.Event(), threading.Event()

    def accumulates(_):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
        with accelerator.accumulate(nn.Linear(2, 2)):
            assert not accelerator.sync_gradients
            ready.set()
            assert done.wait(60)
        return accelerator.mixed_precision

    def steps(_):
        assert ready.wait(60)
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(2, 2)
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
        before = model.weight.clone()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        done.set()
        return accelerator.mixed_precision, not torch.equal(before, model.weight)

    assert side_by_side(accumulates, steps) == ["bf16", ("no", True)]
    assert dict(GradientState._shared_state) == of_process, "the process's are as they were"


def test_an_accelerator_belongs_to_one_trial():
    from accelerate import Accelerator

    shared = Accelerator(cpu=True)

    def objective(_):
        shared.prepare(torch.optim.SGD(nn.Linear(2, 2).parameters()))

    with pytest.raises(hydra_tune.PrepareError, match="Make it within the objective"):
        side_by_side(objective)
    shared.state._reset_state(reset_partial_state=True)
    shared.gradient_state._reset_state()


def gpt2(dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=50, n_positions=16)
    return transformers.GPT2LMHeadModel(config).to(dtype)


@pytest.fixture
def saved(tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        gpt2(dtype).save_pretrained(tmp_path / str(dtype))
    return tmp_path


def is_as_saved(model, dtype):
    other = gpt2(dtype).state_dict()
    equal = all(torch.equal(tensor, other[name]) for name, tensor in model.state_dict().items())
    return equal and model.lm_head.weight is model.transformer.wte.weight and model.lm_head.weight.device.type == "cpu"


def test_models_are_loaded_side_by_side_and_alone_after_that(saved):
    """Sixteen in eight threads: transformers' functions stayed replaced for good, and models without their ties."""

    def load(trial):
        dtype = (torch.float32, torch.bfloat16)[trial.number % 2]
        model = transformers.GPT2LMHeadModel.from_pretrained(saved / str(dtype), dtype=dtype)
        return is_as_saved(model, dtype)

    found = {}

    def objective(trial):
        found[trial.number] = load(trial)
        return 0.0

    with hydra_tune.ShardPool(["cpu"], "8MiB") as pool:
        hydra_tune.HydraTrialRunner(pool, 8).optimize(optuna.create_study(), objective, n_trials=16)
    assert found == dict.fromkeys(range(16), True)
    alone = transformers.GPT2LMHeadModel.from_pretrained(saved / str(torch.float32))
    assert is_as_saved(alone, torch.float32)
    assert torch.get_default_dtype() is torch.float32


class Pauses(transformers.GPT2LMHeadModel):
    """While it is made, another trial does what it does."""

    made, go_on = threading.Event(), threading.Event()

    def __init__(self, config):
        super().__init__(config)
        self.made.set()
        assert self.go_on.wait(60)


def test_what_is_patched_while_a_model_loads_others_do_not_see(saved):
    """A layer that another trial makes meanwhile has weights, ties and PyTorch's default dtype."""
    Pauses.made.clear(), Pauses.go_on.clear()

    def load(_):
        return Pauses.from_pretrained(saved / str(torch.bfloat16), dtype=torch.bfloat16).dtype

    def make(_):
        assert Pauses.made.wait(60)
        try:
            torch.manual_seed(1)
            layer, model = nn.Linear(4, 4), gpt2()
            return torch.zeros(1).dtype, torch.get_default_dtype(), layer, is_as_saved(model, torch.float32)
        finally:
            Pauses.go_on.set()

    dtype, (zeros, default, layer, sound) = side_by_side(load, make)
    torch.manual_seed(1)
    assert (dtype, zeros, default, sound) == (torch.bfloat16, torch.float32, torch.float32, True)
    assert torch.equal(layer.weight, nn.Linear(4, 4).weight)


def test_models_on_the_meta_device_are_made_for_one_thread():
    from accelerate import init_empty_weights

    entered, done = threading.Event(), threading.Event()

    def makes_empty(_):
        with init_empty_weights():
            entered.set()
            assert done.wait(60)
            return nn.Linear(2, 2).weight.device.type

    def makes(_):
        assert entered.wait(60)
        try:
            return nn.Linear(2, 2).weight.device.type
        finally:
            done.set()

    assert side_by_side(makes_empty, makes) == ["meta", "cpu"]


DATA = torch.ones(2, dtype=torch.float32)
MAKES = {
    "scalar": lambda: torch.tensor(1.0),
    "nested": lambda: torch.tensor([[1, 2.0]]),
    "integers": lambda: torch.tensor([1, 2]),
    "range": lambda: torch.arange(3.0),
    "range of integers": lambda: torch.arange(3),
    "full": lambda: torch.full((2,), 1.0),
    "full of integers": lambda: torch.full((2,), 1),
    "from data": lambda: torch.asarray(DATA),
    "random": lambda: torch.rand(2),
    "random integers": lambda: torch.randint(3, (2,)),
    "linspace": lambda: torch.linspace(0, 1, 3),
    "float64": lambda: torch.zeros(2, dtype=torch.float64),
    "int64": lambda: torch.zeros(2, dtype=torch.int64),
    "linear": lambda: nn.Linear(2, 2).weight,
    "norm": lambda: nn.LayerNorm(2).weight,
}


@pytest.mark.parametrize("name", MAKES)
def test_the_default_dtype_of_a_load_is_as_pytorch_s(name):
    from hydra_tune.integrations.frameworks import model_loading
    from hydra_tune.integrations.frameworks.current_trial import running

    torch.set_default_dtype(torch.bfloat16)
    try:
        expected = MAKES[name]()
    finally:
        torch.set_default_dtype(torch.float32)
    with running(), model_loading._own_default_dtype():
        torch.set_default_dtype(torch.bfloat16)
        found = MAKES[name]()
        assert torch.get_default_dtype() is torch.bfloat16
        torch.set_default_dtype(torch.float32)
    assert found.dtype is expected.dtype
    assert torch.get_default_dtype() is torch.float32


def test_what_is_for_the_whole_process_is_warned_of_beside_other_trials(caplog, monkeypatch):
    """Once, by name; not of a trial that runs alone."""
    wandb = types.ModuleType("wandb")
    wandb.init = lambda **_: None
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    process_settings._watch_wandb(wandb)
    monkeypatch.setattr(process_settings, "_warned", {})
    both = threading.Barrier(2)

    def objective(trial):
        both.wait(60)
        wandb.init()
        wandb.init(reinit="create_new")
        random.seed(trial.number)
        numpy.random.seed(trial.number)
        if trial.number == 0:
            torch.set_default_dtype(torch.float64)
            torch.set_default_dtype(torch.float32)
        both.wait(60)

    def alone(_):
        wandb.init()
        random.seed(0)
        numpy.random.seed(0)

    with caplog.at_level(logging.WARNING, "hydra_tune"):
        side_by_side(alone)
        assert not [text for text in caplog.messages if "whole process" in text]
        side_by_side(objective, objective)
    found = [text for text in caplog.messages if "whole process" in text]
    names = ["numpy.random.seed", "random.seed", "torch.set_default_dtype", "wandb.init"]
    assert sorted(text.split(",")[0] for text in found) == [f"a trial calls {name}" for name in names]
