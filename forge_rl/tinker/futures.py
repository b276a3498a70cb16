"""Promises: results of requests, for which clients get an id at once and ask later."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from forge_rl.errors import CheckpointError, ForgeError, LossError
from forge_rl.gateway.errors import ApiError, to_api_error

POLL_S = 30.0
"""Maximum time for which a request for a result waits; the client gives up after 45 s."""
_MOST_DONE = 4096
_MOST_DONE_BYTES = 256 << 20
"""Maximum number and bytes of the results kept for a tenant; a sixteenth more until old ones are next looked for."""
_SHARE = 16
"""Old promises are looked for once a tenant has opened a sixteenth as many as it has: the cost of each is constant."""


@dataclass(frozen=True, kw_only=True)
class FutureResult:
    """The result of a request, in the form that its client gets."""

    body: bytes
    is_protobuf: bool = False


@dataclass(eq=False)
class Promise:
    """The result of one request, once it is known."""

    tenant: str
    done: asyncio.Event = field(default_factory=asyncio.Event)
    result: FutureResult | None = None
    error: str = ""
    is_user_error: bool = False
    is_sent: bool = False
    """True once the answer was sent to its client."""

    @property
    def answer(self) -> FutureResult:
        """The answer for its client once it is done: the result or the error."""
        error = {"error": self.error, "category": "user" if self.is_user_error else "server"}
        return self.result or FutureResult(body=json.dumps(error).encode())

    def keep(self, result: FutureResult) -> None:
        """Set the result."""
        self.result = result
        self.done.set()

    def fail(self, error: Exception) -> None:
        """Set the error that its client sees, without a traceback, and whether the request caused it."""
        api_error = to_api_error(error)
        # A loss or a checkpoint fails for what the request brings, whatever the status of its error.
        self.is_user_error = api_error.status < 500 or isinstance(error, LossError | CheckpointError)
        hint = f" ({error.hint})" if isinstance(error, ForgeError) and error.hint and self.is_user_error else ""
        self.error = api_error.message + hint
        self.done.set()


class Promises:
    """Promises by id; beyond a limit, a tenant's oldest finished ones are forgotten."""

    def __init__(self) -> None:
        self._promises: dict[str, Promise] = {}
        self._names: dict[str, OrderedDict[str, None]] = {}
        """Ids of each tenant's promises, the oldest first."""
        self._opened: Counter[str] = Counter()
        """Number of promises that each tenant has opened since its old ones were last looked for."""

    def open(self, request_id: str, tenant: str) -> Promise:
        """Make a promise."""
        names = self._names.setdefault(tenant, OrderedDict())
        self._opened[tenant] += 1
        # Looking at all promises each time would make each of n promises cost O(n).
        if self._opened[tenant] > len(names) // _SHARE:
            # Only this tenant's: one of many requests must not make the server forget another's results.
            self._forget(tenant)
        # An id that is opened again moves to the end.
        names.pop(request_id, None)
        names[request_id] = None
        promise = self._promises[request_id] = Promise(tenant)
        return promise

    def get(self, request_id: str, tenant: str) -> Promise:
        """Return a tenant's promise.

        Raises:
            ApiError: there is none, or it was forgotten.
        """
        promise = self._promises.get(request_id)
        if promise is None or promise.tenant != tenant:
            raise ApiError(410, f"there is no result for the request {request_id[:100]!r}", code="promise_gone")
        return promise

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._promises

    def has_result(self, request_id: str) -> bool:
        """Return whether a request is known to have succeeded."""
        promise = self._promises.get(request_id)
        return promise is not None and promise.result is not None

    def unsent(self, request_ids: Iterable[str]) -> dict[str, tuple[bool, str]]:
        """Return the answers that clients have not fetched yet, in a JSON-serializable form."""
        promises = [(name, self._promises[name]) for name in request_ids if name in self._promises]
        return {
            name: (promise.answer.is_protobuf, base64.b64encode(promise.answer.body).decode())
            for name, promise in promises
            if promise.done.is_set() and not promise.is_sent
        }

    def take_up(self, results: Mapping[str, tuple[bool, str]], tenant: str) -> None:
        """Restore a tenant's answers, as returned by `unsent`."""
        for name, (is_protobuf, text) in results.items():
            self.open(name, tenant).keep(FutureResult(body=base64.b64decode(text), is_protobuf=is_protobuf))

    def _forget(self, tenant: str) -> None:
        """Forget a tenant's oldest finished promises beyond the limits."""
        self._opened[tenant] = 0
        names = self._names[tenant]
        done = [(name, promise) for name in names if (promise := self._promises[name]).done.is_set()]
        size = sum(len(promise.result.body) for _, promise in done if promise.result is not None)
        surplus = len(done) - _MOST_DONE
        done.sort(key=lambda item: not item[1].is_sent)  # those that their client has got go first
        for name, promise in done:
            if surplus <= 0 and size <= _MOST_DONE_BYTES:
                break
            size -= len(promise.result.body) if promise.result is not None else 0
            surplus -= 1
            del self._promises[name], names[name]
