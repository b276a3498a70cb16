"""Adapters that a vLLM engine samples with: which ones it can serve, their files, and the requests that use them."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest

from forge_rl.errors import ConfigError
from forge_rl.models.adapter_limits import check_served, served_modules, served_rank
from forge_rl.models.adapters import CONFIG, WEIGHTS, Adapter


@dataclass
class _LoadedAdapter:
    """One load of an adapter, which keeps its values until no request uses it any more."""

    request: LoRARequest
    folder: Path
    """Copy of its files, from which vLLM reads them again after it has dropped them."""
    users: int = 0
    """Requests in flight."""
    is_current: bool = True
    """False once another load has taken its name, or the name was dropped."""


class EngineAdapters:
    """The adapters of an engine, by name.

        adapters = EngineAdapters(folder, max_loras=4, max_rank=16, call=engine._all_workers)
        await adapters.load("math", Path("runs/math/model"))
        with adapters.using("math") as request:
            llm.generate(prompt, params, request_id, lora_request=request)

    A name may be loaded again while requests sample with it: they go on with the values that they began with. vLLM
    keys its prefix cache by the load, so that no load reads another's keys and values.

    Args:
        model: folder of the engine's model.
        max_loras: adapters in a step; 0 serves none.
        max_rank: largest rank.
        call: calls a method of all workers.
    """

    def __init__(
        self, model: Path, *, max_loras: int, max_rank: int, call: Callable[..., Awaitable[list[Any]]]
    ) -> None:
        self._model = model
        self._max_loras = max_loras
        self._max_rank = served_rank(max_rank) if max_loras else 0
        self._call = call
        self._current: dict[str, _LoadedAdapter] = {}
        self._loads = 0
        self._folder: Path | None = None

    async def load(self, name: str, folder: Path, *, awake: bool) -> None:
        """Load an adapter; see `DecodeEngine.load_adapter`.

        Args:
            awake: the engine has its weights; otherwise the first request of the adapter loads it into the workers.
        """
        if not self._max_loras:
            raise ConfigError(
                f"the engine serves no adapters, and {name!r:.80} is one",
                hint="set --generator.max-loras to the number of adapters in a step",
            )
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="adapters-"))
        self._loads += 1
        copy = self._folder / str(self._loads)
        copy.mkdir()
        try:
            for file in (CONFIG, WEIGHTS):
                shutil.copy(folder / file, copy / file)
            check_served(Adapter.read(copy), self._model, max_rank=self._max_rank)
            request = LoRARequest(f"{name}@{self._loads}", self._loads, str(copy))
            if awake:
                await self._call("add_adapter", *_arguments(request))
        except OSError as error:
            shutil.rmtree(copy, ignore_errors=True)
            raise ConfigError(
                f"the adapter {name!r:.80} cannot be read from {folder}: {error.strerror or error}",
                hint=f"give a folder with {CONFIG} and {WEIGHTS}",
            ) from error
        except BaseException:
            shutil.rmtree(copy, ignore_errors=True)
            raise
        replaced = self._current.get(name)
        self._current[name] = _LoadedAdapter(request, copy)
        if replaced is not None:
            await self._retire(replaced)

    async def drop(self, name: str) -> None:
        """Forget an adapter; requests that sample with it go on. Unknown names are ignored."""
        if (loaded := self._current.pop(name, None)) is not None:
            await self._retire(loaded)

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[LoRARequest | None]:
        """Yield vLLM's request for an adapter, whose values stay while the body runs; None without a name.

        Raises:
            ConfigError: no such adapter is loaded.
        """
        if not name:
            yield None
            return
        if (loaded := self._current.get(name)) is None:
            names = ", ".join(sorted(self._current)) or "none"
            raise ConfigError(
                f"the engine has no adapter {name!r:.80}", hint=f"load it first; loaded are: {names:.400}"
            )
        loaded.users += 1
        try:
            yield loaded.request
        finally:
            loaded.users -= 1
            if not (loaded.users or loaded.is_current):
                # vLLM drops its copy once another adapter needs the room.
                shutil.rmtree(loaded.folder, ignore_errors=True)

    @property
    def are_served(self) -> bool:
        """True if the engine serves adapters at all."""
        return self._max_loras > 0

    def close(self) -> None:
        """Remove the files."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _retire(self, loaded: _LoadedAdapter) -> None:
        loaded.is_current = False
        if not loaded.users:
            await self._call("remove_adapter", loaded.request.lora_int_id)
            shutil.rmtree(loaded.folder, ignore_errors=True)


def lora_arguments(model: Path, *, max_loras: int, max_rank: int) -> dict[str, Any]:
    """Return vLLM's arguments for an engine that serves adapters; none if `max_loras` is 0.

    vLLM wraps only modules that adapters may have, so that embeddings, heads, routers and experts stay as they are.
    """
    if not max_loras:
        return {}
    modules = {name.removesuffix(".weight").rpartition(".")[2] for name in served_modules(model)}
    return {
        "enable_lora": True,
        "max_loras": max_loras,
        "max_lora_rank": served_rank(max_rank),
        "lora_target_modules": sorted(modules),
    }


def _arguments(request: LoRARequest) -> tuple[str, int, str]:
    return request.lora_name, request.lora_int_id, request.lora_path
