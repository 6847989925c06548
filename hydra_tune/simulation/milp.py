"""The least makespan as a mixed-integer program, solved by scipy's HiGHS.

Hydra's program (arXiv 2110.08633, section 4), tightened. A task cannot start before the tasks that come before it in
its trial have ended; and it must leave time for those after it, within the makespan that is already known (the
horizon). So each start has a window. The constants M are no larger than the windows require, and two tasks whose
windows decide their order need no binary variable.

    minimise C                                     C is the makespan; horizon = 1, so tolerances are relative to it
    C >= X_last + S_last of each trial             X_a start, S_a seconds
    X_b >= X_a + S_a                               b follows a in its trial
    sum_p A_ap = 1                                 A_ap is 1 if a runs on device p
    C >= sum_a S_a A_ap                            implied; makes the relaxation as good as total / devices
    Y_ab + Y_ba >= A_ap + A_bp - 1                 of two tasks on one device, one is before the other
    X_b >= X_a + S_a - M_ab (1 - Y_ab)             Y_ab is 1 if a is before b;
                                                   M_ab = latest end of a - earliest start of b
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import inf

from hydra_tune.errors import ConfigError
from hydra_tune.schedule.plan import Task


@dataclass(frozen=True)
class TaskWindow:
    """A task, its length, and its earliest and latest start; the horizon is 1."""

    task: Task
    length: float
    earliest: float
    latest: float

    def can_precede(self, other: TaskWindow) -> bool:
        return self.earliest + self.length <= other.latest

    def must_precede(self, other: TaskWindow) -> bool:
        return self.latest + self.length <= other.earliest


@dataclass(frozen=True)
class Solution:
    """A schedule. The solver has proved that no makespan is below `bound`, and if `proven` that none is shorter than
    this one's."""

    proven: bool
    bound: float
    starts: dict[Task, float]
    devices: dict[Task, int]


class _Program:
    """A linear program: columns are variables with bounds, rows are weighted sums of them with bounds."""

    def __init__(self) -> None:
        self.column_bounds: list[tuple[float, float]] = []
        self.is_whole: list[int] = []
        self.row_bounds: list[tuple[float, float]] = []
        self.entries: list[tuple[float, int, int]] = []  # (factor, row, column)

    def column(self, lower: float, upper: float, *, whole: bool = False) -> int:
        """Add a variable; returns its number."""
        self.column_bounds.append((lower, upper))
        self.is_whole.append(int(whole))
        return len(self.is_whole) - 1

    def row(self, terms: Iterable[tuple[float, int]], lower: float, upper: float = inf) -> None:
        """Bound the sum of `terms`, each a factor and a column."""
        self.entries += [(factor, len(self.row_bounds), column) for factor, column in terms]
        self.row_bounds.append((lower, upper))


def solve(
    trials: Sequence[Sequence[TaskWindow]],
    equal_pairs: Iterable[tuple[int, int]],
    devices: int,
    bound: float,
    time_limit_s: float,
) -> Solution | None:
    """The best schedule found in `time_limit_s`, or None if none was found. A schedule of makespan 1 must exist.

    Args:
        trials: for each trial its tasks, in order.
        equal_pairs: pairs of trials that differ by number alone.
        bound: no makespan is below it.

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
    program, starts, places = _build(trials, equal_pairs, devices, bound)
    factors, rows, columns = zip(*program.entries, strict=True)
    result = milp(
        [1.0] + [0.0] * (len(program.is_whole) - 1),
        integrality=program.is_whole,
        bounds=Bounds(*zip(*program.column_bounds, strict=True)),
        constraints=LinearConstraint(
            csr_array((factors, (rows, columns)), shape=(len(program.row_bounds), len(program.is_whole))),
            *zip(*program.row_bounds, strict=True),
        ),
        options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
    )
    assert result.status in (0, 1), result.message  # solved, or out of time: a schedule exists
    if result.x is None:
        return None
    return Solution(
        proven=result.status == 0,
        bound=max(bound, float(result.mip_dual_bound)),
        starts={task: float(result.x[column]) for task, column in starts.items()},
        devices={task: max(range(devices), key=lambda p: result.x[columns[p]]) for task, columns in places.items()},
    )


def _build(
    trials: Sequence[Sequence[TaskWindow]], equal_pairs: Iterable[tuple[int, int]], devices: int, bound: float
) -> tuple[_Program, dict[Task, int], dict[Task, list[int]]]:
    """The program; for each task the column of its start, X; and for each task the columns of its devices, A."""
    program = _Program()
    makespan = program.column(bound, 1.0)
    windows = [window for trial in trials for window in trial]
    starts = {window.task: program.column(window.earliest, window.latest) for window in windows}
    # Devices differ by number alone, so the first task runs on device 0, the second on 0 or 1, and so on.
    places = {
        window.task: [program.column(0, int(device <= number), whole=True) for device in range(devices)]
        for number, window in enumerate(windows)
    }
    for trial in trials:
        for before, after in pairwise(trial):
            program.row([(1, starts[after.task]), (-1, starts[before.task])], before.length)
        program.row([(1, makespan), (-1, starts[trial[-1].task])], trial[-1].length)
    for columns in places.values():
        program.row([(1, column) for column in columns], 1, 1)
    for device in range(devices):
        program.row([(1, makespan), *((-window.length, places[window.task][device]) for window in windows)], 0)
    for one, other in equal_pairs:  # equal trials may be exchanged, so the one with the lower number starts first
        program.row([(1, starts[trials[other][0].task]), (-1, starts[trials[one][0].task])], 0)
    for first, second in combinations(trials, 2):
        for a in first:
            for b in second:
                _forbid_overlap(program, a, b, starts, places)
    return program, starts, places


def _forbid_overlap(
    program: _Program, a: TaskWindow, b: TaskWindow, starts: dict[Task, int], places: dict[Task, list[int]]
) -> None:
    """The last two rows above, for two tasks of different trials."""
    if a.must_precede(b) or b.must_precede(a):
        return
    orders = []
    for before, after in ((a, b), (b, a)):
        if before.can_precede(after):
            order = program.column(0, 1, whole=True)
            big_m = before.latest + before.length - after.earliest
            terms = [(1.0, starts[after.task]), (-1.0, starts[before.task]), (-big_m, order)]
            program.row(terms, before.length - big_m)
            orders.append(order)
    for on_a, on_b in zip(places[a.task], places[b.task], strict=True):
        program.row([*((1, order) for order in orders), (-1, on_a), (-1, on_b)], -1)
