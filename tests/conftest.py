"""Most tests run with checks: each operator metered, freed slots poisoned, no device over its budget. Whole trainings
that are compared with plain PyTorch's run without, as users run them: the table of the zoo and `exactness/`."""

import gc
import os
import sys
import traceback
from operator import is_
from pathlib import Path

os.environ["HYDRA_TUNE_CHECKS"] = "1"  # of each test the fixture `checks` says
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in the demo: threads that wait do not spin

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_in_torch_dispatch_mode

from hydra_tune.blocks.ambient_settings import remembers_casts
from hydra_tune.devices.counting_mode import ThreadMode, TrialMode, unwatch
from hydra_tune.devices.device import Device
from hydra_tune.pool.shard_pool import ShardPool
from hydra_tune.process.fork import ForkGate


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Of two processes one has Ray, whose processes its tests count, and one the cells of one table."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0].rpartition("/")[2]
            return "ray" if file.startswith("test_ray_") else file if file == "test_exactness.py" else nodeid

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before proofs are deselected
def pytest_collection_modifyitems(items):
    """Of the cases of a test that is marked `sample(n)`, `make test` runs those the places of whose parameters add up
    to a multiple of n: each case of one parameter with one in n of another's. The rest are proofs."""
    for item in items:
        mark = item.get_closest_marker("sample")
        if mark is None:
            continue
        if sum(_place(item, *each.args[:2]) for each in item.iter_markers("parametrize")) % mark.args[0]:
            item.add_marker(pytest.mark.proof)


AS_USERS_RUN = [Path(__file__).parent / name for name in ("exactness", "test_exactness.py")]


@pytest.fixture(autouse=True)
def checks(request):
    """Off in whole trainings beside plain PyTorch's, but for those that are marked `checks`; on everywhere else."""
    off = any(request.path.is_relative_to(place) for place in AS_USERS_RUN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYDRA_TUNE_CHECKS", "0" if off and not request.node.get_closest_marker("checks") else "1")
        yield


@pytest.fixture(autouse=True, scope="module")
def what_was_imported_stays():
    """Garbage collectors need not look at it again, for which hundreds of tests would wait."""
    gc.collect()
    gc.freeze()


def _place(item, names, values):
    """Of an item's value, or values, among all."""
    names = names if isinstance(names, str) else tuple(names)
    given = item.callspec.params
    wanted = (given[names],) if isinstance(names, str) else tuple(given[name] for name in names)
    for place, value in enumerate(values):
        if isinstance(value, type(pytest.param())):
            found = value.values
        else:
            found = (value,) if isinstance(names, str) else tuple(value)
        if all(map(is_, found, wanted)):
            return place
    raise AssertionError(f"{item.nodeid} has none of the values of {names}")


@pytest.fixture(autouse=True)
def no_mode_is_left():
    """Under checks a model that is dropped without `release` leaves one, for the next prepared model to take away."""
    yield
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, TrialMode):
            unwatch(mode)
    assert not is_in_torch_dispatch_mode()
    looks_for_modes = torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.Python)
    with ThreadMode():  # leaves the thread without, or else every later test would fail
        pass
    assert not looks_for_modes, "operators of this thread look for a mode, and there is none"


@pytest.fixture(autouse=True)
def fixed_threads(request):
    """Thread counts change the last bit of LayerNorm's gradients. Two tests run side by side on two cores; a proof that
    runs alone has both."""
    alone = request.node.get_closest_marker("proof") and "PYTEST_XDIST_WORKER" not in os.environ
    torch.set_num_threads(2 if alone else 1)


@pytest.fixture(autouse=True)
def autocast_left():
    """Where a test leaves its thread within autocast, no later one forgets its casts."""
    yield
    assert not remembers_casts()


@pytest.fixture(autouse=True)
def quiet_optuna():
    """What it says of a failed trial holds the exception, and with it all that the trial had, for as long as pytest
    keeps the log."""
    optuna = sys.modules.get("optuna")
    if optuna is not None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)


@pytest.fixture(autouse=True)
def pools(monkeypatch):
    """Every pool a test makes; afterwards none has ever been over its budget, each scheduler is sound, and nobody has
    come to the gate under a pool's lock: a fork would hold it up, and wait itself for another one that needs the lock.
    Shards are promoted ahead however small they are."""
    monkeypatch.setattr(Device, "least_ahead_bytes", 1)
    made, under_lock = [], []
    original, enter = ShardPool.__init__, ForkGate.enter

    def check(pool):
        pool.close()
        pool.events.machine.validate()
        for device in pool.devices:
            assert device.peak_bytes <= device.budget_bytes, device
            if device.name.startswith("cpu"):
                assert device.measured_peak_bytes <= device.budget_bytes, device

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        made.append(self)
        while len(made) > 100 and made[0].events.closed:  # each has a thread for as long as somebody has it
            check(made.pop(0))

    def enter_without_lock(gate):
        if any(pool.events.lock._is_owned() for pool in made[-4:]):  # a test may have made hundreds, and closed them
            under_lock.append("".join(traceback.format_stack()))
        return enter(gate)

    monkeypatch.setattr(ShardPool, "__init__", init)
    monkeypatch.setattr(ForkGate, "enter", enter_without_lock)
    yield made
    for pool in made:
        check(pool)
    assert not under_lock, under_lock[0]
