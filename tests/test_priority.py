"""Low priority for a while: threads and processes that are started meanwhile get the former one back."""

import os
import subprocess
import sys
import threading

from forge_rl.runtime import priority
from forge_rl.runtime.priority import low_priority

THREADS = "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); print('', flush=True)"


def nice_of(pid: int) -> set[int]:
    """Nice values of all threads of a process."""
    return {os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir(f"/proc/{pid}/task")}


def test_what_is_started_at_low_priority_gets_the_former_one_back():
    (before,) = nice_of(os.getpid())
    end = threading.Event()
    with low_priority():
        thread = threading.Thread(target=end.wait)
        thread.start()
        child = subprocess.Popen([sys.executable, "-c", THREADS], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        lower = nice_of(child.pid)
    after = nice_of(child.pid)
    child.kill()
    child.communicate()
    end.set()
    thread.join()
    assert lower == {before + priority._LESS * priority._may_return_to(before)}
    assert after == nice_of(os.getpid()) == {before}
