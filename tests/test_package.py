"""The package as a user meets it, imports, versions, the wheel; and how its code is arranged."""

import ast
import os
import subprocess
import sys
import warnings
import zipfile
from importlib import import_module
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
    before = "import hydra_tune.calibration, hydra_tune.simulation.simulate, hydra_tune.trials.preparation; "
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


def test_who_makes_the_pools_of_a_run_starts_without_torch_and_without_tune():
    """Its process imported all of Tune: 0.8 s of a CPU in each run."""
    pytest.importorskip("ray")
    module = "hydra_tune.integrations.ray_node.pool_keeper"
    code = f"import sys, {module}; print({{'torch', 'ray.tune'}} & set(sys.modules))"
    assert python(code) == "set()"


def test_every_public_name_resolves_and_unknown_ones_do_not():
    for name in hydra_tune.__all__:
        assert getattr(hydra_tune, name) is not None
        assert name in dir(hydra_tune)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hydra_tune.nothing


def test_an_uninstalled_checkout_finds_its_integrations(tmp_path):
    code = "import hydra_tune.integrations.optuna_runner.runner as m; print(m.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert python(code, cwd=tmp_path, env=environment) == str(ROOT / "integrations" / "optuna_runner" / "runner.py")


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
    runner = "hydra_tune/integrations/optuna_runner/runner.py"
    pages = {f"hydra_tune/show/report_page.{kind}" for kind in ("py", "html", "js")}
    assert {"hydra_tune/py.typed", "hydra_tune/demo/sweep.py", runner, *pages} <= names
    folders = {path.parent.relative_to(ROOT).as_posix() for path in HYDRA_TUNE.rglob("*.py")}
    assert folders <= {name.rpartition("/")[0] for name in names}, "setup.cfg names each"
    assert not any(n.startswith(("tests", "benchmarks", "integrations")) for n in names)
    unpacked = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(unpacked)
    code = "import hydra_tune; print(hydra_tune.HydraTrialRunner.__module__, len(hydra_tune.__path__))"
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    assert python(code, cwd=tmp_path, env=environment) == "hydra_tune.integrations.optuna_runner.runner 1"


HYDRA_TUNE, INTEGRATIONS = ROOT / "hydra_tune", ROOT / "integrations"
MOST_LINES, MOST_LINES_OF_A_CLASS, MOST_FILES = 400, 250, 13
# From the top of the house down. Rooms beside each other import nothing of each other.
FLOORS = [
    ["hydra_tune.cli"],
    ["hydra_tune.demo"],
    ["hydra_tune.calibration", "hydra_tune.doctor", "hydra_tune.integrations"],
    ["hydra_tune.preview"],
    ["hydra_tune.trials"],
    ["hydra_tune.checkpoints", "hydra_tune.pool"],
    ["hydra_tune.planning"],
    ["hydra_tune.sharing"],
    ["hydra_tune.blocks"],
    ["hydra_tune.devices"],
    ["hydra_tune.randomness", "hydra_tune.simulation"],
    ["hydra_tune.process", "hydra_tune.schedule", "hydra_tune.show"],
    ["hydra_tune.config"],
    ["hydra_tune.errors"],
]
# Within integrations/, likewise: each folder is of one library, or of what they have in common.
FLOORS_OF_INTEGRATIONS = [
    ["hugging_face", "lightning_trainer"],
    ["optuna_runner", "ray_tune"],
    ["ray_node"],
    ["frameworks"],
]


def test_imports_point_down():
    """Those for annotations alone, under TYPE_CHECKING, may name who calls."""
    floor_of = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    assert upward(sources(), floor_of) == []


def test_an_import_that_points_up_is_found():
    source = "def late():\n    from hydra_tune.trials import trial\n"
    floor_of = {"hydra_tune.trials": 0, "hydra_tune.blocks": 1}
    assert upward({"hydra_tune.blocks.call": source}, floor_of) == ["hydra_tune.blocks.call: hydra_tune.trials"]


def test_imports_point_down_within_integrations():
    within = "hydra_tune.integrations"
    floor_of = {f"{within}.{room}": i for i, rooms in enumerate(FLOORS_OF_INTEGRATIONS) for room in rooms}
    inside = {name: source for name, source in sources().items() if name.count(".") > 2}
    assert {name.rpartition(".")[0] for name in inside} == set(floor_of)
    assert upward(inside, floor_of, within) == []


@pytest.mark.parametrize(
    ("room", "others"),
    [
        ("hugging_face", {"lightning", "pytorch_lightning", "torchmetrics", "ray"}),
        ("lightning_trainer", {"transformers", "accelerate", "optuna", "ray"}),
        ("optuna_runner", {"transformers", "accelerate", "lightning", "pytorch_lightning", "ray"}),
        ("ray_node", {"transformers", "accelerate", "lightning", "pytorch_lightning", "optuna"}),
        ("ray_tune", {"transformers", "accelerate", "lightning", "pytorch_lightning", "optuna", "torch"}),
    ],
)
def test_an_integration_imports_its_own_library_alone(room, others):
    """A user need not have the others. Proxies of Ray's trials do without torch, whose import takes seconds."""
    for path in (INTEGRATIONS / room).glob("*.py"):
        found = {name.split(".")[0] for name in imports(ast.parse(path.read_text()))}
        assert not found & others, path.name


def sources():
    """Of each module, by its name."""
    named = {f"hydra_tune.{path.relative_to(HYDRA_TUNE)}": path for path in HYDRA_TUNE.rglob("*.py")}
    named |= {f"hydra_tune.integrations.{path.relative_to(INTEGRATIONS)}": path for path in INTEGRATIONS.rglob("*.py")}
    del named["hydra_tune.__init__.py"]  # the public names, which are found when they are asked for
    return {name.removesuffix(".py").replace("/", "."): path.read_text() for name, path in named.items()}


def upward(sources, floor_of, within="hydra_tune"):
    """Imports of a room on the same floor or above, by the module in which they are. Rooms are folders of `within`."""
    depth = within.count(".") + 2
    return [
        f"{name}: {other}"
        for name, source in sources.items()
        for room in [".".join(name.split(".")[:depth])]
        for other in sorted({".".join(i.split(".")[:depth]) for i in imports(ast.parse(source))} - {room, within})
        if other.startswith(within + ".") and floor_of[other] <= floor_of[room]
    ]


def imports(tree):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imports(node)


def test_every_module_can_be_imported():
    """mypy does not follow imports among integrations: a name that is gone would be found by a user first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries' own
        for name in sources():
            import_module(name.removesuffix(".__init__"))


def test_files_and_classes_are_short():
    """But for the machine's."""
    machine = "hydra_tune.schedule.machine"
    too_long = [
        f"{name}.{node.name}"
        for name, source in sources().items()
        if name != machine
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.end_lineno - node.lineno >= MOST_LINES_OF_A_CLASS
    ]
    assert [name for name, source in sources().items() if source.count("\n") > MOST_LINES and name != machine] == []
    assert too_long == []


def test_one_name_is_one_class():
    """Also of classes within others, and of those of each library."""
    assert doubled(sources()) == {}


def test_a_name_of_two_classes_is_found():
    found = doubled({"hydra_tune.a": "class Visit: ...", "hydra_tune.b": "def f():\n    class Visit: ..."})
    assert found == {"Visit": ["hydra_tune.a", "hydra_tune.b"]}


def doubled(sources):
    """The names of several classes, and where these are."""
    places = {}
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    return {name: modules for name, modules in places.items() if len(modules) > 1}


def test_folders_are_small():
    folders = {path.parent for path in (*HYDRA_TUNE.rglob("*.py"), *INTEGRATIONS.rglob("*.py"))}
    assert {folder.name: n for folder in folders if (n := len([*folder.glob("[!_]*.py")])) > MOST_FILES} == {}


@pytest.mark.parametrize("room", ["schedule", "simulation"])
def test_the_machine_and_its_simulation_know_no_torch_thread_or_clock(room):
    for path in (HYDRA_TUNE / room).glob("*.py"):
        roots = {name.split(".")[0] for name in imports(ast.parse(path.read_text()))}
        assert not roots & {"torch", "threading", "time"}, path.name


def test_only_devices_name_cuda():
    """`random_state` stands for CUDA's default generators as well, and must name them."""
    for path in HYDRA_TUNE.rglob("*.py"):
        if path.parent.name not in ("demo", "devices") and path.name != "random_state.py":
            assert "torch.cuda" not in path.read_text(), path.name
