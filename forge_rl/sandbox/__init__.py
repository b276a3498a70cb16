"""Sandbox: stateful sessions of untrusted Python, thousands on one machine. Usable without the rest of the library.

    async with Pool() as pool, pool.session() as session:
        print((await session.run("2 + 2")).value)

Names are imported on first use: the fork server imports neighbours of this file without asyncio and the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_rl.system.lazy import LazyNames

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
    from forge_rl.sandbox.providers.docker import DockerPool as DockerPool
    from forge_rl.sandbox.providers.e2b import E2BPool as E2BPool
    from forge_rl.sandbox.providers.remote import RemotePool as RemotePool
    from forge_rl.sandbox.session import PoolSession as PoolSession
    from forge_rl.sandbox.shared import run_code as run_code
    from forge_rl.sandbox.shared import shared_pool as shared_pool
    from forge_rl.sandbox.workspaces.repositories import Checkout as Checkout
    from forge_rl.sandbox.workspaces.repositories import RepositoryStore as RepositoryStore

_NAMES: LazyNames[object] = LazyNames(
    {
        "CellError": "forge_rl.sandbox.limits:CellError",
        "Checkout": "forge_rl.sandbox.workspaces.repositories:Checkout",
        "DockerPool": "forge_rl.sandbox.providers.docker:DockerPool",
        "DurableSession": "forge_rl.sandbox.durable:DurableSession",
        "DurableSessions": "forge_rl.sandbox.durable:DurableSessions",
        "E2BPool": "forge_rl.sandbox.providers.e2b:E2BPool",
        "Image": "forge_rl.sandbox.limits:Image",
        "Limits": "forge_rl.sandbox.limits:Limits",
        "Pool": "forge_rl.sandbox.pool:Pool",
        "PoolSession": "forge_rl.sandbox.session:PoolSession",
        "RemotePool": "forge_rl.sandbox.providers.remote:RemotePool",
        "RepositoryStore": "forge_rl.sandbox.workspaces.repositories:RepositoryStore",
        "Result": "forge_rl.sandbox.limits:Result",
        "SandboxError": "forge_rl.sandbox.limits:SandboxError",
        "SandboxPool": "forge_rl.sandbox.protocol:SandboxPool",
        "SandboxSession": "forge_rl.sandbox.protocol:SandboxSession",
        "Usage": "forge_rl.sandbox.limits:Usage",
        "run_code": "forge_rl.sandbox.shared:run_code",
        "shared_pool": "forge_rl.sandbox.shared:shared_pool",
    }
)
__all__ = [
    "CellError",
    "Checkout",
    "DockerPool",
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
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _NAMES[name]
