"""The log of a child process: its last lines are its own, not what native code prints after Python has ended."""

import subprocess
import sys
from pathlib import Path

CHILD = """
import atexit, ctypes, sys
from forge_rl.runtime.children import start_child
{started}
libc = ctypes.CDLL(None)
ctypes.pythonapi.Py_AtExit(libc.malloc_stats)  # prints "Arena 0: ..." to stderr
atexit.register(print, "the last error", file=sys.stderr, flush=True)
"""


def test_what_native_code_prints_after_python_has_ended_is_not_in_the_log(tmp_path: Path):
    log = tmp_path / "child.log"
    for started, noisy in (("", True), (f"start_child({str(log)!r}, (), (), {{}})", False)):
        ended = subprocess.run(
            [sys.executable, "-c", CHILD.format(started=started)], capture_output=True, text=True, check=True
        )
        output = ended.stderr if noisy else log.read_text()
        assert "the last error" in output
        assert ("Arena" in output) is noisy
