"""Curves as an SVG: medians as lines, quartiles as bands, the value on a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 400, 64, 48, 16, 16
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728")
Curve = Sequence[Mapping[str, float]]  # quartile_low, median, quartile_high at each x


def curves(xs: Sequence[int], arms: Mapping[str, Curve], *, x_title: str, y_title: str, y_max: float) -> str:
    """From where all quartiles of an arm are below `y_max`."""
    lowest = min(point["quartile_low"] for curve in arms.values() for point in curve)
    low, high = math.log(lowest * 0.95), math.log(y_max)

    def place(x: float, y: float) -> str:
        across = LEFT + (WIDTH - LEFT - RIGHT) * x / max(xs)
        down = TOP + (HEIGHT - TOP - BOTTOM) * (high - math.log(y)) / (high - low)
        return f"{across:.1f},{down:.1f}"

    parts = []
    for i, (name, curve) in enumerate(arms.items()):
        points = [(x, point) for x, point in zip(xs, curve, strict=True) if point["quartile_high"] <= y_max]
        upper = [place(x, point["quartile_high"]) for x, point in points]
        lower = [place(x, point["quartile_low"]) for x, point in reversed(points)]
        line = [place(x, point["median"]) for x, point in points]
        colour, text_y = COLOURS[i % len(COLOURS)], TOP + 20 * (i + 1)
        parts += [
            f'<polygon points="{" ".join(upper + lower)}" fill="{colour}" fill-opacity="0.15"/>',
            f'<polyline points="{" ".join(line)}" fill="none" stroke="{colour}" stroke-width="2"/>',
            f'<text x="{WIDTH - 200}" y="{text_y}" fill="{colour}">{name}</text>',
        ]
    for y in ticks(lowest * 0.95, y_max):
        across, down = place(0, y).split(",")
        parts.append(f'<line x1="{across}" y1="{down}" x2="{WIDTH - RIGHT}" y2="{down}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{float(down) + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in (xs[-1] * i // 4 for i in range(5)):
        across, _ = place(x, y_max).split(",")
        parts.append(f'<text x="{across}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">{x_title}</text>')
    parts.append(f'<text transform="translate(14,{HEIGHT / 2}) rotate(-90)" text-anchor="middle">{y_title}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
    return (
        "\n".join([head + 'font-size="13">', '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"])
        + "\n"
    )


def ticks(low: float, high: float) -> list[float]:
    """1, 1.5, 2, 3, 5 and 7 times powers of ten."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    every = [digit * 10**exponent for exponent in exponents for digit in (1, 1.5, 2, 3, 5, 7)]
    return [value for value in every if low <= value <= high]
