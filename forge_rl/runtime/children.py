"""Environment variables of spawned processes, and their setup before actors start."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from forge_rl.runtime.fork_client import FAILURE
from forge_rl.runtime.host_logs import open_log, own_logs
from forge_rl.runtime.signals import outlive_stop_signals
from forge_rl.system.streams import lasting
from forge_rl.system.variables import handed_on, take

_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_DEFAULTS = {
    # Maximum bytes of a message. torchstore needs this value and prints a line if it has to set it.
    "HYPERACTOR_CODEC_MAX_FRAME_LENGTH": "910737418240",
    # By default Monarch moves an RDMABuffer in 64 MB chunks; over TCP, 4 MB chunks take half the time.
    "MONARCH_RDMA_MAX_CHUNK_SIZE_MB": "4",
    # Otherwise a death on another machine is noticed only after 10 s.
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",
    # Otherwise a process exits if it cannot deliver a message for 30 s, for example to a stopped controller.
    "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "1day",
}
"""Defaults of Monarch's environment variables in every process."""
_CHILDREN_DEFAULTS = {
    # Sockets between the processes of a service are unauthenticated, so they must stay on this machine.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    # The default is a predictable folder under /tmp, from which code is loaded.
    _COMPILED: "~/.cache/torchinductor",
}
"""Defaults of environment variables in spawned processes."""


def changed_variables(*, on_this_host: bool) -> dict[str, str | None]:
    """Return how a child's environment differs from this process's; None removes a variable.

    Monarch logs these values if its log level is info.

    Args:
        on_this_host: whether the child is on this host.
    """
    changes: dict[str, str | None] = {name: os.environ[name] for name in _DEFAULTS}
    changes |= dict.fromkeys(os.environ.keys() - handed_on().keys())
    if os.path.dirname(os.environ.get(_COMPILED, "")) == tempfile.gettempdir():
        changes[_COMPILED] = None  # torch's own choice, set once it has compiled something
    if on_this_host:
        # Not set in the process itself, where Monarch's threads already read the environment: libc could crash.
        for name, value in _CHILDREN_DEFAULTS.items():
            if changes.get(name, os.environ.get(name)) is None:
                changes[name] = os.path.expanduser(value)
    return changes


def visible_gpu(index: int) -> str:
    """Return the CUDA_VISIBLE_DEVICES value with which a child sees the GPU that has this index in this process.

    If CUDA_VISIBLE_DEVICES is set here, to numbers or ids, the index refers to its entries.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",")[index].strip() if visible else str(index)


def set_defaults() -> None:
    """Set Monarch's variables in the environment of this process and so of its children."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def start_child(
    log_file: str, imports: Sequence[str], path: Sequence[str], secrets: Mapping[str, str], logs_name: str = ""
) -> None:
    """Redirect the output of a new process and its children to its log file, then import modules.

    If `logs_name` is set, the file is in that folder of this host, see `own_logs`. The parent's `sys.path` is appended.
    Secrets are passed here because /proc shows a process's initial environment. From here on only the controller stops
    the process.
    """
    take(secrets)
    for name, value in _CHILDREN_DEFAULTS.items():
        os.environ.setdefault(name, os.path.expanduser(value))
    outlive_stop_signals()
    sys.stdout.flush()
    sys.stderr.flush()
    fd = open_log(own_logs(logs_name) / Path(log_file).name if logs_name else log_file)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout, sys.stderr = lasting(1), lasting(2)
    # Handlers run in reverse order. Output of native code after Python has exited, such as nanobind's leak lists, would
    # otherwise hide the last error in the log.
    atexit.register(_silence)
    # At exit Python searches all objects for cycles, which takes seconds of CPU time if torch is loaded.
    atexit.register(gc.freeze)
    if failure := os.environ.get(FAILURE):
        print(f"forge_rl: this process was executed, and imports everything itself: {failure}", file=sys.stderr)
    sys.path += [folder for folder in path if folder not in sys.path]
    for module in imports:
        importlib.import_module(module)


def _silence() -> None:
    """Discard everything written to stderr from now on."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Discard everything written to stderr, also by native code, while the body runs."""
    sys.stderr.flush()
    saved_fd = os.dup(2)
    _silence()
    try:
        yield
    finally:
        os.dup2(saved_fd, 2)
        os.close(saved_fd)
