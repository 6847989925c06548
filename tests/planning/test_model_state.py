"""The look at a model before each forward: it walks as PyTorch does, and sees whatever may ask for another plan."""

import pytest
import torch
from torch import nn

from awkward import WIDTH
from hydra_tune.planning.fingerprint import model_state
from models import hf_gpt2
from zoo import ZOO


@pytest.mark.parametrize("name", ["gpt2", "albert", "repeated", "tied_parameter", "unet"])
def test_it_walks_as_pytorch_does(name):
    """Some of these have one module, or one parameter, in two places."""
    model = ZOO[name].build()
    modules = list(model.modules())
    glance = model_state(model)
    switches = map(dict, glance.switches[: len(modules)])
    assert [own["training"] for own in switches] == [module.training for module in modules]
    assert {number for *_, number in glance.parameters} == set(map(id, model.parameters()))
    sites = [(i, n) for i, module in enumerate(modules) for n, p in module._parameters.items() if p is not None]
    assert [(place, n) for place, n, *_ in glance.parameters] == sites


CHANGES = {
    "parameters": lambda model: setattr(model.transformer.h[1].ln_1, "weight", nn.Parameter(torch.ones(WIDTH))),
    "parameters, by what they require": lambda model: model.transformer.wte.weight.requires_grad_(False),
    "buffers": lambda model: model.transformer.h[0].register_buffer("more", torch.zeros(2)),
    "switches, training mode": lambda model: model.transformer.h[2].eval(),
    "switches of a config": lambda model: setattr(model.config, "output_hidden_states", True),
}


@pytest.mark.parametrize("what", CHANGES)
def test_it_sees_each_change_and_nothing_else(what):
    model = hf_gpt2()
    before = model_state(model)
    assert model_state(model) == before
    CHANGES[what](model)
    after = model_state(model)
    changed = {key for key, value in after._asdict().items() if value != getattr(before, key)}
    also = {"parameters": {"switches"}}.get(what, set())  # that come with it
    named = what.replace(",", "").partition(" ")[0]
    assert {named} <= changed <= {named} | also
