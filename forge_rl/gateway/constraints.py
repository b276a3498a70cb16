"""Tries requests' constraints, such as schemas and grammars, in a process that may crash, before an engine does."""

from __future__ import annotations

import asyncio
import hashlib
import json
import select
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from forge_rl.gateway.errors import ApiError
from forge_rl.tokens.tokenizer import Tokenizer

_MOST_BYTES = 128 << 10
"""Maximum bytes of a constraint."""
_MOST_DEPTH = 200
"""Maximum nesting of brackets in a constraint."""
_MOST_WAITING, _MOST_OF_ONE = 64, 16
"""Maximum constraints waiting to be tried, of all callers and of one."""
_MOST_VERDICTS = 4096
_START_S = 120.0
"""Maximum start time of the process, which imports torch."""


@dataclass(frozen=True, kw_only=True)
class TrialLimits:
    """Limits on the trial of a constraint: `TrialLimits(wall_s=10)`."""

    wall_s: float = 60.0
    """Maximum wall time."""
    read_s: float = 1.0
    """Maximum CPU time to parse it, which engines do in their event loops."""
    compile_s: float = 20.0
    """Maximum CPU time to compile it; xgrammar takes seconds for a string with a maxLength."""
    walk_s: float = 5.0
    """Maximum CPU time to sample completions under it."""
    memory_bytes: int = 1 << 30
    """Maximum memory added by the trial."""


class ConstraintChecker:
    """Checks that engines can decode under constraints; one that crashes or hangs fails only its own request.

    checker = ConstraintChecker(tokenizer)
    await checker.check("regex", "[a-z]{1,9}")
    await checker.close()

    The process starts with the first constraint. Constraints are tried one at a time, and callers take turns: each
    waits for at most one trial of every other caller. Verdicts are cached.

    Args:
        tokenizer: the model's tokenizer.
        limits: limits on each trial.
    """

    def __init__(self, tokenizer: Tokenizer, limits: TrialLimits | None = None) -> None:
        self._tokenizer = tokenizer
        self._limits = limits or TrialLimits()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="gateway-constraints")
        """One thread, which also kills the process at the end."""
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._waiting: dict[bytes, asyncio.Future[str]] = {}
        self._callers: dict[str, tuple[asyncio.Lock, set[bytes]]] = {}
        """By caller, the lock that its constraints take in turn, and the keys of those that wait."""
        self._turn = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    async def check(self, kind: str, text: str, caller: str = "") -> None:
        """Check that an engine can decode under a constraint.

        Args:
            kind: "json", "regex", "ebnf", "lark" or "tag".
            text: the constraint.
            caller: name of the sender.

        Raises:
            ApiError: an engine cannot, or too many constraints wait, of this caller or in total.
        """
        self.check_size(len(text.encode(errors="replace")))
        if (depth := _depth(text)) > _MOST_DEPTH:
            raise _refusal(f"its brackets nest {depth} deep, more than {_MOST_DEPTH}")
        key = hashlib.sha256(f"{kind}\n{text}".encode(errors="replace")).digest()
        problem = self._verdicts.get(key)
        if problem is None:
            problem = await self._verdict(key, kind, text, caller)
        else:
            # The verdict used least recently is forgotten first.
            self._verdicts.move_to_end(key)
        if problem:
            raise _refusal(problem)

    def check_size(self, size: int) -> None:
        """Raise ApiError if a constraint of `size` bytes is too large."""
        if size > _MOST_BYTES:
            raise _refusal(f"it has {size} bytes, more than {_MOST_BYTES}")

    async def close(self) -> None:
        """Kill the process; waiting constraints are refused."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()  # ends a trial that waits for it
        # Behind a trial that still runs: only the executor's thread touches the pipes.
        self._executor.submit(self._kill)
        await asyncio.to_thread(self._executor.shutdown)

    async def _verdict(self, key: bytes, kind: str, text: str, caller: str) -> str:
        """Try a constraint, or wait for a trial of the same one."""
        if (trial := self._waiting.get(key)) is None:
            _, waiting_keys = self._callers.get(caller, (None, set()))
            if len(self._waiting) >= _MOST_WAITING or len(waiting_keys) >= _MOST_OF_ONE:
                raise ApiError(503, "too many constraints wait to be tried; try again", code="busy")
            self._callers.setdefault(caller, (asyncio.Lock(), waiting_keys))[1].add(key)
            self._waiting[key] = trial = asyncio.ensure_future(self._in_turn(key, kind, text, caller))
            trial.add_done_callback(lambda future: self._keep(key, future))
        # Other requests may wait for the same trial, which one that is cancelled must not end.
        return await asyncio.shield(trial)

    async def _in_turn(self, key: bytes, kind: str, text: str, caller: str) -> str:
        """Try a constraint when it is its caller's turn."""
        caller_lock, waiting_keys = self._callers[caller]
        try:
            async with caller_lock, self._turn:  # both locks are FIFO; one constraint per caller waits for the second
                if self._closed:
                    raise ApiError(503, "the server was closed", code="closed")
                return await asyncio.get_running_loop().run_in_executor(self._executor, self._try, kind, text)
        finally:
            waiting_keys.remove(key)
            if not waiting_keys:
                del self._callers[caller]

    def _keep(self, key: bytes, future: asyncio.Future[str]) -> None:
        del self._waiting[key]
        # Only verdicts are kept: a failure of the process says nothing about the constraint.
        if not future.cancelled() and future.exception() is None:
            self._verdicts[key] = future.result()
            if len(self._verdicts) > _MOST_VERDICTS:
                self._verdicts.popitem(last=False)

    def _try(self, kind: str, text: str) -> str:
        """Try a constraint in the process; return the problem, or "". Runs in the executor's thread."""
        if self._closed:
            raise ApiError(503, "the server was closed", code="closed")
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps([kind, text]).encode() + b"\n")
            process.stdin.flush()
            answers = select.poll()  # select.select rejects descriptors of 1024 and above
            answers.register(process.stdout, select.POLLIN)
            # The first trial also waits for the start of the process.
            if answers.poll((self._limits.wall_s + _START_S) * 1000):
                (problem,) = json.loads(process.stdout.readline())
                return str(problem)
        except (OSError, ValueError):  # the process ended
            pass
        self._kill()
        raise ApiError(503, "the process that tries constraints failed; try again", code="busy")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            from xgrammar import TokenizerInfo  # loads torch

            script, limits = Path(__file__).with_name("constraint_worker.py"), json.dumps(asdict(self._limits))
            # A session of its own: Ctrl-C is for the gateway, which then kills this process.
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(script), limits],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            assert self._process.stdin is not None
            vocabulary = TokenizerInfo.from_huggingface(self._tokenizer.hf).serialize_json()
            self._process.stdin.write(json.dumps(vocabulary).encode() + b"\n")
        return self._process

    def _kill(self) -> None:
        if (process := self._process) is not None:
            process.kill()  # its forks end with it
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None


def _depth(text: str) -> int:
    """Return the maximum nesting of brackets in a text, also of those in literals."""
    depth = max_depth = 0
    for character in text:
        if character in "([{":
            depth += 1
            max_depth = max(max_depth, depth)
        elif character in ")]}":
            depth -= 1
    return max_depth


def _refusal(problem: str) -> ApiError:
    return ApiError(400, f"the request's constraint cannot be used: {problem}", code="invalid_constraint")
