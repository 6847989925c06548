"""Lines that come above the live view: each whole, once."""

import io
import logging
import threading

import pytest
from rich.console import Console
from tqdm import tqdm

from hydra_tune.show.above_view import AboveView


@pytest.fixture
def stream():
    return AboveView(Console(file=io.StringIO(), width=200), io.StringIO())


def shown(stream):
    """The lines so far, with those of bars that may be done, as two frames leave them."""
    stream.settle()
    stream.settle()
    return stream._console.file.getvalue().splitlines()


@pytest.fixture
def log(stream):
    logger = logging.getLogger("an objective")
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    yield logger.warning
    logger.removeHandler(handler)


def bar(stream, total, name, **options):
    """Drawn at each step."""
    form = "{desc} {n_fmt}/{total_fmt}"
    return tqdm(total=total, desc=name, file=stream, bar_format=form, mininterval=0, miniters=1, ncols=80, **options)


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)


# ---- prints and logs ----


def test_lines_of_several_threads_are_not_mixed(stream):
    stream.write("one")
    in_thread(lambda: stream.write("other\n"))
    stream.write(" line\n")
    assert shown(stream) == ["other", "one line"]


def test_lines_that_are_written_together_are_printed_together(stream):
    """A traceback that a thread logs, beside others that log."""
    printed = []
    stream._console.print = lambda text, **options: printed.append(text.plain)
    stream.write("Traceback:\n\n  in train\nKeyError\nand")
    assert printed == ["Traceback:\n\n  in train\nKeyError"]


def test_markup_and_colours_of_users_are_theirs(stream):
    stream.write("[bold]x[/bold] \x1b[31mred\x1b[0m\n")
    assert shown(stream) == ["[bold]x[/bold] red"]


def test_a_line_that_has_no_end_is_printed_at_the_end_of_the_view(stream):
    print("loading ..", end="", file=stream)
    assert shown(stream) == []
    stream.end()
    assert shown(stream) == ["loading .."]


def test_after_the_view_whoever_has_the_stream_still_writes_to_the_terminal(stream):
    """A log handler that was made while the view had the terminal."""
    stream.end()
    stream.write("\rlater")
    assert stream._stream.getvalue() == "\rlater" and shown(stream) == []


# ---- progress bars ----


def test_a_bar_is_printed_once_it_is_done(stream):
    with bar(stream, 2, "train") as progress:
        for _ in range(2):
            progress.update()
            assert shown(stream) == []
    assert shown(stream) == ["train 2/2"]


def test_a_bar_that_ends_early_is_printed_as_it_was(stream):
    with bar(stream, 5, "train") as progress:
        progress.update(3)
    assert shown(stream) == ["train 3/5"]


def test_logs_and_prints_within_a_bar_are_whole_and_the_bar_is_printed_when_it_is_done(stream, log):
    """Of 24 log lines beside tqdm six were shown. The others were taken for the end of the bar before them."""
    for _ in tqdm(range(3), "train", file=stream, bar_format="{desc} {n_fmt}/3", mininterval=0, miniters=1):
        log("a log")
        print("a", "print", file=stream)
        print("\nEpoch", file=stream)
    assert shown(stream) == [*["a log", "a print", "", "Epoch"] * 3, "train 3/3"]


def test_threads_with_a_bar_each_show_all_their_logs(stream, log):
    """tqdm draws those of the second and third thread below, and moves them up when one ends."""
    both = threading.Barrier(3, timeout=60)

    def train(name):
        with bar(stream, 4, name) as progress:
            for step in range(4):
                both.wait()
                log("%s at %d", name, step)
                progress.update()
            both.wait()

    threads = [threading.Thread(target=train, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    lines = shown(stream)
    logs = [f"{name} at {step}" for name in "abc" for step in range(4)]
    assert sorted(lines) == sorted([*logs, "a 4/4", "b 4/4", "c 4/4"])


def test_bars_below_each_other_are_printed_as_each_is_done(stream, log):
    with bar(stream, 2, "epochs") as epochs:
        for epoch in range(2):
            with bar(stream, 2, f"steps of {epoch}") as steps:
                for _ in range(2):
                    log("a log")
                    steps.update()
            epochs.update()
    assert shown(stream) == ["a log", "a log", "steps of 0 2/2", "a log", "a log", "steps of 1 2/2", "epochs 2/2"]


def test_bars_that_vanish_leave_nothing(stream):
    with bar(stream, 2, "epochs") as epochs:
        for _ in range(2):
            with bar(stream, 2, "steps", leave=False) as steps:
                for _ in range(2):
                    steps.update()
            epochs.update()
            tqdm.write("an epoch", file=stream)
    assert shown(stream) == ["an epoch", "an epoch", "epochs 2/2"]


def test_a_bar_that_is_not_done_is_not_printed(stream):
    progress = bar(stream, 2, "train")
    below = bar(stream, 2, "below")
    progress.update()
    below.update()
    stream.end()
    assert shown(stream) == []
    progress.disable = below.disable = True  # else tqdm would write at their end


def test_a_line_that_returns_at_its_end_is_a_bar(stream, log):
    for step in range(3):
        print(f"step {step}", end="\r", file=stream)
    log("a log")
    print("step 3", end="\r\n", file=stream)
    assert shown(stream) == ["a log", "step 3"]


def test_a_bar_is_not_taken_for_done_while_its_thread_draws_the_one_below(stream):
    """A frame may come between the line feed and the way up."""
    stream.write("\rtrain 1/2")
    stream.settle()
    stream.write("\n")
    stream.settle()
    stream.write("\rbelow 1/2")
    stream.settle()
    stream.write("\x1b[A")
    assert shown(stream) == []
