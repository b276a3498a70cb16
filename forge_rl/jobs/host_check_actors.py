"""Actors with which the doctor examines a host; see `forge_rl.jobs.doctor`."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import shutil
import socket
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from monarch.actor import concurrent_endpoint

from forge_rl.models.bundled import default_cache
from forge_rl.runtime.host_facts import SampledTokens, TrainStepResult, write_rate
from forge_rl.runtime.service import ServiceActor
from forge_rl.services.host_actor import HostActor
from forge_rl.system.variables import set_here

_CONNECT_S = 3.0
_DECODED = 32
_RDMA_TIMEOUT_S = 60


class HostCheckActor(HostActor):
    """Reports what its host has, and how fast it is. Loads torch only when speeds are measured."""

    def __init__(self) -> None:
        self._listeners: list[socket.socket] = []
        self._shared: tuple[Any, Any] | None = None

    @concurrent_endpoint
    async def disk(self, folder: Path | None, size: int) -> tuple[int, float]:
        """Return the free bytes of a folder's disk and its write speed in bytes per second, measured with `size` bytes.

        By default, the folder is the host's own cache.
        """
        if folder is None:
            folder = default_cache()
            folder.mkdir(parents=True, exist_ok=True)
        rate = await asyncio.to_thread(write_rate, folder, size)
        return shutil.disk_usage(folder).free, rate

    @concurrent_endpoint
    async def speeds(self) -> dict[str, float]:
        """Return the matmul speed of each device."""
        from forge_rl.engines.titan.checks import matmul_speeds

        return await asyncio.to_thread(matmul_speeds)

    @concurrent_endpoint
    async def listen(self, loopback: bool) -> list[tuple[str, int]]:
        """Listen on a free port of each private address; return them. Nothing is read from connections.

        Args:
            loopback: whether to listen on loopback addresses instead.
        """
        for name in _addresses(loopback):
            family = socket.AF_INET6 if ":" in name else socket.AF_INET
            with contextlib.suppress(OSError):  # an address that is being configured
                listener = socket.socket(family)
                listener.bind((name, 0))
                listener.listen()
                self._listeners.append(listener)
        return [listener.getsockname()[:2] for listener in self._listeners]

    @concurrent_endpoint
    async def reach(self, places: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Return another host's addresses to which this one can connect."""

        async def connects(place: tuple[str, int]) -> bool:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_CONNECT_S):
                    _, writer = await asyncio.open_connection(*place)
                writer.close()
                return True
            return False

        reachable = await asyncio.gather(*map(connects, places))
        return [place for place, is_reachable in zip(places, reachable, strict=True) if is_reachable]

    @concurrent_endpoint
    async def share(self, size: int) -> object:
        """Offer `size` bytes to other hosts, as a Monarch RDMABuffer."""
        import torch
        from monarch.rdma import RDMABuffer

        memory = torch.ones(size, dtype=torch.uint8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without ibverbs it says that it uses TCP
            self._shared = memory, RDMABuffer(memory)
        return self._shared[1]

    @concurrent_endpoint
    async def fetch(self, buffer: Any, size: int) -> float:
        """Read another host's bytes twice; return the bytes per second of the second time."""
        import torch

        memory = torch.empty(size, dtype=torch.uint8)
        start_time = 0.0
        # The first read includes the connection's setup, and is not counted.
        for _ in range(2):
            start_time = time.perf_counter()
            await buffer.read_into(memory, timeout=_RDMA_TIMEOUT_S)
        return size / (time.perf_counter() - start_time)

    @concurrent_endpoint
    async def unshare(self) -> None:
        """Take the offered bytes back, and stop listening."""
        if self._shared is not None:
            # An RDMABuffer that is not dropped leaks.
            await self._shared[1].drop()
            self._shared = None
        while self._listeners:
            self._listeners.pop().close()

    @concurrent_endpoint
    async def all_reduce(self, rank: int, ranks: int, address: str, port: int, size: int) -> float:
        """Sum `size` bytes over all hosts; return bytes per second. Rank 0 listens at the address."""
        from forge_rl.engines.titan.checks import all_reduce_rate

        # The interface that leads to the meeting point; gloo and NCCL might choose another.
        if interface := _interface(address if rank == 0 else _source(address, port)):
            set_here({"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface})
        return await asyncio.to_thread(all_reduce_rate, rank, ranks, address, port, size)


class DecodeCheckActor(ServiceActor):
    """Starts an engine and samples a few tokens."""

    @concurrent_endpoint
    async def sample(self, model: Path) -> SampledTokens:
        from forge_rl.engines.factory import start_decode_engine
        from forge_rl.engines.protocol import DecodeSettings
        from forge_rl.types import Sampling

        settings = DecodeSettings(max_model_len=256, max_num_seqs=4, kv_cache_gib=0.25, enforce_eager=True)
        engine = await start_decode_engine(model, settings, seed=0)
        try:
            await engine.serve_model()
            prompt = tuple(range(10, 42))
            token_ids, logprobs = list[int](), list[float]()
            start_time = time.perf_counter()
            sampling = Sampling(max_tokens=_DECODED, seed=0, extra={"ignore_eos": True})
            async with contextlib.aclosing(engine.stream(prompt, sampling)) as chunks:
                async for chunk in chunks:
                    token_ids += map(int, chunk.token_ids)
                    logprobs += map(float, chunk.logprobs)
            seconds = time.perf_counter() - start_time
        finally:
            engine.close()
        return SampledTokens(prompt_ids=prompt, token_ids=token_ids, logprobs=logprobs, seconds=seconds)


class TrainCheckActor(ServiceActor):
    """Makes one update on the tokens that an engine sampled."""

    @concurrent_endpoint
    async def train(self, model: Path, sampled: SampledTokens) -> TrainStepResult:
        from forge_rl.engines.titan.checks import train_once

        return await asyncio.to_thread(train_once, model, sampled)


def _addresses(loopback: bool) -> list[str]:
    """Return the addresses of this machine that other networks cannot reach."""
    texts = [entry.address for entries in _interfaces().values() for entry in entries]
    addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in texts]
    return [
        str(address)
        for address in addresses
        if not address.is_global and not address.is_link_local and address.is_loopback == loopback
    ]


def _interfaces() -> dict[str, list[Any]]:
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }


def _interface(address: str) -> str:
    """Return the name of the network interface that has an address; "" if none has it."""
    return next((name for name, entries in _interfaces().items() if any(a.address == address for a in entries)), "")


def _source(address: str, port: int) -> str:
    """Return this machine's address towards another one; nothing is sent."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0])
