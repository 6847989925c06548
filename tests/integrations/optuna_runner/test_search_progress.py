"""What a search shows: figures in the study while trials run, a summary at the end, each ending said once."""

import logging
import pickle
import re
import threading
import time

import optuna
import pytest
import torch
from optuna.trial import TrialState

import hydra_tune
from hydra_tune.config import parse_bytes
from hydra_tune.errors import clear_frames
from hydra_tune.integrations.optuna_runner import live_attributes, search_progress
from hydra_tune.integrations.optuna_runner.outcome import Outcome
from hydra_tune.integrations.optuna_runner.search_progress import SearchProgress
from hydra_tune.planning.measurement import Measurement
from hydra_tune.preview import unmeasured
from hydra_tune.preview.rehearsal import Script
from models import BUDGETS, WIDTH, Net
from waiting import WAIT_S, wait_until


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Live figures are written as often as can be."""
    monkeypatch.setattr(live_attributes, "FIRST_S", 0.001)
    monkeypatch.setattr(live_attributes, "LEAST_PAUSE_S", 0.001)
    monkeypatch.setattr(live_attributes, "MOST_OF_A_CORE", 1.0)
    monkeypatch.setattr(live_attributes, "MOST_OF_TIME", 1.0)


def train(trial, steps=3):
    model = Net()
    model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), total_steps=steps)
    for _ in range(steps):
        loss = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def search(objective, n_trials, budget=BUDGETS["spilled"], study=None, **options):
    study = study or optuna.create_study(sampler=optuna.samplers.RandomSampler(0), study_name="digits")
    pool = hydra_tune.ShardPool(["cpu"], budget, seed=0, **options)
    hydra_tune.HydraTrialRunner(pool, 1).optimize(study, objective, n_trials)
    return study


def summary(caplog):
    (text,) = [r for r in caplog.records if re.match(r"\d+ trials? in ", r.getMessage())]
    return text


# ---- live ----


def test_figures_are_in_the_storage_while_a_trial_runs(tmp_path):
    url = f"sqlite:///{tmp_path / 'study.db'}"
    study, seen = optuna.create_study(storage=url, study_name="live"), {}

    def as_another_process_sees_it():
        (trial,) = optuna.load_study(study_name="live", storage=url).trials
        return trial.user_attrs if trial.state is TrialState.RUNNING else {}

    def objective(trial):
        value = train(trial)
        wait_until(lambda: as_another_process_sees_it().get("hydra/steps") == 3)
        seen.update(as_another_process_sees_it())
        return value

    search(objective, 1, study=study)
    assert seen["hydra/state"] == "spilled" and seen["hydra/step_ms"] > 0 and seen["hydra/peak_mib"] > 0
    told = study.trials[0].user_attrs
    assert set(seen) <= set(told) and told["hydra/promoted_mib"] >= seen["hydra/promoted_mib"] > 0
    assert {"hydra/devices", "hydra/busy_pct", "hydra/did_not_fit"} <= set(study.user_attrs)


def test_the_first_step_is_told_at_once_and_nothing_before_it_is_known(monkeypatch, tmp_path):
    """Of each trial. With SQLite a write took long, so that the next came ten seconds later; until then all were zeros,
    or a later trial had no figures."""
    monkeypatch.setattr(live_attributes, "LEAST_PAUSE_S", 3600.0)
    study = optuna.create_study(storage=f"sqlite:///{tmp_path / 'study.db'}")

    def told():
        (running,) = study.get_trials(states=[TrialState.RUNNING])
        return running.user_attrs

    def objective(trial):
        model = Net()
        model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        wait_until(lambda: "hydra/did_not_fit" in study.user_attrs)
        assert set(told()) <= {"hydra/state", "hydra/device"}
        assert not {"hydra/busy_pct", "hydra/peak_mib"} & set(study.user_attrs)
        for _ in range(2):
            model(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()
        wait_until(lambda: told().get("hydra/steps"))
        return 0.0

    search(objective, 2, study=study)
    assert [t.state for t in study.trials] == [TrialState.COMPLETE] * 2


def test_a_storage_that_fails_costs_the_live_figures_alone(monkeypatch, caplog):
    def fail(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(optuna.Study, "set_user_attr", fail)
    study = search(train, 2)
    assert [t.state for t in study.trials] == [TrialState.COMPLETE] * 2
    assert "live figures are no longer written to the study's storage (No space left on device)" in caplog.messages


def test_a_first_step_is_told_though_it_was_looked_at_before_the_plan_for_the_next(monkeypatch):
    """Between the two the figures are not known. Those of such a trial were never written."""
    monkeypatch.setattr(live_attributes, "LEAST_PAUSE_S", 3600.0)
    study, looks, figures_of = optuna.create_study(), [], live_attributes.figures_of

    def unknown_at_first(trials):
        figures = figures_of(trials)
        if figures["hydra/steps"] and len(looks) < 3:
            looks.append(1)
            return figures | {"hydra/steps": None}
        return figures

    monkeypatch.setattr(live_attributes, "figures_of", unknown_at_first)

    def objective(trial):
        value = train(trial)
        wait_until(lambda: study.get_trials(states=[TrialState.RUNNING])[0].user_attrs.get("hydra/steps"))
        return value

    search(objective, 1, study=study)
    assert looks == [1] * 3


def test_a_trials_last_figures_stay(monkeypatch):
    """Live ones that were found before its end, and written after it, took their place."""
    found, ended, figures_of = threading.Event(), threading.Event(), live_attributes.figures_of

    def late(trials):
        figures = figures_of(trials)
        if figures["hydra/steps"] == 2 and not found.is_set():
            found.set()
            assert ended.wait(WAIT_S)
        return figures

    monkeypatch.setattr(live_attributes, "figures_of", late)
    note = Outcome.note_figures
    monkeypatch.setattr(Outcome, "note_figures", lambda own: (note(own), ended.set(), time.sleep(0.2)))

    def objective(trial):
        model = hydra_tune.prepare(Net())
        for step in range(3):
            model(torch.randn(4, WIDTH)).sum().backward()
            if step == 1:
                assert found.wait(WAIT_S)
        return 0.0

    assert search(objective, 1).trials[0].user_attrs["hydra/steps"] == 3


def test_live_figures_take_a_share_of_one_core_at_most(monkeypatch):
    """Overdrawn by one write, a storage is not written to until that has come in."""
    now_s, cpu_s = [100.0], [0.0]
    monkeypatch.setattr(live_attributes.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(live_attributes.time, "thread_time", lambda: cpu_s[0])
    allowance = live_attributes._Allowance(0.01)

    def write():
        cpu_s[0] += 0.05
        raise OSError("full")

    assert allowance.is_left
    with pytest.raises(OSError, match="full"):
        allowance.spend(write)
    now_s[0] += 4.9
    assert not allowance.is_left
    now_s[0] += 0.2
    assert allowance.is_left


# ---- at the end ----


def test_a_summary_counts_how_trials_ended(caplog):
    caplog.set_level(logging.INFO, "hydra_tune")

    def objective(trial):
        if trial.number == 0:
            raise optuna.TrialPruned
        return train(trial) if trial.number == 1 else float(trial.number)

    study = search(objective, 4)
    text = summary(caplog).getMessage()
    assert ": 3 complete, 1 pruned; best " in text
    assert f"(trial {study.best_trial.number})" in text and "devices computed" in text
    assert summary(caplog).levelno == logging.INFO


def test_where_nothing_fits_a_warning_says_how_many_and_what_would_hold_them(caplog):
    """Every trial was pruned, and the search ended without a word."""
    study = search(train, 3, budget=28_000)
    assert [t.state for t in study.trials] == [TrialState.PRUNED] * 3
    record = summary(caplog)
    assert record.levelno == logging.WARNING
    counts, lacking, _ = record.getMessage().splitlines()
    assert counts.endswith(": none complete")
    assert lacking.startswith('3 did not fit device memory; memory="') and "Raise memory=" in lacking
    enough = lacking.split('"')[1]
    assert search(train, 1, budget=enough).trials[0].state is TrialState.COMPLETE, "it is enough indeed"
    assert parse_bytes(enough) < 1.05 * planned(), "and hardly more than the least"


def planned():
    model = Net()
    return hydra_tune.plan(model, torch.optim.SGD(model.parameters(), lr=0.01), batch=torch.randn(4, WIDTH)).least_bytes


@pytest.mark.parametrize("budget", [20, 20_000])
def test_what_a_first_step_needs_that_found_no_room_is_rehearsed_after_the_search(caplog, budget):
    """A guess was told, up to nine times the least, and too little for a large batch; then none."""
    caplog.set_level(logging.INFO, "hydra_tune")
    state = torch.get_rng_state()
    study = search(train, 3, budget=budget)
    assert torch.equal(state, torch.get_rng_state())
    assert [t.state for t in study.trials] == [TrialState.PRUNED] * 3
    lacking = summary(caplog).getMessage().splitlines()[1]
    assert lacking.startswith('3 did not fit device memory; memory="') and " would hold each. " in lacking
    enough = parse_bytes(lacking.split('"')[1])
    assert 0.99 * planned() < enough < 1.05 * planned()
    assert not [m for m in caplog.messages if m.startswith("plan: ")], "rehearsals are silent"
    assert search(train, 1, budget=enough).trials[0].state is TrialState.COMPLETE


def test_a_refused_evaluation_is_rehearsed_as_one(caplog):
    def objective(trial):
        model = hydra_tune.prepare(Net())
        with torch.no_grad():
            for _ in range(3):
                outputs = model(torch.randn(200, WIDTH))
            return outputs.sum().item()

    search(objective, 1, budget=20_000)
    enough = summary(caplog).getMessage().split('memory="')[1].split('"')[0]
    assert search(objective, 1, budget=enough).trials[0].state is TrialState.COMPLETE
    assert search(objective, 1, budget=parse_bytes(enough) // 2).trials[0].state is TrialState.PRUNED


def test_the_number_is_of_the_trials_whose_need_is_known(caplog, monkeypatch):
    """That of a model which takes minutes to rehearse is not."""
    monkeypatch.setattr(unmeasured, "_MOST_BYTES", 1 << 20)

    def objective(trial):
        if trial.number:
            return train(trial)
        model = torch.nn.Sequential(*(torch.nn.Linear(900, 900) for _ in range(2)))
        return hydra_tune.prepare(model)(torch.randn(1, 900)).sum().item()

    search(objective, 3, budget=28_000)
    told = 'memory="31.5 KiB" would hold 2, and hydra_tune.plan says what would hold the others'
    assert f"3 did not fit device memory; {told}. Raise" in summary(caplog).getMessage()


def test_rehearsals_after_a_search_end_in_time(caplog, monkeypatch):
    monkeypatch.setattr(search_progress, "_REHEARSALS_S", 0.0)
    rehearsals, at = [], Script.at
    monkeypatch.setattr(Script, "at", lambda *args, **kwargs: rehearsals.append(1) or at(*args, **kwargs))
    search(train, 2, budget=20_000)
    assert "2 did not fit device memory; hydra_tune.plan says" in summary(caplog).getMessage() and not rehearsals


def test_a_refused_step_keeps_neither_its_model_nor_its_inputs():
    pool, inputs = hydra_tune.ShardPool(["cpu"], 20_000), torch.randn(4, WIDTH)
    model = hydra_tune.prepare(Net(), pool=pool)
    with pytest.raises(hydra_tune.BudgetError) as raised:
        model(inputs)
    step = raised.value.step
    assert step.alive().model is model and step.alive().args == (inputs,)
    travelled = pickle.loads(pickle.dumps(raised.value))
    assert type(travelled) is hydra_tune.BudgetError and str(travelled) == str(raised.value) and travelled.step is None
    clear_frames(raised.value)
    del inputs
    assert step.alive() is None
    pool.close()


def test_a_step_whose_model_cannot_be_copied_tells_no_number(caplog):
    class Uncopied(Net):
        def __deepcopy__(self, memo):
            raise TypeError("not this one")

    def objective(trial):
        hydra_tune.prepare(Uncopied())(torch.randn(4, WIDTH)).sum().backward()

    study = search(objective, 2, budget=20_000)
    assert [t.state for t in study.trials] == [TrialState.PRUNED] * 2
    assert "2 did not fit device memory; hydra_tune.plan says" in summary(caplog).getMessage()


def test_a_step_whose_model_does_not_run_with_other_weights_tells_no_number(caplog):
    class Picky(Net):
        def forward(self, x):
            if next(self.parameters()).detach().abs().max() < 0.1:  # of 2048 uniform ones within 0.18
                raise ValueError("these are not its weights")
            return super().forward(x)

    def objective(trial):
        hydra_tune.prepare(Picky())(torch.randn(4, WIDTH)).sum().backward()

    search(objective, 2, budget=20_000)
    told = "2 did not fit device memory; hydra_tune.plan says what would hold each. Raise memory="
    assert told in summary(caplog).getMessage()


def test_trials_alike_that_find_no_room_in_a_backward_are_measured_once(caplog, monkeypatch):
    """Where the backward found none, each was measured anew, and the samplers were told the same lack for all."""
    runs, run = [], Measurement.run
    monkeypatch.setattr(Measurement, "run", lambda *args, **kwargs: runs.append(1) or run(*args, **kwargs))
    losses = []

    def objective(trial):
        blocks = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(8)]
        model = hydra_tune.prepare(torch.nn.Sequential(*blocks, torch.nn.Linear(256, 10)))
        loss = model(torch.randn(32, 256)).square().mean()
        losses.append(len(runs))
        loss.backward()

    monkeypatch.setattr(SearchProgress, "measure_refused", lambda self: None)
    study = search(objective, 3, budget=1 << 20)
    assert losses == [len(runs)], "one trial came to its backward, and no other was measured"
    told = {(t.user_attrs["hydra_tune: pruned because"], t.user_attrs["hydra_tune: lacks"]) for t in study.trials}
    ((text, lack),) = told
    assert "a step, with what it keeps between its blocks, does not fit" in text and lack > 1


def test_host_memory_that_lacks_is_named(caplog):
    search(train, 2, host_memory=1000)
    assert '2 did not fit host memory; host_memory="' in summary(caplog).getMessage()


def test_a_summary_says_how_a_recording_becomes_a_report(caplog, tmp_path):
    caplog.set_level(logging.INFO, "hydra_tune")
    search(train, 1, record=tmp_path / "run.jsonl")
    assert summary(caplog).getMessage().splitlines()[-1] == f"report: hydra-tune report {tmp_path / 'run.jsonl'}"


def test_a_failed_trial_counts_as_failed(caplog):
    caplog.set_level(logging.INFO, "hydra_tune")

    def objective(trial):
        raise ValueError("of the objective")

    with pytest.raises(ValueError, match="of the objective"):
        search(objective, 1)
    assert re.match(r"1 trial in \d+ s: 1 failed", summary(caplog).getMessage())


def test_the_best_follows_the_direction(caplog):
    caplog.set_level(logging.INFO, "hydra_tune")
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(0))
    search(lambda trial: float(trial.number), 3, study=study)
    assert "best 2 (trial 2)" in summary(caplog).getMessage()


# ---- said once ----


def test_each_ending_is_said_once_by_optuna(caplog):
    caplog.set_level(logging.INFO, "hydra_tune")
    search(lambda trial: float("nan") if trial.number else train(trial), 2)
    (plan,) = [m for m in caplog.messages if m.startswith("trial ")]
    assert plan.startswith("trial 0: Net is spilled, in ")


def test_a_plan_is_said_once(caplog):
    """Each change between training and evaluation said it again, where their batches differ."""
    caplog.set_level(logging.INFO, "hydra_tune")

    def objective(trial):
        model = Net()
        model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for _ in range(3):
            model(torch.randn(4, WIDTH)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model(torch.randn(8, WIDTH))
        return 0.0

    search(objective, 2)
    assert len([m for m in caplog.messages if " is spilled, in " in m]) == 1


def test_our_lines_are_as_quiet_as_optunas(capsys, monkeypatch):
    """They came whatever Optuna's verbosity was."""
    logger, root = logging.getLogger("hydra_tune"), logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(logger, "handlers", [])
    level, verbosity = logger.level, optuna.logging.get_verbosity()
    try:
        logger.setLevel(logging.NOTSET)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        search(train, 3, budget=20)
        assert capsys.readouterr().err == ""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        search(train, 3, budget=20)
        assert "3 did not fit device memory" in capsys.readouterr().err
    finally:
        logger.setLevel(level)
        optuna.logging.set_verbosity(verbosity)
