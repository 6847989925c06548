"""Lines that come above the live view: each whole, once."""

import io
import threading

from rich.console import Console

from hydra_tune.show.above_view import AboveView


class FakeTerminal(io.StringIO):
    def isatty(self):
        return True


def above():
    file = io.StringIO()
    return AboveView(Console(file=file, width=200), FakeTerminal()), file


def test_a_progress_bar_is_printed_once_it_is_done():
    stream, file = above()
    for percent in (0, 50, 100):
        stream.write(f"\r{percent}%|####|")
    assert file.getvalue() == ""
    stream.write("\n")
    assert file.getvalue() == "100%|####|\n"


def test_moves_of_bars_below_each_other_print_no_empty_lines():
    """tqdm goes down to its line by line feeds, and up again by an escape, at each update of a second bar."""
    stream, file = above()
    for percent in (0, 50):
        stream.write("\n")
        stream.write(f"\r{percent}%|####|")
        stream.write("\x1b[A")
    assert file.getvalue() == ""


def test_lines_of_several_threads_are_not_mixed():
    stream, file = above()
    stream.write("one")
    other = threading.Thread(target=lambda: stream.write("other\n"))
    other.start()
    other.join()
    stream.write(" line\n")
    assert file.getvalue() == "other\none line\n"


def test_markup_and_colours_of_users_are_theirs():
    stream, file = above()
    stream.write("[bold]x[/bold] \x1b[31mred\x1b[0m\n")
    assert file.getvalue() == "[bold]x[/bold] red\n"
