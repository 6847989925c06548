"""Draws spans, of a real run or of a simulated one: for ui.perfetto.dev, or as a plotly figure.

A span is a mapping with kind, device, trial, shard, direction, start_s and end_s; cause, step and the trial's name are
optional:

    run      the device computed                     promote, spill   its copy streams did
    stall    it did not, though trials were live:    wait             a trial waited; shown by trial, in the trace only
             the cause says why
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra_tune.config import check_folder
from hydra_tune.errors import ConfigError

if TYPE_CHECKING:
    from plotly.graph_objects import Bar, Figure

Span = Mapping[str, Any]
STREAMS = ("compute", "copies (promote)", "copies (spill)")
_STREAM = {"run": 0, "stall": 0, "promote": 1, "spill": 2}
_HATCH = {"run": "", "stall": "", "promote": "/", "spill": "\\"}
_GREY = "#b0b0b0"  # no trial's: theirs are saturated
_GOLDEN_DEGREES = 137.508  # hues that many degrees apart never meet, and neighbours differ much


class Thread(NamedTuple):
    """A row of Perfetto's. `place` is a stream of a device; of the process behind the devices, a trial."""

    process: int
    place: int
    lane: int


def chrome_trace(spans: Iterable[Span], device_names: Sequence[str]) -> dict[str, Any]:
    """The trace event format of Chrome and Perfetto: one complete event a span, in order of start, in microseconds.

    A process for each device with a thread for each stream, one more for trials that waited. Spans of one thread that
    overlap get a second thread: Perfetto would leave out all but the first.

    Raises:
        ConfigError: a span of unknown kind or device, or that ends before it starts.
    """
    placed, threads = _placed(_checked(spans, device_names), len(device_names))
    tids = {thread: tid for tid, thread in enumerate(threads, start=1)}  # viewers take 0 for an idle processor
    whose = {span["trial"]: _whose(span) for span, _ in placed}
    events = [_event(span, thread[0] + 1, tids[thread]) for span, thread in placed]
    return {"traceEvents": [*_names(tids, device_names, whose), *events], "displayTimeUnit": "ms"}


def figure(spans: Iterable[Span], device_names: Sequence[str]) -> Figure:
    """Rows are devices, and under each its copy streams; bars are visits to shards, one colour a trial in any figure.

    Promotions and spills are hatched, stalls grey; the legend hides and shows trials. Zooming is along time.

    Raises:
        ConfigError: plotly is not installed; a span of unknown kind or device, or that ends before it starts.
    """
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise ConfigError(
            "a figure is drawn by plotly, but plotly is not installed: pip install "
            '"hydra-tune[timeline]", or save a .json for ui.perfetto.dev.'
        ) from error
    of_trial: defaultdict[int, list[Span]] = defaultdict(list)
    stalls = []
    for span in _checked(spans, device_names):
        if span["kind"] == "stall":
            stalls.append(span)
        elif span["kind"] != "wait":
            of_trial[span["trial"]].append(span)
    bars = [_bars(go.Bar, _whose(of[0]), _colour(trial), of) for trial, of in sorted(of_trial.items())]
    if stalls:
        bars.append(_bars(go.Bar, "stalled", _GREY, stalls))
    labels = [label for name in device_names for label in (name, *STREAMS[1:])]
    rows = {"tickvals": list(range(len(labels))), "ticktext": labels, "range": [len(labels) - 0.5, -0.5]}
    layout = {
        "template": "none",  # plotly's own warns of itself in version 6
        "barmode": "overlay",
        "hovermode": "closest",
        "showlegend": True,
        "height": 160 + 32 * len(labels),
        "margin": {"l": 160},
        "xaxis": {"title": {"text": "seconds"}},
        "yaxis": {**rows, "fixedrange": True, "zeroline": False},
    }
    return go.Figure(bars, layout)


def save(spans: Iterable[Span], device_names: Sequence[str], path: str | PathLike[str]) -> Path:
    """Write `chrome_trace` to a .json, `figure` to a .html that needs no network.

    A browser slows with the number of bars: of a long run, save a .json.

    Raises:
        ConfigError: another suffix, no such folder, plotly is not installed, or spans that cannot be drawn.
    """
    path = checked_path(path)
    if path.suffix.lower() == ".json":
        path.write_text(json.dumps(chrome_trace(spans, device_names)), encoding="utf-8")
    else:
        page = figure(spans, device_names).to_html(include_plotlyjs=True, div_id="timeline")
        path.write_text(page, encoding="utf-8")
    return path


def checked_path(path: str | PathLike[str]) -> Path:
    """Where a timeline can be saved.

    Raises:
        ConfigError: another suffix, or no such folder.
    """
    path = Path(path)
    if path.suffix.lower() not in (".json", ".html"):
        raise ConfigError(
            f"a timeline is saved as .json (for ui.perfetto.dev) or .html (a figure), got {path.name!r}. "
            f'Write "{path.stem}.json" or "{path.stem}.html".'
        )
    check_folder(path, "a timeline")
    return path


def _colour(trial: int) -> str:
    """The same for one trial everywhere, whoever else is shown."""
    return f"hsl({trial * _GOLDEN_DEGREES % 360:.1f},65%,50%)"


def _checked(spans: Iterable[Span], device_names: Sequence[str]) -> list[Span]:
    """In order of start."""
    known = sorted(spans, key=lambda span: (span["start_s"], span["end_s"]))
    for span in known:
        if span["kind"] not in (*_STREAM, "wait"):
            raise ConfigError(
                f"a span's kind is one of {', '.join(_STREAM)} and wait, got {span['kind']!r}. "
                "Rename it, or leave the span out."
            )
        if span["kind"] != "wait" and not 0 <= span["device"] < len(device_names):
            raise ConfigError(
                f"a span's device is an index into the {len(device_names)} device_names, got {span['device']}. "
                "Name every device."
            )
        if not 0 <= span["start_s"] <= span["end_s"] < float("inf"):
            raise ConfigError(
                f"a span starts at 0 seconds or later and ends after that, got {span['start_s']} to {span['end_s']}. "
                "Count from the start of the run."
            )
    return known


def _placed(spans: Iterable[Span], num_devices: int) -> tuple[list[tuple[Span, Thread]], list[Thread]]:
    """Each span with the first of its track's lanes that is free, and all lanes in order."""
    ends_us: dict[tuple[int, int], list[int]] = {(d, s): [0] for d in range(num_devices) for s in range(len(STREAMS))}
    placed = []
    for span in spans:
        waits = span["kind"] == "wait"
        track: tuple[int, int] = (num_devices, span["trial"]) if waits else (span["device"], _STREAM[span["kind"]])
        lanes = ends_us.setdefault(track, [])
        start_us, end_us = _ends_us(span)
        lane = next((i for i, last_us in enumerate(lanes) if last_us <= start_us), len(lanes))
        lanes[lane : lane + 1] = [end_us]
        placed.append((span, Thread(*track, lane=lane)))
    return placed, [Thread(*track, lane=i) for track in sorted(ends_us) for i in range(len(ends_us[track]))]


def _ends_us(span: Span) -> tuple[int, int]:
    """Whole, so that neighbours meet and do not overlap by a rounding."""
    return round(span["start_s"] * 1e6), round(span["end_s"] * 1e6)


def _event(span: Span, pid: int, tid: int) -> dict[str, Any]:
    start_us, end_us = _ends_us(span)
    arguments = {key: span[key] for key in ("trial", "shard", "direction", "step") if key in span}
    return {
        "ph": "X",
        "name": _name(span),
        "cat": span["kind"],
        "pid": pid,
        "tid": tid,
        "ts": start_us,
        "dur": end_us - start_us,
        "args": {**arguments, "cause": span.get("cause", "")},
    }


def _name(span: Span) -> str:
    """What a bar says: `trial 2 F0`, as in docs/how-it-works.md."""
    if span["kind"] == "stall":
        return f"stalled: {span.get('cause') or 'no cause given'}"
    return f"{_whose(span)} {span['direction']}{span['shard']}"


def _whose(span: Span) -> str:
    return span.get("name") or f"trial {span['trial']}"


def _names(tids: Mapping[Thread, int], device_names: Sequence[str], whose: Mapping[int, str]) -> list[dict[str, Any]]:
    """Metadata events: what processes and threads are called, and their order."""
    waited = len(device_names)
    named = {(thread.process + 1, 0): (*device_names, "trials that waited")[thread.process] for thread in tids}
    for thread, tid in tids.items():
        track = whose[thread.place] if thread.process == waited else STREAMS[thread.place]
        named[thread.process + 1, tid] = f"{track} {thread.lane + 1}" if thread.lane else track
    return [
        {"ph": "M", "name": f"{'thread' if tid else 'process'}_{key}", "pid": pid, "tid": tid, "args": {key: value}}
        for (pid, tid), name in named.items()
        for key, value in (("name", name), ("sort_index", tid or pid))
    ]


def _bars(make: type[Bar], name: str, fill: str, spans: Sequence[Span]) -> Bar:
    """One trace: its legend entry hides and shows all of it."""
    return make(
        name=name,
        orientation="h",
        base=[span["start_s"] for span in spans],
        x=[span["end_s"] - span["start_s"] for span in spans],
        y=[len(STREAMS) * span["device"] + _STREAM[span["kind"]] for span in spans],
        width=0.8,  # else plotly takes the gap between the rows that this trace happens to have
        marker={"color": fill, "line": {"width": 0}, "pattern": {"shape": [_HATCH[span["kind"]] for span in spans]}},
        hovertext=[_hover(span) for span in spans],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _hover(span: Span) -> str:
    lines = [_name(span) if span["kind"] in ("run", "stall") else f"{_name(span)}, {span['kind']}"]
    if "step" in span and span["kind"] != "stall":
        lines[0] += f", step {span['step']}"
    if span["kind"] != "stall" and span.get("cause"):
        lines.append(f"cause: {span['cause']}")
    duration_ms = (span["end_s"] - span["start_s"]) * 1e3
    return "<br>".join([*lines, f"{span['start_s']:.6f} to {span['end_s']:.6f} s ({duration_ms:.3f} ms)"])
