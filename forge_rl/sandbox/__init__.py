"""Sandbox: stateful sessions of untrusted Python, thousands on one machine. Usable without the rest of the library.

    async with Pool() as pool, pool.session() as session:
        print((await session.run("2 + 2")).value)

Names are imported on first use: the fork server imports neighbours of this file without asyncio and the rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_rl.sandbox.durable import DurableSession as DurableSession
    from forge_rl.sandbox.durable import DurableSessions as DurableSessions
    from forge_rl.sandbox.limits import CellError as CellError
    from forge_rl.sandbox.limits import Image as Image
    from forge_rl.sandbox.limits import Limits as Limits
    from forge_rl.sandbox.limits import Result as Result
    from forge_rl.sandbox.limits import SandboxError as SandboxError
    from forge_rl.sandbox.limits import Usage as Usage
    from forge_rl.sandbox.pool import Pool as Pool
    from forge_rl.sandbox.protocol import SandboxPool as SandboxPool
    from forge_rl.sandbox.protocol import SandboxSession as SandboxSession
    from forge_rl.sandbox.providers.e2b import E2BPool as E2BPool
    from forge_rl.sandbox.providers.remote import RemotePool as RemotePool
    from forge_rl.sandbox.session import PoolSession as PoolSession
    from forge_rl.sandbox.shared import run_code as run_code
    from forge_rl.sandbox.shared import shared_pool as shared_pool
    from forge_rl.sandbox.workspaces.repositories import Checkout as Checkout
    from forge_rl.sandbox.workspaces.repositories import RepositoryStore as RepositoryStore

_HOMES = {
    **dict.fromkeys(("CellError", "Image", "Limits", "Result", "SandboxError", "Usage"), "limits"),
    **dict.fromkeys(("DurableSession", "DurableSessions"), "durable"),
    "E2BPool": "providers.e2b",
    "Pool": "pool",
    "RemotePool": "providers.remote",
    "SandboxPool": "protocol",
    "SandboxSession": "protocol",
    **dict.fromkeys(("Checkout", "RepositoryStore"), "workspaces.repositories"),
    "PoolSession": "session",
    **dict.fromkeys(("run_code", "shared_pool"), "shared"),
}
__all__ = [
    "CellError",
    "Checkout",
    "DurableSession",
    "DurableSessions",
    "E2BPool",
    "Image",
    "Limits",
    "Pool",
    "PoolSession",
    "RemotePool",
    "RepositoryStore",
    "Result",
    "SandboxError",
    "SandboxPool",
    "SandboxSession",
    "Usage",
    "run_code",
    "shared_pool",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
