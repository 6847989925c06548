"""What PyTorch keeps for the whole process, where trials run side by side in it."""

import re
import threading
from contextlib import contextmanager
from unittest import mock

import optuna
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize

import hydra_tune
from hydra_tune.blocks import ambient_settings
from models import BUDGETS, WIDTH, Layer, Net


class NotesDtype(Layer):
    seen = ()

    def forward(self, x):
        self.seen.append(torch.get_default_dtype())
        return super().forward(x)


class Switched:
    """A setting that another objective has switched while this one is between its forward and its backward."""

    def __init__(self, switch, back, kind=Layer):
        self.kind, self.forward_done, self.switched = kind, threading.Event(), threading.Event()
        self.backward_done, self.switch, self.back = threading.Event(), switch, back
        self.after = self.error = None

    def __call__(self, trial):
        if trial.number == 0:
            return self.train()
        assert self.forward_done.wait(60)
        self.switch()
        try:
            self.switched.set()
            assert self.backward_done.wait(60)
            self.after = torch.get_default_dtype(), torch._C._get_mkldnn_enabled()
        finally:
            self.back()
        return 0.0

    def train(self):
        model = hydra_tune.prepare(Net(self.kind).float())
        try:
            loss = model(torch.randn(4, WIDTH, dtype=torch.float32)).sum()
            self.forward_done.set()
            assert self.switched.wait(60)
            loss.backward()
        except RuntimeError as error:
            self.error = error
            raise
        finally:
            self.forward_done.set()
            self.backward_done.set()
        return loss.item()

    def search(self):
        study = optuna.create_study()
        with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
            hydra_tune.HydraTrialRunner(pool, 2).optimize(study, self, n_trials=2, catch=RuntimeError)
        return study.trials


def test_the_default_dtype_that_another_trial_has_set_is_not_put_back():
    """As while it loads a model in bfloat16: a backward beside it set what its forward had seen, and then back what
    it had found, which by then nobody wanted any more."""
    seen = NotesDtype.seen = []
    script = Switched(lambda: torch.set_default_dtype(torch.bfloat16), lambda: torch.set_default_dtype(torch.float32),
                      NotesDtype)  # fmt: skip
    trials = script.search()
    assert [trial.state.name for trial in trials] == ["COMPLETE", "COMPLETE"]
    assert script.after == (torch.bfloat16, True)
    assert seen[-6:] == [torch.bfloat16] * 6, "the backward's repetitions"
    assert torch.get_default_dtype() is torch.float32


def test_a_backward_that_needs_other_kernels_than_another_trial_has_set_is_refused():
    script = Switched(lambda: torch._C._set_mkldnn_enabled(False), lambda: torch._C._set_mkldnn_enabled(True))
    trials = script.search()
    assert [trial.state.name for trial in trials] == ["FAIL", "COMPLETE"]
    assert "mkldnn_enabled was True in the forward of block" in str(script.error)
    assert script.after == (torch.float32, False)
    assert torch._C._get_mkldnn_enabled()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="here is one")
def test_what_only_gpus_heed_may_be_switched_where_none_is(monkeypatch):
    """Hugging Face's CTC losses do, each time."""
    switch = torch._C._set_cudnn_enabled
    trials = Switched(lambda: switch(False), lambda: switch(True)).search()
    assert [trial.state.name for trial in trials] == ["COMPLETE", "COMPLETE"]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(ambient_settings, "_read_kernel_choices", ambient_settings._read_kernel_choices.__wrapped__)
    script = Switched(lambda: switch(False), lambda: switch(True))
    assert [trial.state.name for trial in script.search()] == ["FAIL", "COMPLETE"]
    assert "cudnn_enabled was True" in str(script.error)


def test_a_repetition_under_autocast_clears_no_other_threads_casts():
    """Who leaves a thread's outermost `torch.autocast` clears the casts of all."""

    class CastsWithin(Layer):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                x = x.float()
            return super().forward(x)

    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        model = hydra_tune.prepare(Net(CastsWithin), pool=pool)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(4, WIDTH)).sum()
        with mock.patch.object(torch, "clear_autocast_cache", side_effect=AssertionError):
            loss.backward()
        assert not torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
        hydra_tune.release(model)


def test_a_precision_that_was_set_by_operator_is_left_as_it_is():
    """PyTorch then refuses to say it for all."""
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    try:
        with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
            model = hydra_tune.prepare(Net(), pool=pool)
            model(torch.randn(4, WIDTH)).sum().backward()
            hydra_tune.release(model)
        assert torch.backends.cudnn.conv.fp32_precision == "ieee"
    finally:
        torch.backends.cudnn.conv.fp32_precision = "none"


def priorities():
    """All are allowed, as ever."""
    kinds = "MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"
    return sdpa_kernel([getattr(SDPBackend, kind) for kind in kinds], set_priority=True)


@contextmanager
def precision():
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("chosen", "name"),
    [
        pytest.param(lambda: sdpa_kernel(SDPBackend.MATH), "flash_sdp_enabled", id="attention"),
        pytest.param(priorities, "sdp_priority_order", id="priorities"),
        pytest.param(precision, "fp32_precision of mkldnn matmul", id="precision"),
    ],
)
def test_kernels_that_are_chosen_for_a_forward_alone_from_now_on_are_refused_once(chosen, name):
    """They are chosen for all threads: a repetition would choose them for its neighbours, too."""
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        model = hydra_tune.prepare(Net(), pool=pool)
        with chosen():
            model(torch.randn(4, WIDTH, dtype=next(model.parameters()).dtype)).sum().backward()
            loss = model(torch.randn(4, WIDTH, dtype=next(model.parameters()).dtype)).sum()
        with pytest.raises(RuntimeError, match=f"{re.escape(name)} was .* in the forward of block"):
            loss.backward()
        with chosen():
            loss = model(torch.randn(4, WIDTH, dtype=next(model.parameters()).dtype)).sum()
        loss.backward()
        hydra_tune.release(model)


def test_another_trials_cache_of_parametrizations_is_no_reason_to_refuse_a_model_without():
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool, parametrize.cached():
        model = hydra_tune.prepare(Net(), pool=pool)
        model(torch.randn(4, WIDTH)).sum().backward()
        assert not pool.report()["trials"][0]["resident"]
        hydra_tune.release(model)
