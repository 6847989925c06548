"""Runs the notebooks anew and keeps their outputs: python .ci/run_notebooks.py [PATH ..]

Logs and warnings are dropped, for libraries name files and times in them; so are times and versions of the run.
"""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"

if __name__ == "__main__":
    os.environ["RAY_AUTH_MODE"] = "disabled"
    for path in [Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        print(path.name, flush=True)
        notebook = nbformat.read(path, as_version=4)
        about = notebook.metadata.copy()
        NotebookClient(notebook, record_timing=False, resources={"metadata": {"path": str(FOLDER)}}).execute()
        notebook.metadata = about
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        nbformat.write(notebook, path)
