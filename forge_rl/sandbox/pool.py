"""A pool of sandbox sessions on this machine: warm ones, a bound on starts, and a queue in order of arrival."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import warnings
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from forge_rl.errors import ConfigError
from forge_rl.sandbox.bodies import Body, fork_body, start_body, start_body_in, with_network
from forge_rl.sandbox.host import Host, ServerSettings
from forge_rl.sandbox.images.image import ContainerImage
from forge_rl.sandbox.inside.gates import MOST_ADDRESSES
from forge_rl.sandbox.limits import Limits, SandboxError
from forge_rl.sandbox.network import named_addresses
from forge_rl.sandbox.session import PoolSession
from forge_rl.system.cpus import cpu_cores
from forge_rl.system.memory import available_bytes
from forge_rl.system.tasks import TaskGroup

PRELOADED = (
    *("ast", "bisect", "collections", "copy", "csv", "dataclasses", "datetime", "decimal", "enum"),
    *("fractions", "functools", "heapq", "inspect", "io", "itertools", "json", "math", "operator", "pathlib", "random"),
    *("re", "statistics", "string", "textwrap", "time", "typing"),
)
"""Modules that every session has imported already.

Left out are those that run code at each fork, such as threading and what imports it: 0.4 MiB of each session's memory;
and shutil, tempfile and uuid, whose shared libraries would be a fifth of the mappings that each fork copies.
"""
Profile: TypeAlias = Literal["standard", "strict", "process"]
_OPTIONAL = ("cgroup", "landlock", "seccomp")
# An idle session costs about 1.5 MiB of its own, a strict one about 3.3; some are at work.
_BYTES_PER_SESSION = 4 << 20
_SPARE_FILES = 128
_STARTING = 16
"""Sessions that start at a time."""
_ASKED_FOR = 16
"""Number of latest sessions whose limits decide which ones are kept warm."""


@dataclass(kw_only=True, eq=False, repr=False)
class Pool:
    """Sessions that run untrusted Python on this machine, each confined and within limits.

    async with Pool() as pool, pool.session() as session:
        result = await session.run("sum(range(10))")
    """

    profile: Profile = "standard"
    """"standard", or "strict" for namespaces of each session's own; strict costs more time and memory. "process" runs
    command lines, in any language, with bubblewrap. Without root, only these two work."""
    limits: Limits = field(default_factory=Limits)
    """Limits of sessions that are opened without limits of their own."""
    warm: int = 4
    """Number of sessions kept ready to be opened, with recently requested limits."""
    sessions: int | None = None
    """How many may be open, forks included; None for as many as memory and open files allow."""
    memory_bytes: int | None = None
    """Memory of all sessions together; None for three quarters of what this machine, or its container, has available
    now."""
    servers: int | None = None
    """Number of fork servers that share the work; None for one per core that this process may use, at
    most 8."""
    packages: Sequence[str | Path] = ()
    """Folders of packages that sessions may import, such as a site-packages folder; they can read all of it."""
    preload: Sequence[str] = PRELOADED
    """Modules imported before sessions are forked."""
    images: str | Path = ""
    """Folder with the layers of images, such as an `ImageStore` has; "" for a pool that opens no images."""
    without: Sequence[str] = ()
    """Layers of isolation that may be missing on this machine: "cgroup", "landlock", "seccomp"."""

    def __post_init__(self) -> None:
        """Raises ConfigError for settings that cannot work."""
        self.most = _most_sessions() if self.sessions is None else self.sessions
        self._num_servers = min(8, cpu_cores()) if self.servers is None else self.servers
        for name, value, minimum in (("warm", self.warm, 0), ("servers", self._num_servers, 1)):
            if value < minimum:
                raise ConfigError(f"Pool({name}={value})", hint=f"{name} must be {minimum} or more")
        if self.most < 1:
            raise ConfigError(f"there is room for {self.most} sessions", hint="free memory, or raise `ulimit -n`")
        if self.profile not in ("standard", "strict", "process"):
            raise ConfigError(f"Pool(profile={self.profile!r})", hint="profiles are standard, strict and process")
        if unknown := set(self.without) - set(_OPTIONAL):
            raise ConfigError(f"Pool(without={sorted(unknown)})", hint=f"layers are {', '.join(_OPTIONAL)}")
        self._images = _images(self.images) if self.images else ""
        memory_bytes = available_bytes() * 3 // 4 if self.memory_bytes is None else self.memory_bytes
        self._settings = ServerSettings(
            profile=self.profile,
            packages=[_packages(folder) for folder in self.packages],
            preload=[] if self.profile == "process" else list(self.preload),
            without=list(self.without),
            memory_bytes=memory_bytes // self._num_servers,
            images=self._images,
            processes=int(Path("/proc/sys/kernel/pid_max").read_text()) // 2 // self._num_servers,
        )
        self.hosts: list[Host] = []
        self._starting_servers = asyncio.Lock()
        self._names = itertools.count(1)
        self._places = asyncio.Semaphore(self.most)
        self._starting = asyncio.Semaphore(_STARTING)
        self.opened: Counter[str] = Counter()
        """Sessions opened so far, "warm" and "fresh", without those in a workspace, which are never warm."""
        self._warm: deque[tuple[Limits, Body]] = deque()
        self._warming: Counter[Limits] = Counter()
        self._most_warm = self.warm
        self._asked_for: deque[Limits] = deque([self.limits], maxlen=_ASKED_FOR)
        """Limits of the latest sessions; warm ones are kept in their proportions."""
        self._told = set[str]()
        """Reasons for copying a workspace that this pool has warned of."""
        self._tasks = TaskGroup()

    async def __aenter__(self) -> Pool:
        await self._tasks.__aenter__()
        try:
            await self._start_servers()
        except BaseException:
            await self.__aexit__()
            raise
        self._refill()
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._most_warm = 0
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            # Also when this task is cancelled: what is left of a server would hold memory and cgroups.
            await asyncio.shield(asyncio.gather(*(host.close() for host in self.hosts)))
            for _, body in self._warm:
                body.channel.close()

    @contextlib.asynccontextmanager
    async def session(
        self,
        *,
        limits: Limits | None = None,
        undo: bool = False,
        workspace: str | Path | None = None,
        image: ContainerImage | None = None,
        network: Sequence[str] = (),
        wait_s: float | None = None,
    ) -> AsyncIterator[PoolSession]:
        """Open a session for a block of code; see `open`."""
        async with await self.open(
            limits=limits, undo=undo, workspace=workspace, image=image, network=network, wait_s=wait_s
        ) as session:
            yield session

    async def open(
        self,
        *,
        limits: Limits | None = None,
        undo: bool = False,
        workspace: str | Path | None = None,
        image: ContainerImage | None = None,
        network: Sequence[str] = (),
        wait_s: float | None = None,
    ) -> PoolSession:
        """Open a session, which its caller closes. Callers that wait for a place get it in order of arrival.

        Args:
            limits: limits of the session instead of the pool's.
            undo: keep the state before each cell, for `PoolSession.restore`; takes a second place.
            workspace: a folder in which the session works as if it was its own, with its owner's files as the
                session's. The folder never changes, and nobody should change it meanwhile; many sessions share it.
                Where the kernel has no overlays for it, each session gets a copy, within its limits, and this warns.
            image: what commands see as their root, writable, with its variables, user and working folder; its layers
                never change, and all sessions share them. In the profiles of Python, it is the root of this machine's
                Python, with the image's variables and working folder, and the session does not fork. The image's
                programs have a loopback of their own and no other network but `network`. Where the kernel has no
                overlays for it, each session gets a copy, as of a workspace.
            network: addresses that Python code of the session, or its commands, may connect to by TCP, as HOST:PORT,
                and its forks with it. A name that leads to a private address is refused; name that address itself.
            wait_s: how long to wait for a place; None for as long as it takes.

        Raises:
            SandboxError: no place became free, or the session could not be started.
        """
        addresses = named_addresses(network)
        if self._settings.profile == "process" and len(addresses) > MOST_ADDRESSES:
            raise ConfigError(
                f"network=(...) has {len(addresses)} addresses", hint=f"commands listen at {MOST_ADDRESSES} at most"
            )
        folder = None if workspace is None else _resolved(workspace)
        if image is not None:
            self._check_image(image, has_workspace=folder is not None, undo=undo)
        try:
            async with asyncio.timeout(wait_s):
                await self._places.acquire()
        except TimeoutError:
            raise SandboxError(
                f"all {self.most} sessions are open, and none was closed within {wait_s:g} s",
                hint="close sessions, or raise Pool(sessions=...)",
            ) from None
        try:
            limits = limits or self.limits
            # A warm session already runs in the pool's plain root: it can be given neither a workspace nor an image.
            body = self._take_warm(limits) if folder is None and image is None else None
            if body is None:
                body = await self._start(limits, folder if image is None else image)
            if addresses:
                body = await with_network(body, addresses)
        except BaseException as error:
            self._places.release()
            if isinstance(error, OSError):  # of this process, such as too many open files
                hint = "raise `ulimit -n`, or open fewer sessions"
                raise SandboxError(f"a session did not start: {error}", hint=hint) from None
            raise
        self._refill()
        return PoolSession(body, limits, fork_body=self._fork, release=self._places.release, undo=undo)

    def signature(self) -> list[object]:
        """Return what the results of cells depend on besides their code and limits, as JSON values."""
        settings = self._settings
        packages = [[folder, *sorted(os.listdir(folder))] for folder in settings.packages]
        return [settings.profile, packages, list(settings.preload)]

    def _take_warm(self, limits: Limits) -> Body | None:
        # Fresh opens count as well, so that limits which are asked for more often become warm.
        self._asked_for.append(limits)
        for place in [place for place, (warm_limits, _) in enumerate(self._warm) if warm_limits == limits]:
            body = self._warm[place][1]
            if body.alive:
                del self._warm[place]
                self.opened["warm"] += 1
                return body
        self.opened["fresh"] += 1
        return None

    def _check_image(self, image: ContainerImage, *, has_workspace: bool, undo: bool) -> None:
        """Check that sessions of this pool can have an image as their root.

        Raises:
            ConfigError: they cannot.
        """
        if undo and self.profile != "process":
            raise ConfigError(
                f"undo=True, and a session of Python in the image {image.reference} cannot fork",
                hint='leave out undo, or use Pool(profile="process", images=...)',
            )
        if has_workspace:
            raise ConfigError("a session has a workspace or an image", hint="put the files into the image's session")
        if not image.layers or not all(layer.is_relative_to(self._images or "/dev/null") for layer in image.layers):
            raise ConfigError(
                f"the layers of {image.reference} are not in Pool(images={str(self.images)!r})",
                hint="name the folder of the store that has the image",
            )

    async def _start(self, limits: Limits, workspace: str | ContainerImage | None = None) -> Body:
        async with self._starting:
            # A server that was killed is replaced by the next session that starts.
            if len(self.hosts) < self._num_servers or any(host.lost for host in self.hosts):
                await self._start_servers()
            host = min(self.hosts, key=lambda host: len(host.sessions))
            # Names of a pool are numbers, of which the server makes the session's user id.
            name = str(next(self._names))
            if workspace is None:
                return await start_body(name, host, limits)
            layers = (
                [str(layer.relative_to(self._images)) for layer in workspace.layers]
                if isinstance(workspace, ContainerImage)
                else []
            )
            body = await start_body_in(name, host, limits, workspace, layers)
        if body.workspace is not None and (reason := body.workspace.copied) and reason not in self._told:
            self._told.add(reason)
            copied = workspace.reference if isinstance(workspace, ContainerImage) else workspace
            warnings.warn(f"each session copies {copied}, as an overlay of it failed: {reason}", stacklevel=2)
        return body

    async def _fork(self, parent: Body, limits: Limits) -> Body:
        if self._places.locked():  # waiting could be for ever: the caller holds a place
            raise SandboxError(
                f"all {self.most} sessions are open: none can be forked", hint="raise Pool(sessions=...)"
            )
        await self._places.acquire()
        try:
            return await fork_body(str(next(self._names)), parent, limits)
        except BaseException:
            self._places.release()
            raise

    async def _start_servers(self) -> None:
        """Start the servers that are not there, or no longer."""
        async with self._starting_servers:
            lost_hosts = [host for host in self.hosts if host.lost]
            self.hosts = [host for host in self.hosts if not host.lost]
            await asyncio.gather(*(host.close() for host in lost_hosts))
            while len(self.hosts) < self._num_servers:
                host = await Host.start(self._settings)
                self.hosts.append(host)
                for layer, reason in host.missing.items():
                    warnings.warn(f"sandbox sessions run without {layer}: {reason}", stacklevel=2)

    def _refill(self) -> None:
        """Start warm sessions in the background, as many as are missing and have a place, and end those that nobody
        asks for any more."""
        num_wanted = self._wanted()
        live: deque[tuple[Limits, Body]] = deque()
        for limits, body in self._warm:
            if body.alive and num_wanted[limits] > 0:
                num_wanted[limits] -= 1
                live.append((limits, body))
            else:
                self._tasks.create_task(body.end())
        self._warm = live
        for limits, missing in (num_wanted - self._warming).items():
            for _ in range(missing):
                # Warm sessions take no place, but are not started either once all places are taken.
                if not self._places.locked():
                    self._warming[limits] += 1
                    self._tasks.create_task(self._warm_up(limits))

    def _wanted(self) -> Counter[Limits]:
        """Return how many warm sessions there should be, by their limits: none with limits that may be asked for once
        only."""
        num_wanted: Counter[Limits] = Counter()
        recent = Counter(self._asked_for)
        for limits, times in recent.most_common(self._most_warm):
            # The very first entry is the pool's own limits, before anybody has asked for any.
            if times > 1 or recent.total() == 1:
                share = max(1, round(self._most_warm * times / recent.total()))
                num_wanted[limits] = min(share, self._most_warm - num_wanted.total())
        return num_wanted

    async def _warm_up(self, limits: Limits) -> None:
        try:
            body = await self._start(limits)
        except (SandboxError, OSError):  # the next `open` starts one itself, and reports what fails
            return
        finally:
            self._warming[limits] -= 1
        self._warm.append((limits, body))


def _packages(folder: str | Path) -> str:
    path = Path(folder).resolve()
    # A session's own /tmp would hide them.
    if not path.is_dir() or path.is_relative_to("/tmp"):
        cause = "is in /tmp, of which sessions have their own" if path.is_dir() else "is not a folder"
        raise ConfigError(f"Pool(packages=...): {path} {cause}", hint="name a site-packages folder elsewhere")
    return str(path)


def _images(folder: str | Path) -> str:
    path = os.path.realpath(folder)
    if not os.path.isdir(path):
        raise ConfigError(f"Pool(images=...): {path} is not a folder", hint="name the folder of a store of images")
    return path


def _resolved(folder: str | Path) -> str:
    return os.path.realpath(folder)


def _most_sessions() -> int:
    """Return how many sessions memory and open files have room for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # At least one descriptor here for each session: its channel.
    files = soft - len(os.listdir("/proc/self/fd")) - _SPARE_FILES
    return min(available_bytes() // _BYTES_PER_SESSION, files, 10_000)
