"""Cache of a judge's replies and count of its spending, in an SQLite file shared by processes and resumed runs."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from forge_rl.errors import ConfigError, JudgeError
from forge_rl.system.folders import make_private

_TABLES = """
create table if not exists replies (key text primary key, reply text not null);
create table if not exists spent (judge text primary key, calls integer not null, tokens integer not null);
"""


class JudgeStore:
    """Stores replies by key, and the number of calls and tokens by judge.

        store = JudgeStore(Path("runs/grpo-1/reward"))
        await store.reserve("gpt", max_calls=100, max_tokens=0)  # False when the limit is reached

    Its methods run in a thread of the store, as another process's lock may hold them up for half a minute.

    Args:
        folder: created if missing, and made private; None keeps everything in memory.

    Raises:
        ConfigError: the folder or its file cannot be used.
        JudgeError: a method cannot read or write the file.
    """

    def __init__(self, folder: Path | None) -> None:
        try:
            if folder is not None:
                make_private(folder, ConfigError)
            path = ":memory:" if folder is None else str(folder / "judge.sqlite")
            # Autocommit, as each method commits on its own, and a timeout of 30 s for the locks of other replicas.
            self._database = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
            self._database.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"the judge cannot store its replies in {folder}: {error}",
                hint="fix or delete the folder, or choose another",
            ) from error
        # A single thread, as counts of changed rows belong to the connection.
        self._thread = ThreadPoolExecutor(1, "judge-store")

    async def reply(self, key: str) -> str | None:
        """Return a stored reply, or None."""
        rows, _ = await self._execute("select reply from replies where key = ?", (key,))
        return str(rows[0][0]) if rows else None

    async def keep(self, key: str, reply: str) -> None:
        """Store a reply."""
        await self._execute("insert or replace into replies values (?, ?)", (key, reply))

    async def reserve(self, judge: str, *, max_calls: int, max_tokens: int) -> bool:
        """Count a call before it is made; return False if it would exceed a limit. 0 means no limit."""
        await self._execute("insert or ignore into spent values (?, 0, 0)", (judge,))
        # Check and count are one statement, so replicas that share the file cannot exceed a limit together.
        condition = "(? = 0 or calls < ?) and (? = 0 or tokens < ?)"
        limits = (max_calls, max_calls, max_tokens, max_tokens)
        statement = f"update spent set calls = calls + 1 where judge = ? and {condition}"
        _, num_changed = await self._execute(statement, (judge, *limits))
        return num_changed == 1

    async def add_tokens(self, judge: str, tokens: int) -> None:
        """Count the tokens of a call after it is made."""
        await self._execute("update spent set tokens = tokens + ? where judge = ?", (tokens, judge))

    async def spent(self, judge: str) -> tuple[int, int]:
        """Return the number of calls and tokens of a judge."""
        rows, _ = await self._execute("select calls, tokens from spent where judge = ?", (judge,))
        return rows[0] if rows else (0, 0)

    async def _execute(self, statement: str, values: Sequence[str | int]) -> tuple[list[Any], int]:
        """Execute a statement; return its rows, and how many it changed."""

        def execute() -> tuple[list[Any], int]:
            cursor = self._database.execute(statement, values)
            return cursor.fetchall(), cursor.rowcount

        try:
            # Shielded: a score that is given up leaves no reply that was paid for unstored, and no cost uncounted.
            return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, execute))
        except sqlite3.Error as error:
            # After any other error the episode would be scored, and the replies that cannot be stored paid for, again.
            raise JudgeError(
                f"the judge cannot use its stored replies: {error}",
                hint="free space on the disk of the run folder, or of the cache in --reward judge:...",
            ) from error
