"""The live view: what it draws, where, and that nothing it meets stops or changes a search."""

import io
import json
import logging
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from hydra_tune.show import live_view, top
from hydra_tune.show.above_view import AboveView
from hydra_tune.show.live_table import MOST_ROWS, LiveTable, format_seconds, plain_line
from hydra_tune.show.live_view import LiveView
from hydra_tune.show.snapshot import DeviceSnapshot, PoolSnapshot, SearchSnapshot, TrialSnapshot

MIB = 2**20
DEVICE = DeviceSnapshot("cuda:0", 20 * MIB, 5 * MIB, 9 * MIB, "trial 1", "trial 2", 6.0, {"promotion": 1.0})
TRIALS = (
    TrialSnapshot("trial 1", "spilled", 10, 40, 0.25, 0.5, 5 * MIB, 8 * MIB, 0.4),
    TrialSnapshot("trial 2", "waits for memory of cuda:0"),
)
ENDED = tuple(TrialSnapshot(f"trial {n}", "complete", value=n / 4) for n in range(3, 40))
SEARCH = SearchSnapshot("digits", 30, 2, running=2, n_trials=64, best=0.25, best_trial=7, elapsed_s=64.0)
CROWD = PoolSnapshot(1.0, (DEVICE,), tuple(TrialSnapshot(f"trial {n}", "resident") for n in range(25)))
SNAPSHOT = PoolSnapshot(10.0, (DEVICE,), TRIALS, 9 * MIB, 90 * MIB, SEARCH)


def drawn(snapshot, columns=100, **options):
    console = Console(file=io.StringIO(), width=columns)
    console.print(LiveTable(snapshot, **options))
    return console.file.getvalue().splitlines()


class FakeTerminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def open_terminal(monkeypatch):
    """Opens one of 100 columns that both streams write to. Called in a test: pytest sets its own streams before."""

    def opened():
        stream = FakeTerminal()
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        for name, value in (("TERM", "xterm"), ("COLUMNS", "100"), ("LINES", "40")):
            monkeypatch.setenv(name, value)
        return stream

    return opened


def plain(text):
    from rich.ansi import AnsiDecoder

    return [line.plain for line in AnsiDecoder().decode(text)]


# ---- what is drawn ----


def test_a_table_says_what_the_search_the_devices_and_the_trials_do():
    search, device, header, _, first, second, more = map(str.rstrip, drawn(SNAPSHOT))
    assert search == "digits   32 of 64 done, 2 running, 2 pruned   best 0.25 (trial 7)   64 s left"
    assert device.split("━")[-1] == "  5.0 MiB of 20.0 MiB   busy 60%   computes trial 1, promotes trial 2"
    assert header.split() == ["trial", "state", "step", "ms/step", "value", "device", "host", "share", "left"]
    assert first.split() == [
        *("trial", "1", "spilled", "10/40", "250", "0.5", "5.0", "MiB", "8.0", "MiB", "40%", "8", "s"),
    ]
    assert second == "trial 2  waits for memory of cuda:0"
    assert more == " and 32 more", "those that have ended"


def test_a_search_ends_no_sooner_than_its_trials():
    """It said 3 s where one trial of many was left, with 17 s."""
    search = SearchSnapshot("s", complete=11, running=1, n_trials=12, elapsed_s=33.0)
    slow = TrialSnapshot("trial 11", "spilled", 10, 27, step_s=1.0)
    assert drawn(PoolSnapshot(33.0, (DEVICE,), (slow,), search=search))[0].rstrip().endswith("17 s left")
    fast = replace(slow, step_s=0.1)
    assert drawn(PoolSnapshot(33.0, (DEVICE,), (fast,), search=search))[0].rstrip().endswith("3 s left")


def test_ended_trials_fill_the_rows_that_are_left_and_the_rest_is_a_count():
    many = PoolSnapshot(1.0, (DEVICE,), TRIALS, search=SearchSnapshot("s", ended=ENDED))
    rows = [line for line in drawn(many) if line.startswith("trial ")][1:]
    assert len(rows) == MOST_ROWS and rows[-1].startswith("trial 39 ")
    assert drawn(CROWD)[-1] == " and 5 more"


def test_the_chosen_trial_is_among_those_that_are_shown():
    rows = drawn(CROWD, chosen="trial 22", most_rows=3)[-4:]
    assert [row[:8] for row in rows] == ["trial 20", "trial 21", "trial 22", " and 22 "]


def test_top_fits_its_terminal():
    """Rows filled it, and the line of keys was below its end."""
    console = Console(file=io.StringIO(), width=80)
    console.print(top._drawn(7, [replace(CROWD, search=SEARCH)], "trial 0", top._HELP, 24))
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 24 and lines[-1].rstrip() == top._HELP


@pytest.mark.parametrize(("lines", "rows"), [("24", 8), ("40", 16), ("80", 20)])
def test_at_least_half_of_a_terminal_is_for_what_is_printed(open_terminal, monkeypatch, lines, rows):
    terminal = open_terminal()
    monkeypatch.setenv("LINES", lines)
    with LiveView(lambda: CROWD):
        pass
    last = [line for line in plain(terminal.getvalue()) if line][-rows - 1 :]
    assert last[0].startswith("trial 0 ") and last[-1] == f" and {25 - rows} more"


def test_a_search_with_a_long_name_still_says_when_it_ends():
    named = replace(SEARCH, name="no-name-7873f486-2df6-4cde-acb3-1cdcc40a24ab")
    line = drawn(replace(SNAPSHOT, search=named), 80)[0].rstrip()
    assert line == "32 of 64 done, 2 running, 2 pruned   best 0.25 (trial 7)   64 s left"


STATES = (
    "resident",
    "waits for memory of cuda:0",
    "waits for trial 16's first step",
    "waits for 10.7 GiB of host memory",
)
WIDE = tuple(
    TrialSnapshot(f"trial {n}", state, 140, 2000, 0.21, 0.2134, 1200 * MIB, 7700 * MIB, 0.48)
    for n, state in enumerate(STATES, start=100)
)


@pytest.mark.parametrize(
    ("columns", "left_out"),
    [(60, "ms/step value device host share left"), (80, "host share left"), (100, "left"), (120, ""), (160, "")],
)
def test_a_narrow_terminal_gets_fewer_columns_and_no_cut_names_or_states(columns, left_out):
    """At 80 columns each row began with "trial..", for all cells shrank alike."""
    header, _, *rows = drawn(PoolSnapshot(1.0, (DEVICE,), WIDE), columns)[1:]
    assert header.split() == "trial state step ms/step value device host share left".removesuffix(left_out).split()
    assert [(row[:9], row[11:44].rstrip()) for row in rows] == [(trial.name, trial.state) for trial in WIDE]
    assert not any("…" in row for row in rows) and all(row[44:].split()[0] == "140/2000" for row in rows)


def test_a_name_that_leaves_no_room_for_its_state_is_whole():
    trial = TrialSnapshot("a name of 37 columns as Tune's may be", STATES[2])
    row = drawn(PoolSnapshot(1.0, (DEVICE,), (trial,)), 60)[-1]
    assert row == "a name of 37 columns as Tune's may be  waits for trial 16's…"


def test_a_line_says_the_same_for_logs():
    assert plain_line(SNAPSHOT) == (
        "digits   32 of 64 done, 2 running, 2 pruned   best 0.25 (trial 7)   64 s left; cuda:0 busy 60%, 5.0 MiB of "
        "20.0 MiB; trial 1 spilled at step 10/40, trial 2 waits for memory of cuda:0"
    )


def test_a_line_says_how_long_a_trial_has_waited():
    trial = TrialSnapshot("trial 3", "waits for 1.0 MiB of host memory", waits_s=18.2)
    assert plain_line(PoolSnapshot(1.0, (), (trial,))).endswith("trial 3 waits for 1.0 MiB of host memory (18 s)")


def test_a_snapshot_goes_through_json():
    assert PoolSnapshot.from_dict(json.loads(json.dumps(SNAPSHOT.to_dict()))) == SNAPSHOT


@pytest.mark.parametrize(("seconds", "text"), [(75, "75 s"), (600, "10 min"), (9000, "2 h 30 min"), (119.6, "120 s")])
def test_seconds_are_rounded_for_people(seconds, text):
    assert format_seconds(seconds) == text


# ---- where ----


def test_in_a_terminal_prints_and_logs_come_above_the_table_and_streams_are_given_back(open_terminal):
    terminal = open_terminal()
    handler = logging.StreamHandler()  # made before, as Optuna's
    logger = logging.getLogger("somebody")
    logger.addHandler(handler)
    try:
        with LiveView(lambda: SNAPSHOT):
            print("an objective prints")
            sys.stderr.write("a warning\n")
            logger.error("a log")
            sys.stderr.write("\r100%|####|\n")
            assert isinstance(sys.stdout, AboveView) and isinstance(handler.stream, AboveView)
    finally:
        logger.removeHandler(handler)
    assert sys.stdout is sys.stderr is handler.stream is terminal
    lines = [line for line in plain(terminal.getvalue()) if line]
    said = [lines.index(text) for text in ("an objective prints", "a warning", "a log", "100%|####|")]
    assert said == sorted(said) and lines[-2].startswith("trial 2"), "the table stays at the end"
    assert any(line.startswith("digits   32 of 64") for line in lines)


def test_stdout_that_goes_to_a_file_is_not_touched(open_terminal, monkeypatch):
    terminal = open_terminal()
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    with LiveView(lambda: SNAPSHOT):
        print("a result")
    assert file.getvalue() == "a result\n" and "a result" not in terminal.getvalue()


def test_without_a_terminal_progress_is_a_line_of_the_log(caplog, monkeypatch):
    monkeypatch.setattr(live_view, "LINE_S", 0.01)
    monkeypatch.setattr(live_view.LogScreen, "pause_s", 0.01)
    caplog.set_level("INFO", "hydra_tune")
    seen = threading.Event()

    def read():
        if caplog.messages:
            seen.set()
        return SNAPSHOT

    with LiveView(read):
        assert seen.wait(60)
    assert set(caplog.messages) == {plain_line(SNAPSHOT)}


def test_a_notebook_has_one_output_that_is_drawn_anew(monkeypatch):
    updates = []
    handle = SimpleNamespace(update=updates.append)
    shell = type("ZMQInteractiveShell", (), {})()
    display = SimpleNamespace(HTML=str, display=lambda html, display_id: handle)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell, display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *_: pytest.fail("each frame was one more output"))
    with LiveView(lambda: SNAPSHOT):
        pass
    assert "32 of 64 done" in updates[-1] and updates[-1].startswith("<pre")
    assert live_view._one_view.acquire(blocking=False)
    live_view._one_view.release()


def test_false_shows_nothing(open_terminal):
    terminal = open_terminal()
    with LiveView(lambda: SNAPSHOT, wanted=False):
        assert sys.stdout is terminal
    assert terminal.getvalue() == ""


def test_of_two_searches_the_first_has_the_terminal(open_terminal):
    open_terminal()
    with LiveView(lambda: SNAPSHOT), LiveView(lambda: SNAPSHOT) as second:
        assert isinstance(second._screen, live_view.LogScreen)
    with LiveView(lambda: SNAPSHOT) as third:
        assert isinstance(third._screen, live_view.TerminalScreen)


# ---- what goes wrong ----


def test_a_terminal_that_is_gone_ends_the_view_with_one_warning(open_terminal, monkeypatch, caplog):
    terminal = open_terminal()

    def write(_):
        raise OSError("Input/output error")

    with LiveView(lambda: SNAPSHOT):
        monkeypatch.setattr(terminal, "write", write)
    assert sys.stdout is terminal
    assert caplog.messages == [
        "the live view has ended, for it could not be drawn (Input/output error); the search goes on"
    ]
    assert live_view._one_view.acquire(blocking=False)
    live_view._one_view.release()


def test_a_view_that_cannot_read_gives_the_terminal_back(open_terminal, monkeypatch, caplog):
    """It left the cursor hidden."""
    terminal = open_terminal()
    monkeypatch.setattr(live_view.TerminalScreen, "pause_s", 0.01)
    with LiveView(lambda: 1 / 0) as view:
        view._thread.join(60)
        assert sys.stdout is terminal
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")
    assert "division by zero" in caplog.text


def test_an_error_in_the_search_passes_through(open_terminal):
    terminal = open_terminal()
    with pytest.raises(KeyboardInterrupt), LiveView(lambda: SNAPSHOT):
        raise KeyboardInterrupt
    assert sys.stdout is terminal


def test_a_forked_child_prints_by_itself(open_terminal):
    """In a loader's worker the view's locks may be held for ever."""
    terminal = open_terminal()
    with LiveView(lambda: SNAPSHOT):
        of_a_bar = sys.stderr
        assert of_a_bar is not terminal
        live_view._in_child()
        assert sys.stdout is sys.stderr is terminal
        of_a_bar.write("\rof a worker")
        assert terminal.getvalue().endswith("\rof a worker")
