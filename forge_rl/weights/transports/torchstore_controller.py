"""torchstore's controller with async endpoints only: torchstore 0.1.2 mixes in sync ones, which Monarch 0.7 rejects."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any

from monarch.actor import endpoint
from torchstore.controller import Controller


def _asynchronous(method: Callable[..., Any]) -> Any:
    async def call(self: object, *args: object, **kwargs: object) -> object:
        return method(self, *args, **kwargs)

    call.__name__ = method.__name__
    return endpoint(call)


def _endpoints() -> dict[str, Any]:
    if importlib.metadata.version("torchstore") != "0.1.2":
        return {}
    methods = {name: getattr(member, "_method", None) for name, member in vars(Controller).items()}
    return {
        name: _asynchronous(body) for name, body in methods.items() if body and not inspect.iscoroutinefunction(body)
    }


AsyncController = type("AsyncController", (Controller,), {**_endpoints(), "__module__": __name__})
"""Controller whose endpoints are all async; unchanged for newer versions of torchstore."""
