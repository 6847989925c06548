"""Where the repository is, and what the processes that tests start can import."""

import os
from pathlib import Path

HELPERS = Path(__file__).parent
TESTS = HELPERS.parent
ROOT = TESTS.parent


def python_path(*folders):
    """A PYTHONPATH with the package, the helpers and these folders before what is there now."""
    places = [ROOT, HELPERS, *folders, os.environ.get("PYTHONPATH")]
    return os.pathsep.join(str(place) for place in places if place)
