"""The package as a user meets it: imports, versions, the wheel."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hydra_tune

ROOT = Path(__file__).parent.parent


def python(code, **options):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.sample(2)
@pytest.mark.parametrize("order", [sorted, lambda names: sorted(names, reverse=True)], ids=["sorted", "reversed"])
def test_a_name_is_what_it_says_whatever_was_imported_before(order):
    """A submodule of the same name would take its place as soon as anything imports it: `prepare` once did."""
    before = "import hydra_tune.calibration, hydra_tune.simulation, hydra_tune.preparation; "
    names = ", ".join(f"hydra_tune.{name}{'.run' * (name == 'tune')}" for name in order(hydra_tune.__all__))
    assert python(before + f"print(all(map(callable, [{names}])))") == "True"


def test_import_brings_in_neither_optuna_nor_ray_nor_torch():
    assert python("import sys, hydra_tune; print(sorted({'optuna', 'ray', 'torch'} & set(sys.modules)))") == "[]"


def test_using_a_pool_brings_in_neither_optuna_nor_ray_nor_plotly():
    code = (
        "import sys, hydra_tune; hydra_tune.ShardPool, hydra_tune.prepare; "
        "print({'optuna', 'ray', 'plotly'} & set(sys.modules))"
    )
    assert python(code) == "set()"


def test_every_public_name_resolves_and_unknown_ones_do_not():
    for name in hydra_tune.__all__:
        assert getattr(hydra_tune, name) is not None
        assert name in dir(hydra_tune)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hydra_tune.nothing


def test_an_uninstalled_checkout_finds_its_integrations(tmp_path):
    code = "import hydra_tune.integrations.optuna_runner as m; print(m.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert python(code, cwd=tmp_path, env=environment) == str(ROOT / "integrations" / "optuna_runner.py")


def test_the_wheel_holds_the_packages_and_the_typing_marker(tmp_path):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        ".",
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"hydra_tune/py.typed", "hydra_tune/demo/sweep.py", "hydra_tune/integrations/optuna_runner.py"} <= names
    assert not any(n.startswith(("tests", "benchmarks", "integrations")) for n in names)
    unpacked = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(unpacked)
    code = "import hydra_tune; print(hydra_tune.HydraTrialRunner.__module__, len(hydra_tune.__path__))"
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    assert python(code, cwd=tmp_path, env=environment) == "hydra_tune.integrations.optuna_runner 1"


@pytest.mark.parametrize(
    "name",
    [
        *["schedule", "slots", "state", "events", "progress", "ready", "policy", "ledger", "config", "errors", "shard"],
        *["workload", "cost", "sweeps", "exact", "milp", "baselines", "replay", "simulation"],
    ],
)
def test_the_pure_column_knows_no_torch_thread_or_clock(name):
    source = (ROOT / "hydra_tune" / f"{name}.py").read_text()
    for module in ("torch", "threading", "time"):
        assert f"import {module}" not in source
        assert f"from {module}" not in source


def test_only_devices_name_cuda():
    """`trial_state` stands for CUDA's default generators as well, and must name them."""
    allowed = {"cuda_device.py", "devices.py", "trial_state.py"}
    for path in (*(ROOT / "hydra_tune").glob("*.py"), *(ROOT / "hydra_tune" / "randomness").glob("*.py")):
        if path.name not in allowed:
            assert "torch.cuda" not in path.read_text(), path.name
