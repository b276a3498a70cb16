"""Another user of the machine at every socket, file and process of a live run."""

import contextlib
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import SHM, Command, metrics, tiny_run
from tests.conftest import command_line_of, started_processes
from tests.security.other_user import NOBODY, as_user, connects, needs_root, opens

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("nothing_left"), needs_root]
PRIVATE = ("environ", "mem", "maps", "auxv", "stack", "fd", "io")
"""Files of a process that tell its secrets."""


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that every user may enter."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def sockets_near(pid: int) -> tuple[set[str], set[str], dict[str, int]]:
    """Names of abstract sockets, paths of sockets, and ports that are listened at in a process's network, by inode."""
    rows = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    names = {row[7] for row in rows if len(row) > 7 and row[3] == "00010000"}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    ports = {row[9]: int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A"}
    abstract = {name.removeprefix("@") for name in names if name.startswith("@")}
    return abstract, {name for name in names if not name.startswith("@")}, ports


def files_of(pids: set[int]) -> set[Path]:
    """Files that processes have open, where they have names and are none of the system's."""
    files = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if (file := link.readlink()).is_file() and not file.is_relative_to("/proc"):
                        files.add(file)
    return files


def test_another_user_gets_in_nowhere_and_the_run_goes_on(
    commands: list[Command], tiny_model: Path, public_folder: Path
):
    out = public_folder / "run"
    earlier_pids = started_processes()
    command = tiny_run(
        commands, tiny_model, out, "--steps", "1000", "--private-network", "--strict-isolation", "--trainer.ranks", "2"
    )
    command.wait_for("step +2/")
    pids = {pid for pid in started_processes() - earlier_pids if "--outside" not in command_line_of(pid)}
    abstract, paths, ports = sockets_near(command.process.pid)
    assert len(pids) >= 6
    assert min(map(len, (abstract, paths, ports))) >= 2

    def attack() -> list[object]:
        openings: list[object] = [name for name in abstract if connects(socket.AF_UNIX, f"\0{name}")]
        openings += [path for path in paths if connects(socket.AF_UNIX, path)]
        _, _, inodes = sockets_near(os.getpid())  # others may listen at the same number outside
        reachable = [port for inode, port in ports.items() if inode in inodes]
        openings += [port for port in reachable if connects(socket.AF_INET, ("127.0.0.1", port))]
        for pid in pids:
            openings += [path for name in PRIVATE for path in [Path(f"/proc/{pid}/{name}")] if list(opens(path))]
            with contextlib.suppress(PermissionError):
                os.kill(pid, 0)
                openings.append(pid)
        return openings

    assert as_user(NOBODY, attack) == []

    shared = [SHM / f"forge_rl-{os.geteuid()}", Path("/tmp") / os.environ.get("USER", "root")]
    mine = {*files_of(pids), *out.rglob("*"), out, *(path for folder in shared for path in folder.rglob("*")), *shared}
    mine = {path for path in mine if path.is_relative_to("/tmp") or path.is_relative_to("/dev/shm")}
    assert len(mine) > 20
    # What is public belongs to others: libraries, and the model that the run was given.
    access_of = as_user(NOBODY, lambda: {str(path): does for path in mine if (does := list(opens(path)))})
    assert {path: does for path, does in access_of.items() if not Path(path).is_relative_to(tiny_model)} == {}

    command.wait_for(f"step +{metrics(out)[-1]['step'] + 2}/")
    command.process.send_signal(signal.SIGINT)
    assert command.end() == 130, command.output
    assert command.strays() == []
