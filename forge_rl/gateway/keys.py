"""API keys: the caller that a key belongs to, and the file with the owner's key."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from starlette.datastructures import Headers

from forge_rl.errors import ConfigError
from forge_rl.gateway.errors import ApiError
from forge_rl.gateway.sessions import Session

_MOST_KEY_BYTES = 4096
_MOST_FILE_BYTES = 1 << 20
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class KeyRing:
    """Maps API keys to callers: sessions, or the owner.

        keys: KeyRing = KeyRing("the owner's")
        keys.add(session.key, session)
        keys.caller(headers)  # the session, None for the owner, or an ApiError with status 401

    Args:
        owner: the owner's key; "" for none.
        open_to_all: if the owner has no key, treat requests without a session's key as the owner's.
    """

    def __init__(self, owner: str = "", *, open_to_all: bool = False) -> None:
        self._owner = _digest(owner) if owner else None
        self._open_to_all = open_to_all and not owner
        self._sessions: dict[bytes, Session] = {}
        """Sessions by the digest of their key, so that lookup times reveal nothing about keys."""

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Sessions whose keys are accepted."""
        return tuple(self._sessions.values())

    def add(self, key: str, session: Session) -> None:
        """Accept a session's key."""
        self._sessions[_digest(key)] = session

    def remove(self, key: str) -> None:
        """Stop accepting a session's key."""
        self._sessions.pop(_digest(key), None)

    def caller(self, headers: Headers) -> Session | None:
        """Return the session whose key a request carries; None for the owner.

        Raises:
            ApiError: the key is missing or wrong.
        """
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        key = bearer.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(key)
        session = self._sessions.get(digest)
        # The comparison takes the same time for every wrong key.
        if session is not None or (self._owner is not None and hmac.compare_digest(digest, self._owner)):
            return session
        if self._open_to_all and not (key.startswith("forge-") and "." in key):  # the key of a closed session
            return None
        wrong = "wrong API key, or the key of a closed session"
        missing = "no API key: send it as `Authorization: Bearer KEY` or `x-api-key`"
        raise ApiError(401, wrong if key else missing, code="invalid_api_key")


def read_key(file: Path) -> str:
    """Read a key from a file that no other user can read or write.

    Raises:
        ConfigError: the file holds no key, or other users may read or write it.
    """
    key = read_key_file(file, most_bytes=_MOST_KEY_BYTES + 1).strip()
    if not key or len(key) > _MOST_KEY_BYTES or not all("!" <= letter <= "~" for letter in key):
        raise ConfigError(
            f"the key file {file} does not hold a valid key",
            hint="put one line into it: letters, digits and punctuation, without spaces",
        )
    return key


def read_key_file(file: Path, *, most_bytes: int = _MOST_FILE_BYTES) -> str:
    """Read a text of keys, up to its maximum length, from a file that no other user can read or write.

    Raises:
        ConfigError: the file cannot be read, or other users may read or write it.
    """
    users = {0, os.getuid()}
    try:
        # Whoever owns a link decides which file is read next time.
        link = file.lstat()
        if stat.S_ISLNK(link.st_mode) and link.st_uid not in users:
            raise ConfigError(f"the key file {file} is another user's link", hint="use a file that you own")
        # Without O_NONBLOCK, opening a pipe would wait for its writer.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            # Of the open file, as another could take its path between a check and the read.
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid not in users or status.st_mode & _OTHERS:
                raise ConfigError(
                    f"the key file {file} is open to other users (mode {stat.filemode(status.st_mode)})",
                    hint=f"run chmod 600 {file}, and put a new key into it",
                )
            return stream.read(most_bytes).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise ConfigError(f"cannot read the key file {file}: {cause}", hint="use a file that holds a key") from error


def kept_key(file: Path, *, prefix: str = "") -> str:
    """Return the key in a file; if the file does not exist, create it and its folder, with a new key that only this
    user can read.

    The file appears with its key: a process that is killed, or a full disk, leaves none, not one that holds no key.

    Raises:
        ConfigError: the file cannot be written, or other users may read or write it.
    """
    try:
        if not os.path.lexists(file):
            with contextlib.suppress(FileExistsError):  # not a folder: writing the file says so
                file.parent.mkdir(parents=True, exist_ok=True)
            # Written under another name first, so that no reader finds a file without its key.
            partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}.partial")
            try:
                with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as stream:
                    stream.write(f"{prefix}{secrets.token_urlsafe(32)}\n")
                    stream.flush()
                    os.fsync(stream.fileno())
                try:
                    os.link(partial, file)  # unlike a rename, it replaces no key that another process has just written
                except FileExistsError:
                    raise
                except OSError:  # a file system without links
                    os.rename(partial, file)
            finally:
                with contextlib.suppress(OSError):
                    partial.unlink()
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(f"cannot write the key file {file}: {error.strerror}", hint="set another --out") from error
    return read_key(file)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
