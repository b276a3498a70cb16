"""Checkouts of many git repositories by revision, kept on disk once for all sessions, processes and runs."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_rl.errors import ConfigError
from forge_rl.sandbox.limits import SandboxError
from forge_rl.system.folders import make_private
from forge_rl.system.redaction import without_credentials
from forge_rl.system.variables import handed_on

_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_NAME = re.compile(r"[\w.+@][\w./+@-]{0,200}")
_LFS = b"version https://git-lfs.github.com/spec/"
_MOST_POINTER = 1024
_FETCH_S, _GIT_S = 3600.0, 600.0
_PARTIAL = ".partial-"
_CONFIG = """[safe]
    directory = *
[protocol]
    version = 2
[gc]
    auto = 0
[maintenance]
    auto = false
[fetch]
    fsckObjects = true
[fetch "fsck"]
    zeroPaddedFilemode = warn
    missingSpaceBeforeDate = warn
    badTimezone = warn
    missingEmail = warn
"""
"""Configuration for git. `safe.directory` allows local repositories of any owner: all that runs on them is
`upload-pack`, which git means to be safe for that."""


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """The files of one commit, for `pool.session(workspace=checkout.folder)`. Nobody may change them."""

    folder: Path
    commit: str
    left_out: Sequence[str]
    """Submodules, and files that are only pointers to Git LFS, as "submodule PATH" and "LFS PATH"."""


@dataclass(eq=False)
class _CheckoutLease:
    """A checkout that this process uses, and the lock that keeps others from evicting it."""

    checkout: Checkout
    lock: int
    users: int = 0


class RepositoryStore:
    """Checkouts of git repositories, fetched on first use and evicted when they take too much space.

        store = RepositoryStore(Path("~/.cache/forge_rl/repositories"))
        async with (
            store.checkout("https://host/project", "9fceb02d0ae598e95dc970b74767f19372d61af8") as checkout,
            pool.session(workspace=checkout.folder) as session,
        ):
            ...

    All repositories share one object database, and equal files of all checkouts are one file on disk. Only the wanted
    commit is fetched, without its history, and a checkout has no `.git`. Several processes may use one store.
    Submodules are left out, and files in Git LFS stay pointers; `Checkout.left_out` lists both.

    Args:
        folder: made if it does not exist; only this user may enter it.
        most_bytes: bytes of checkouts and objects. What was used longest ago is evicted, but nothing in use.

    Raises:
        ConfigError: somebody else could have written to the folder, or git is not installed.
    """

    def __init__(self, folder: Path, *, most_bytes: int = 20 << 30) -> None:
        if shutil.which("git") is None:
            raise ConfigError("repositories need git, which is not installed", hint="install git")
        self.folder = folder.expanduser().absolute()
        self.most_bytes = most_bytes
        make_private(self.folder, ConfigError, deep=False)
        for name in ("trees", "blobs"):
            (self.folder / name).mkdir(exist_ok=True)
        self._slow = asyncio.Lock()
        self._guard = threading.Lock()
        self._held: dict[str, _CheckoutLease] = {}

    @contextlib.asynccontextmanager
    async def checkout(self, repository: str, revision: str) -> AsyncIterator[Checkout]:
        """Keep a checkout in place for a block of code; the first use of a commit fetches it.

        Args:
            repository: an https or file URL, or a folder, of a repository that can be read without a password.
            revision: a commit's full hash; or the name of a branch or tag, which is looked up each time.

        Raises:
            ConfigError: the URL has another form, or the revision does not exist.
            SandboxError: it could not be fetched.
        """
        url = _url(repository)
        commit = revision if _COMMIT.fullmatch(revision) else await asyncio.to_thread(self._resolve, url, revision)
        # Checkouts that are there are found without waiting for a fetch of another.
        lease = await self._in_thread(lambda: self._hold(commit))
        if lease is None:
            async with self._slow:
                lease = await self._in_thread(lambda: self._make(url, commit))
        assert lease is not None
        try:
            yield lease.checkout
        finally:
            self._release(lease)

    async def _in_thread(self, work: Callable[[], _CheckoutLease | None]) -> _CheckoutLease | None:
        """Run work that may return a held checkout, which is released if the caller was cancelled meanwhile."""
        task = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._release_unused)
            raise

    def _release_unused(self, task: asyncio.Future[_CheckoutLease | None]) -> None:
        if not task.cancelled() and task.exception() is None and (lease := task.result()) is not None:
            self._release(lease)

    def _hold(self, commit: str) -> _CheckoutLease | None:
        """Lock a checkout against eviction; return None if it is not in the store."""
        with self._guard:
            if (lease := self._held.get(commit)) is not None:
                lease.users += 1
                return lease
        lock = os.open(self._tree(commit, ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
        info_path = self._tree(commit, ".json")
        if not (self._tree(commit).is_dir() and info_path.exists()):
            os.close(lock)
            return None
        # The time of last use, by which checkouts are evicted.
        os.utime(info_path)
        left_out = tuple(json.loads(info_path.read_text())["left_out"])
        with self._guard:
            if (lease := self._held.get(commit)) is None:
                checkout = Checkout(folder=self._tree(commit), commit=commit, left_out=left_out)
                lease = self._held[commit] = _CheckoutLease(checkout, lock)
            else:
                os.close(lock)
            lease.users += 1
            return lease

    def _release(self, lease: _CheckoutLease) -> None:
        with self._guard:
            lease.users -= 1
            if lease.users == 0:
                del self._held[lease.checkout.commit]
                os.close(lease.lock)

    def _tree(self, commit: str, suffix: str = "") -> Path:
        return self.folder / "trees" / f"{commit}{suffix}"

    def _resolve(self, url: str, revision: str) -> str:
        """Return the commit that a branch or tag is at."""
        if not _NAME.fullmatch(revision):
            raise ConfigError(
                f"{revision!r:.100} is not a revision", hint="give a commit's full hash, a branch or a tag"
            )
        names = ["HEAD"] if revision == "HEAD" else [f"refs/{kind}/{revision}" for kind in ("heads", "tags")]
        peeled = f"refs/tags/{revision}^{{}}"
        with _locked(self.folder / "lock") as lock:
            self._prepare()
            listing = self._git(["ls-remote", "--end-of-options", url, *names, peeled], lock, about=url).decode()
        commits = {name: commit for commit, _, name in (line.partition("\t") for line in listing.splitlines())}
        for name in (peeled, *reversed(names)):
            if _COMMIT.fullmatch(commits.get(name, "")):
                return commits[name]
        raise ConfigError(
            f"{without_credentials(url)} has no branch or tag {revision}",
            hint="a commit must be given by its full hash",
        )

    def _make(self, url: str, commit: str) -> _CheckoutLease:
        """Fetch a commit if its objects are not there, and write its files."""
        with _locked(self.folder / "lock") as lock:
            if (lease := self._hold(commit)) is not None:  # made by another process
                return lease
            self._prepare()
            if subprocess.run(self._command("cat-file", "-e", f"{commit}^{{tree}}"), env=self._environment,
                              stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:  # fmt: skip
                fetch = [
                    "fetch",
                    "--quiet",
                    "--depth=1",
                    "--no-tags",
                    "--no-recurse-submodules",
                    "--no-write-fetch-head",
                ]
                self._git([*fetch, "--end-of-options", url, commit], lock, about=url, timeout_s=_FETCH_S)
            # The reference keeps the objects from being collected. Made last, so that it never names incomplete ones.
            self._git(["update-ref", f"refs/kept/{commit}", f"{commit}^{{commit}}"], lock, about=url)
            if left_out := self._write(commit, lock):
                examples = ", ".join(left_out[:5]) + (f" and {len(left_out) - 5} more" if len(left_out) > 5 else "")
                warnings.warn(f"{without_credentials(url)} at {commit}: left out are {examples}", stacklevel=2)
            lease = self._hold(commit)
            assert lease is not None
            self._evict(lock)
            return lease

    def _prepare(self) -> None:
        """Make the object database, or remove what an interrupted process has left in the store."""
        config, objects = self.folder / "gitconfig", self.folder / "objects.git"
        config.write_text(_CONFIG)
        # Whoever made these held the store's lock, which this process has: it is gone.
        for path in (self.folder / "trees").glob(f"{_PARTIAL}*"):
            shutil.rmtree(path)
        for pattern in ("*.lock", "refs/**/*.lock", "objects/**/tmp_*"):
            for path in objects.glob(pattern):
                path.unlink() if path.is_file() else shutil.rmtree(path)
        if not (objects / "HEAD").exists():
            command = ["git", "init", "--quiet", "--bare", "--template=", str(objects)]
            subprocess.run(command, env=self._environment, check=True, capture_output=True, timeout=_GIT_S)

    def _command(self, *arguments: str) -> list[str]:
        return ["git", f"--git-dir={self.folder / 'objects.git'}", "-c", "core.hooksPath=/dev/null", *arguments]

    @property
    def _environment(self) -> dict[str, str]:
        """Variables for git, with nothing of the user's configuration: no hooks, filters, helpers or other URLs."""
        return handed_on(
            {
                "GIT_CONFIG_GLOBAL": str(self.folder / "gitconfig"),
                "GIT_CONFIG_NOSYSTEM": "1",
                "GIT_ALLOW_PROTOCOL": "file:https",
                "GIT_TERMINAL_PROMPT": "0",
                "GIT_NO_REPLACE_OBJECTS": "1",
                "LC_ALL": "C.UTF-8",
            }
        )

    def _git(self, arguments: list[str], lock: int, *, about: str, timeout_s: float = _GIT_S) -> bytes:
        """Run git with the store's lock, which it keeps if this process dies."""
        with subprocess.Popen(
            self._command(*arguments),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[lock],
            start_new_session=True,
        ) as process:
            try:
                out, error = process.communicate(timeout=timeout_s)
            except BaseException as raised:
                with contextlib.suppress(ProcessLookupError):
                    # git's helpers too, which would go on fetching.
                    os.killpg(process.pid, signal.SIGKILL)
                if isinstance(raised, subprocess.TimeoutExpired):
                    raise SandboxError(
                        f"git took longer than {timeout_s:g} s with {without_credentials(about)}"
                    ) from None
                raise
        if process.returncode:
            lines = error.decode("utf-8", "replace").strip().splitlines() or ["no reason"]
            reason = without_credentials(next((line for line in lines if line.startswith("fatal:")), lines[-1])[:300])
            raise SandboxError(
                f"git {arguments[0]} failed for {without_credentials(about)}: {reason}",
                hint="the repository must be readable without a password, and have the revision",
            )
        return out

    def _write(self, commit: str, lock: int) -> list[str]:
        """Write a commit's files, each as a link to the one file with its content; return the paths left out.

        Git writes no file: contents are as they were committed, without filters, line ends or attributes.
        """
        # One record is "MODE KIND BLOB SIZE\tPATH", ended by NUL: -z leaves paths as they are, whatever bytes they
        # have.
        listing = self._git(["ls-tree", "-r", "-z", "-l", "--full-tree", commit], lock, about=commit)
        files, left_out = list[_File](), list[str]()
        for line in listing.split(b"\0")[:-1]:
            attributes, _, path = line.partition(b"\t")
            mode, kind, blob, size = attributes.split()
            _check_path(path)
            if kind != b"blob":
                left_out.append(f"submodule {os.fsdecode(path)}")
            else:
                files.append(_File(path, int(mode, 8), blob.decode(), int(size)))
        with self._reader() as read:
            for file in files:
                self._keep(file, read)
            left_out += [f"LFS {os.fsdecode(file.path)}" for file in files if self._is_pointer(file)]
            partial = os.fsencode(tempfile.mkdtemp(dir=self.folder / "trees", prefix=_PARTIAL))
            os.chmod(partial, 0o755)
            for folder in sorted({os.path.dirname(file.path) for file in files}):
                os.makedirs(os.path.join(partial, folder), 0o755, exist_ok=True)
            for file in files:
                if not stat.S_ISLNK(file.mode):
                    self._link(file, os.path.join(partial, file.path))
            for file in files:  # at the end, so that no file is written through a link
                if stat.S_ISLNK(file.mode):
                    os.symlink(read(file.blob), os.path.join(partial, file.path))
        self._tree(commit, ".json").write_text(json.dumps({"left_out": left_out}))
        # The last step: a checkout is there as a whole or not at all.
        os.rename(partial, self._tree(commit))
        return left_out

    @contextlib.contextmanager
    def _reader(self) -> Iterator[Callable[[str], bytes]]:
        """Yield a function that returns a blob's content."""
        with subprocess.Popen(
            self._command("cat-file", "--batch"), env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            stdin, stdout = process.stdin, process.stdout

            def read(blob: str) -> bytes:
                stdin.write(f"{blob}\n".encode())
                stdin.flush()
                head = stdout.readline().split()
                if len(head) != 3:
                    raise SandboxError(f"the object {blob} is missing", hint="remove the store's folder")
                return stdout.read(int(head[2]) + 1)[:-1]

            try:
                yield read
            finally:
                stdin.close()

    def _blob(self, file: _File) -> Path:
        kind = "x" if file.mode & stat.S_IXUSR else "f"
        return self.folder / "blobs" / file.blob[:2] / f"{file.blob[2:]}.{kind}"

    def _keep(self, file: _File, read: Callable[[str], bytes]) -> None:
        path = self._blob(file)
        if stat.S_ISLNK(file.mode) or path.exists():
            return
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_bytes(read(file.blob))
        partial.chmod(0o755 if file.mode & stat.S_IXUSR else 0o644)
        partial.rename(path)

    def _link(self, file: _File, target: bytes) -> None:
        try:
            os.link(os.fsencode(self._blob(file)), target)
        except OSError:  # as many links as a file can have
            shutil.copy(os.fsencode(self._blob(file)), target)

    def _is_pointer(self, file: _File) -> bool:
        return (
            not stat.S_ISLNK(file.mode) and file.size < _MOST_POINTER and self._blob(file).read_bytes().startswith(_LFS)
        )

    def _evict(self, lock: int) -> None:
        """Remove unused checkouts, least recently used first, until the rest fits; then objects without a checkout."""
        ages = sorted((path.stat().st_mtime, path.stem) for path in (self.folder / "trees").glob("*.json"))
        for _, commit in ages:
            if self._bytes() <= self.most_bytes:
                return
            with _locked(self._tree(commit, ".lock"), wait=False) as free:
                if free >= 0:
                    self._tree(commit, ".json").unlink()
                    shutil.rmtree(self._tree(commit), ignore_errors=True)
        if self._bytes() > self.most_bytes:
            references = self._git(
                ["for-each-ref", "--format=%(refname)", "refs/kept"], lock, about="the store"
            ).decode()
            for name in references.split():
                if not self._tree(name.rpartition("/")[2]).exists():
                    self._git(["update-ref", "-d", name], lock, about="the store")
            self._git(["gc", "--quiet", "--prune=now"], lock, about="the store")

    def _bytes(self) -> int:
        """Return the bytes on disk, after removing files that no checkout has any more."""
        total = 0
        for path in (self.folder / "blobs").glob("*/*"):
            status = path.stat()
            # The store's own name is the last: no checkout has the file.
            if status.st_nlink == 1:
                path.unlink()
            else:
                total += status.st_size
        return total + sum(path.stat().st_size for path in (self.folder / "objects.git" / "objects").glob("*/*"))


@dataclass(frozen=True)
class _File:
    path: bytes
    mode: int
    blob: str
    size: int


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[int]:
    """Hold a file's lock; yields its descriptor, or -1 if another process holds it and `wait` is false."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(lock)
        yield -1
        return
    try:
        yield lock
    finally:
        os.close(lock)


def _url(repository: str) -> str:
    """Return the URL of a repository, or of a folder.

    Raises:
        ConfigError: it is of another kind, such as one that runs a command.
    """
    if repository.startswith(("https://", "file:///")):
        return repository
    path = Path(repository).expanduser()
    if "://" in repository or "::" in repository or not path.is_dir():
        raise ConfigError(
            f"{without_credentials(repository)!r:.200} is not a repository",
            hint="give an https or file URL, or a folder",
        )
    return path.absolute().as_uri()


def _check_path(path: bytes) -> None:
    """Refuse names that git's own checks refuse too."""
    if any(part in (b"", b".", b"..") or part.lower() == b".git" for part in path.split(b"/")):
        raise SandboxError(f"the repository has the path {os.fsdecode(path)!r:.200}", hint="it was made to do harm")
