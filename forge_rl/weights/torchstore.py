"""The torchstore transport: buckets lie in a storage volume of torchstore, in a process of its own."""

from __future__ import annotations

import importlib.metadata
import inspect
from typing import TYPE_CHECKING, Protocol, cast

import torch

from forge_rl.errors import WeightsError

if TYPE_CHECKING:
    from monarch.actor import ProcMesh


class TorchStoreTransport:
    """A client of one torchstore, as `Transport` says. Pickles: it holds actor handles only."""

    imports = ("torchstore",)
    """What the store's process must import first: several actors share it."""

    def __init__(self, controller: object, strategy: object) -> None:
        self._controller = controller
        self._strategy = strategy

    @staticmethod
    async def open(mesh: ProcMesh) -> TorchStoreTransport:
        """Spawn a store on a process mesh; it lives as long as the mesh.

        Its controller is an actor of ours on that mesh, not torchstore's singleton: the singleton lives in the client's
        process, and after a crash every later look-up fails.
        """
        from torchstore.storage_volume import StorageVolume
        from torchstore.strategy import SingletonStrategy

        strategy = SingletonStrategy()
        volumes = await StorageVolume.spawn(num_volumes=1, mesh=mesh, id_func=strategy.get_volume_id)
        controller = mesh.spawn("torchstore_controller", _controller_class())
        await controller.init.call(strategy=strategy, num_storage_volumes=1, storage_volumes=volumes)
        return TorchStoreTransport(controller, await controller.get_controller_strategy.call_one())

    async def put(self, key: str, bucket: torch.Tensor) -> None:
        await self._client().put(key, bucket)

    async def get(self, key: str) -> torch.Tensor:
        try:
            return await self._client().get(key)
        except KeyError as error:
            raise WeightsError(f"torchstore holds no bucket {key}") from error

    async def delete(self, key: str) -> None:
        client = self._client()
        if await client.exists(key):
            await client.delete(key)

    async def delete_version(self, version: int) -> None:
        for key in await self._client().keys():
            if key.startswith(f"{version}/"):
                await self.delete(key)

    def _client(self) -> _Client:
        from torchstore.client import LocalClient

        return cast(_Client, LocalClient(controller=self._controller, strategy=self._strategy))


class _Client(Protocol):
    """The part of torchstore's LocalClient that is used here; it has no types of its own."""

    async def put(self, key: str, value: torch.Tensor) -> None: ...
    async def get(self, key: str) -> torch.Tensor: ...
    async def exists(self, key: str) -> bool: ...
    async def keys(self) -> list[str]: ...
    async def delete(self, key: str) -> None: ...


def _controller_class() -> type:
    """torchstore's controller; that of 0.1.2 mixes sync and async endpoints, which Monarch 0.7 refuses to spawn."""
    from torchstore.controller import Controller

    if importlib.metadata.version("torchstore") != "0.1.2":
        return cast(type, Controller)
    return __getattr__("AsyncController")


def __getattr__(name: str) -> type:
    """Make `AsyncController` on first use, also where it is unpickled; importing this module imports no Monarch."""
    if name != "AsyncController":
        raise AttributeError(name)
    from monarch.actor import endpoint
    from torchstore.controller import Controller

    def asynchronous(method: object) -> object:
        async def call(self: object, *args: object, **kwargs: object) -> object:
            return method(self, *args, **kwargs)  # type: ignore[operator]

        call.__name__ = method.__name__  # type: ignore[attr-defined]
        return endpoint(call)

    endpoints = {
        name: asynchronous(member._method)
        for name, member in vars(Controller).items()
        if hasattr(member, "_method") and not inspect.iscoroutinefunction(member._method)
    }
    made = type("AsyncController", (Controller,), {**endpoints, "__module__": __name__})
    globals()["AsyncController"] = made
    return made
