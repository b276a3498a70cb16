"""The subprocess runtime of verifiers with its programs under bubblewrap; imports nothing from forge_rl.

Setup by the environment and the harness runs on the host as before: it installs, and nothing of the model's is there
yet. From then on, every program runs in namespaces of its own (users or a user, processes, mounts, network, IPC) and
reaches the policy's endpoint and the environment's tool servers only.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from verifiers.v1 import runtimes
from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes import ProgramResult, Runtime, SubprocessConfig, SubprocessRuntime

_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "alternatives",
    "mime.types",
    "ssl",
    "ca-certificates",
)
_DEVICES = ("null", "zero", "full", "random", "urandom")
_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TERM", "TZ", "TMPDIR", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
_HOME = "/home/agent"
_HOME_FOLDERS = (".local/bin", ".local/share/uv")
"""Where setup installs programs, below the run's own home folder."""
_FIRST_UID, _UIDS = 0x50000000, 0x10000
_PROCESSES = 512
_MOST_READ = 64 << 20
_NEEDS = "its programs need bubblewrap (apt-get install bubblewrap), or confine=false, with which they run unconfined"

_trusted = contextvars.ContextVar("trusted", default=False)
_numbers = itertools.count()


class ConfinedRuntime(SubprocessRuntime):
    """A subprocess runtime whose agent phase is confined."""

    filter = ""
    """Seccomp filter in hexadecimal; "" for none."""

    def __init__(self, config: SubprocessConfig, name: str | None = None) -> None:
        super().__init__(config, name)
        self._servers: dict[int, asyncio.Server] = {}
        self._hosts: set[str] = set()
        self._state: Path | None = None
        """Folder of the home folder, /tmp and sockets of the confined programs; None before the agent starts."""
        # By process, as workers share no counter. Only root can start programs as other users.
        self._uid = _FIRST_UID + (os.getpid() * 64 + next(_numbers)) % _UIDS if os.geteuid() == 0 else 0

    async def prepare_execution(self, routes: list[str] | None) -> None:
        await super().prepare_execution(routes)
        if routes is None:
            return
        if self._state is None:
            self._state = Path(tempfile.mkdtemp(prefix="forge-rl-"))
            for name in ("home", "tmp"):
                (self._state / name).mkdir()
        for route in routes:
            await self._serve(route)
        if self._uid:
            # The program's user may pass through to what is mounted, and cannot list the folder.
            self._state.chmod(0o711)
            await asyncio.to_thread(give, [self.workdir, self._state / "home", self._state / "tmp"], self._uid)

    async def _serve(self, route: str) -> None:
        """Let programs reach the host and port of a URL."""
        url = urlsplit(route)
        host, port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
        if port in self._servers:
            return

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                host_reader, host_writer = await asyncio.open_connection(host, port)
                await asyncio.gather(carry(reader, host_writer), carry(host_reader, writer), return_exceptions=True)
                host_writer.close()
            writer.close()

        path = self._state / f"{port}.sock"
        self._servers[port] = await asyncio.start_unix_server(connected, path)
        path.chmod(0o666)  # in a folder that nobody else can enter
        self._hosts.add(host)
        (self._state / "hosts").write_text("".join(f"127.0.0.1 {name}\n" for name in {"localhost", *self._hosts}))

    def _confined(self, argv: list[str], env: dict[str, str]) -> list[str]:
        """Return the command that runs a program confined, or unconfined before the agent starts."""
        if self._state is None or _trusted.get():
            return argv
        if (bwrap := shutil.which("bwrap")) is None:
            raise SandboxError(_NEEDS)
        settings = {
            "uid": self._uid,
            "ports": {port: f"/run/host/{port}.sock" for port in self._servers},
            "processes": _PROCESSES,
            "filter": self.filter,
            "variables": [*_VARIABLES, *self.process_env(env)],
            "home": _HOME,
        }
        launcher = Path(__file__).with_name("confined_program.py")
        command = [bwrap, *self._namespaces(), "--die-with-parent", "--new-session", *self._view()]
        # Mounted read-only at a fixed path, outside of all that programs may write.
        command += ["--ro-bind", str(launcher), "/run/launcher.py", "--chdir", str(self.workdir)]
        python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
        return [*command, "--", python, "-I", "-S", "/run/launcher.py", json.dumps(settings), *argv]

    def _view(self) -> list[str]:
        """Return bubblewrap's arguments that show the system, the interpreters and this runtime's own folders."""
        work, home = str(self.workdir), os.environ.get("HOME", "/root")
        visible_paths = [*self._interpreter_folders(), *(f"{home}/{name}" for name in _HOME_FOLDERS)]
        arguments = passable([*visible_paths, work, _HOME, "/run/host", "/etc/hosts"])
        for name in _SYSTEM:
            if os.path.islink(f"/{name}"):
                arguments += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
            elif os.path.isdir(f"/{name}"):
                arguments += ["--ro-bind", f"/{name}", f"/{name}"]
        arguments += ["--proc", "/proc", "--dir", "/dev"]
        for name in _DEVICES:
            arguments += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
        for path in [*(f"/etc/{name}" for name in _ETC), *visible_paths]:
            arguments += ["--ro-bind-try", path, path]
        mounts = {f"{self._state}/tmp": ("/tmp", "/dev/shm"), f"{self._state}/home": (_HOME,), work: (work,)}
        for folder, places in mounts.items():
            for mount_point in places:
                arguments += ["--bind", folder, mount_point]
        return [
            *arguments,
            "--ro-bind",
            str(self._state),
            "/run/host",
            "--ro-bind",
            f"{self._state}/hosts",
            "/etc/hosts",
        ]

    def _namespaces(self) -> list[str]:
        namespaces = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        # Without root, a user namespace gives the rights that the other namespaces need.
        if not self._uid:
            return ["--unshare-user", *namespaces, "--cap-drop", "ALL"]
        # The launcher needs both to become the program's user, and loses them by that.
        return [*namespaces, "--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]

    def _interpreter_folders(self) -> list[str]:
        """Return the folders of the interpreters that setup has prepared, and of scripts."""
        folders = {self.scripts_dir, sys.prefix, sys.base_prefix}
        for path in [sys.executable, *self._uv_interpreters.values()]:
            # An interpreter of a virtual environment is a link to another one, and needs both folders.
            folders |= {str(Path(path).parent.parent), str(Path(os.path.realpath(path)).parent.parent)}
        return sorted(folder for folder in folders if not folder.startswith(("/usr", "/bin")) and folder != "/")

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        return await super().run(self._confined(argv, env), env)

    async def open_process(self, argv: list[str], env: dict[str, str]) -> Any:
        return await super().open_process(self._confined(argv, env), env)

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        await super().run_background(self._confined(argv, env), env, log)

    async def prepare_uv_script(self, *arguments: Any, **options: Any) -> list[str]:
        """Install what a script of the harness or the environment declares, on the host."""
        # A context variable, so that programs started meanwhile by other tasks stay confined.
        token = _trusted.set(True)
        try:
            return await super().prepare_uv_script(*arguments, **options)
        finally:
            _trusted.reset(token)

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        """Read as a confined program: a link that the agent has left leads nowhere that it could not go."""
        if self._state is None:
            return await super()._read(path, max_bytes)
        return await Runtime._read(self, path, _MOST_READ if max_bytes is None else max_bytes)

    async def write(self, path: str, data: bytes) -> None:
        """Write as a confined program, once the agent has started."""
        if self._state is None or _trusted.get():
            await super().write(path, data)
            return
        # The path is an argument, not a part of the script, so that it needs no quotes.
        script = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
        process = await SubprocessRuntime.open_process(self, self._confined(["sh", "-c", script, "sh", path], {}), {})
        await process.write(data)
        process._stdin.close()
        if await process.wait():
            raise SandboxError(f"write {path!r}: it cannot be written")

    async def teardown(self) -> None:
        for server in self._servers.values():
            server.close()
        await super().teardown()
        if self._state is not None:
            await asyncio.to_thread(shutil.rmtree, self._state, True)

    def cleanup(self) -> None:
        super().cleanup()
        if self._state is not None:
            shutil.rmtree(self._state, ignore_errors=True)


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy one direction of a connection until it ends."""
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def passable(paths: list[str]) -> list[str]:
    """Return bubblewrap's arguments that make the parents of paths, which it would make for root only."""
    parents = {str(parent) for path in paths for parent in Path(path).parents if str(parent) != "/"}
    return [argument for parent in sorted(parents) for argument in ("--perms", "0755", "--dir", parent)]


def give(folders: list[Path], uid: int) -> None:
    """Make folders with all that they hold a user's; setup has written them."""
    for folder in folders:
        os.chown(folder, uid, uid)
        for directory, names, files in os.walk(folder):
            for name in [*names, *files]:
                os.chown(os.path.join(directory, name), uid, uid, follow_symlinks=False)


def confine(program: str) -> None:
    """Have verifiers make confined runtimes in place of its subprocess runtime.

    Args:
        program: seccomp filter in hexadecimal.
    """
    ConfinedRuntime.filter = program
    original_cls = runtimes._runtime_cls
    runtimes._runtime_cls = lambda config: ConfinedRuntime if config.type == "subprocess" else original_cls(config)
