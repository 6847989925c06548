"""The report after a run: one page that opens in a browser without a network.

It is built from plain data. Spans travel as columns, packed by gzip, and the page's script (`report_page.js`) draws
them at any zoom: a run of 100,000 tasks takes less than a megabyte. plotly, which is 4.8 MB, is packed likewise, and
only there if there are figures that need it.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from hydra_tune.config import format_bytes
from hydra_tune.errors import ConfigError
from hydra_tune.show.live_table import format_seconds
from hydra_tune.show.timeline import trial_colour

_HERE = Path(__file__).parent
_MOST_SAMPLES = 4000  # of a device's memory, some for each pixel
_KINDS = {"run": 0, "promote": 1, "spill": 2, "stall": 3}
CAUSES = {
    "pilot": "measuring first steps",
    "memory": "waiting for memory",
    "no ready task": "no ready task",
    "promotion": "waiting for a promotion",
    "launch": "waiting for the host",
}


@dataclass(frozen=True)
class RunRecord:
    """What a report is made of.

    `report`       of `ShardPool.report`
    `spans`        of `ShardPool.timeline`
    `memory`       (device, seconds, bytes used) whenever that changed
    `environment`  names and values
    `results`      by a trial's name: what its search knows of it, such as its value
    `figures`      a title, and a plotly figure as JSON
    """

    report: Mapping[str, Any]
    spans: Sequence[Mapping[str, Any]]
    memory: Sequence[tuple[int, float, int]] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    results: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    figures: Sequence[tuple[str, str]] = ()
    title: str = "hydra_tune report"


def checked_page_path(given: str | os.PathLike[str]) -> Path:
    """The path, if a report can be written there.

    Raises:
        ConfigError: it is no path, its name ends otherwise, or there is no such folder.
    """
    if not isinstance(given, (str, os.PathLike)):
        raise ConfigError(f"a report is saved at a path, got {type(given).__name__}. Write save_report('report.html').")
    path = Path(given)
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(
            f'a report is a .html, got {(path.name or str(path))!r}. Write "{path.stem or "report"}.html".'
        )
    if not path.parent.is_dir():
        raise ConfigError(f"a report is saved in a folder that there is, got {str(path)!r}. Make {str(path.parent)!r}.")
    return path


def save_page(run: RunRecord, given: str | os.PathLike[str]) -> Path:
    path, text = checked_page_path(given), page(run)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"a report cannot be saved as {str(path)!r} ({error.strerror}). Name another file.") from None
    return path


def page(run: RunRecord) -> str:
    """The page as HTML."""
    plots, plotly = _plots(run.figures)
    return Template((_HERE / "report_page.html").read_text(encoding="utf-8")).substitute(
        title=escape(run.title),
        summary=escape(_summary(run)),
        cards="".join(f'<div class="card"><span>{escape(k)}</span><b>{escape(v)}</b></div>' for k, v in _cards(run)),
        shares="".join(_shares(device, run.report["elapsed_s"]) for device in run.report["devices"]),
        table=_table(run),
        plots=plots,
        environment="".join(
            f'<tr><td>{escape(name)}</td><td style="text-align:left">{escape(value)}</td></tr>'
            for name, value in run.environment.items()
        ),
        data=_packed(json.dumps(_data(run), separators=(",", ":"))),
        plotly=plotly,
        script=(_HERE / "report_page.js").read_text(encoding="utf-8"),
    )


def _packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


# ---- the timeline's data ----


def _data(run: RunRecord) -> dict[str, Any]:
    devices = run.report["devices"]
    end_s = max([run.report["elapsed_s"], *(span["end_s"] for span in run.spans)])
    memory: list[list[tuple[int, int]]] = [[] for _ in devices]
    for device, at_s, used_bytes in run.memory:
        memory[device].append((_us(at_s), used_bytes))
    memory = [_fewer(samples, _us(end_s)) for samples in memory]
    return {
        "devices": [device["name"] for device in devices],
        "budgets": [device["budget_bytes"] for device in devices],
        "names": [(t["trial"], t["name"], trial_colour(t["trial"])) for t in _in_order(run.report["trials"])],
        "memory": memory,
        "end_us": _us(end_s),
        **columns(run.spans),
    }


def _fewer(samples: list[tuple[int, int]], end_us: int) -> list[tuple[int, int]]:
    """If there are many samples: of each of `_MOST_SAMPLES` equal times the largest, and the last, at its end."""
    if len(samples) <= _MOST_SAMPLES:
        return samples
    length_us = end_us // _MOST_SAMPLES + 1
    largest, last = dict[int, tuple[int, int]](), dict[int, tuple[int, int]]()
    for at_us, used_bytes in samples:
        place = at_us // length_us
        largest[place] = max(largest.get(place, (0, 0)), (at_us, used_bytes), key=lambda sample: sample[1])
        last[place] = at_us, used_bytes
    return sorted({*largest.values(), *last.values()})


def columns(spans: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Spans as one list of whole numbers for each attribute, in order of start; a start is the difference from the one
    before, in microseconds. Waits of trials are left out."""
    drawn = sorted((s for s in spans if s["kind"] in _KINDS), key=lambda s: float(s["start_s"]))
    causes: dict[str, int] = {}
    found: defaultdict[str, list[int]] = defaultdict(list)
    before_us = 0
    for span in drawn:
        start_us = _us(span["start_s"])
        found["start"].append(start_us - before_us)
        before_us = start_us
        found["length"].append(max(0, _us(span["end_s"]) - start_us))
        found["kind"].append(_KINDS[span["kind"]])
        found["device"].append(span["device"])
        found["trial"].append(span["trial"])
        found["shard"].append(span["shard"])
        found["step"].append(span.get("step", 0))
        found["backward"].append(int(span["direction"] == "B"))
        cause = span.get("cause", "")
        found["cause"].append(causes.setdefault(CAUSES.get(cause, cause or "no cause given"), len(causes)))
    names = ("start", "length", "kind", "device", "trial", "shard", "step", "backward", "cause")
    return {"spans": {name: found[name] for name in names}, "causes": list(causes)}


def _in_order(trials: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Trial 2 before trial 10."""
    return sorted(trials, key=lambda trial: (len(trial["name"]), trial["name"]))


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


# ---- words and tables ----


def _summary(run: RunRecord) -> str:
    trials, devices = run.report["trials"], run.report["devices"]
    busy_s = sum(device["busy_s"] for device in devices)
    stalled: defaultdict[str, float] = defaultdict(float)
    for device in devices:
        for cause, seconds in device["stalled_by"].items():
            stalled[cause] += seconds
    whole_s = run.report["elapsed_s"] * len(devices) or 1.0
    told = f"{len(trials)} trials on {', '.join(device['name'] for device in devices)} "
    told += f"in {format_seconds(run.report['elapsed_s'])}. Devices computed {busy_s / whole_s:.0%} of the time"
    if stalled:
        cause, seconds = max(stalled.items(), key=lambda item: item[1])
        told += f"; the longest stalls, {seconds / whole_s:.0%}, were {CAUSES.get(cause, cause)}"
    return told + "."


def _cards(run: RunRecord) -> list[tuple[str, str]]:
    devices, trials = run.report["devices"], run.report["trials"]
    whole_s = run.report["elapsed_s"] * len(devices) or 1.0
    cards = [
        ("trials", str(len(trials))),
        ("time", format_seconds(run.report["elapsed_s"])),
        ("devices computed", f"{sum(device['busy_s'] for device in devices) / whole_s:.0%}"),
        ("promoted", format_bytes(sum(device["promoted_bytes"] for device in devices))),
        ("gradients to the host", format_bytes(sum(device["spilled_bytes"] for device in devices))),
    ]
    for device in devices:
        peak = f"{format_bytes(device['peak_bytes'])} of {format_bytes(device['budget_bytes'])}"
        cards.append((f"peak of {device['name']}", peak))
    return cards


def _shares(device: Mapping[str, Any], elapsed_s: float) -> str:
    whole_s = elapsed_s or 1.0
    parts = [("computing", device["busy_s"], "var(--ink)")]
    greys = ("#8b949e", "#a8b0b8", "#c3c9cf", "#6e7781", "#dadfe4")
    causes = sorted(device["stalled_by"].items(), key=lambda item: -float(item[1]))
    parts += [(CAUSES.get(c, c), s, greys[i % len(greys)]) for i, (c, s) in enumerate(causes)]
    left_s = whole_s - sum(seconds for _, seconds, _ in parts)
    parts.append(("without trials", max(0.0, left_s), "var(--card)"))
    shown = [(name, seconds / whole_s, colour) for name, seconds, colour in parts if seconds / whole_s >= 0.001]
    bars = "".join(
        f'<div style="width:{share:.3%};background:{colour}" title="{escape(name)}: {share:.1%}"></div>'
        for name, share, colour in shown
    )
    words = "".join(
        f'<span><span class="sample" style="background:{colour}"></span>{escape(name)} {share:.1%}</span>'
        for name, share, colour in shown
    )
    return f'<div>{escape(device["name"])}</div><div class="bar">{bars}</div><div class="legend">{words}</div>'


def _table(run: RunRecord) -> str:
    more = [key for key in dict.fromkeys(key for known in run.results.values() for key in known) if key != "state"]
    heads = ["trial", "state", *more, "steps", "ms/step", "weights", "shards", "promoted/step", "computed", "waited"]
    named = {trial["name"] for trial in run.report["trials"]}
    # those that the pool has refused as they were prepared
    refused = [name for name, known in run.results.items() if known.get("state") == "did not fit" and name not in named]
    trials = _in_order([*run.report["trials"], *({"trial": -1, "name": name, "state": ""} for name in refused)])
    rows = "".join(f"<tr>{_row(trial, run.results.get(trial['name'], {}), more)}</tr>" for trial in trials)
    return f"<thead><tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr></thead><tbody>{rows}</tbody>"


def _row(trial: Mapping[str, Any], known: Mapping[str, Any], more: Sequence[str]) -> str:
    nothing = dict.fromkeys(("steps", "trained_steps", "weight_bytes", "promoted_bytes", "busy_s", "stalled_s"), 0)
    # it may wait for host memory yet
    trial = {"resident": False, "shards": (), "step_s": None, **nothing, **trial}
    steps = max(1, trial["steps"])
    how = "resident" if trial["resident"] else "spilled"
    state = str(known.get("state", trial["state"]))
    shown = f"{state}, {how}" if trial["shards"] and state != "did not fit" else state
    cells: list[tuple[str, Any]] = [(shown, shown)]
    cells += [(_of_result(known.get(key)), known.get(key, "")) for key in more]
    cells += [
        (str(trial["trained_steps"]), trial["trained_steps"]),
        _ms(trial["step_s"]),
        (format_bytes(trial["weight_bytes"]), trial["weight_bytes"]),
        (str(len(trial["shards"])), len(trial["shards"])),
        (format_bytes(trial["promoted_bytes"] // steps), trial["promoted_bytes"] / steps),
        (f"{trial['busy_s']:.1f} s", trial["busy_s"]),
        (f"{trial['stalled_s']:.1f} s", trial["stalled_s"]),
    ]
    dot = f'<span class="dot" style="background:{trial_colour(trial["trial"])}"></span>'
    first = f"<td>{dot}{escape(trial['name'])}</td>"
    return first + "".join(f'<td data-value="{escape(str(value))}">{escape(text)}</td>' for text, value in cells)


def _ms(seconds: float | None) -> tuple[str, Any]:
    if seconds is None:
        return "", ""
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}", seconds


def _of_result(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _plots(figures: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The places of these figures in the page, and plotly, packed; both empty if there are none."""
    if not figures:
        return "", ""
    from plotly.offline import get_plotlyjs

    places = "".join(
        f'<h2>{escape(title)}</h2><div class="plot"><script type="application/json">'
        f"{figure.replace('</', '<' + chr(92) + '/')}</script></div>"
        for title, figure in figures
    )
    return places, _packed(get_plotlyjs())
