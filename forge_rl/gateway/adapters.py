"""Adapters that a gateway serves by name, besides the model itself; the owner's clients may load and drop some."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from forge_rl.errors import ConfigError, ForgeError
from forge_rl.gateway.errors import ApiError, invalid, to_api_error

_MOST_PATH = 4096


class AdapterEngines(Protocol):
    """Engines that serve adapters; `Generator` implements it."""

    async def load_adapter(self, name: str, folder: Path) -> None: ...
    async def drop_adapter(self, name: str) -> None: ...


class LoadRequest(BaseModel):
    """Body of POST /v1/load_lora_adapter, as vLLM has it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    """Replace the adapter of that name, if there is one; requests in flight continue with the weights they started
    with."""


class UnloadRequest(BaseModel):
    """Body of POST /v1/unload_lora_adapter, as vLLM has it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: str
    lora_int_id: int | None = None
    """Without effect, as in vLLM."""


class ServedAdapters:
    """The adapters of a gateway, by the name that requests give as their model.

        adapters = ServedAdapters(generator, find, folders=(Path("runs"),), max_adapters=16)
        await adapters.add("math", Path("runs/math"))

    Args:
        find: returns the folder, in PEFT's format, of the adapter in a run or folder, after checking that the engines
            can serve it; raises ConfigError or ModelError.
        folders: folders from which requests may load adapters; if empty, requests can neither load nor drop any.
        max_adapters: maximum number of adapters loaded at a time.
    """

    def __init__(
        self,
        engines: AdapterEngines,
        find: Callable[[Path], Path],
        *,
        folders: Sequence[Path] = (),
        max_adapters: int,
    ) -> None:
        self._engines = engines
        self._find = find
        self._folders = [folder.resolve() for folder in folders]
        self._max_adapters = max_adapters
        self._places: dict[str, Path] = {}
        self._changing = asyncio.Lock()

    @property
    def names(self) -> Mapping[str, Path]:
        """The loaded adapters: the folder of each by name."""
        return self._places

    async def add(self, name: str, place: Path) -> None:
        """Load an adapter into the engines, in place of an earlier one of its name.

        Raises:
            ConfigError: the engines cannot serve it, or `max_adapters` are already loaded.
            ModelError: its files are missing, malformed, or of another base model.
            ServiceError: no engine is left.
        """
        async with self._changing:
            await self._add(name, place)

    async def load(self, body: bytes, model_names: Sequence[str]) -> str:
        """Load the adapter that a request names; return the text of the response.

        Args:
            model_names: names of the model itself.

        Raises:
            ApiError: the request is malformed, or the adapter may not or cannot be loaded.
        """
        self._check_open()
        try:
            request = LoadRequest.model_validate_json(body)
        except ValidationError as error:
            raise invalid(error) from None
        name = request.lora_name
        if not name or not request.lora_path:
            raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", param="lora_name")
        if name in model_names:
            raise ApiError(400, f"`{name[:100]}` is the model's own name", param="lora_name", code="invalid_value")
        # Resolving a path reads the file system, which may be slow.
        place = await asyncio.to_thread(self._allowed, request.lora_path)
        async with self._changing:
            if name in self._places and not request.load_inplace:
                raise ApiError(
                    400,
                    f"The lora adapter '{name[:100]}' has already been loaded; set load_inplace to replace it.",
                    param="lora_name",
                )
            try:
                await self._add(name, place)
            except ForgeError as error:
                raise to_api_error(error) from error
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload(self, body: bytes) -> str:
        """Drop the adapter that a request names, and return the text of the response. Requests in flight continue.

        Raises:
            ApiError: the request is malformed, or no such adapter is loaded.
        """
        self._check_open()
        try:
            name = UnloadRequest.model_validate_json(body).lora_name
        except ValidationError as error:
            raise invalid(error) from None
        async with self._changing:
            if name not in self._places:
                raise ApiError(
                    404, f"The lora adapter '{name[:100]}' cannot be found.", param="lora_name", code="model_not_found"
                )
            del self._places[name]  # from here on no request begins with it
            await self._engines.drop_adapter(name)
        return f"Success: LoRA adapter '{name}' removed successfully."

    async def _add(self, name: str, place: Path) -> None:
        # Replacing an adapter takes no further place.
        if name not in self._places and len(self._places) >= self._max_adapters:
            raise ConfigError(
                f"{len(self._places)} adapters are loaded, the most that there may be",
                hint="unload one, or raise --max-adapters",
            )
        folder = await asyncio.to_thread(self._find, place)
        await self._engines.load_adapter(name, folder)
        self._places[name] = folder

    def _check_open(self) -> None:
        if not self._folders:
            raise ApiError(
                403,
                "adapters cannot be loaded or dropped by requests here; the server's owner may allow it with "
                "--adapter-folders",
                code="adapters_not_allowed",
            )

    def _allowed(self, text: str) -> Path:
        """Return the path that a request names, if it is in a folder from which requests may load.

        The error is the same whether or not a path outside of those folders exists.
        """
        try:
            # Resolved before the comparison, so that neither `..` nor a link leads out of the folders.
            place = Path(text[:_MOST_PATH]).resolve()
        except (OSError, ValueError, RuntimeError):  # a NUL, or links in a circle
            place = Path("/")
        if len(text) > _MOST_PATH or not any(place.is_relative_to(folder) for folder in self._folders):
            raise ApiError(
                403,
                f"{text[:200]!r} is in none of the folders from which adapters may be loaded",
                param="lora_path",
                code="adapters_not_allowed",
            )
        return place
