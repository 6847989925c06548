"""The report after a run: one page without a network, small, with all that happened, and safe whatever names say."""

import base64
import gzip
import itertools
import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import optuna
import pytest
import torch

import hydra_tune
from hydra_tune.show import report_page
from hydra_tune.show.environment import environment
from hydra_tune.show.report_page import RunRecord, columns, page, save_page
from models import BUDGETS, WIDTH, Net


def device(name="cpu:0", **more):
    sizes = {"budget_bytes": 100, "used_bytes": 0, "peak_bytes": 90, "promoted_bytes": 7, "spilled_bytes": 3}
    return {"name": name, **sizes, "busy_s": 6.0, "stalled_by": {"pilot": 1.0, "memory": 0.5}, **more}


def trial(number=0, **more):
    known = {
        "trial": number,
        "name": f"trial {number}",
        "state": "ended",
        "resident": False,
        "steps": 4,
        "trained_steps": 4,
    }
    sizes = {"weight_bytes": 1 << 20, "shards": [1, 2], "promoted_bytes": 4 << 20, "busy_s": 1.0, "stalled_s": 0.5}
    return {**known, **sizes, "steps": 4, "trained_steps": 4, "step_s": 1.375, **more}


def span(kind="run", start_s=0.0, end_s=1.0, **more):
    known = {"kind": kind, "device": 0, "trial": 0, "shard": 1, "direction": "F", "step": 2, "cause": ""}
    return {**known, "start_s": start_s, "end_s": end_s, **more}


def a_run(**more):
    report = {"elapsed_s": 10.0, "devices": [device()], "trials": [trial()]}
    return RunRecord(**{"report": report, "spans": [span()], **more})


def data_of(text):
    packed = re.search(r'id="data">([^<]*)<', text)[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_spans_go_there_and_come_back():
    spans = [
        span("promote", 0.5, 0.75, trial=3, shard=2),
        span("run", 0.25, 0.5, direction="B", step=9),
        span("stall", 1.0, 1.5, trial=-1, shard=-1, direction="", cause="pilot"),
        span("wait", 0.0, 9.0),
    ]
    found = columns(spans)
    assert found["causes"][found["spans"]["cause"][2]] == "measuring first steps"
    starts = list(itertools.accumulate(found["spans"]["start"]))
    assert starts == [250_000, 500_000, 1_000_000] and found["spans"]["length"] == [250_000, 250_000, 500_000]
    assert found["spans"]["kind"] == [0, 1, 3] and found["spans"]["backward"] == [1, 0, 0]
    assert (found["spans"]["trial"][1], found["spans"]["shard"][1], found["spans"]["step"][0]) == (3, 2, 9)


def test_a_page_tells_what_happened_and_asks_no_network():
    text = page(a_run(memory=[(0, 1.0, 50), (0, 2.0, 20)], environment={"torch": "2.13"}))
    assert "computed 60% of the time; the longest stalls, 10%, were measuring first steps." in text
    assert "90 B of 100 B" in text and "<td>torch</td>" in text and "computing 60.0%" in text
    assert "1.0 MiB" in text and ">1375<" in text, "promoted and milliseconds a step"
    data = data_of(text)
    assert data["memory"] == [[[1_000_000, 50], [2_000_000, 20]]] and data["names"] == [
        [0, "trial 0", "hsl(0.0,65%,50%)"]
    ]
    assert not re.search(r'(src|href)="?http|@import|url\(', text), "nothing is fetched"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_chart_of_memory_ends_where_the_memory_was_given_back():
    """Two samples within a pixel were drawn as their larger one until the next sample, or until the end."""
    script = (Path(report_page.__file__).parent / "report_page.js").read_text()
    samples = [[5, 70], [12, 90], [12.4, 0]]
    code = script.rpartition("main()")[0] + f"console.log(JSON.stringify(stairs({samples}, 10, 20)))"
    drawn = subprocess.run(["node", "-e", code], capture_output=True, check=True, text=True).stdout
    assert json.loads(drawn) == [[10, 11, 70], [11, 12, 70], [12, 13, 90], [13, 20, 0]]


def test_names_are_text_and_not_markup():
    name = '<script>alert(1)</script>"&'
    report = {"elapsed_s": 1.0, "devices": [device(name)], "trials": [trial(name=name)]}
    run = a_run(report=report, title=name, results={name: {"value": name}}, environment={name: name})
    text = page(run)
    assert "alert(1)" in text and "<script>alert" not in text and data_of(text)["devices"] == [name]
    assert text.count("</script>") == page(a_run()).count("</script>")


def test_a_page_of_a_hundred_thousand_tasks_is_small():
    """With Optuna's plots, for which plotly travels along. Real times are less regular than any pattern."""
    rng, now_s, spans = random.Random(0), [0.0, 0.0], []
    for i in range(100_000):
        number = i % 2
        start_s = now_s[number] = now_s[number] + rng.expovariate(1e5)
        end_s = now_s[number] = start_s + rng.lognormvariate(-6, 1)
        kind = rng.choices(["run", "promote", "spill", "stall"], [5, 3, 2, 1])[0]
        more = {"trial": rng.randrange(8), "shard": rng.randrange(16), "step": i // 64, "direction": rng.choice("FB")}
        spans.append(span(kind, start_s, end_s, device=number, **more))
    memory = [(i % 2, spans[i]["start_s"], rng.randrange(10**9)) for i in range(0, 100_000, 2)]
    report = {"elapsed_s": max(now_s), "devices": [device(), device("cpu:1")], "trials": [trial(n) for n in range(8)]}
    figures = [("History", json.dumps({"data": [], "layout": {}}))]
    text = page(RunRecord(report, spans, memory, environment(), figures=figures))
    assert len(text) < 3e6
    drawn = data_of(text)["memory"]
    assert max(used for _, used in drawn[0]) == max(used for number, _, used in memory if number == 0), (
        "no peak is lost"
    )


def test_a_trial_that_waits_for_host_memory_is_a_row():
    """It has made no step, and has no plan yet."""
    waits = {"trial": 1, "name": "trial 1", "state": "waits for 3 MiB of host memory", "promoted_bytes": 0}
    report = {"elapsed_s": 1.0, "devices": [device()], "trials": [trial(), {**waits, "busy_s": 0.0, "stalled_s": 0.0}]}
    assert "waits for 3 MiB of host memory" in page(a_run(report=report))


def test_a_trial_that_the_pool_has_refused_is_a_row_that_says_so():
    """One without room in host memory is none of the pool's. One that was cut is not said to be spilled."""
    results = {f"trial {n}": {"state": "did not fit", "value": None, "kind": "None"} for n in (0, 7)}
    text = page(a_run(results={**results, "trial 8": {"state": "complete"}}))
    assert text.count('<td data-value="did not fit">did not fit</td>') == 2
    assert text.count(">None</td>") == 2 and "trial 7" in text and "trial 8" not in text


def test_a_report_is_a_html_in_a_folder_that_there_is(tmp_path):
    assert save_page(a_run(), tmp_path / "a.html").read_text().startswith("<!doctype html>")
    with pytest.raises(hydra_tune.ConfigError, match=r'got \'a.pdf\'\. Write "a\.html"'):
        save_page(a_run(), tmp_path / "a.pdf")
    with pytest.raises(hydra_tune.ConfigError, match="in a folder that there is"):
        save_page(a_run(), tmp_path / "none" / "a.html")


def test_a_report_says_which_trials_did_not_fit_and_shows_a_choice_of_none(tmp_path):
    """They were pruned, as others are; and None was an empty cell."""

    def objective(trial):
        width = {None: WIDTH, "wide": 4000}[trial.suggest_categorical("kind", [None, "wide"])]
        model = hydra_tune.prepare(torch.nn.Sequential(torch.nn.Linear(WIDTH, width), torch.nn.Linear(width, 2)))
        model(torch.randn(4, WIDTH)).sum().backward()
        if trial.number == 2:
            raise optuna.TrialPruned
        return 0.0

    pool, study = hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]), optuna.create_study()
    for kind in ("wide", None, None):
        study.enqueue_trial({"kind": kind})
    hydra_tune.HydraTrialRunner(pool, 1).optimize(study, objective, n_trials=3)
    text = hydra_tune.save_report(pool, tmp_path / "report.html", study).read_text()
    rows = re.findall(r"<tr><td>.*?</tr>", text.split("<tbody>")[1])[:3]
    states = [re.findall(r'data-value="([^"]*)"', row)[0] for row in rows]
    assert states == ["did not fit", "complete, resident", "pruned, resident"]
    assert [">None</td>" in row for row in rows] == [False, True, True]


def test_a_search_has_a_report_with_its_values_and_plots(tmp_path):
    def objective(trial):
        lr = trial.suggest_float("lr", 0.01, 0.1)
        model = Net()
        model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
        for step in range(3):
            loss = model(torch.randn(4, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            trial.report(loss.item(), step)
        return loss.item()

    pool = hydra_tune.ShardPool(["cpu", "cpu"], BUDGETS["spilled"], seed=0)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0), study_name="digits")
    hydra_tune.HydraTrialRunner(pool, 2).optimize(study, objective, n_trials=3)
    text = hydra_tune.save_report(pool, tmp_path / "report.html", study).read_text()
    assert "<title>digits</title>" in text and "<h2>Optimization history</h2>" in text and "Slices" in text
    assert all(f">{t.value:.4g}<" in text and f">{t.params['lr']:.4g}<" in text for t in study.trials)
    data = data_of(text)
    assert [name for _, name, _ in data["names"]] == ["trial 0", "trial 1", "trial 2"] and len(data["devices"]) == 2
    assert {0, 1, 3} <= set(data["spans"]["kind"]) and all(data["memory"])
    assert max(used for _, used in data["memory"][0]) <= pool.devices[0].budget_bytes
    for swapped in ((tmp_path / "a.html", pool, study), (pool, study, tmp_path / "a.html"), (study, pool)):
        with pytest.raises(hydra_tune.ConfigError, match=r"a pool, a path and a study, but got .* Write save_report\("):
            hydra_tune.save_report(*swapped)
    with pytest.raises(hydra_tune.ConfigError, match=r"saved at a path, got Study"):
        pool.save_report(study)
    plain = pool.save_report(tmp_path / "plain.html").read_text()
    assert "plotly" not in plain.split('id="plotly"')[0] and len(plain) < 200_000
