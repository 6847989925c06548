"""The least makespan as a mixed-integer program, solved by scipy's HiGHS.

Hydra's program (arXiv 2110.08633, section 4), tightened: each start has a window, from the tasks before it and from
those after it in the makespan already known, so that big-M is no larger than two windows ask for, and pairs whose
windows decide their order have no binary.

    minimise C                                     C the makespan; horizon = 1, so tolerances are relative to it
    C >= X_last + S_last of each trial             X_a start, S_a seconds
    X_b >= X_a + S_a                               b follows a in its trial
    sum_p A_ap = 1                                 A_ap: a runs on device p
    C >= sum_a S_a A_ap                            implied; makes the relaxation as good as total / devices
    Y_ab + Y_ba >= A_ap + A_bp - 1                 on one device, one is before the other
    X_b >= X_a + S_a - M_ab (1 - Y_ab)             M_ab = latest end of a - earliest start of b
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import inf

from hydra_tune.errors import ConfigError
from hydra_tune.schedule.plan import Task


@dataclass(frozen=True)
class Timed:
    """A task, how long it takes and the window of its start, in horizons."""

    task: Task
    length: float
    earliest: float
    latest: float

    def can_precede(self, other: Timed) -> bool:
        return self.earliest + self.length <= other.latest

    def must_precede(self, other: Timed) -> bool:
        return self.latest + self.length <= other.earliest


@dataclass(frozen=True)
class Solution:
    """`bound` is what the solver proved about every schedule; with `proven`, this one reaches it."""

    proven: bool
    bound: float
    starts: dict[Task, float]
    devices: dict[Task, int]


class _Rows:
    """Columns are variables with bounds; rows are sums of them with bounds."""

    def __init__(self) -> None:
        self.column_bounds: list[tuple[float, float]] = []
        self.is_whole: list[int] = []
        self.row_bounds: list[tuple[float, float]] = []
        self.entries: list[tuple[float, int, int]] = []

    def column(self, lower: float, upper: float, *, whole: bool = False) -> int:
        self.column_bounds.append((lower, upper))
        self.is_whole.append(int(whole))
        return len(self.is_whole) - 1

    def row(self, terms: Iterable[tuple[float, int]], lower: float, upper: float = inf) -> None:
        self.entries += [(factor, len(self.row_bounds), column) for factor, column in terms]
        self.row_bounds.append((lower, upper))


def solve(
    trials: Sequence[Sequence[Timed]], alike: Iterable[tuple[int, int]], devices: int, bound: float, time_limit_s: float
) -> Solution | None:
    """The best schedule found in `time_limit_s`, or None. `alike` are pairs of trials that differ by number alone; no
    makespan is below `bound`, and one of 1 is known.

    Raises:
        ConfigError: scipy is not installed.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError:
        raise ConfigError(
            "the exact optimum needs scipy, which is not installed. "
            'Install it with pip install "hydra-tune[simulate]", or compare with lower_bound().'
        ) from None
    rows, starts, places = _program(trials, alike, devices, bound)
    factors, at, columns = zip(*rows.entries, strict=True)
    result = milp(
        [1.0] + [0.0] * (len(rows.is_whole) - 1),
        integrality=rows.is_whole,
        bounds=Bounds(*zip(*rows.column_bounds, strict=True)),
        constraints=LinearConstraint(
            csr_array((factors, (at, columns)), shape=(len(rows.row_bounds), len(rows.is_whole))),
            *zip(*rows.row_bounds, strict=True),
        ),
        options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
    )
    assert result.status in (0, 1), result.message  # a schedule is known, so the program has a solution
    if result.x is None:
        return None
    return Solution(
        proven=result.status == 0,
        bound=max(bound, float(result.mip_dual_bound)),
        starts={task: float(result.x[column]) for task, column in starts.items()},
        devices={task: max(range(devices), key=lambda p: result.x[on[p]]) for task, on in places.items()},
    )


def _program(
    trials: Sequence[Sequence[Timed]], alike: Iterable[tuple[int, int]], devices: int, bound: float
) -> tuple[_Rows, dict[Task, int], dict[Task, list[int]]]:
    """The rows, and of each task the column of its start and the columns of its devices."""
    rows = _Rows()
    makespan = rows.column(bound, 1.0)
    tasks = [timed for trial in trials for timed in trial]
    starts = {timed.task: rows.column(timed.earliest, timed.latest) for timed in tasks}
    # Devices are alike: call the first task's device 0, the next new one 1, and so on.
    places = {
        timed.task: [rows.column(0, int(device <= number), whole=True) for device in range(devices)]
        for number, timed in enumerate(tasks)
    }
    for trial in trials:
        for before, after in pairwise(trial):
            rows.row([(1, starts[after.task]), (-1, starts[before.task])], before.length)
        rows.row([(1, makespan), (-1, starts[trial[-1].task])], trial[-1].length)
    for on in places.values():
        rows.row([(1, column) for column in on], 1, 1)
    for device in range(devices):
        rows.row([(1, makespan), *((-timed.length, places[timed.task][device]) for timed in tasks)], 0)
    for one, other in alike:  # which of them starts first is a matter of names
        rows.row([(1, starts[trials[other][0].task]), (-1, starts[trials[one][0].task])], 0)
    for first, second in combinations(trials, 2):
        for a in first:
            for b in second:
                _keep_apart(rows, a, b, starts, places)
    return rows, starts, places


def _keep_apart(rows: _Rows, a: Timed, b: Timed, starts: dict[Task, int], places: dict[Task, list[int]]) -> None:
    if a.must_precede(b) or b.must_precede(a):
        return
    orders = []
    for before, after in ((a, b), (b, a)):
        if before.can_precede(after):
            order = rows.column(0, 1, whole=True)
            big = before.latest + before.length - after.earliest
            terms = [(1.0, starts[after.task]), (-1.0, starts[before.task]), (-big, order)]
            rows.row(terms, before.length - big)
            orders.append(order)
    for on_a, on_b in zip(places[a.task], places[b.task], strict=True):
        rows.row([*((1, order) for order in orders), (-1, on_a), (-1, on_b)], -1)
