"""Clients' sessions, and the samplers that they have opened; both survive a restart of the server."""

from __future__ import annotations

import json
import os
import secrets
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from forge_rl.errors import CheckpointError
from forge_rl.gateway.errors import ApiError
from forge_rl.system.folders import write_whole

_MOST_SAMPLERS = 512
"""Maximum samplers of a session; past it, the one idle longest is forgotten."""


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Weights to sample from, for one session."""

    sampler_id: str
    seq: int
    """Its sequence number in the session, from which the seeds of its samples are derived."""
    model_path: str | None
    """None for the base."""


@dataclass(kw_only=True)
class ClientSession:
    """A client's session."""

    session_id: str
    tenant: str
    user_metadata: Mapping[str, str] | None = None
    display_name: str | None = None
    samplers: dict[str, Sampler] = field(default_factory=dict)
    """By id, least recently used first."""


class Sessions:
    """Sessions, least recently used first, each in a file of its own: changing one costs the same, however much the
    others hold.

    Args:
        folder: folder of the files, created if it is missing. A file of the same name with the suffix .json, in which
            earlier servers kept all sessions, is split up.
        max_sessions: maximum sessions of a tenant; past it, the one idle longest ends.
        on_end: called with the id of each session that ends.
    """

    def __init__(self, folder: Path, *, max_sessions: int, on_end: Callable[[str], None]) -> None:
        folder.mkdir(exist_ok=True)
        _split(folder.with_suffix(".json"), folder)
        self._folder = folder
        self._max_sessions = max_sessions
        self._on_end = on_end
        self._sessions = _read(folder)
        self._used_s = dict.fromkeys(self._sessions, time.monotonic())
        """Time of each session's last request, by id; clients send one every 10 s."""

    def create(
        self, tenant: str, user_metadata: Mapping[str, str] | None = None, display_name: str | None = None
    ) -> ClientSession:
        """Open a session."""
        session = ClientSession(
            session_id=secrets.token_hex(12), tenant=tenant, user_metadata=user_metadata, display_name=display_name
        )
        self._write(session)  # first: on a full disk, none ends for one that has not begun
        self._sessions[session.session_id] = session
        self._used_s[session.session_id] = time.monotonic()
        for idle in self.of(tenant)[: -self._max_sessions]:
            self.end(idle.session_id, tenant)
        return session

    def of(self, tenant: str) -> list[ClientSession]:
        """Return a tenant's sessions, least recently used first."""
        return [session for session in self._sessions.values() if session.tenant == tenant]

    def get(self, session_id: str, tenant: str) -> ClientSession:
        """Return a tenant's session, which counts as used.

        Raises:
            ApiError: there is none, or it has ended.
        """
        session = self._sessions.get(session_id)
        if session is None or session.tenant != tenant:
            raise ApiError(410, f"there is no session {session_id[:100]!r}", code="session_gone")
        # To the end, as the one used last.
        self._sessions[session_id] = self._sessions.pop(session_id)
        self._used_s[session_id] = time.monotonic()
        return session

    def silent_sessions(self, seconds: float) -> list[ClientSession]:
        """Return the sessions whose clients have sent nothing for a time, the longest first."""
        since = time.monotonic() - seconds
        return [session for session in self._sessions.values() if self._used_s[session.session_id] <= since]

    def end(self, session_id: str, tenant: str) -> None:
        """End a session."""
        self.get(session_id, tenant)
        self._on_end(session_id)  # first: a training without its session could not be ended with it
        del self._sessions[session_id], self._used_s[session_id]
        self._file(session_id).unlink(missing_ok=True)

    def open_sampler(self, session_id: str, seq: int, model_path: str | None) -> str:
        """Open a sampler of a session; the same seq and path give the same one. Returns its id."""
        sampler_id = f"{session_id}:sample:{seq}"
        if (session := self._sessions.get(session_id)) is not None:  # else it has ended meanwhile
            session.samplers.pop(sampler_id, None)
            session.samplers[sampler_id] = Sampler(sampler_id=sampler_id, seq=seq, model_path=model_path)
            # In order of use, so that the last ones stay.
            for idle in list(session.samplers)[:-_MOST_SAMPLERS]:
                del session.samplers[idle]
            self._write(session)
        return sampler_id

    def sampler(self, sampler_id: str, tenant: str) -> Sampler:
        """Return a tenant's sampler.

        Raises:
            ApiError: there is none.
        """
        samplers = self.get(sampler_id.partition(":")[0], tenant).samplers
        if sampler_id not in samplers:
            raise ApiError(404, f"there is no sampler {sampler_id[:100]!r}", code="not_found")
        samplers[sampler_id] = sampler = samplers.pop(sampler_id)  # to the end, as the one used last
        return sampler

    def paths(self, session_id: str) -> list[str]:
        """Return the checkpoints of a session's samplers, least recently used first."""
        session = self._sessions.get(session_id)
        samplers = session.samplers.values() if session is not None else ()
        return [sampler.model_path for sampler in samplers if sampler.model_path is not None]

    def _file(self, session_id: str) -> Path:
        return self._folder / f"{session_id}.json"

    def _write(self, session: ClientSession) -> None:
        write_whole(self._file(session.session_id), json.dumps(asdict(session)))


def _split(file: Path, folder: Path) -> None:
    """Split a file of all sessions into a file for each, and remove it."""
    if not file.exists():
        return
    try:
        time_ns = file.stat().st_mtime_ns
        for index, fields in enumerate(json.loads(file.read_text())):
            path = folder / f"{ClientSession(**fields).session_id}.json"
            write_whole(path, json.dumps(fields))
            os.utime(path, ns=(time_ns, time_ns + index))  # their order of use
        file.unlink()
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", hint="move it away") from error


def _read(folder: Path) -> dict[str, ClientSession]:
    sessions = []
    for file in sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns):
        try:
            session = ClientSession(**json.loads(file.read_text()))
            session.samplers = {name: Sampler(**vars_) for name, vars_ in dict(session.samplers).items()}  # type: ignore[arg-type]
        except (OSError, ValueError, TypeError) as error:
            # One client's session must not keep the server from all others.
            warnings.warn(f"a session is left out: {file} cannot be read: {error}", stacklevel=2)
            continue
        sessions.append(session)
    return {session.session_id: session for session in sessions}
