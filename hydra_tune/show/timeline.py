"""Draws spans, of a real run or of a simulated one: for ui.perfetto.dev, or as a plotly figure.

A span is a mapping with kind, device, trial, shard, direction, start_s and end_s; cause, step and the trial's name are
optional:

    run             the device computed          stall   it did not, though trials were live; its cause says why
    promote, spill  its copy streams did         wait    a trial waited for it: not drawn
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
_WHEN = itemgetter("start_s", "end_s")
STREAMS = ("compute", "copies (promote)", "copies (spill)")
_STREAM = {"run": 0, "stall": 0, "promote": 1, "spill": 2}
_HATCH = {"run": "", "stall": "", "promote": "/", "spill": "\\"}
_GREY = "#b0b0b0"  # no trial's: theirs are saturated
_GOLDEN_DEGREES = 137.508  # hues that many degrees apart never meet, and neighbours differ much


def chrome_trace(spans: Iterable[Span], device_names: Sequence[str]) -> dict[str, Any]:
    """The trace event format of Chrome and Perfetto: one complete event a span, in order of start, in microseconds.

    A process for each device with a thread for each stream. Spans of one thread that overlap get a second thread:
    Perfetto would leave out all but the first.
    """
    names = {(pid, stream, 0): label for pid in range(len(device_names)) for stream, label in enumerate(STREAMS)}
    tids = {thread: tid for tid, thread in enumerate(names, start=1)}  # viewers take 0 for an idle processor
    ends_us: defaultdict[tuple[int, int, int], float] = defaultdict(lambda: -inf)
    events: list[dict[str, Any]] = []
    for span in _drawn(spans):
        start_us, end_us = round(span["start_s"] * 1e6), round(span["end_s"] * 1e6)  # whole, so that neighbours meet
        pid, stream = span["device"], _STREAM[span["kind"]]
        thread = next((pid, stream, lane) for lane in count() if ends_us[pid, stream, lane] <= start_us)
        ends_us[thread] = end_us
        names.setdefault(thread, f"{STREAMS[stream]} {thread[2] + 1}")
        tid = tids.setdefault(thread, len(tids) + 1)
        arguments = {key: span[key] for key in ("trial", "shard", "direction", "step", "cause") if key in span}
        what = {"ph": "X", "name": _name(span), "cat": span["kind"], "args": arguments}
        events.append({**what, "pid": pid + 1, "tid": tid, "ts": start_us, "dur": end_us - start_us})
    metadata = [
        {"ph": "M", "name": f"{what}_{key}", "pid": thread[0] + 1, "tid": tids[thread], "args": {key: value}}
        for place, thread in enumerate(sorted(names))
        for what, name in (("process", device_names[thread[0]]), ("thread", names[thread]))
        for key, value in (("name", name), ("sort_index", place))
    ]
    return {"traceEvents": metadata + events, "displayTimeUnit": "ms"}


def figure(spans: Iterable[Span], device_names: Sequence[str]) -> Figure:
    """Rows are devices, and under each its copy streams; bars are visits to shards, one colour a trial in any figure.

    Promotions and spills are hatched, stalls grey; the legend hides and shows trials. Zooming is along time.
    """
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise ConfigError(
            "a figure is drawn by plotly, but plotly is not installed: pip install "
            '"hydra-tune[timeline]", or save a .json for ui.perfetto.dev.'
        ) from error
    drawn: defaultdict[float, list[Span]] = defaultdict(list)  # by trial, and stalls last
    for span in _drawn(spans):
        drawn[inf if span["kind"] == "stall" else span["trial"]].append(span)
    bars = [
        {
            "name": "stalled" if trial == inf else _whose(of[0]),
            "orientation": "h",
            "base": [span["start_s"] for span in of],
            "x": [span["end_s"] - span["start_s"] for span in of],
            "y": [len(STREAMS) * span["device"] + _STREAM[span["kind"]] for span in of],
            "width": 0.8,  # else plotly takes the gap between the rows that this trace happens to have
            "marker": {
                "color": _GREY if trial == inf else f"hsl({trial * _GOLDEN_DEGREES % 360:.1f},65%,50%)",
                "line": {"width": 0},
                "pattern": {"shape": [_HATCH[span["kind"]] for span in of]},
            },
            "hovertext": [_hover(span) for span in of],
            "hovertemplate": "%{hovertext}<extra></extra>",
        }
        for trial, of in sorted(drawn.items())
    ]
    labels = [label for name in device_names for label in (name, *STREAMS[1:])]
    axis = {"tickvals": list(range(len(labels))), "ticktext": labels, "range": [len(labels) - 0.5, -0.5]}
    layout = {
        "template": "none",  # plotly's own warns of itself in version 6
        "barmode": "overlay",
        "hovermode": "closest",
        "showlegend": True,
        "height": 160 + 32 * len(labels),
        "margin": {"l": 160},
        "xaxis": {"title": {"text": "seconds"}},
        "yaxis": {**axis, "fixedrange": True, "zeroline": False},
    }
    return go.Figure([go.Bar(bar) for bar in bars], layout)


def save(spans: Iterable[Span], device_names: Sequence[str], path: str | PathLike[str]) -> Path:
    """Write `chrome_trace` to a .json, `figure` to a .html that needs no network. A browser slows with the number of
    bars: of a long run, save a .json."""
    path = checked_path(path)
    if path.suffix.lower() == ".json":
        text = json.dumps(chrome_trace(spans, device_names))
    else:
        text = figure(spans, device_names).to_html(include_plotlyjs=True, div_id="timeline")
    path.write_text(text, encoding="utf-8")
    return path


def checked_path(path: str | PathLike[str]) -> Path:
    """Where a timeline can be saved."""
    path = Path(path)
    if path.suffix.lower() not in (".json", ".html"):
        raise ConfigError(
            f"a timeline is saved as .json (for ui.perfetto.dev) or .html (a figure), got {path.name!r}. "
            f'Write "{path.stem}.json" or "{path.stem}.html".'
        )
    check_folder(path, "a timeline")
    return path


def _drawn(spans: Iterable[Span]) -> list[Span]:
    return sorted((span for span in spans if span["kind"] != "wait"), key=_WHEN)


def _whose(span: Span) -> str:
    return span.get("name") or f"trial {span['trial']}"


def _name(span: Span) -> str:
    """What a bar says: `trial 2 F0`, as in docs/architecture.md."""
    if span["kind"] == "stall":
        return f"stalled: {span.get('cause') or 'no cause given'}"
    return f"{_whose(span)} {span['direction']}{span['shard']}"


def _hover(span: Span) -> str:
    start_s, end_s = span["start_s"], span["end_s"]
    copy = f", {span['kind']}" if span["kind"] in ("promote", "spill") else ""
    step = f", step {span['step']}" if span.get("step") else ""  # a stall has none
    return f"{_name(span)}{copy}{step}<br>{start_s:.6f} to {end_s:.6f} s ({(end_s - start_s) * 1e3:.3f} ms)"
