"""One host's part of the store: a private folder in shared memory with reusable segments.

The folder belongs to one process, which locks the file `lock` in it while it lives. A folder whose lock is free was
left by a killed process: its successor takes it over, or the next volume on the host removes it. Writers hold a shared
lock on the folder: segments freed meanwhile are not reused until they finish, since a rank of an abandoned publish may
still be writing to them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from forge_rl.errors import WeightsError
from forge_rl.system.memory import available_bytes
from forge_rl.weights.manifest import SegmentRef
from forge_rl.weights.segment import PAGE, create, is_whole, release, renew

_LOCK = "lock"


class Volume:
    """Creates, frees and reuses the segments of a host.

    Args:
        root: a folder in shared memory, such as /dev/shm.
        previous_folder: folder of a volume whose process died, to continue with, if it still exists.
        previous_segments: segments of that volume that are still needed, by key. Complete ones are kept; all other
            files in the folder are removed.

    Raises:
        WeightsError: the folder cannot be used.
    """

    def __init__(
        self,
        root: Path,
        *,
        previous_folder: Path | None = None,
        previous_segments: Mapping[str, SegmentRef] | None = None,
    ) -> None:
        with _home(root) as home:
            self.folder, self._lock = _take_over(previous_folder) or _make(home)
        self.reclaimed = reclaim(root)
        """Bytes reclaimed from killed processes' folders."""
        self._root = root
        self._used = {
            key: ref
            for key, ref in (previous_segments or {}).items()
            if Path(ref.path).parent == self.folder and is_whole(ref)
        }
        # A predecessor's files that no version needs, and those it was still creating when it died.
        file_names = {_LOCK, *(Path(ref.path).name for ref in self._used.values())}
        for path in self.folder.iterdir():
            if path.name not in file_names:
                path.unlink()
        self._freed: list[SegmentRef] = []
        """Freed segments to which a writer may still be writing."""
        self._spare: list[SegmentRef] = []

    def reserve(self, sizes: Mapping[str, int]) -> dict[str, SegmentRef]:
        """Reserve a segment for each key, all or none.

        Args:
            sizes: bytes by key; the keys are new.

        Raises:
            WeightsError: out of memory, or a key is in use.
        """
        if used_keys := [key for key in sizes if key in self._used]:
            raise WeightsError(f"bucket {used_keys[0]} is held already")
        # Writers may have finished since the last call, and what they held can be used again.
        self._recycle()
        refs: dict[str, SegmentRef] = {}
        for key, size in sizes.items():
            spare = next((ref for ref in self._spare if ref.bytes == size), None)
            if spare is not None:
                self._spare.remove(spare)
                with contextlib.suppress(OSError):  # somebody removed the file
                    refs[key] = renew(spare)
        self._drop_spare()  # the other ones have sizes that are no longer needed
        missing_sizes = {key: size for key, size in sizes.items() if key not in refs}
        needed_bytes = sum(PAGE + -(-size // PAGE) * PAGE for size in missing_sizes.values())
        try:
            # Asked before anything is allocated: tmpfs may be larger than the memory left, and filling that invites the
            # OOM killer.
            if needed_bytes > free_bytes(self._root):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            for key, size in missing_sizes.items():
                refs[key] = create(self.folder / secrets.token_hex(16), size)
        except OSError as error:
            refusal = _refused(self._root, needed_bytes, error)
            # All or none. Spares that were already renewed go too: the next attempt needs their memory.
            self._spare.extend(refs.values())
            self._drop_spare()
            raise refusal from error
        self._used |= refs
        return {key: refs[key] for key in sizes}

    def find(self, key: str) -> SegmentRef | None:
        """Return a key's segment, or None."""
        return self._used.get(key)

    def free(self, keys: Collection[str]) -> list[SegmentRef]:
        """Free segments, keeping their memory for the next version; unknown keys are ignored.

        Returns:
            The segments, with the tokens that they had.
        """
        freed = [self._used.pop(key) for key in keys if key in self._used]
        for ref in freed:
            try:
                self._freed.append(renew(ref))  # whoever still reads or writes it notices
            except OSError:
                _remove(ref)
        self._recycle()
        return freed

    def close(self) -> None:
        """Remove the folder and its contents; mapped segments keep their memory."""
        for ref in (*self._used.values(), *self._freed, *self._spare):
            release(ref)
        self._used.clear()
        self._freed.clear()
        self._spare.clear()
        with _home(self._root):
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def _recycle(self) -> None:
        """Make freed segments reusable unless somebody is writing."""
        if not self._freed:
            return
        # flock belongs to an open file, so a fresh descriptor conflicts with the writers' shared locks, also those of
        # this process.
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Never wait: this runs on the store's event loop, and a writer may take seconds. The next call tries again.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        else:
            self._spare.extend(self._freed)
            self._freed.clear()
        finally:
            os.close(fd)

    def _drop_spare(self) -> None:
        for ref in self._spare:
            _remove(ref)
        self._spare.clear()


def _make(home: Path) -> tuple[Path, int]:
    """Make a volume's folder; return it with its lock."""
    folder = home / secrets.token_hex(16)
    folder.mkdir(mode=0o700)
    lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def _take_over(folder: Path | None) -> tuple[Path, int] | None:
    """Lock the folder of a process that died; None if it is gone, or the process lives."""
    if folder is None:
        return None
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return folder, lock


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Hold a volume's writer lock while the body runs; check the segments after entering and at the end.

    Raises:
        WeightsError: the volume is gone.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightsError(
            f"the store's folder {folder} cannot be opened ({error.strerror}): the store has ended",
            hint="start the run again",
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


def free_bytes(root: Path) -> int:
    """Bytes available in a shared memory folder, within its own limit and the machine's memory."""
    space = os.statvfs(root)
    return min(space.f_bavail * space.f_frsize, available_bytes())


def problem(root: Path, needed: int) -> str | None:
    """Describe why a folder cannot hold `needed` bytes of weights; None if it can."""
    if not root.is_dir():
        return f"{root} is no folder"
    if not os.access(root, os.W_OK | os.X_OK):
        return f"{root} cannot be written"
    free = free_bytes(root)
    return f"{root} has {free / 2**30:.1f} GiB free, {needed / 2**30:.1f} are needed" if free < needed else None


def reclaim(root: Path) -> int:
    """Remove the folders of this user's volumes whose processes have ended.

    Returns:
        Bytes freed.
    """
    freed = 0
    with _home(root) as home:
        for folder in home.iterdir():
            lock = -1
            with contextlib.suppress(OSError):  # another process is removing it, or holds it
                lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                freed += sum(path.stat().st_size for path in folder.iterdir())
                shutil.rmtree(folder, ignore_errors=True)
            if lock >= 0:
                os.close(lock)
    return freed


@contextlib.contextmanager
def _home(root: Path) -> Iterator[Path]:
    """This user's private folder under the root, locked against this user's other processes.

    It is removed at the end if it is empty.
    """
    home = root / f"forge_rl-{os.geteuid()}"
    not_private = WeightsError(f"{home} is not this user's alone", hint="find out who made it, and remove it")
    while True:
        try:
            with contextlib.suppress(FileExistsError):
                home.mkdir(mode=0o700)
        except OSError as error:
            message = f"{home} cannot be made: {error.strerror}" if root.is_dir() else f"{root} is no folder"
            raise WeightsError(message, hint="set --weights.shm to a folder in shared memory") from error
        try:
            fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:  # the last process to leave has just removed it
            continue
        except OSError as error:
            raise not_private from error
        try:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise not_private
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:  # else the last one that left has just removed it
                yield home
                with contextlib.suppress(OSError):  # a volume is in it
                    home.rmdir()
                return
        finally:
            os.close(fd)


def _remove(ref: SegmentRef) -> None:
    release(ref)
    Path(ref.path).unlink(missing_ok=True)


def _refused(root: Path, needed: int, error: OSError) -> WeightsError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
        return WeightsError(
            f"no room for a version of the weights in {root}: {needed} bytes are needed, {free_bytes(root)} are free",
            hint="free memory, give the container more shared memory (docker run --shm-size), lower "
            "--weights.keep-versions, or set --weights.transport torchstore",
        )
    return WeightsError(
        f"segments cannot be made in {root}: {error.strerror}",
        hint="set --weights.shm to a folder in shared memory that can be written",
    )
