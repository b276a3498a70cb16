"""One Monarch host of an allocation, started there by a launcher such as srun, or one that joins a live run.

python -m forge_rl.jobs.host CONTROLLER [--interface NAME] [--public] [--watch JOB]

It listens on this machine's address towards CONTROLLER, an IP address, or on a socket in a private folder if that is
"local". It writes one JSON object a line to stdout, after a mark: {"address": ...} once it listens, then
{"notice": "SIGTERM"} for each signal by which a scheduler says that the host is about to end. It and its processes end
when stdin does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from forge_rl.errors import ForgeError
from forge_rl.jobs.slurm_queue import requeue_without_controller
from forge_rl.runtime.addresses import own_address, url
from forge_rl.runtime.children import quiet_stderr, set_defaults
from forge_rl.runtime.monarch_log import secure_monarch_log
from forge_rl.runtime.processes import clean_up_after, cleans_up
from forge_rl.runtime.scratch import make_scratch

MARK = "forge_rl host: "
"""Begins each line that is meant for the controller; a login shell may print others."""
_NOTICES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
_ATTEMPTS = 5
_LOOK_S = 0.1
_WATCH_S = 15.0
"""Seconds between questions to Slurm."""


def main() -> None:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser(prog="python -m forge_rl.jobs.host")
    parser.add_argument("controller")
    parser.add_argument("--interface", default="")
    parser.add_argument("--public", action="store_true")
    parser.add_argument("--watch", metavar="JOB", default="")
    flags = parser.parse_args()
    os.environ.setdefault("HYPERACTOR_MESH_ORPHAN_TIMEOUT", "60s")  # ssh passes no variables on
    # Sockets and files of Monarch's processes go where they are removed with this process.
    os.environ["TMPDIR"] = scratch = make_scratch()
    clean_up_after([scratch])
    for number in _NOTICES:
        signal.signal(number, _notice)  # the controller decides when this host ends
    try:
        secure_monarch_log()
        set_defaults()
        if flags.controller == "local":
            _tell("address", _serve_here(scratch))
        else:
            _tell("address", _serve(own_address([flags.controller], flags.interface, may_be_public=flags.public)))
    except ForgeError as error:
        sys.exit(f"error: {error}")
    for number in _NOTICES:
        signal.signal(number, _notice)  # Monarch may have set its own
    _wait(flags.watch)
    # Except Python's resource trackers, which free the shared memory of killed processes and then end.
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if not cleans_up(process):
                process.kill()
    os._exit(0)  # Monarch's threads still run


def _wait(job: str) -> None:
    """Return when stdin ends; meanwhile requeue the Slurm job, if one is given, once its controller is gone."""
    while True:
        ready, _, _ = select.select([0], [], [], _WATCH_S if job else None)
        if ready and not os.read(0, 4096):
            return
        if not ready:
            with contextlib.suppress(ForgeError):  # slurmctld restarts; it is asked again
                requeue_without_controller(job)


def _serve(ip: str) -> str:
    """Start Monarch's server on a free port; return its address for `attach_to_workers`."""
    with quiet_stderr():
        from monarch._src.job.service_identity import new_service_proc_id, service_proc_addr
        from monarch.actor import start_worker_loop_forever

    failure = ""
    for _ in range(_ATTEMPTS):
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        # Between this and Monarch's own bind another process may take the port: hence several attempts.
        with socket.socket(family) as any_socket:  # Monarch cannot tell which port it was given
            any_socket.bind((ip, 0))
            port = any_socket.getsockname()[1]
        # An identity of its own, as the same machine may be known by several addresses.
        address = str(service_proc_addr(url(ip, port), new_service_proc_id()))
        with quiet_stderr():
            serving = start_worker_loop_forever(address=address, ca="trust_all_connections")
        # `serving` is done only if the server ends: a timeout means that it may still be starting.
        while not _listens(port):
            try:
                serving.get(timeout=_LOOK_S)
            except TimeoutError:
                continue
            except Exception as error:  # the port has just been taken
                failure = str(error)
                break
        else:
            return address
    sys.exit(f"error: Monarch does not listen on {ip}: {failure}")


def _serve_here(folder: str) -> str:
    """Start Monarch's server on a socket in a folder; return its address."""
    with quiet_stderr():
        from monarch._src.job.service_identity import new_service_proc_id, service_proc_addr
        from monarch.actor import start_worker_loop_forever

        path = Path(folder, "host")
        address = str(service_proc_addr(f"ipc://{path}", new_service_proc_id()))
        serving = start_worker_loop_forever(address=address, ca="trust_all_connections")
    while not path.is_socket():
        with contextlib.suppress(TimeoutError):
            serving.get(timeout=_LOOK_S)
    return address


def _listens(port: int) -> bool:
    connections = psutil.Process().net_connections("tcp")
    return any(connection.status == psutil.CONN_LISTEN and connection.laddr.port == port for connection in connections)


def _notice(number: int, frame: object) -> None:
    _tell("notice", signal.Signals(number).name)


def _tell(key: str, value: str) -> None:
    with contextlib.suppress(OSError):  # the controller is gone
        os.write(1, f"{MARK}{json.dumps({key: value})}\n".encode())


if __name__ == "__main__":
    main()
