"""A thread with a working directory of its own, as each trial under Tune has one."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hydra_tune.integrations.ray_node import working_directory

linux = pytest.mark.skipif(sys.platform != "linux", reason="threads share it elsewhere")


@pytest.fixture(autouse=True)
def _not_yet_warned():
    working_directory._warn.cache_clear()


def in_a_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def writes_in(folder):
    working_directory.enter(str(folder))
    Path("relative").write_text(folder.name)
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getcwd())"], capture_output=True, text=True)
    return [str(Path.cwd()), child.stdout.strip()]


@linux
def test_threads_have_their_own_and_so_have_processes_that_they_start(tmp_path):
    before = Path.cwd()
    for name in "ab":
        folder = tmp_path / name  # made there
        assert in_a_thread(lambda folder=folder: writes_in(folder)) == [str(folder)] * 2
    assert [(tmp_path / name / "relative").read_text() for name in "ab"] == ["a", "b"]
    assert Path.cwd() == before


@linux
def test_a_thread_may_go_on_to_another(tmp_path):
    def work():
        for name in "ab":
            working_directory.enter(str(tmp_path / name))
        return Path.cwd().name

    assert in_a_thread(work) == "b"


def test_where_the_system_refuses_it_stays_and_is_said_once(tmp_path, monkeypatch, caplog):
    """Docker's default seccomp profile allows unshare(2) to privileged processes alone."""
    monkeypatch.setattr(working_directory, "_unshare", lambda: "unshare(2) fails: Operation not permitted")
    before = Path.cwd()
    for name in "ab":
        working_directory.enter(str(tmp_path / name))
    assert Path.cwd() == before
    (record,) = caplog.records
    assert f"trials share the working directory {before}" in record.getMessage()
    assert "(unshare(2) fails: Operation not permitted)" in record.getMessage()
