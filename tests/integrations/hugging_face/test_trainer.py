"""Hugging Face's Trainer over a pool, by `HydraTrainerCallback` alone: each equal to itself without it, bitwise."""

import ast
import pickle
import signal
from pathlib import Path

import optuna
import pytest
import torch

import hydra_tune
from hydra_tune.blocks.root import trial_of
from hydra_tune.integrations.frameworks import current_trial
from paths import run_in_a_process

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer  # noqa: E402

from hugging_face import (  # noqa: E402
    DATA,
    RESIDENT,
    SPILLED,
    VOCABULARY,
    HalfTrainer,
    arguments,
    equal,
    gpt,
    llama,
    result_of,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),  # names that change in transformers 6
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]
MODES = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "fp16": {},
    "accumulation with bf16": {"gradient_accumulation_steps": 2, "bf16": True},
}
FEATURES = {
    "clipping": {"max_grad_norm": 0.01},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "NEFTune": {"neftune_noise_alpha": 5.0},
    "evaluation and the best model": {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
        "load_best_model_at_end": True, "per_device_eval_batch_size": 3,
    },
    "evaluation at the start": {"eval_strategy": "epoch", "eval_on_start": True, "num_train_epochs": 1},
    "epochs": {"max_steps": -1, "num_train_epochs": 1, "warmup_steps": 3},
    "Adafactor": {"optim": "adafactor"},
    "SGD": {"optim": "sgd"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # transformers 4 leaves there what it was told last
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(folder, callbacks, kind=Trainer, model=gpt, **options):
    trainer = kind(model(), arguments(folder, **options), train_dataset=DATA, eval_dataset=DATA[:6],
                   callbacks=callbacks)  # fmt: skip
    trainer.train()
    assert trial_of(trainer.model) is None, "released"
    return result_of(trainer)


def searched(objective, n_trials, budget=SPILLED, concurrency=None, **options):
    study = optuna.create_study(pruner=optuna.pruners.NopPruner())
    with hydra_tune.ShardPool(["cpu"], budget) as pool:
        runner = hydra_tune.HydraTrialRunner(pool, concurrency or n_trials)
        runner.optimize(study, objective, n_trials=n_trials, **options)
        assert all(device.used_bytes == 0 for device in pool.devices)
    return study.trials


@pytest.mark.parametrize("budget", [SPILLED, RESIDENT], ids=["spilled", "resident"])
@pytest.mark.parametrize("mode", MODES)
def test_three_side_by_side(tmp_path, mode, budget):
    """With accumulation they were silently wrong: accelerate's states were of all of them."""
    kind = HalfTrainer if mode == "fp16" else Trainer
    alone, together = trained(tmp_path, [], kind, **MODES[mode]), {}

    def objective(trial):
        callbacks = [hydra_tune.HydraTrainerCallback()]
        together[trial.number] = trained(tmp_path, callbacks, kind, **MODES[mode])
        return 0.0

    trials = searched(objective, 3, budget)
    assert [equal(together[number], alone) for number in range(3)] == [True] * 3
    assert len({tuple(alone[0])}) == 1 and len(alone[0]) == 4
    assert [trial.user_attrs["hydra/promoted_mib"] > 8 for trial in trials] == [budget == SPILLED] * 3


def test_bf16_beside_fp32(tmp_path):
    alone, together = [trained(tmp_path, [], bf16=bf16) for bf16 in (False, True)], {}

    def objective(trial):
        callbacks = [hydra_tune.HydraTrainerCallback]
        together[trial.number] = trained(tmp_path, callbacks, bf16=trial.number == 1)
        return 0.0

    searched(objective, 2)
    assert [equal(together[number], alone[number]) for number in range(2)] == [True, True]


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_of_the_trainer(tmp_path, feature):
    """In a plain script, over a pool of its own."""
    alone = trained(tmp_path / "alone", [], **FEATURES[feature])
    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool:
        callbacks = [hydra_tune.HydraTrainerCallback(pool)]
        assert equal(trained(tmp_path / "pool", callbacks, **FEATURES[feature]), alone)
        (trial,) = pool.report()["trials"]
        assert trial["promoted_bytes"] > 2**21 and pool.devices[0].used_bytes == 0


def test_gradient_checkpointing_is_the_pool_s(tmp_path):
    """Within a block that is repeated in its backward each layer would be repeated once more."""
    counts = []

    def count(model):
        counts.append(0)
        layer = model.transformer.h[0].mlp.c_fc
        layer.register_forward_hook(lambda *_: counts.__setitem__(-1, counts[-1] + 1))
        return model

    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool:
        for options in ({}, {"gradient_checkpointing": True}):
            callbacks = [hydra_tune.HydraTrainerCallback(pool)]
            trained(tmp_path, callbacks, model=lambda: count(gpt()), **options)
    assert counts[0] == counts[1]


def test_sizes_grouped_by_length_and_a_collator(tmp_path):
    def padded(rows):
        longest = max(len(row["input_ids"]) for row in rows)
        ids = torch.stack(
            [torch.nn.functional.pad(row["input_ids"], (0, longest - len(row["input_ids"]))) for row in rows]
        )
        return {"input_ids": ids, "labels": ids}

    data = [{"input_ids": row["input_ids"][: 3 + i % 6]} for i, row in enumerate(DATA)]
    name = "group_by_length"
    options = (
        {name: True}
        if name in transformers.TrainingArguments.__dataclass_fields__
        else {"train_sampling_strategy": "group_by_length"}
    )

    def train(callbacks):
        trainer = Trainer(gpt(), arguments(tmp_path, **options), padded, data, callbacks=callbacks)
        trainer.train()
        return result_of(trainer)

    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool:
        assert equal(train([hydra_tune.HydraTrainerCallback(pool)]), train([]))


def test_evaluation_and_prediction_without_training(tmp_path):
    """They prepare the model for as long as they take."""

    def evaluated(callbacks):
        trainer = Trainer(gpt(), arguments(tmp_path), eval_dataset=DATA[:6], callbacks=callbacks)
        metrics, predicted = trainer.evaluate(), trainer.predict(DATA[:6])
        return metrics["eval_loss"], torch.as_tensor(predicted.predictions[0])

    loss, logits = evaluated([])
    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool:
        found, predictions = evaluated([hydra_tune.HydraTrainerCallback(pool)])
        assert pool.devices[0].peak_bytes <= SPILLED and pool.devices[0].used_bytes == 0
        assert sum(trial["promoted_bytes"] for trial in pool.report()["trials"]) > 2**20
    assert found == loss and torch.equal(predictions, logits)


@pytest.mark.parametrize("rows", [8, 9])
def test_evaluation_on_data_without_a_length(tmp_path, rows):
    """Of which the last batch is not a full one: it was counted as one, as if accelerate had put no batch anywhere."""

    class Streamed(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(DATA[:rows])

    def evaluated(callbacks):
        args = arguments(tmp_path, per_device_eval_batch_size=4)
        return Trainer(gpt(), args, eval_dataset=Streamed(), callbacks=callbacks).evaluate()["eval_loss"]

    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool:
        assert evaluated([hydra_tune.HydraTrainerCallback(pool)]) == evaluated([])


def test_sequence_to_sequence_with_generation(tmp_path):
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    def train(callbacks):
        torch.manual_seed(0)
        config = T5Config(vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=128, num_layers=4, num_heads=4,
                          decoder_start_token_id=0, use_cache=False)  # fmt: skip
        options = {"predict_with_generate": True, "eval_strategy": "steps", "eval_steps": 2, "generation_max_length": 6}
        args = arguments(tmp_path, Seq2SeqTrainingArguments, **options)
        trainer = Seq2SeqTrainer(T5ForConditionalGeneration(config), args, train_dataset=DATA, eval_dataset=DATA[:4],
                                 compute_metrics=lambda p: {"sum": int(p.predictions.sum())},
                                 callbacks=callbacks)  # fmt: skip
        trainer.train()
        sums = [each["eval_sum"] for each in trainer.state.log_history if "eval_sum" in each]
        return [*result_of(trainer)[0], *sums], result_of(trainer)[1]

    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool:
        assert equal(train([hydra_tune.HydraTrainerCallback(pool)]), train([]))


def test_training_twice_and_two_trainers_with_one_callback(tmp_path):
    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool:
        callback = hydra_tune.HydraTrainerCallback(pool)

        def train(callbacks):
            trainer = Trainer(gpt(), arguments(tmp_path), train_dataset=DATA, callbacks=callbacks)
            trainer.train()
            trainer.train()
            return result_of(trainer)

        alone = train([])
        assert equal(train([callback]), alone) and equal(train([callback]), alone)


def test_the_model_is_made_for_each_training(tmp_path):
    """By `model_init`."""

    def train(callbacks):
        trainer = Trainer(args=arguments(tmp_path), model_init=lambda: gpt(), train_dataset=DATA, callbacks=callbacks)
        trainer.train()
        return result_of(trainer)

    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool:
        assert equal(train([hydra_tune.HydraTrainerCallback(pool)]), train([]))


def test_the_pool_is_told_how_many_batches_come(tmp_path, monkeypatch):
    """Of an accumulated step each counts."""
    told = []

    def prepare(model, *rest, total_steps=None, **options):
        told.append(total_steps)
        return hydra_tune.prepare(model, *rest, total_steps=total_steps, **options)

    monkeypatch.setattr("hydra_tune.integrations.hugging_face.pooled_trainer.prepare", prepare)
    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool:
        callbacks = [hydra_tune.HydraTrainerCallback(pool)]
        trained(tmp_path, callbacks, max_steps=3, gradient_accumulation_steps=2)
    assert told == [6]


# ---- where the model is ----


class Moves(torch.nn.Module):
    """Notes each device that it is told to go to."""

    def __init__(self):
        super().__init__()
        self.model, self.told = gpt(), []
        self.config = self.model.config

    def forward(self, input_ids, labels):
        return self.model(input_ids=input_ids, labels=labels)

    def to(self, *args, **kwargs):
        self.told.append((args, kwargs))
        return super().to(*args, **kwargs)


def test_a_model_is_never_told_to_go_to_a_device(tmp_path):
    """A Trainer, and then accelerate, move it whole before the first batch."""
    model, plain = Moves(), Moves()
    Trainer(plain, arguments(tmp_path), train_dataset=DATA).train()
    assert plain.told
    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool:
        trainer = Trainer(model, arguments(tmp_path), train_dataset=DATA,
                          callbacks=[hydra_tune.HydraTrainerCallback(pool)])  # fmt: skip
        trainer.train()
        trainer.evaluate(DATA[:4])
    assert not model.told


@pytest.mark.parametrize(
    ("options", "named"),
    [({"bf16_full_eval": True, "bf16": True}, "bf16_full_eval"), ({"torch_compile": True}, "torch_compile")],
)
def test_an_argument_that_contradicts_the_pool_is_refused_by_name(tmp_path, options, named, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # which TrainingArguments sets
    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool, pytest.raises(hydra_tune.ConfigError, match=named):
        Trainer(gpt(), arguments(tmp_path, **options), callbacks=[hydra_tune.HydraTrainerCallback(pool)])


def test_a_model_that_is_placed_or_quantized_is_refused_by_name(tmp_path):
    model = gpt()
    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool:
        callbacks = [hydra_tune.HydraTrainerCallback(pool)]
        model.hf_device_map = {"": 0}
        with pytest.raises(hydra_tune.PrepareError, match="without device_map"):
            Trainer(model, arguments(tmp_path), callbacks=callbacks)
        del model.hf_device_map
        model.quantization_method = "bitsandbytes"
        with pytest.raises(hydra_tune.PrepareError, match="Load it without quantization_config"):
            Trainer(model, arguments(tmp_path), callbacks=callbacks)


def test_a_callback_that_comes_too_late_is_refused(tmp_path):
    """It would train beside the pool, in silence; on a GPU the model is there by then."""
    trainer = Trainer(gpt(), arguments(tmp_path), train_dataset=DATA)
    trainer.add_callback(hydra_tune.HydraTrainerCallback())
    with pytest.raises(hydra_tune.ConfigError, match=r"got HydraTrainerCallback later"):
        trainer.train()


def test_the_arguments_are_the_user_s_own(tmp_path):
    """One object may be given to several trainers: a trial's folder and device are in a copy."""
    args, folders = arguments(tmp_path), []

    def objective(_):
        trainer = Trainer(gpt(), args, train_dataset=DATA, callbacks=[hydra_tune.HydraTrainerCallback()])
        folders.append(Path(trainer.args.output_dir).name)
        return 0.0

    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool:
        hydra_tune.HydraTrialRunner(pool, 1).optimize(optuna.create_study(), objective, n_trials=2)
    assert folders == ["run-0", "run-1"] and args.output_dir == str(tmp_path)


# ---- a search ----


def test_each_evaluation_is_reported_and_the_pruner_is_asked(tmp_path):
    class Prunes(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return trial.number == 1 and trial.last_step == 4

    study = optuna.create_study(pruner=Prunes())
    losses = {}

    def objective(trial):
        trainer = Trainer(gpt(), arguments(tmp_path, max_steps=6, eval_strategy="steps", eval_steps=2),
                          train_dataset=DATA, eval_dataset=DATA[:6],
                          callbacks=[hydra_tune.HydraTrainerCallback()])  # fmt: skip
        try:
            trainer.train()
        finally:
            losses[trial.number] = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
            assert trial_of(trainer.model) is None
        return trainer.evaluate()["eval_loss"]

    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool:
        hydra_tune.HydraTrialRunner(pool, 2).optimize(study, objective, n_trials=2)
        assert pool.devices[0].used_bytes == 0
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED"]
    assert study.trials[0].intermediate_values == losses[0] and list(losses[0]) == [2, 4, 6]
    assert list(study.trials[1].intermediate_values) == [2, 4]


def test_the_metric_that_is_reported(tmp_path, caplog):
    """The one that is named, if the study's direction is its own; a loss is nothing that a study may maximize."""

    def reported(direction, report=True, **options):
        study = optuna.create_study(direction=direction, pruner=optuna.pruners.NopPruner())
        metrics = {"eval_loss": 2.0, "eval_accuracy": 0.5, "epoch": 1.0}
        if not options:
            del metrics["eval_accuracy"]

        def objective(_):
            args = arguments(tmp_path, eval_strategy="steps", eval_steps=2, max_steps=2, **options)
            trainer = Trainer(gpt(2), args, train_dataset=DATA, eval_dataset=DATA[:2],
                              compute_metrics=(lambda _: {"accuracy": 0.5}) if options else None,
                              callbacks=[hydra_tune.HydraTrainerCallback(report=report)])  # fmt: skip
            trainer.train()
            return 0.0

        with hydra_tune.ShardPool(["cpu"], SPILLED) as pool:
            hydra_tune.HydraTrialRunner(pool, 1).optimize(study, objective, n_trials=1)
        return study.trials[0].intermediate_values

    assert reported("minimize", report=False) == {}
    assert reported("maximize", metric_for_best_model="accuracy", greater_is_better=True) == {2: 0.5}
    assert list(reported("minimize")) == [2]
    assert reported("maximize") == {} and "nothing is reported to the pruner" in caplog.text


def test_the_batch_is_halved_where_the_pool_has_no_room(tmp_path):
    """`auto_find_batch_size` knew no other errors than CUDA's."""
    options = {"auto_find_batch_size": True, "per_device_train_batch_size": 16, "max_steps": 2}

    with hydra_tune.ShardPool(["cpu"], 700_000) as pool:
        args = arguments(tmp_path, **options)
        trainer = Trainer(gpt(), args, train_dataset=DATA, callbacks=[hydra_tune.HydraTrainerCallback(pool)])
        trainer.train()
        size = trainer._train_batch_size
        assert 1 < size < 16 and pool.devices[0].used_bytes == 0
    assert len(result_of(trainer)[0]) == 2


def test_a_trainer_is_pickled_with_its_pool_s_part(tmp_path):
    """As Ray does it."""
    with current_trial.running(optuna.create_study().ask()):
        trainer = Trainer(
            gpt(2), arguments(tmp_path), train_dataset=DATA, callbacks=[hydra_tune.HydraTrainerCallback()]
        )
        copy = pickle.loads(pickle.dumps(trainer))
    assert type(copy) is type(trainer) and isinstance(copy, Trainer)


def test_an_error_in_the_loop_releases_the_model(tmp_path):
    class Fails(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            raise ZeroDivisionError

    with hydra_tune.ShardPool(["cpu"], SPILLED) as pool:
        trainer = Trainer(gpt(), arguments(tmp_path), train_dataset=DATA,
                          callbacks=[Fails(), hydra_tune.HydraTrainerCallback(pool)])  # fmt: skip
        with pytest.raises(ZeroDivisionError):
            trainer.train()
        assert trial_of(trainer.model) is None and pool.devices[0].used_bytes == 0


# ---- after a kill ----

SCRIPT = """
import os, sys, signal
import optuna, torch, transformers
import hydra_tune
from hugging_face import DATA, SPILLED, arguments, gpt, result_of
torch.set_num_threads(1)
folder, kills = sys.argv[1], int(sys.argv[2])

class Kills(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == kills:
            os.kill(os.getpid(), signal.SIGKILL)

def objective(trial):
    options = {"max_steps": 9, "gradient_accumulation_steps": 2}
    trainer = transformers.Trainer(gpt(), arguments(folder + "/out", **options), train_dataset=DATA,
                                   callbacks=[hydra_tune.HydraTrainerCallback(), Kills()])
    trainer.train()
    torch.save(result_of(trainer), f"{folder}/result-{trial.number}.pt")
    trial.set_user_attr("left", sorted(os.listdir(trainer.args.output_dir)))
    return 0.0

study = optuna.create_study(storage=f"sqlite:///{folder}/study.db", study_name="s", load_if_exists=True,
                            pruner=optuna.pruners.NopPruner())
with hydra_tune.ShardPool(["cpu"], SPILLED, seed=3) as pool:
    runner = hydra_tune.HydraTrialRunner(pool, 2, checkpoint_dir=folder + "/checkpoints", checkpoint_every=4)
    runner.optimize(study, objective, n_trials=2)
print([(t.user_attrs.get("hydra_tune: resumed at step"), t.user_attrs["left"]) for t in study.trials])
"""


@pytest.mark.proof
def test_a_search_that_was_killed_goes_on_with_the_same_numbers(tmp_path):
    """`kill -9` while two train: each goes on from the checkpoint that its Trainer wrote when the runner asked."""

    def run(folder, kills):
        folder.mkdir(exist_ok=True)
        return run_in_a_process(SCRIPT, folder, kills)

    whole = run(tmp_path / "whole", -1)
    assert whole.returncode == 0, whole.stderr
    killed = run(tmp_path / "killed", 7)
    assert killed.returncode == -signal.SIGKILL
    resumed = run(tmp_path / "killed", -1)
    assert resumed.returncode == 0, resumed.stderr
    assert whole.stdout.split("\n")[-2] == "[(None, []), (None, [])]"
    steps = {step for step, left in ast.literal_eval(resumed.stdout.split("\n")[-2]) if left == []}
    assert 12 in steps and steps <= {4, 8, 12}, steps
    for number in range(2):
        one, other = (torch.load(tmp_path / name / f"result-{number}.pt") for name in ("whole", "killed"))
        assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])
        assert one[0] == other[0]


@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_adapters_as_they_are(tmp_path, options):
    """peft asks a weight for its dtype before it drops: under autocast that was the lower precision's."""
    peft = pytest.importorskip("peft")

    def adapted():
        return peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))

    alone = trained(tmp_path, [], model=adapted, **options)
    for budget in (4_000_000, 10**8):
        with hydra_tune.ShardPool(["cpu"], budget) as pool:
            callbacks = [hydra_tune.HydraTrainerCallback(pool)]
            assert equal(trained(tmp_path, callbacks, model=adapted, **options), alone)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("order", ["pool first", "accelerate first"])
def test_a_loop_with_an_accelerator(order, precision):
    """Two in objectives side by side, with gradient accumulation."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    def train(prepare):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
        model, losses = gpt(), []
        optimizer, loader = torch.optim.AdamW(model.parameters(), lr=1e-3), DataLoader(DATA[:12], batch_size=2)
        if prepare and order == "pool first":
            hydra_tune.prepare(model, optimizer)
        wrapped, stepping, loader = accelerator.prepare(model, optimizer, loader, device_placement=[False, False, True])
        if prepare and order == "accelerate first":
            hydra_tune.prepare(model, optimizer)
        for batch in loader:
            with accelerator.accumulate(wrapped):
                loss = wrapped(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
                stepping.step()
                stepping.zero_grad()
                losses.append(loss.item())
        return losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}

    with current_trial.running(optuna.create_study().ask()):  # whose accelerate states are fresh
        alone = train(False)
    together = {}

    def objective(trial):
        together[trial.number] = train(True)
        return 0.0

    searched(objective, 2)
    assert [equal(together[number], alone) for number in range(2)] == [True, True]
