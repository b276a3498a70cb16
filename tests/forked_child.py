"""A function that `multiprocessing` runs in a child of a forked program."""

import os
import sys
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any


def report(queue: "SimpleQueue[Any]") -> None:
    """Sends what the child is, and ends with status 3."""
    state = {"pid": os.getpid(), "parent": os.getppid(), "threads": len(os.listdir("/proc/self/task"))}
    state["niceness"] = os.getpriority(os.PRIO_PROCESS, 0)
    environment = Path("/proc/self/environ").read_text(errors="replace")
    queue.put({**state, "forked": "decimal" in sys.modules, "shown": environment})
    sys.exit(3)
