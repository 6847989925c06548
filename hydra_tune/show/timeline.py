"""Draws a timeline of a real or a simulated run: a trace for ui.perfetto.dev, or a plotly figure.

It is drawn from spans. A span is a mapping with kind, device, trial, shard, direction, start_s and end_s; cause, step
and the trial's name are optional. Its kind:

    run              the device computed
    promote, spill   the device copied, beside its computing
    stall            the device did not compute though trials were live; the cause says why
    wait             a trial waited for the device; not drawn
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from math import inf
from operator import itemgetter
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra_tune.config import check_folder
from hydra_tune.errors import ConfigError

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Span = Mapping[str, Any]
_TIMES = itemgetter("start_s", "end_s")
STREAMS = ("compute", "copies (promote)", "copies (spill)")
_STREAM = {"run": 0, "stall": 0, "promote": 1, "spill": 2}  # index into STREAMS, by kind
_HATCH = {"run": "", "stall": "", "promote": "/", "spill": "\\"}
_GREY = "#b0b0b0"  # of stalls; trials have saturated colours
_LEGEND = "Visits to shards, coloured by trial. Hatched: copies. Grey: a device had trials, and computed for none."
MOST_BARS = 1500  # in a row of a figure; a browser is slow with many more


def chrome_trace(spans: Iterable[Span], device_names: Sequence[str]) -> dict[str, Any]:
    """The spans in the trace event format of Chrome and Perfetto: one complete event for each span, in order of start,
    in microseconds.

    Each device is a process, and each of its streams a thread. Perfetto shows only the first of spans that overlap in
    one thread, so the others go to further threads of the stream.
    """
    names = {(pid, stream, 0): label for pid in range(len(device_names)) for stream, label in enumerate(STREAMS)}
    tids = {thread: tid for tid, thread in enumerate(names, start=1)}  # to viewers thread 0 is an idle processor
    ends_us: defaultdict[tuple[int, int, int], float] = defaultdict(lambda: -inf)
    events: list[dict[str, Any]] = []
    for span in _drawn(spans):
        # whole microseconds, so that a span which follows another at once does not overlap it
        start_us, end_us = round(span["start_s"] * 1e6), round(span["end_s"] * 1e6)
        pid, stream = span["device"], _STREAM[span["kind"]]
        thread = next((pid, stream, lane) for lane in count() if ends_us[pid, stream, lane] <= start_us)
        ends_us[thread] = end_us
        names.setdefault(thread, f"{STREAMS[stream]} {thread[2] + 1}")
        tid = tids.setdefault(thread, len(tids) + 1)
        arguments = {key: span[key] for key in ("trial", "shard", "direction", "step", "cause") if key in span}
        event = {"ph": "X", "name": _label(span), "cat": span["kind"], "args": arguments}
        events.append({**event, "pid": pid + 1, "tid": tid, "ts": start_us, "dur": end_us - start_us})
    metadata = [
        {"ph": "M", "name": f"{level}_{key}", "pid": thread[0] + 1, "tid": tids[thread], "args": {key: value}}
        for position, thread in enumerate(sorted(names))
        for level, name in (("process", device_names[thread[0]]), ("thread", names[thread]))
        for key, value in (("name", name), ("sort_index", position))
    ]
    return {"traceEvents": metadata + events, "displayTimeUnit": "ms"}


def figure(spans: Iterable[Span], device_names: Sequence[str], memory: Sequence[tuple[int, float, int]] = ()) -> Figure:
    """A plotly figure of the spans. Rows are devices, each followed by its copy streams. Bars are visits to shards.

    A trial has the same colour in every figure. Promotions and spills are hatched, stalls are grey. A click in the
    legend hides a trial. Zooming is along time only. Of a row with more than `MOST_BARS` spans, those that follow each
    other closely are drawn as one bar of the trial that has most of it. With `memory`, (device, seconds, bytes used)
    whenever that changed, a line for each device is below.
    """
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise ConfigError(
            "a figure is drawn by plotly, but plotly is not installed: pip install "
            '"hydra-tune[timeline]", or save a .json for ui.perfetto.dev.'
        ) from error
    spans_of: defaultdict[float, list[Span]] = defaultdict(list)  # by trial; stalls last, under infinity
    for span in _fewer(_drawn(spans)):
        spans_of[inf if span["kind"] == "stall" else span["trial"]].append(span)
    bars = [
        {
            "name": "stalled" if trial == inf else _trial_name(group[0]),
            "orientation": "h",
            "base": [span["start_s"] for span in group],
            "x": [span["end_s"] - span["start_s"] for span in group],
            "y": [len(STREAMS) * span["device"] + _STREAM[span["kind"]] for span in group],
            "width": 0.8,  # by default it would depend on the gaps between the rows that this trial has
            "marker": {
                "color": _GREY if trial == inf else trial_colour(int(trial)),
                "line": {"width": 0},
                "pattern": {"shape": [_HATCH[span["kind"]] for span in group]},
            },
            "hovertext": [_hover(span) for span in group],
            "hovertemplate": "%{hovertext}<extra></extra>",
        }
        for trial, group in sorted(spans_of.items(), key=_by_name)
    ]
    labels = [label for name in device_names for label in (name, *STREAMS[1:])]
    layout: dict[str, Any]
    axis = {"tickvals": list(range(len(labels))), "ticktext": labels, "range": [len(labels) - 0.5, -0.5]}
    layout = {
        "template": "none",  # the default one makes plotly 6 warn
        "barmode": "overlay",
        "hovermode": "closest",
        "title": {"text": _LEGEND, "font": {"size": 13}, "x": 0},
        "showlegend": True,
        "height": 160 + 32 * len(labels),
        "margin": {"l": 160},
        "xaxis": {"title": {"text": "seconds"}},
        "yaxis": {**axis, "fixedrange": True, "zeroline": False},
    }
    if memory:
        layout |= {"yaxis": {**layout["yaxis"], "domain": [0.32, 1.0]}, "height": layout["height"] + 200}
        layout["xaxis"]["anchor"] = "y2"  # the seconds are below the memory
        layout["yaxis2"] = {
            "domain": [0.0, 0.24],
            "title": {"text": "MiB used"},
            "fixedrange": True,
            "rangemode": "tozero",
        }
    lines = [_memory_line(number, name, memory) for number, name in enumerate(device_names) if memory]
    return go.Figure([*(go.Bar(bar) for bar in bars), *(go.Scattergl(line) for line in lines)], layout)


def _by_name(spans_of_trial: tuple[float, list[Span]]) -> tuple[bool, int, str]:
    """Trial 2 before trial 10, stalls last."""
    trial, spans = spans_of_trial
    name = _trial_name(spans[0])
    return trial == inf, len(name), name


def _memory_line(device: int, name: str, memory: Sequence[tuple[int, float, int]]) -> dict[str, Any]:
    samples = [(at_s, used_bytes / 2**20) for number, at_s, used_bytes in memory if number == device]
    x, y = [at_s for at_s, _ in samples], [used_mib for _, used_mib in samples]
    return {"x": x, "y": y, "name": f"memory of {name}", "yaxis": "y2", "mode": "lines", "line": {"shape": "hv"}}


def _fewer(spans: list[Span]) -> list[Span]:
    """Spans of rows that have too many are put together: of each of `MOST_BARS` equal times, those that begin in it."""
    rows: defaultdict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in spans:
        rows[span["device"], _STREAM[span["kind"]]].append(span)
    begin_s, end_s = (spans[0]["start_s"], max(span["end_s"] for span in spans)) if spans else (0.0, 0.0)
    found: list[Span] = []
    for row in rows.values():
        if len(row) <= MOST_BARS:
            found += row
            continue
        groups: defaultdict[int, list[Span]] = defaultdict(list)
        for span in row:
            groups[int((span["start_s"] - begin_s) / (end_s - begin_s) * MOST_BARS)].append(span)
        found += [_together(group) for group in groups.values()]
    return sorted(found, key=_TIMES)


def _together(group: list[Span]) -> Span:
    """One span for all of the group, of the trial and kind that has most of its time."""
    shares: defaultdict[tuple[Any, ...], float] = defaultdict(float)
    for span in group:
        shares[span["kind"], span["trial"], span.get("cause", "")] += span["end_s"] - span["start_s"]
    kind, trial, cause = max(shares, key=lambda key: shares[key])
    most = next(s for s in group if (s["kind"], s["trial"], s.get("cause", "")) == (kind, trial, cause))
    times = {"start_s": group[0]["start_s"], "end_s": max(span["end_s"] for span in group)}
    return most if len(group) == 1 else {**most, **times, "of": len(group)}


def save(spans: Iterable[Span], device_names: Sequence[str], path: str | PathLike[str]) -> Path:
    """Write a `chrome_trace` to a .json, or a `figure` to a .html that needs no network; returns the path.

    A .html with many bars is slow in a browser: save a long run as .json.
    """
    path = checked_path(path)
    if path.suffix.lower() == ".json":
        text = json.dumps(chrome_trace(spans, device_names))
    else:
        text = figure(spans, device_names).to_html(include_plotlyjs=True, div_id="timeline")
    path.write_text(text, encoding="utf-8")
    return path


def checked_path(path: str | PathLike[str]) -> Path:
    """The path, if a timeline can be saved there.

    Raises:
        ConfigError: the name ends otherwise, or there is no such folder.
    """
    path = Path(path)
    if path.suffix.lower() not in (".json", ".html"):
        raise ConfigError(
            f"a timeline is saved as .json (for ui.perfetto.dev) or .html (a figure), got {path.name!r}. "
            f'Write "{path.stem}.json" or "{path.stem}.html".'
        )
    check_folder(path, "a timeline")
    return path


def _drawn(spans: Iterable[Span]) -> list[Span]:
    """The spans to draw, in order of time."""
    return sorted((span for span in spans if span["kind"] != "wait"), key=_TIMES)


def trial_colour(number: int) -> str:
    """The same in every figure. Hues are a golden angle apart, so that none repeats; those of trials 5 or 8 apart are
    close, and differ in lightness."""
    return f"hsl({number * 137.508 % 360:.1f},65%,{(50, 36, 64)[number % 3]}%)"


def _trial_name(span: Span) -> str:
    return span.get("name") or f"trial {span['trial']}"


def _label(span: Span) -> str:
    """The text of a bar, such as `trial 2 F0`: the forward of its shard 0."""
    if span["kind"] == "stall":
        return f"stalled: {span.get('cause') or 'no cause given'}"
    return f"{_trial_name(span)} {span['direction']}{span['shard']}"


def _hover(span: Span) -> str:
    start_s, end_s = span["start_s"], span["end_s"]
    copy = f", {span['kind']}" if span["kind"] in ("promote", "spill") else ""
    step = f", step {span['step']}" if span.get("step") else ""  # a stall has none
    several = f" and others, {span['of']} in all" if "of" in span else ""
    return f"{_label(span)}{copy}{step}{several}<br>{start_s:.6f} to {end_s:.6f} s ({(end_s - start_s) * 1e3:.3f} ms)"
