"""Timelines as Perfetto and plotly get them, of spans written here and of a real spilled run."""

import json
import sys
from collections import Counter, defaultdict
from itertools import pairwise
from math import inf

import plotly.graph_objects as go
import pytest

import hydra_tune
from comparison import Script
from hydra_tune.pool.trace import Trace
from hydra_tune.show.timeline import MOST_BARS, STREAMS, chrome_trace, figure, save
from models import BUDGETS

NAMES = ["left", "right"]


def span(kind, start_s, end_s, device=0, trial=0, shard=0, direction="F", **more):
    return dict(
        kind=kind, device=device, trial=trial, shard=shard, direction=direction, start_s=start_s, end_s=end_s, **more
    )


def story():
    """Two trials on the left device, one on the right; in order of end, as a pool notes them."""
    return [
        span("promote", 0.0, 0.1),
        span("stall", 0.0, 0.1, trial=-1, shard=-1, cause="promotion"),
        span("wait", 0.0, 0.3, trial=4),
        span("run", 0.1, 0.3, step=7),
        span("promote", 0.2, 0.35, trial=4),
        span("stall", 0.3, 0.35, trial=-1, shard=-1, cause="memory"),
        span("spill", 0.3, 0.4, direction="B"),
        span("run", 0.35, 0.5, trial=4),
        span("run", 0.0, 0.6, device=1, trial=2, shard=3, direction="B"),
    ]


def written(trace):
    """What a viewer reads, with each event's track by name; every trace is checked for what viewers ask."""
    trace = json.loads(json.dumps(trace, allow_nan=False))
    assert trace["displayTimeUnit"] == "ms"
    metadata = [e for e in trace["traceEvents"] if e["ph"] == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in metadata if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in metadata if e["name"] == "thread_name"}
    assert 0 not in processes and all(tid > 0 for _, tid in threads)
    events = [e for e in trace["traceEvents"] if e["ph"] != "M"]
    assert all(e["ph"] == "X" and e["dur"] >= 0 for e in events)
    assert all(type(e["ts"]) is type(e["dur"]) is int for e in events), "a viewer rounds fractions, and they overlap"
    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    ends_us = defaultdict(int)
    for event in events:
        track = event["pid"], event["tid"]
        assert event["ts"] >= ends_us[track], "Perfetto leaves out what overlaps"
        ends_us[track] = event["ts"] + event["dur"]
        event["track"] = processes[event["pid"]], threads[track]
    return events, list(processes.values()), list(threads.values())


def test_a_trace_has_one_event_a_span_on_its_stream():
    events, processes, threads = written(chrome_trace(story(), NAMES))
    assert processes == ["left", "right"]
    assert threads == [*STREAMS, *STREAMS]
    assert Counter((*e["track"], e["cat"]) for e in events) == {
        ("left", "compute", "run"): 2,
        ("left", "compute", "stall"): 2,
        ("left", "copies (promote)", "promote"): 2,
        ("left", "copies (spill)", "spill"): 1,
        ("right", "compute", "run"): 1,
    }


def test_an_event_tells_who_when_and_why():
    events, _, _ = written(chrome_trace(story(), NAMES))
    by_name = {(e["cat"], e["name"]): e for e in events}
    run = by_name["run", "trial 0 F0"]
    assert (run["ts"], run["dur"]) == (100_000, 200_000), "microseconds"
    assert run["args"] == {"trial": 0, "shard": 0, "direction": "F", "step": 7}
    assert by_name["run", "trial 2 B3"]["args"] == {"trial": 2, "shard": 3, "direction": "B"}
    assert by_name["stall", "stalled: memory"]["args"]["cause"] == "memory"


def test_spans_that_overlap_on_one_stream_have_a_thread_each():
    spans = [span("promote", 0.0, 0.2), span("promote", 0.1, 0.3, trial=1), span("promote", 0.2, 0.4, trial=2)]
    events, _, threads = written(chrome_trace(spans, ["only"]))
    assert [e["track"][1] for e in events] == ["copies (promote)", "copies (promote) 2", "copies (promote)"]
    assert threads == ["compute", "copies (promote)", "copies (promote) 2", "copies (spill)"]


def test_neighbours_meet_whatever_their_seconds_round_to():
    edges_s = [i / 3e6 for i in range(200)]
    spans = [span("run", a, b) for a, b in pairwise(edges_s)]
    events, _, threads = written(chrome_trace(spans, ["only"]))
    assert len(events) == len(spans)
    assert threads == list(STREAMS)


def test_a_trace_of_nothing_names_its_devices():
    events, processes, threads = written(chrome_trace([], NAMES))
    assert (events, processes, threads) == ([], NAMES, [*STREAMS, *STREAMS])


def test_rows_are_devices_with_their_copy_streams_beneath():
    drawn = figure(story(), NAMES)
    axis = drawn.layout.yaxis
    assert axis.ticktext == (
        "left",
        "copies (promote)",
        "copies (spill)",
        "right",
        "copies (promote)",
        "copies (spill)",
    )
    assert axis.tickvals == (0, 1, 2, 3, 4, 5)
    assert axis.range == (5.5, -0.5), "the first at the top"
    bars = [
        (bar.name, row, base, round(base + length, 6))
        for bar in drawn.data
        for row, base, length in zip(bar.y, bar.base, bar.x, strict=True)
    ]
    assert bars == [
        ("trial 0", 1, 0.0, 0.1),
        ("trial 0", 0, 0.1, 0.3),
        ("trial 0", 2, 0.3, 0.4),
        ("trial 2", 3, 0.0, 0.6),
        ("trial 4", 1, 0.2, 0.35),
        ("trial 4", 0, 0.35, 0.5),
        ("stalled", 0, 0.0, 0.1),
        ("stalled", 0, 0.3, 0.35),
    ]


def test_bars_keep_to_their_row_and_their_time():
    """Plotly stacks bars otherwise, and makes those of a trial on rows 0 and 3 three rows high."""
    drawn = figure(story(), NAMES)
    assert drawn.layout.barmode == "overlay"
    assert {(bar.type, bar.orientation, bar.width) for bar in drawn.data} == {("bar", "h", 0.8)}


def test_a_trial_has_one_colour_in_every_figure_and_stalls_are_grey():
    colours = {bar.name: bar.marker.color for bar in figure(story(), NAMES).data}
    assert len(set(colours.values())) == 4
    assert colours["stalled"] == "#b0b0b0"
    (alone,) = figure([span("run", 0.0, 1.0, device=1, trial=4)], NAMES).data
    assert alone.marker.color == colours["trial 4"]


def test_no_two_of_a_thousand_trials_share_a_colour():
    drawn = figure([span("run", 0.0, 1.0, trial=trial) for trial in range(1000)], NAMES)
    assert len({bar.marker.color for bar in drawn.data}) == 1000


def test_promotions_and_spills_are_hatched():
    hatches = {bar.name: bar.marker.pattern.shape for bar in figure(story(), NAMES).data}
    assert hatches == {"trial 0": ("/", "", "\\"), "trial 2": ("",), "trial 4": ("/", ""), "stalled": ("", "")}


def test_the_pointer_is_told_who_and_why():
    told = {bar.name: bar.hovertext for bar in figure(story(), NAMES).data}
    assert told["stalled"] == (
        "stalled: promotion<br>0.000000 to 0.100000 s (100.000 ms)",
        "stalled: memory<br>0.300000 to 0.350000 s (50.000 ms)",
    )
    assert told["trial 0"] == (
        "trial 0 F0, promote<br>0.000000 to 0.100000 s (100.000 ms)",
        "trial 0 F0, step 7<br>0.100000 to 0.300000 s (200.000 ms)",
        "trial 0 B0, spill<br>0.300000 to 0.400000 s (100.000 ms)",
    )
    (unknown,) = figure([span("stall", 0.0, 0.1)], NAMES).data
    assert unknown.hovertext[0].startswith("stalled: no cause given<br>")


def test_many_spans_make_no_more_traces_than_trials():
    """A trace, a shape or an annotation a span is what plotly is slow with."""
    kinds = ("run", "promote", "spill", "stall")
    spans = [span(kinds[i % 4], i, i + 1, trial=i % 7) for i in range(20_000)]
    drawn = figure(spans, ["only"])
    assert len(drawn.data) == 8
    assert sum(len(bar.x) for bar in drawn.data) <= 3 * MOST_BARS
    assert drawn.layout.shapes == drawn.layout.annotations == ()


@pytest.mark.parametrize("name", ["run.svg", "run"])
def test_another_suffix_is_refused_with_what_to_write(tmp_path, name):
    with pytest.raises(hydra_tune.ConfigError, match=r'got \'run.*Write "run\.json" or "run\.html"'):
        save(story(), NAMES, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_without_plotly_the_page_says_what_to_install_and_the_trace_is_saved(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(hydra_tune.ConfigError, match=r'pip install "hydra-tune\[timeline\]"'):
        save(story(), NAMES, tmp_path / "run.html")
    assert save(story(), NAMES, str(tmp_path / "run.json")) == tmp_path / "run.json"


def drawn_in(page):
    """The traces of a saved page, as a browser hands them to plotly."""
    start = page.index("[", page.index("Plotly.newPlot(", page.index('id="timeline"')))
    traces, _ = json.JSONDecoder().raw_decode(page[start:])
    return go.Figure(traces).data


def device_s(spans):
    """Seconds busy and stalled; at no time both."""
    mine = sorted((s["start_s"], s["end_s"], s["kind"]) for s in spans if s["kind"] in ("run", "stall"))
    assert all(end <= start for (_, end, _), (start, _, _) in pairwise(mine))
    return [sum(end - start for start, end, kind in mine if kind == wanted) for wanted in ("run", "stall")]


def test_a_spilled_run_is_saved_in_both_formats(tmp_path, monkeypatch):
    monkeypatch.setattr("hydra_tune.pool.trace._LEAST_WAKE_S", inf)  # a slow machine is late between two tasks
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        Script().run(pool)
        spans, (device,), (device_report,) = pool.timeline(), pool.devices, pool.report()["devices"]
        trace, page = pool.save_timeline(tmp_path / "run.json"), pool.save_timeline(str(tmp_path / "run.html"))
    kinds = Counter(s["kind"] for s in spans)
    assert kinds["run"] > 0 and kinds["promote"] > 0, "else it was not spilled"
    backwards = [(s["step"], s["shard"]) for s in spans if s["kind"] == "run" and s["direction"] == "B"]
    assert {(s["step"], s["shard"]) for s in spans if s["kind"] == "spill"} == set(backwards), "gradients"
    assert (trace, page) == (tmp_path / "run.json", tmp_path / "run.html")

    events, processes, _ = written(json.loads(trace.read_text()))
    assert Counter(e["cat"] for e in events) == {kind: n for kind, n in kinds.items() if kind != "wait"}
    assert device.name in processes
    assert {e["track"][1] for e in events if e["cat"] == "run"} == {"compute"}, "one lease a device"

    text = page.read_text()
    assert "<script src=" not in text and len(text) > 1_000_000, "plotly is in the page"
    bars, stalled = drawn_in(text)
    assert (bars.name, stalled.name) == ("trial 0", "stalled")
    assert Counter(bars.marker.pattern.shape) == {"": kinds["run"], "/": kinds["promote"], "\\": kinds["spill"]}
    assert len(stalled.x) == kinds["stall"] > 0
    assert {s["cause"] for s in spans if s["kind"] == "stall"} == {"pilot", "promotion", "no ready task"}
    assert device_s(spans) == pytest.approx((device_report["busy_s"], device_report["stalled_s"]))
    stalls = [(s["start_s"], s["end_s"], s["cause"]) for s in spans if s["kind"] == "stall"]
    handed_over = [(one, then) for (_, end, one), (start, _, then) in pairwise(stalls) if end == start]
    between_steps = ("no ready task", "promotion")  # then for the next one's first shard
    assert handed_over[:2] == [("no ready task", "pilot"), ("pilot", "no ready task")]
    assert set(handed_over[2:]) == {between_steps}
    ends = {s["end_s"] for s in spans if s["kind"] in ("run", "stall")}
    assert all(start in ends for start, _, _ in stalls[1:])


def test_between_trials_a_device_does_not_stall():
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        Script().run(pool)
        between_s = pool.report()["elapsed_s"]
        Script().run(pool)
        stalls = [s for s in pool.timeline() if s["kind"] == "stall"]
    before, after = ([s for s in stalls if (s["end_s"] <= between_s) is ended] for ended in (True, False))
    assert before and after and all(s["start_s"] >= between_s for s in after)
    assert (before[0]["cause"], after[0]["cause"]) == ("no ready task", "no ready task"), "until the first batch"


def test_a_trace_forgets_its_oldest_spans_and_keeps_the_totals(monkeypatch):
    monkeypatch.setattr("hydra_tune.pool.trace.MAX_SPANS", 3)
    trace = Trace()
    for start_s in range(5):
        trace.note_stall(0, start_s, start_s + 1, "memory")
    assert [span.start_s for span in trace.spans] == [2, 3, 4]
    assert trace.devices[0].stalled_s == 5


def test_a_row_of_many_spans_is_drawn_by_fewer_and_memory_is_a_line_below():
    many = [span("run", i * 1e-3, (i + 0.9) * 1e-3, trial=int(i % 3 == 0)) for i in range(30_000)]
    many.append(span("stall", 10.0, 10.5, trial=-1, cause="memory"))
    samples = [(0, 0.0, 0), (0, 1.0, 2**21), (1, 2.0, 2**20)]
    drawn = figure(many, ["cpu:0", "cpu:1"], samples)
    bars = [bar for bar in drawn.data if isinstance(bar, go.Bar)]
    assert sum(len(bar.x) for bar in bars) <= MOST_BARS + 1
    assert {bar.name for bar in bars} == {"trial 0", "stalled"}, "of the trial that has most of each time"
    assert "and others, 20 in all" in bars[0].hovertext[0]
    first, second = (line for line in drawn.data if not isinstance(line, go.Bar))
    assert (first.name, list(first.x), list(first.y)) == ("memory of cpu:0", [0.0, 1.0], [0.0, 2.0])
    assert list(second.y) == [1.0] and drawn.layout.yaxis2.domain[1] < drawn.layout.yaxis.domain[0]
