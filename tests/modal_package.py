"""A stand-in of the classes of Modal's package that `ModalContainers` uses. Its gRPC services are not imitated."""

from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from tests.container_machine import ContainerMachine


class Aio:
    """A function as Modal's package has them: `f.aio(...)` is awaited."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.aio = function


class FilesystemError(Exception):
    pass


class NotFoundError(Exception):
    pass


class ConflictError(Exception):
    pass


class ModalPackage:
    """What `import modal` gives; `calls` has all calls with their arguments, to be held to the real signatures."""

    def __init__(self, machine: ContainerMachine) -> None:
        self.machine = machine
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.sandboxes: dict[str, dict[str, str]] = {}
        """Tags by name."""
        self.exception = SimpleNamespace(
            SandboxFilesystemError=FilesystemError, NotFoundError=NotFoundError, ConflictError=ConflictError
        )
        self.App = SimpleNamespace(lookup=self._noted("App.lookup", self._lookup))
        self.Image = SimpleNamespace(from_registry=self._from_registry)
        self.Sandbox = SimpleNamespace(
            create=self._noted("Sandbox.create", self._create),
            list=Aio(self._list),
            from_id=self._noted("Sandbox.from_id", self._from_id),
        )

    def _noted(self, name: str, function: Callable[..., Awaitable[Any]]) -> Aio:
        async def noted(*args: Any, **options: Any) -> Any:
            self.calls.append((name, args, options))
            return await function(*args, **options)

        return Aio(noted)

    async def _lookup(self, name: str, create_if_missing: bool) -> Any:
        return SimpleNamespace(app_id=name)

    def _from_registry(self, *args: Any, **options: Any) -> Any:
        self.calls.append(("Image.from_registry", args, options))

        def entrypoint(*entrypoint_args: Any) -> str:
            self.calls.append(("Image.entrypoint", (None, *entrypoint_args), {}))
            return str(args[0])

        return SimpleNamespace(entrypoint=entrypoint)

    async def _create(self, *command: str, image: str, tags: dict[str, str], **options: Any) -> Any:
        if image not in self.machine.images:
            raise NotFoundError(f"no image {image}")
        name = f"sb-{len(self.calls)}"
        await self.machine.start(name, image)
        self.sandboxes[name] = tags
        return self._sandbox(name)

    async def _list(self, **options: Any) -> AsyncIterator[Any]:
        self.calls.append(("Sandbox.list", (), options))
        for name in list(self.sandboxes):
            yield self._sandbox(name)

    async def _from_id(self, name: str) -> Any:
        return self._sandbox(name)

    def _sandbox(self, name: str) -> Any:
        async def execute(*command: str, text: bool) -> Any:
            if name not in self.sandboxes:
                raise NotFoundError(name)
            status, out, err = await self.machine.run(name, command)

            async def wait() -> int:
                return status

            return SimpleNamespace(stdout=_stream(out), stderr=_stream(err), wait=Aio(wait))

        async def terminate() -> None:
            self.sandboxes.pop(name, None)
            await self.machine.end(name)

        async def get_tags() -> dict[str, str]:
            return self.sandboxes[name]

        async def write_bytes(data: bytes, path: str) -> None:
            await self.machine.put(name, path, data)

        async def read_bytes(path: str) -> bytes:
            if (data := await self.machine.get(name, path)) is None:
                raise FilesystemError(f"{path} does not exist")
            return data

        async def facts(path: str) -> Any:
            return SimpleNamespace(size=len(await read_bytes(path)))

        def noted(method: str, function: Callable[..., Awaitable[Any]]) -> Aio:
            async def with_self(*args: Any, **options: Any) -> Any:
                self.calls.append((method, (None, *args), options))
                return await function(*args, **options)

            return Aio(with_self)

        filesystem = SimpleNamespace(
            write_bytes=noted("filesystem.write_bytes", write_bytes),
            read_bytes=noted("filesystem.read_bytes", read_bytes),
            stat=noted("filesystem.stat", facts),
        )
        return SimpleNamespace(
            object_id=name,
            exec=noted("Sandbox.exec", execute),
            terminate=noted("Sandbox.terminate", terminate),
            get_tags=noted("Sandbox.get_tags", get_tags),
            filesystem=filesystem,
        )


async def _stream(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 1 << 16):
        yield data[start : start + (1 << 16)]
