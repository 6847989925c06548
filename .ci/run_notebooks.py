"""Runs the notebooks anew and keeps their outputs, but neither times nor versions: python .ci/run_notebooks.py [PATH ..]"""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"

if __name__ == "__main__":
    os.environ["PYTHONWARNINGS"] = "ignore"  # of libraries, which name their files
    os.environ["RAY_AUTH_MODE"] = "disabled"
    for path in [Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        print(path.name, flush=True)
        notebook = nbformat.read(path, as_version=4)
        about = notebook.metadata.copy()
        NotebookClient(notebook, record_timing=False, resources={"metadata": {"path": str(FOLDER)}}).execute()
        notebook.metadata = about
        nbformat.write(notebook, path)
