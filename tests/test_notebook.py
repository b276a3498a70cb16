"""The notebook of the documentation, executed as a kernel would: cell by cell in one event loop."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

KERNEL = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        result = shell.run_cell("".join(cell["source"]), store_history=True)
        print("--", flush=True)
        if not result.success:
            sys.exit(1)
"""


@pytest.mark.nightly
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path, nothing_left: None) -> None:
    notebook = ROOT / "docs" / "notebooks" / "steer.ipynb"
    done = subprocess.run(
        [sys.executable, "-c", KERNEL, str(notebook)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    outputs = done.stdout.split("--\n")
    assert len(outputs) == 1 + sum(cell["cell_type"] == "code" for cell in json.loads(notebook.read_text())["cells"])
    assert "Run  step 0 of 10" in outputs[0]
    assert "{'easy'}" in outputs[4], "the mixture without hard tasks"
    assert "Out[7]: '" in outputs[6], "an answer of the policy"
    assert "Run  step 4 of 10" in outputs[7]
