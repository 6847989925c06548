"""Lightning's Trainer over a pool, by `HydraLightningCallback` alone: each equal to itself without it, bitwise."""

import ast
import logging
import signal
import threading
from pathlib import Path

import optuna
import pytest
import torch
from torch import nn

import hydra_tune
from hydra_tune.blocks.root import trial_of
from hydra_tune.integrations.frameworks import current_trial, framework_checkpoints, process_settings
from hydra_tune.planning.planner import Planner
from paths import run_in_a_process

lightning = pytest.importorskip("lightning")
lightning_callback = pytest.importorskip("hydra_tune.integrations.lightning_trainer.lightning_callback")

from lightning.pytorch.callbacks import (  # noqa: E402
    EarlyStopping,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from hydra_tune.integrations.lightning_trainer import trainer_events  # noqa: E402
from hydra_tune.integrations.lightning_trainer.several_optimizers import SeveralOptimizers  # noqa: E402
from lightning_modules import (  # noqa: E402
    CLASSES,
    RESIDENT,
    SPILLED,
    WIDTH,
    ByHand,
    Classifier,
    Copies,
    Draws,
    Gan,
    ItselfAndParts,
    Layer,
    Measured,
    PartsOnly,
    Plateau,
    Scheduled,
    TrainsSome,
    Unfreezes,
    WithAnExample,
    equal,
    in_pool,
    left_by,
    loaders,
    trained,
    trainer,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),  # Lightning's advice on speed, on logging
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval.*"),
    pytest.mark.filterwarnings("ignore:.*training_step. returned .None.*"),
    pytest.mark.filterwarnings("ignore:.*tensorboardX. has been removed.*"),
    pytest.mark.filterwarnings("ignore:.*Consider setting `persistent_workers=True`.*"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),  # which Lightning asks still
    pytest.mark.filterwarnings("ignore:.*exists and is not empty.*"),  # a folder, on purpose
]
BUDGETS = {"spilled": SPILLED, "resident": RESIDENT}
MODULES = [Classifier, PartsOnly, ItselfAndParts, Gan, ByHand, Scheduled, Plateau, Measured, Draws]
FEATURES = {
    "accumulation and clipping": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "bf16-mixed": {"precision": "bf16-mixed", "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "validation in the epoch": {"val_check_interval": 2, "max_epochs": 1},
    "steps, not epochs": {"max_steps": 5, "max_epochs": -1},
    "early stopping": {"more": [lambda: EarlyStopping("val_loss", patience=1)], "max_epochs": 4},
    "weight averaging": {"more": [lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1)], "max_epochs": 3},
    "unfreezing": {"more": [Unfreezes], "make": TrainsSome},
    "a copy": {"more": [Copies]},
    "a summary": {"enable_model_summary": True, "make": WithAnExample, "max_epochs": 1},
    "detect_anomaly": {"detect_anomaly": True, "max_epochs": 1},
}


@pytest.fixture(autouse=True)
def _silent():
    """It logs what a Trainer uses, once for each."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning")]
    before = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    yield
    for each, level in zip(loggers, before, strict=True):
        each.setLevel(level)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    """Where a Trainer would write that is told of none."""
    monkeypatch.chdir(tmp_path)


def searched(objective, n_trials, budget=SPILLED, concurrency=None, study=None, **options):
    study = study or optuna.create_study(pruner=optuna.pruners.NopPruner())
    with hydra_tune.ShardPool(["cpu"], budget) as pool:
        runner = hydra_tune.HydraTrialRunner(pool, concurrency or n_trials, **options)
        try:
            runner.optimize(study, objective, n_trials=n_trials)
        finally:
            assert pool.devices[0].used_bytes == 0
    return study.trials


# ---- a training by itself ----


def over_a_base(build):
    """A module whose layers come from `build`, frozen; its head is trained."""
    torch.manual_seed(1)
    module = TrainsSome()
    module.layers = build()
    module.layers.requires_grad_(False)
    return module


def base():
    torch.manual_seed(2)
    return Classifier().layers


@pytest.mark.parametrize("budget", [SPILLED, RESIDENT], ids=["spilled", "resident"])
def test_a_base_that_several_trials_share(budget):
    """It was refused: its Parameters are of a class that guards the base."""

    def train(callbacks, build):
        torch.manual_seed(0)
        module = over_a_base(build)
        torch.manual_seed(0)
        used = trainer(callbacks)
        used.fit(module, *loaders())
        return left_by(module, used)

    found = []
    callback = hydra_tune.HydraLightningCallback()
    searched(lambda _: found.append(train([callback], lambda: hydra_tune.share(base))) or 0.0, 2, budget, 1)
    wanted = train([], base)
    assert equal(found[0], wanted) and equal(found[1], wanted)


@pytest.mark.sample(2)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("make", MODULES, ids=lambda make: make.__name__)
def test_a_module(make, budget):
    alone = trained(make=make)
    found, (trial,) = in_pool(BUDGETS[budget], trained, make=make)
    assert equal(found, alone) and len(alone[0]) >= 8
    assert trial["resident"] == (budget == "resident") and (budget == "resident" or len(trial["shards"]) > 1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_of_the_trainer(feature, budget):
    options = FEATURES[feature]
    assert equal(in_pool(BUDGETS[budget], trained, **options)[0], trained(**options))


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_scaler(budget):
    """Of `16-mixed`, which Lightning gives to no CPU itself."""

    def options():
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        return {"plugins": MixedPrecision("16-mixed", "cpu", scaler), "gradient_clip_val": 0.1, "max_epochs": 1}

    assert equal(in_pool(BUDGETS[budget], trained, **options())[0], trained(**options()))


def test_a_step_is_one_forward():
    """The pool sees a batch's step as one, however often it calls the module, and whichever number it has."""
    _, (trial,) = in_pool(RESIDENT, trained, make=Gan, num_sanity_val_steps=0, limit_val_batches=0)
    assert trial["steps"] == 8


@pytest.mark.parametrize("budget", BUDGETS)
def test_evaluation_and_prediction_without_training(budget):
    def evaluated(callbacks):
        torch.manual_seed(0)
        module, used, (_, loader) = Classifier(), trainer(callbacks, max_epochs=1), loaders()
        metrics = [used.validate(module, loader, verbose=False), used.test(module, loader, verbose=False)]
        predicted = used.predict(module, loader)
        used.fit(module, *loaders())
        return [*metrics, used.test(module, loader, verbose=False)], predicted, left_by(module, used)

    metrics, predicted, left = evaluated([])
    (found, predictions, found_left), trials = in_pool(BUDGETS[budget], evaluated)
    assert found == metrics and all(map(torch.equal, predictions, predicted)) and equal(found_left, left)
    assert len(trials) == 5 and all(trial["promoted_bytes"] for trial in trials)


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need.*")  # not what is tested
@pytest.mark.parametrize("budget", BUDGETS)
def test_checkpoints_of_lightning_are_written_and_gone_on_from(tmp_path, budget):
    """Each by the other kind of Trainer, too."""

    def train(callbacks, goes_on, folder):
        torch.manual_seed(0)
        kept = ModelCheckpoint(tmp_path / folder, monitor="val_loss", save_top_k=2, save_last=True)
        module, used = Classifier(), trainer([*callbacks, kept], enable_checkpointing=True)
        used.fit(module, *loaders())
        tested = used.test(ckpt_path="best", dataloaders=loaders()[1], verbose=False)
        other, last = trainer(goes_on, max_epochs=3), Classifier()
        other.fit(last, *loaders(), ckpt_path=tmp_path / folder / "last.ckpt")
        files = sorted(path.name for path in (tmp_path / folder).iterdir())
        return tested, files, left_by(last, other)

    tested, files, left = train([], [], "alone")
    with hydra_tune.ShardPool(["cpu"], BUDGETS[budget]) as pool:
        ours = [hydra_tune.HydraLightningCallback(pool)]
        for first, second in ((ours, []), ([], ours)):
            found, found_files, found_left = train(first, second, f"ours {len(first)}")
            assert found == tested and found_files == files and equal(found_left, left)


def test_a_learning_rate_is_found():
    from lightning.pytorch.tuner import Tuner

    def found_by(callbacks):
        torch.manual_seed(0)
        module, used = Classifier(), trainer(callbacks, max_epochs=1)
        found = Tuner(used).lr_find(module, *loaders(), num_training=5)
        used.fit(module, *loaders())
        return found.results, left_by(module, used)

    results, left = found_by([])
    (found, found_left), _ = in_pool(SPILLED, found_by)
    assert found == results and equal(found_left, left)


def test_loaders_that_a_module_makes_and_one_callback_for_several_trainers():
    class Loads(Classifier):
        def train_dataloader(self):
            return loaders()[0]

        def val_dataloader(self):
            return loaders()[1]

    def train(callbacks):
        torch.manual_seed(0)
        left = []
        for _ in range(2):
            module, used = Loads(), trainer(callbacks, max_epochs=1)
            used.fit(module)
            used.fit(module)
            left += left_by(module, used)[0]
        return left

    assert in_pool(SPILLED, train)[0] == train([])


def test_the_other_package():
    """`pytorch_lightning` has a Trainer and a Callback of its own."""
    pytorch_lightning = pytest.importorskip("pytorch_lightning")

    class Module(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers, self.head = nn.Sequential(*[Layer() for _ in range(8)]), nn.Linear(WIDTH, CLASSES)
            self.losses = []

        def training_step(self, batch, batch_idx):
            loss = nn.functional.cross_entropy(self.head(self.layers(batch[0])), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    def train(callbacks):
        torch.manual_seed(0)
        module, used = Module(), trainer(callbacks, pytorch_lightning.Trainer, max_epochs=1)
        used.fit(module, loaders()[0])
        return left_by(module, used)

    found, (trial,) = in_pool(SPILLED, train)
    assert equal(found, train([])) and not trial["resident"]


def test_fabric():
    """Prepared before `setup`, which is to move nothing."""

    def train(prepare):
        torch.manual_seed(0)
        fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        inner = Classifier()
        optimizer = torch.optim.AdamW(inner.parameters(), lr=0.01)
        prepare(inner, optimizer)
        model, optimizer = fabric.setup(inner, optimizer, move_to_device=False)
        losses = []
        for x, y in fabric.setup_dataloaders(loaders()[0]):
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if trial_of(inner) is not None:
            hydra_tune.release(inner)
        return losses, [t.clone() for t in inner.state_dict().values()]

    losses, weights = train(lambda *_: None)
    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool:
        found, found_weights = train(lambda *given: hydra_tune.prepare(*given, pool=pool))
        assert not pool.report()["trials"][0]["resident"]
    assert found == losses and all(map(torch.equal, found_weights, weights))


# ---- where the module is, and what is left ----


def test_a_module_never_goes_to_a_device_as_a_whole():
    """Lightning moves it before the first batch."""

    class Moves(Classifier):
        told = ()

        def to(self, *args, **kwargs):
            self.told += ((*args, *kwargs.values()),)
            return super().to(*args, **kwargs)

    plain, ours = Moves(), Moves()
    trainer(max_epochs=1).fit(plain, *loaders())
    in_pool(SPILLED, lambda callbacks: trainer(callbacks, max_epochs=1).fit(ours, *loaders()))
    assert plain.told and not ours.told


class Raises(lightning.Callback):
    def __init__(self, error):
        self.error = error

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 2:
            raise self.error


@pytest.mark.parametrize("error", [ZeroDivisionError, hydra_tune.TrialStopped, optuna.TrialPruned])
def test_after_an_error_no_byte_is_left_and_the_module_is_plain(error):
    module = Classifier()
    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool:
        used = trainer([hydra_tune.HydraLightningCallback(pool), Raises(error("x"))])
        with pytest.raises(error):
            used.fit(module, *loaders())
        assert trial_of(module) is None and "forward" not in vars(module) and pool.devices[0].used_bytes == 0
        assert not any(each._optimizer_step_pre_hooks for each in used.optimizers)


def test_ctrl_c_in_a_search_is_the_search_s():
    """Lightning would ignore the signal from then on, and end the process."""
    study = optuna.create_study()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

    def objective(_):
        trainer([hydra_tune.HydraLightningCallback(), Raises(KeyboardInterrupt())]).fit(Classifier(), *loaders())

    try:
        with pytest.raises(KeyboardInterrupt):
            searched(objective, 3, concurrency=1, study=study)
        assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert [trial.state.name for trial in study.trials] == ["FAIL"]


def test_a_forward_of_the_module_s_own_and_hooks_on_it_stay_who_they_are():
    def train(callbacks):
        torch.manual_seed(0)
        module, calls = Classifier(), []
        module.forward = lambda x: module.head(module.layers(2 * x))
        module.register_forward_hook(lambda *_: calls.append(0))
        own, used = module.forward, trainer(callbacks, max_epochs=1)
        used.fit(module, *loaders())
        assert vars(module)["forward"] is own
        return left_by(module, used), len(calls)

    (found, found_calls), _ = in_pool(SPILLED, train)
    left, calls = train([])
    assert found_calls == calls > 0 and equal(found, left)


# ---- refused ----


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "ddp"}, "DDPStrategy and 1 device"),
        ({"devices": 2}, "DDPStrategy and 2 device"),
        ({"precision": "bf16-true"}, "HalfPrecision"),
        ({"precision": "64-true"}, "DoublePrecision"),
    ],
)
def test_an_argument_that_contradicts_the_pool_is_refused_by_name(options, words):
    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool, pytest.raises(hydra_tune.ConfigError, match=words):
        trainer([hydra_tune.HydraLightningCallback(pool)], **options)


def test_several_optimizers_are_one_to_the_pool():
    """On a GPU their states move with the weights, and each one's step is heard of."""
    parts, heard = [nn.Linear(2, 2) for _ in range(2)], []
    optimizers = [torch.optim.Adam(part.parameters()) for part in parts]
    several = SeveralOptimizers.of(optimizers)
    handle = several.register_step_post_hook(lambda *_: heard.append(0))

    def step():
        for part, optimizer in zip(parts, optimizers, strict=True):
            part(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    step()
    optimizers[1].load_state_dict(optimizers[1].state_dict())  # which makes the state another object
    weights = [p for part in parts for p in part.parameters()]
    assert [p for group in several.param_groups for p in group["params"]] == weights
    for optimizer in optimizers:
        for p, values in optimizer.state.items():
            assert several.state.get(p) is values
    assert len(several.state) == len(weights) and len(heard) == 2
    handle.remove()
    step()
    assert len(heard) == 2
    assert SeveralOptimizers.of(optimizers[:1]) is optimizers[0]
    assert SeveralOptimizers.of([]) is None


def test_a_trainer_on_another_kind_of_device_is_refused(monkeypatch):
    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool:
        monkeypatch.setattr(pool.devices[0], "torch_device", torch.device("cuda", 0))
        with pytest.raises(hydra_tune.ConfigError, match=r'the pool has cuda and the Trainer cpu.*accelerator="gpu"'):
            trainer([hydra_tune.HydraLightningCallback(pool)])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated.*")  # which torch.compile itself imports
def test_a_compiled_module_and_a_callback_that_comes_late_are_refused():
    class Configures(Classifier):
        def configure_callbacks(self):
            return [hydra_tune.HydraLightningCallback()]

    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool:
        used = trainer([hydra_tune.HydraLightningCallback(pool)])
        with pytest.raises(hydra_tune.PrepareError, match=r"Classifier was given to torch\.compile"):
            used.fit(torch.compile(Classifier()), *loaders())
    with pytest.raises(hydra_tune.ConfigError, match="as it is made"):
        trainer().fit(Configures(), *loaders())
    with pytest.raises(hydra_tune.ConfigError, match="pool is a ShardPool or None, got int"):
        hydra_tune.HydraLightningCallback(3)


# ---- a search ----


@pytest.mark.parametrize("budget", BUDGETS)
def test_four_side_by_side(budget):
    """Two are stepped by hand, and one is in another precision."""
    cases = [{"make": Gan}, {"make": ByHand}, {"precision": "bf16-mixed"}, {}]
    alone, together = [trained(**case) for case in cases], {}

    def objective(trial):
        callbacks = [hydra_tune.HydraLightningCallback]
        together[trial.number] = trained(callbacks, **cases[trial.number])
        return 0.0

    searched(objective, 4, BUDGETS[budget])
    assert [equal(together[number], alone[number]) for number in range(4)] == [True] * 4


def test_each_validation_is_reported_and_the_pruner_is_asked():
    class Prunes(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return trial.number == 1 and trial.last_step == 8

    losses = {}

    class Notes(lightning.Callback):
        def on_validation_end(self, trainer, module):
            if not trainer.sanity_checking:
                module.validated[trainer.global_step] = trainer.callback_metrics["val_loss"].item()

    def objective(trial):
        module = Classifier()
        module.validated = losses[trial.number] = {}
        try:
            trainer([Notes(), hydra_tune.HydraLightningCallback()], max_epochs=3).fit(module, *loaders())
        finally:
            assert trial_of(module) is None
        return 0.0

    trials = searched(objective, 2, study=optuna.create_study(pruner=Prunes()))
    assert [trial.state.name for trial in trials] == ["COMPLETE", "PRUNED"]
    assert [trial.intermediate_values for trial in trials] == [losses[0], losses[1]]
    assert list(losses[0]) == [4, 8, 12] and list(losses[1]) == [4, 8]


class PyTorchLightningPruningCallback(lightning.Callback):
    __module__ = "optuna_integration.pytorch_lightning.pytorch_lightning"


def test_the_metric_that_is_reported(caplog):
    class Accurate(Classifier):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.log("accuracy", 0.5)

    def reported(direction, *more):
        def objective(_):
            callbacks = [hydra_tune.HydraLightningCallback(), *more]
            trainer(callbacks, max_epochs=1).fit(Accurate(depth=2), *loaders())
            return 0.0

        study = optuna.create_study(direction=direction, pruner=optuna.pruners.NopPruner())
        (trial,) = searched(objective, 1, study=study)
        return trial.intermediate_values

    assert list(reported("minimize")) == [4]
    assert reported("maximize", EarlyStopping("accuracy", mode="max")) == {4: 0.5}
    assert reported("minimize", PyTorchLightningPruningCallback()) == {}, "it reports by itself"
    assert reported("maximize") == {} and "nothing is reported to the pruner" in caplog.text


def test_first_steps_are_made_once_for_all_trials(monkeypatch):
    """What Lightning notes in a module at each step, its metrics and its rate made it another model each time."""
    made, begin = [], Planner.begin
    monkeypatch.setattr(
        Planner, "begin", lambda planner, kind, *given: made.append(kind) or begin(planner, kind, *given)
    )

    def objective(trial):
        module = Measured()
        module.lr = 0.01 * (1 + trial.number)
        trainer([hydra_tune.HydraLightningCallback()]).fit(module, *loaders())
        return 0.0

    searched(objective, 3, concurrency=1)
    assert [kind.trains for kind in made] == [False, True]


def test_a_module_stays_where_it_is_while_it_trains():
    class Moves(Classifier):
        def on_train_epoch_end(self):
            self.double()

    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool:
        used = trainer([hydra_tune.HydraLightningCallback(pool)], limit_val_batches=0)
        with pytest.raises(hydra_tune.PrepareError, match="Convert the model before prepare"):
            used.fit(Moves(), *loaders())
        module = hydra_tune.prepare(Classifier(), pool=pool)
        with pytest.raises(hydra_tune.PrepareError, match=r"Leave hydra_tune\.prepare out"):
            used.fit(module, *loaders())
        assert trial_of(module) is not None


def test_ray_tune_gets_all_metrics(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(trainer_events, "report", lambda *given, **_: told.append(given))
    monkeypatch.setattr(framework_checkpoints, "_ray_trial_id", lambda: "a1b2_00000")
    with hydra_tune.ShardPool(["cpu"], RESIDENT) as pool, current_trial.running():
        used = trainer([hydra_tune.HydraLightningCallback(pool)], default_root_dir=tmp_path)
        used.fit(Measured(), *loaders())
    assert used.default_root_dir == str(tmp_path / "run-a1b2_00000")
    assert [step for _, step, _ in told] == [4, 8] and [value for value, *_ in told] == [
        m["val_loss"] for *_, m in told
    ]
    assert {"val_loss", "val_MulticlassAccuracy", "accuracy_step"} <= set(told[0][2])


def test_each_trial_writes_to_a_folder_of_its_own(tmp_path):
    def objective(_):
        ours, kept = hydra_tune.HydraLightningCallback(), ModelCheckpoint(tmp_path / "given", save_last=True)
        given = {"enable_checkpointing": True, "default_root_dir": tmp_path / "root", "max_epochs": 1}
        trainer([ours, kept], logger=CSVLogger(tmp_path / "csv"), **given).fit(Classifier(depth=1), *loaders())
        given |= {"limit_val_batches": 0}  # a step is reported once
        trainer([ours], logger=CSVLogger(str(tmp_path)), **given).fit(Classifier(depth=1), *loaders())
        used = trainer([ours], **given)
        for _ in range(2):
            used.fit(Classifier(depth=1), *loaders())
        return 0.0

    searched(objective, 2, RESIDENT)
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    of_trial = [[file for file in files if f"run-{number}" in file] for number in range(2)]
    assert sorted([*of_trial[0], *of_trial[1]]) == files
    assert [file.replace("run-1", "run-0") for file in of_trial[1]] == of_trial[0]
    folders = {"given/run-0", "csv/run-0/lightning_logs/version_0", "run-0/lightning_logs/version_0/checkpoints",
               "root/run-0/checkpoints"}  # fmt: skip
    assert folders <= {str(Path(file).parent) for file in of_trial[0]}


def test_what_is_for_the_whole_process_is_warned_of_by_name(caplog, monkeypatch):
    """Where others run, too."""
    monkeypatch.setattr(process_settings, "_warned", {})
    monkeypatch.setattr(process_settings, "runs_beside_others", lambda: True)
    monkeypatch.setattr(lightning_callback, "runs_beside_others", lambda: True)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0"), monkeypatch.setenv("PL_SEED_WORKERS", "0")
    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool:
        trainer([hydra_tune.HydraLightningCallback(pool)], detect_anomaly=True)
        lightning.seed_everything(0, verbose=False), lightning.pytorch.seed_everything(0, verbose=False)
    assert caplog.text.count("Trainer(detect_anomaly=...)") == caplog.text.count("a trial calls seed_everything") == 1


# ---- after a kill ----


class AsksForSteps(Plateau):
    """As schedules are often made: the Trainer makes its loader's iterator for it, before anything is restored."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


@pytest.mark.parametrize("kind", [Plateau, AsksForSteps])
def test_a_training_that_was_interrupted_goes_on_with_the_same_numbers(tmp_path, kind):
    """With the order of the data, the dropout, schedules, early stopping and best checkpoints of one that was not."""
    left, study = {}, optuna.create_study(pruner=optuna.pruners.NopPruner())

    class Interrupts(lightning.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            if trainer.global_step == 10 and module.is_interrupted:
                raise KeyboardInterrupt

    def objective(trial):
        torch.manual_seed(0)
        module, kept = kind(depth=4), ModelCheckpoint(monitor="val_loss", save_top_k=2)
        module.is_interrupted = trial.number == 1
        more = [kept, EarlyStopping("val_loss", patience=2), Interrupts()]
        options = {"max_epochs": 4, "gradient_clip_val": 0.5, "enable_checkpointing": True}
        used = trainer([hydra_tune.HydraLightningCallback(), *more], **options)
        used.fit(module, *loaders())
        losses, metrics, tensors = left_by(module, used)
        left[trial.number] = losses[-3:], metrics, tensors, used.global_step, kept.best_model_score
        return 0.0

    def search(n_trials):
        options = {"study": study, "concurrency": 1, "checkpoint_dir": tmp_path / "checkpoints", "checkpoint_every": 3}
        return searched(objective, n_trials, **options)

    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            search(2)
    finally:
        signal.signal(signal.SIGINT, before)
    *_, trial = search(1)
    assert trial.number == 2 and trial.user_attrs["hydra_tune: resumed at step"] == 8
    assert left[0][0] == left[2][0] and left[0][1] == left[2][1] and left[0][3:] == left[2][3:]
    assert all(map(torch.equal, left[0][2], left[2][2])) and not list((tmp_path / "checkpoints").rglob("*.ckpt"))


def test_a_clone_begins_with_the_weights_of_its_trial(tmp_path):
    """Which are written where no step is under way, and read as the clone is prepared; after an interruption it goes on
    from a checkpoint of its own."""
    begun = {}

    class Clones(lightning.Callback):
        def on_train_start(self, trainer, module):
            begun[module.number] = [p.detach().clone() for p in module.parameters()]

        def on_train_epoch_start(self, trainer, module):
            if module.number == 0 and trainer.current_epoch == 1:
                begun["at its clone"] = [p.detach().clone() for p in module.parameters()]
                thread = threading.Thread(target=runner.clone, args=(0,), kwargs={"lr": 0.5})
                thread.start()
                thread.join()
            if module.number == 1 and trainer.current_epoch == 1:
                begun["at its interruption"] = [p.detach().clone() for p in module.parameters()]
                raise KeyboardInterrupt

    def objective(trial):
        module = Classifier(lr=trial.suggest_float("lr", 0.0, 1.0), depth=4)
        module.number = trial.number
        trainer([hydra_tune.HydraLightningCallback(), Clones()], limit_val_batches=0).fit(module, *loaders())
        return 0.0

    before, study = signal.getsignal(signal.SIGINT), optuna.create_study()
    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool:
        runner = hydra_tune.HydraTrialRunner(pool, 1, checkpoint_dir=tmp_path, checkpoint_every=4)
        try:
            with pytest.raises(KeyboardInterrupt):
                runner.optimize(study, objective, n_trials=2)
        finally:
            signal.signal(signal.SIGINT, before)
        runner.optimize(study, objective, n_trials=1)
    assert all(map(torch.equal, begun[1], begun["at its clone"])) and not torch.equal(begun[0][0], begun[1][0])
    assert all(map(torch.equal, begun[2], begun["at its interruption"]))


SCRIPT = """
import logging, os, signal, sys
import optuna, torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
import lightning, hydra_tune
from lightning_modules import SPILLED, Plateau, left_by, loaders, trainer
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)
folder, kills = sys.argv[1], int(sys.argv[2])

class Kills(lightning.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == kills and trainer.max_epochs == 4:
            os.kill(os.getpid(), signal.SIGKILL)

def objective(trial):
    left = []
    for epochs in (2, 4):  # two trainings: the second goes on from none of the first's
        module, kept = Plateau(depth=6), ModelCheckpoint(monitor="val_loss", save_top_k=2)
        more = [kept, EarlyStopping("val_loss", patience=2), Kills()]
        used = trainer([hydra_tune.HydraLightningCallback(), *more], enable_checkpointing=True, max_epochs=epochs,
                       default_root_dir=folder + "/out", gradient_clip_val=0.5)
        used.fit(module, *loaders())
        losses, metrics, tensors = left_by(module, used)
        left.append((losses[-3:], metrics, tensors, used.current_epoch, used.global_step, kept.best_model_score))
    torch.save(left, f"{folder}/result-{trial.number}.pt")
    return 0.0

study = optuna.create_study(storage=f"sqlite:///{folder}/study.db", study_name="s", load_if_exists=True,
                            pruner=optuna.pruners.NopPruner())
with hydra_tune.ShardPool(["cpu"], SPILLED, seed=3) as pool:
    runner = hydra_tune.HydraTrialRunner(pool, 2, checkpoint_dir=folder + "/checkpoints", checkpoint_every=3)
    runner.optimize(study, objective, n_trials=2)
left = [str(path) for _, _, files in os.walk(folder + "/checkpoints") for path in files if path.endswith(".ckpt")]
print([t.user_attrs.get("hydra_tune: resumed at step") for t in study.trials], left)
"""


@pytest.mark.proof
def test_a_search_that_was_killed_goes_on_with_the_same_numbers(tmp_path):
    """`kill -9` while two train: each goes on from the epoch's end at which a checkpoint was due, with the order of the
    data, the dropout, schedules, early stopping and best checkpoints of the search that nobody killed."""

    def run(folder, kills):
        folder.mkdir(exist_ok=True)
        return run_in_a_process(SCRIPT, folder, kills)

    whole = run(tmp_path / "whole", -1)
    assert whole.returncode == 0, whole.stderr
    assert ast.literal_eval("[" + whole.stdout.split("\n")[-2].replace("] [", "], [") + "]") == [[None, None], []]
    killed = run(tmp_path / "killed", 10)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run(tmp_path / "killed", -1)
    assert resumed.returncode == 0, resumed.stderr
    steps, files = ast.literal_eval("[" + resumed.stdout.split("\n")[-2].replace("] [", "], [") + "]")
    assert 8 in steps and {*steps} <= {None, 4, 8} and files == []
    for number in range(2):
        one, other = (torch.load(tmp_path / name / f"result-{number}.pt") for name in ("whole", "killed"))
        for (losses, metrics, tensors, *rest), (others, other_metrics, other_tensors, *other_rest) in zip(
            one, other, strict=True
        ):
            assert losses == others and metrics == other_metrics and rest == other_rest
            assert all(map(torch.equal, tensors, other_tensors))
