"""Makes a workload from what a pool has seen of its trials. With it, the same sweep can be simulated on other devices
or under another policy."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from hydra_tune.schedule.plan import Direction
from hydra_tune.simulation.workload import TrialWork

LEAST_S = 1e-9  # the time of a task that never ran: a frozen shard has no backward
Span = Mapping[str, Any]


class Visit(NamedTuple):
    """A task that has run. It was ready at `asked_s`, and may have waited until `start_s`."""

    step: int
    shard: int
    direction: str
    asked_s: float
    start_s: float
    end_s: float


def recorded(spans: Iterable[Span], trials: Iterable[Mapping[str, Any]]) -> list[TrialWork]:
    """The workload of a pool's timeline and of the trials of its report. It has the trials that have made a training
    step.

    A task's time is the median of its runs. The loop's time is the median of what a step takes outside of its tasks:
    the loss, the optimizer, the loader and whatever else the script does. Gradients take no time of their own, since
    they have reached the host when the backward ends. Both times include that trials slowed each other down, as by
    sharing cores on virtual devices.
    """
    visits = _visits(spans)
    return [work for trial in trials if (work := _work(trial, visits[trial["trial"]])) is not None]


def _visits(spans: Iterable[Span]) -> defaultdict[int, list[Visit]]:
    """The visits of each trial, in their order."""
    visits: defaultdict[int, list[Visit]] = defaultdict(list)
    asked_s: dict[tuple[int, Any], float] = {}  # by task: on a GPU, others' waits may come before its run
    for span in spans:
        trial, what = span["trial"], (span["step"], span["shard"], span["direction"])
        if span["kind"] == "wait":
            asked_s[trial, what] = span["start_s"]
        elif span["kind"] == "run":
            asked = asked_s.pop((trial, what), span["start_s"])
            visits[trial].append(Visit(*what, asked, span["start_s"], span["end_s"]))
    return visits


def _work(trial: Mapping[str, Any], visits: Sequence[Visit]) -> TrialWork | None:
    seconds: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    outside_s: defaultdict[int, float] = defaultdict(float)
    for visit in visits:
        seconds[visit.shard, visit.direction].append(visit.end_s - visit.start_s)
    for visit, after in pairwise(visits):
        outside_s[visit.step] += max(0.0, after.asked_s - visit.end_s)  # a GPU may end after the next is asked
    trained = {visit.step for visit in visits if visit.direction == Direction.BACKWARD.value}
    if not trained:
        return None

    def median_s(direction: Direction) -> tuple[float, ...]:
        of_shards = (seconds[n, direction.value] or [LEAST_S] for n in range(len(trial["shards"])))
        return tuple(map(statistics.median, of_shards))

    return TrialWork(
        steps=len(trained),
        forward_s=median_s(Direction.FORWARD),
        backward_s=median_s(Direction.BACKWARD),
        shard_bytes=tuple(shard["slot_bytes"] for shard in trial["shards"]),
        name=trial["name"],
        work_bytes=tuple(max(s["forward_work_bytes"], s["backward_work_bytes"]) for s in trial["shards"]),
        gradient_bytes=(0,) * len(trial["shards"]),
        boundary_bytes=max(shard["boundary_bytes"] for shard in trial["shards"]),
        loop_s=statistics.median(outside_s[step] for step in trained),
        held_bytes=trial["held_bytes"],
        step_bytes=trial["step_bytes"],
    )
