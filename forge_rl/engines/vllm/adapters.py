"""Adapters that a vLLM engine samples with: which ones it can serve, their files, and the requests that use them."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.lora.request import LoRARequest

from forge_rl.engines.protocol import DecodeSettings
from forge_rl.errors import ConfigError, WeightsError
from forge_rl.models.adapter_limits import check_served, served_modules, served_rank
from forge_rl.models.adapters import CONFIG, WEIGHTS, Adapter, write_factors
from forge_rl.weights.fingerprints import Move, move
from forge_rl.weights.manifest import Manifest, factor_names
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.transports.protocol import TensorBucket


@dataclass
class _LoadedAdapter:
    """One load of an adapter, which keeps its values until no request uses it any more."""

    request: LoRARequest
    folder: Path
    """Copy of its files, from which vLLM reads them again after it has dropped them."""
    users: int = 0
    """Requests in flight."""
    is_current: bool = True
    """False once another load took its name, or the name was dropped."""
    version: int | None = None
    """Version that the base and this adapter make up; None for an adapter that requests name."""


@dataclass
class VersionFactors:
    """Factors of a version's adapters, as they arrive; see `factor_names`."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    fingerprints: dict[str, int] = field(default_factory=dict)

    def read(self, bucket: TensorBucket) -> None:
        """Copy a bucket's factors, if it holds any.

        Raises:
            WeightsError: the bytes are gone.
        """
        entries = [entry for entry in bucket.entries if entry.name.endswith(factor_names(""))]
        if not entries:
            return
        with bucket.open() as stored:
            for entry in entries:
                # Copied: the bucket is gone by the time all factors are there.
                values = torch.empty_like(stored[entry.name], device="cpu")
                moved = Move(values, stored[entry.name].cpu(), entry.shape, TensorSlice.whole(entry.shape))
                (self.fingerprints[entry.name],) = move([moved])
                self.tensors[entry.name] = values

    @property
    def bytes(self) -> int:
        """Size of the factors."""
        return sum(values.nbytes for values in self.tensors.values())


class EngineAdapters:
    """The adapters of an engine, by name, and its versions, if these are adapters of one base.

        adapters = EngineAdapters(folder, DecodeSettings(max_loras=4), call=engine._all_workers)
        await adapters.load("math", Path("runs/math/model"))
        with adapters.using("math") as (request, version):
            llm.generate(prompt, params, request_id, lora_request=request)

    A name may be loaded again while requests sample with it: those requests keep the values that they began with. vLLM
    keys its prefix cache by the load, so no load reads another's keys and values. With `adapters="served"`, requests
    without a name sample with the latest version. The newest `max_loras` versions are kept, and older ones for as long
    as requests sample with them.

    Args:
        model: folder of the engine's model.
        settings: the engine's settings.
        call: calls a method of all workers.
    """

    def __init__(self, model: Path, settings: DecodeSettings, *, call: Callable[..., Awaitable[list[Any]]]) -> None:
        self._model = model
        self._max_loras = settings.max_loras
        self._max_rank = served_rank(settings.max_lora_rank) if settings.max_loras else 0
        self.serve_versions = settings.adapters == "served"
        """True if versions are adapters of one base."""
        self._call = call
        self._current: dict[str, _LoadedAdapter] = {}
        self._versions: list[_LoadedAdapter] = []
        """Versions that are kept, the newest last."""
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

        def write(copy: Path) -> None:
            # A copy of its own: the folder may be overwritten by the run that trains the adapter, and vLLM reads it
            # again later.
            for file in (CONFIG, WEIGHTS):
                try:
                    shutil.copy(folder / file, copy / file)
                except OSError as error:
                    raise _copy_error(error, name, folder / file, copy) from error

        loaded = await self._add(name, write, awake=awake)
        replaced = self._current.get(name)
        self._current[name] = loaded
        if replaced is not None:
            await self._retire(replaced)

    async def load_version(self, manifest: Manifest, factors: VersionFactors) -> None:
        """Load a version's adapters; requests without a name then sample with them.

        Raises:
            WeightsError: factors are missing, or have several scales.
            ConfigError: vLLM does not serve them.
        """
        pairs = {}
        for entry in manifest.tensors:
            if entry.adapter_scale is None:
                continue
            a, b = (factors.tensors.get(name) for name in factor_names(entry.name))
            if a is None or b is None:
                raise WeightsError(f"version {manifest.version} lacks the adapter of {entry.name!r}")
            pairs[entry.name] = a, b
        if len(manifest.adapter_scales) != 1:
            raise WeightsError(f"version {manifest.version} has adapters of {len(manifest.adapter_scales)} scales")
        # PEFT's scale is alpha / rank.
        (scale,), rank = manifest.adapter_scales, len(next(iter(pairs.values()))[0])

        def write(copy: Path) -> None:
            write_factors(copy, pairs, base=self._model, alpha=scale * rank)

        loaded = await self._add(f"version {manifest.version}", write, awake=True)
        loaded.version = manifest.version
        # Requests that begin from here on sample with it; older versions stay for requests that began with them.
        self._versions.append(loaded)
        while len(self._versions) > self._max_loras:
            await self._retire(self._versions.pop(0))

    async def forget_versions(self) -> None:
        """Forget all versions because their base is about to be replaced.

        Raises:
            WeightsError: requests in flight sample with one.
        """
        # Requests in flight would go on with their adapter over another base.
        if versions := [str(loaded.version) for loaded in self._versions if loaded.users]:
            raise WeightsError(
                f"the base of versions {', '.join(versions)} would change while requests sample with them",
                hint="--generator.adapters merged loads any base",
            )
        # At once: a request that begins while the workers drop one must not get another.
        loaded_versions, self._versions = self._versions, []
        try:
            while loaded_versions:
                await self._retire(loaded_versions[0])
                del loaded_versions[0]
        finally:
            self._versions[:0] = loaded_versions  # those that workers still have, after an error

    @property
    def num_versions(self) -> int:
        """Number of versions that are kept."""
        return len(self._versions)

    async def _add(self, name: str, write: Callable[[Path], None], *, awake: bool) -> _LoadedAdapter:
        """Load an adapter under a number of its own, from a folder that `write` fills."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="adapters-"))
        # A new number and name for each load, as vLLM keys adapters and cached prefixes by them.
        self._loads += 1
        copy = self._folder / str(self._loads)
        copy.mkdir()
        try:
            write(copy)
            # Checked on the copy, which nobody else changes.
            check_served(Adapter.read(copy), self._model, max_rank=self._max_rank)
            request = LoRARequest(f"{name}@{self._loads}", self._loads, str(copy))
            # Asleep, the workers have no memory for it: vLLM loads it from the folder at its first request.
            if awake:
                await self._call("add_adapter", *_arguments(request))
        except BaseException:
            shutil.rmtree(copy, ignore_errors=True)
            raise
        return _LoadedAdapter(request, copy)

    async def drop(self, name: str) -> None:
        """Forget an adapter. Requests that sample with it continue; unknown names are ignored."""
        if (loaded := self._current.pop(name, None)) is not None:
            await self._retire(loaded)

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[tuple[LoRARequest | None, int | None]]:
        """Yield vLLM's request for an adapter and the adapter's version, and keep its values while the body runs.

        Without a name, this is the latest version if versions are adapters, and None otherwise. A named adapter has no
        version.

        Raises:
            ConfigError: no such adapter is loaded.
        """
        if not name and not self._versions:
            yield None, None
            return
        if (loaded := self._current.get(name) if name else self._versions[-1]) is None:
            names = ", ".join(sorted(self._current)) or "none"
            raise ConfigError(
                f"the engine has no adapter {name!r:.80}", hint=f"load it first; loaded are: {names:.400}"
            )
        loaded.users += 1
        try:
            yield loaded.request, loaded.version
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

    vLLM wraps only modules that may have adapters; embeddings, heads, routers and experts stay as they are.
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


def _copy_error(error: OSError, name: str, source: Path, copy: Path) -> ConfigError:
    """Return the error of a failed copy of an adapter's file into the folder `copy`."""
    cause = error.strerror or error
    try:
        with source.open("rb") as file:
            file.read(1)
    except OSError:
        return ConfigError(
            f"the adapter {name!r:.80} cannot be read from {source.parent}: {cause}",
            hint=f"give a folder with {CONFIG} and {WEIGHTS}",
        )
    return ConfigError(
        f"the adapter {name!r:.80} cannot be copied to {copy}: {cause}",
        hint="free space there, or set TMPDIR to another folder",
    )


def _arguments(request: LoRARequest) -> tuple[str, int, str]:
    return request.lora_name, request.lora_int_id, request.lora_path
