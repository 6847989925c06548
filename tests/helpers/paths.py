"""Where the repository is, and what the processes that tests start can import."""

import os
import subprocess
import sys
from pathlib import Path

HELPERS = Path(__file__).parent
TESTS = HELPERS.parent
ROOT = TESTS.parent


def python_path(*folders):
    """A PYTHONPATH with the package, the helpers and these folders before what is there now."""
    places = [ROOT, HELPERS, *folders, os.environ.get("PYTHONPATH")]
    return os.pathsep.join(str(place) for place in places if place)


def run_in_a_process(script, *arguments):
    """As Python runs it with these arguments; its output, and how it ended."""
    command = [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
