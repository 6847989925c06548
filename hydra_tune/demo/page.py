"""The demo's report on one page: the trials, their loss curves, and which trial had the device when. HTML and SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hydra_tune.config import format_bytes

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5")
WIDTH, HEIGHT, MARGIN = 960, 260, 46
MAX_BARS = 6000
LEAST_STALL = 0.5  # width from which a stall is drawn; between any two tasks there are shorter ones

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>hydra_tune demo</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:{width}px;margin:2em auto;padding:0 1em;color:#222}}
table{{border-collapse:collapse}}td,th{{padding:.15em .8em;text-align:right;border-bottom:1px solid #ddd}}
td:first-child,th:first-child{{text-align:left}}svg{{width:100%;height:auto}}text{{font-size:11px;fill:#555}}</style>
<h1>A sweep of models larger than the device</h1>
<p>{summary}</p><h2>Trials</h2>{table}
<h2>Training loss</h2>{losses}<h2>Who had the device</h2>{timeline}
<p>Bars are the last visits to shards, as many as a page can draw, coloured by trial: forward at the top of each row,
backward below; pale bars are promotions from host memory. The lowest row is the device, grey where it ran no task
(point at it for the cause); the rows above are its trials' shards.</p></html>
"""


def write_page(path: Path, report: dict[str, Any], spans: Sequence[dict[str, Any]]) -> None:
    """Write the report of `sweep.run`, and the spans of its pool's timeline, to a .html."""
    numbers = {t["trial"]: int(t["name"].split()[-1]) for t in report["pool"]["trials"]}
    curves = {t["number"]: t["losses"] for t in report["trials"]}
    path.write_text(
        _PAGE.format(
            width=WIDTH,
            summary=_summary(report),
            table=_table(report),
            losses=_curves(curves),
            timeline=_timeline(spans, numbers),
        )
    )


def _summary(report: dict[str, Any]) -> str:
    best, proof, device = report["best"], report["proof"], report["pool"]["devices"][0]
    equal = proof["losses_equal"] and proof["weights_equal"]
    return (
        f"Best: trial {best['trial']} with {best['bits_per_byte']:.3f} bits per byte. Trained again in plain PyTorch, "
        f"{report['again']}, its losses and final weights are {'equal bit for bit' if equal else 'DIFFERENT'}. "
        f"Peak {format_bytes(device['peak_bytes'])} of a budget of {format_bytes(device['budget_bytes'])} on "
        f"{escape(device['name'])}; the device was busy {device['busy_s']:.0f} s of {report['sweep_s']:.0f} s, and "
        f"ran no task beside live trials for {device['stalled_s']:.1f} s, pilots included."
    )


def _table(report: dict[str, Any]) -> str:
    pool = {t["name"]: t for t in report["pool"]["trials"]}
    rows = ["<tr><th>trial<th>bits per byte<th>depth<th>lr<th>weights<th>shards<th>promoted a step<th>busy<th>waited"]
    for trial in report["trials"]:
        t, number = pool[f"trial {trial['number']}"], trial["number"]
        rows.append(
            f"<tr><td><span style='color:{_colour(number)}'>&#9632;</span> {number}"
            f"<td>{trial['validation'][-1][1]:.3f}<td>{trial['config']['depth']}<td>{trial['config']['lr']:.2g}"
            f"<td>{format_bytes(t['weight_bytes'])}<td>{len(t['shards'])}"
            f"<td>{format_bytes(t['promoted_bytes'] // max(1, t['steps']))}"
            f"<td>{t['busy_s']:.1f} s<td>{t['stalled_s']:.1f} s"
        )
    return f"<table>{''.join(rows)}</table>"


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _svg(height: int, parts: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'


def _curves(curves: dict[int, list[float]]) -> str:
    highest = max(max(c) for c in curves.values())
    lowest = min(min(c) for c in curves.values())
    steps = max(len(c) for c in curves.values())
    parts = []
    for value in (lowest, (lowest + highest) / 2, highest):
        y = _scale(value, lowest, highest, HEIGHT - MARGIN, 10)
        parts.append(f'<path d="M{MARGIN} {y}H{WIDTH}" stroke="#ddd"/><text x="4" y="{y + 4}">{value:.2f}</text>')
    for number, losses in curves.items():
        xs = [_scale(i, 0, max(1, steps - 1), MARGIN, WIDTH - 10) for i in range(len(losses))]
        ys = [_scale(v, lowest, highest, HEIGHT - MARGIN, 10) for v in losses]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{_colour(number)}" stroke-width="1.5"/>')
    parts.append(f'<text x="{WIDTH - 80}" y="{HEIGHT - 20}">step {steps}</text>')
    return _svg(HEIGHT, parts)


def _timeline(spans: Sequence[dict[str, Any]], numbers: dict[int, int]) -> str:
    """One row for each trial (shards from top to bottom) and one for the device. Only the last spans, if too many."""
    shown = [s for s in spans if s["kind"] in ("run", "promote")][-MAX_BARS:]
    if not shown:
        return "<p>Nothing ran.</p>"
    stalls = [s for s in spans if s["kind"] == "stall" and s["start_s"] >= shown[0]["start_s"]]
    start, end = shown[0]["start_s"], shown[-1]["end_s"]
    shards = 1 + max(s["shard"] for s in shown)
    rows = {trial: row for row, trial in enumerate(sorted({s["trial"] for s in shown}, key=lambda t: numbers[t]))}
    row_height, bottom = 44, 44 * (len(rows) + 1)
    parts = [
        f'<text x="4" y="{row * row_height + 22}">trial {numbers[trial]}</text>' for trial, row in rows.items()
    ] + [f'<text x="4" y="{bottom - 14}">device</text>']
    for s in shown:
        x = _scale(s["start_s"], start, end, MARGIN + 10, WIDTH)
        width = max(0.3, _scale(s["end_s"], start, end, MARGIN + 10, WIDTH) - x)
        pale = ' opacity=".35"' if s["kind"] == "promote" else ""
        fill = f'fill="{_colour(numbers[s["trial"]])}"{pale}'
        half = 0 if s["direction"] == "F" else 18
        y = rows[s["trial"]] * row_height + half + 16 * s["shard"] / shards
        parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{16 / shards + 0.5:.1f}" {fill}/>')
        parts.append(f'<rect x="{x:.1f}" y="{bottom - 32 + half}" width="{width:.1f}" height="14" {fill}/>')
    for s in stalls:
        x = _scale(s["start_s"], start, end, MARGIN + 10, WIDTH)
        width = _scale(s["end_s"], start, end, MARGIN + 10, WIDTH) - x
        if width >= LEAST_STALL:
            bar = f'<rect x="{x:.1f}" y="{bottom - 32}" width="{width:.1f}" height="32" fill="#ccc">'
            parts.append(f"{bar}<title>{escape(s['cause'])}</title></rect>")
    parts.append(f'<text x="{MARGIN}" y="{bottom + 14}">{start:.1f} s</text>')
    parts.append(f'<text x="{WIDTH - 40}" y="{bottom + 14}">{end:.1f} s</text>')
    return _svg(bottom + 20, parts)


def _scale(value: float, low: float, high: float, to_low: float, to_high: float) -> float:
    """Map `value` linearly from the range `low` to `high` to the range `to_low` to `to_high`."""
    return to_low + (value - low) / ((high - low) or 1) * (to_high - to_low)
