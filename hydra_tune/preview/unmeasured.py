"""Finds what a first step needs that found no room, once its search is over: for the closing summary.

While the error is on its way the step's model and inputs are alive. The model is copied without its weights, so that
all that such a copy takes is its buffers and the inputs. After the search it gets weights again, of any value, for
a rehearsal.
"""

from __future__ import annotations

import time
from contextlib import suppress

import torch
from torch import nn

from hydra_tune.devices.open_devices import host_free_bytes
from hydra_tune.planning.known_steps import RefusedStep
from hydra_tune.preview.feeding import Arguments, batch_copy, copies_of
from hydra_tune.preview.least_budget import least_rehearsal
from hydra_tune.preview.rehearsal import Script, process_untouched
from hydra_tune.sharing.shared_parameter import SharedParameter

_DEVIATION = 0.02  # of weights that are made up
_MOST_BYTES = 2 << 30  # of weights: the host takes minutes for a step of a larger model


def script_of(step: RefusedStep) -> Script | None:
    """What a rehearsal of the step needs; None if some of it is gone, or cannot be copied: the error that is on its way
    goes before any other."""
    if (alive := step.alive()) is None:
        return None
    try:
        with torch.no_grad():
            # memory that nobody has written yet takes none
            weights = {
                id(p): nn.Parameter(torch.empty_like(p, device="cpu"), p.requires_grad)
                for p in alive.model.parameters()
                if type(p) in (nn.Parameter, SharedParameter)
            }
            model, optimizer = copies_of(alive.model, alive.optimizer, weights)
            call = Arguments(*batch_copy((alive.args, alive.kwargs)))
    except Exception:
        return None
    batch, eval_batch = (call, None) if step.trains else (None, call)
    return Script(model, optimizer, batch, eval_batch, None, step.counts_as_gpu)


def least_bytes(script: Script, until_s: float) -> int | None:
    """The least budget in which the script runs; None if none was found until then, by `time.monotonic`, or if the
    model is too large for a rehearsal, or does not run with weights that are made up."""
    weights = list(script.model.parameters())
    free_bytes = host_free_bytes()
    if time.monotonic() > until_s or sum(p.nbytes for p in weights) > min(_MOST_BYTES, free_bytes // 8):
        return None
    with suppress(Exception), process_untouched(), torch.no_grad():
        for p in weights:
            if type(p) is nn.Parameter:
                p.normal_(0, _DEVIATION) if p.is_floating_point() else p.zero_()
        ample = script.at(free_bytes // 4, briefly=True)
        if ample.refusal is None and ample.needs is not None:
            least = least_rehearsal(script, ample, until_s)
            return None if least is ample else least.budget_bytes
    return None
