"""Creates engines: the only module that names their backends, each imported when first used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from forge_rl.engines.adapter_settings import AdapterEngine
from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.cpu import HEAP_ENVIRONMENT
from forge_rl.engines.devices import device_type
from forge_rl.engines.memory import TrainMemory
from forge_rl.engines.parts import EnginePart
from forge_rl.engines.protocol import DecodeEngine, DecodeSettings, TrainEngine, TrainSettings
from forge_rl.engines.remote import RemoteServer
from forge_rl.runtime.children import visible_gpu
from forge_rl.system.cpus import cpu_cores
from forge_rl.system.variables import value_of

if TYPE_CHECKING:
    from forge_rl.engines.titan.plan import Traces

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DECODE_MODULE = "forge_rl.engines.vllm.engine"
DECODE_MODULES = (_DECODE_MODULE, "forge_rl.engines.vllm.preloaded")
"""Modules that a decode engine's processes import for any model."""


class Closable(Protocol):
    """An object that owns processes."""

    def close(self) -> None:
        """End its processes."""


def thread_environment(sharers: int, cores: int | None = None) -> dict[str, str]:
    """Return environment variables for a process that computes on its share of the machine's cores.

    Waiting threads spin for a fraction of a millisecond, then sleep. By default libgomp, which torch loads, has them
    spin for milliseconds, and when other programs are busy each barrier then costs that long; asleep, a thread takes
    longer to wake than an idle machine's barriers last. On two cores of a Xeon, an update of SmolLM2-135M in float32
    took 4.6 s with 300 spins, 3.9 with 8,000 and 3.9 with 30,000; next to two busy programs 8.2 s with 300 and 10.1
    with 8,000, while 30,000 took 1.65 times as long as 300.

    OMP_THREAD_LIMIT, if it is set here, bounds the number of threads.

    Args:
        sharers: number of processes that share the cores.
        cores: number of cores of their host; this machine's by default.
    """
    threads = max(1, (cores or cpu_cores()) // sharers)
    # vLLM's attention on CPU divides its work among OMP_NUM_THREADS threads, and computes garbage with fewer.
    if (limit := value_of("OMP_THREAD_LIMIT").strip()).isdecimal() and int(limit) > 0:
        threads = min(threads, int(limit))
    return {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "8000",
    }


def train_environment(ranks: int, cores: int | None = None) -> dict[str, str]:
    """Return environment variables for one of `ranks` trainer ranks on a host with `cores`, by default this one's."""
    env = thread_environment(ranks, cores) | HEAP_ENVIRONMENT
    if device_type() == "cuda":  # whose tensors are not in the heap
        env.pop("LD_PRELOAD", None)
    return env


def decode_environment(
    place: int,
    *,
    replicas: int,
    devices: int = 1,
    gpus: Sequence[str] = (),
    cores: int | None = None,
    batch_invariant: bool = False,
) -> dict[str, str]:
    """Return environment variables for a decode engine's process.

    Args:
        place: index of the engine on its host; on CUDA, engines take consecutive blocks of GPUs.
        replicas: number of engines that share the host's cores.
        devices: devices per engine.
        gpus: the host's GPUs for engines, as CUDA_VISIBLE_DEVICES names them there; by default this machine's.
        cores: number of cores of the host; this machine's by default.
        batch_invariant: see `DecodeSettings`; vLLM reads it when it is imported.
    """
    env = thread_environment(replicas * devices, cores) | {
        # An engine with a single worker runs in its process: it starts sooner and needs no messages between the two.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if batch_invariant:
        env["VLLM_BATCH_INVARIANT"] = "1"
    if gpus or device_type() == "cuda":
        # A forked worker would inherit locks held by this process's threads, and no CUDA context survives a fork. The
        # thread count is set because vLLM would leave one thread to fingerprint all repacked weights.
        indices = range(place * devices, (place + 1) * devices)
        names = [gpus[index] if gpus else visible_gpu(index) for index in indices]
        return env | {_VISIBLE: ",".join(names), "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    # vLLM's sampler compiles two one-line functions even if nothing else is compiled: that delays the first rollout by
    # half a minute to save 3 ms per step.
    return env | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}


def spare_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an engine's environment variables without its devices, for a spare that gets them later."""
    return {name: value for name, value in environment.items() if name != _VISIBLE}


def import_decode_engine() -> None:
    """Import what a decode engine needs, without touching a device."""
    importlib.import_module(_DECODE_MODULE)


async def start_decode_engine(
    folder: Path, settings: DecodeSettings, *, seed: int, part: EnginePart | None = None
) -> DecodeEngine:
    """Start a decode engine in a process that has the variables of `decode_environment`.

    Args:
        folder: Hugging Face model folder; the engine serves its weights until the first load.
        seed: seed for requests without one.
        part: the first part of an engine of several hosts, which waits for the others.

    Raises:
        ModelError: the engine does not start with this model.
    """
    # Imported here, since vLLM's import takes seconds and most processes do not need it.
    from forge_rl.engines.vllm.engine import VLLMEngine

    return await VLLMEngine.start(folder, settings, seed, part)


def start_following_part(folder: Path, settings: DecodeSettings, *, seed: int, part: EnginePart) -> Closable:
    """Start a part, other than the first, of an engine on several hosts; arguments as for `start_decode_engine`.

    Raises:
        ModelError: the part does not start with this model.
    """
    from forge_rl.engines.vllm.following import FollowingPart

    return FollowingPart(folder, settings, seed, part)


def part_environment(ip: str, interface: str) -> dict[str, str]:
    """Return environment variables for one host's part of an engine of several hosts.

    Args:
        ip: address of this host at which its other hosts reach it.
        interface: network interface with this address.
    """
    return {
        "VLLM_HOST_IP": ip,
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is `platform.open_store`
    }


def serve_command(folder: Path, settings: DecodeSettings, *, host: str, port: int, seed: int) -> list[str]:
    """Return the arguments of Python that start a server for `connect_decode_engine`; see `vllm.served`."""
    from forge_rl.engines.vllm.served import serve_command

    return serve_command(folder, settings, host=host, port=port, seed=seed)


async def connect_decode_engine(server: RemoteServer, settings: DecodeSettings) -> DecodeEngine:
    """Connect to a decode engine that somebody else started.

    Raises:
        ConfigError: the server does not answer, or its settings do not fit.
    """
    from forge_rl.engines.remote.engine import RemoteEngine

    return await RemoteEngine.connect(server, settings)


def plan_training(
    folder: Path,
    settings: TrainSettings,
    *,
    ranks: int,
    reference: bool,
    values: bool = False,
    tokens: int | None = None,
    traces: Traces | None = None,
) -> TrainMemory:
    """Estimate the memory that each of `ranks` trainer ranks needs for a full row; see `titan.plan.plan_training`."""
    from forge_rl.engines.titan.plan import plan_training

    return plan_training(
        read_architecture(folder, settings.modelling),
        settings,
        ranks=ranks,
        reference=reference,
        values=values,
        tokens=tokens,
        traces=traces,
    )


def import_train_engine() -> None:
    """Import what a train engine needs, without touching a device."""
    importlib.import_module("forge_rl.engines.titan.train")


def make_train_engine(
    folder: Path, settings: TrainSettings, *, reference: bool = False, values: bool = False
) -> TrainEngine:
    """Create this rank's train engine; the process group must be initialised (`init_distributed`).

    Args:
        folder: Hugging Face model folder that the policy starts from.
        reference: keep a frozen copy of the starting weights, for a KL penalty.
        values: train a value model in place of a policy. Its head is the folder's `score.weight`, or starts at 0.

    Raises:
        ModelError: the folder holds no trainable model.
        ConfigError: `settings.frozen` matches nothing, or everything.
    """
    from forge_rl.engines.titan.train import TitanEngine

    return TitanEngine(folder, settings, reference=reference, values=values)


def make_adapter_engine(engine: TrainEngine, folder: Path) -> AdapterEngine:
    """Let several adapters be trained over the base of this rank's train engine.

    Args:
        folder: Hugging Face folder of the base.

    Raises:
        ConfigError: the engine's settings have no adapters, or moments that are not in float32.
    """
    from forge_rl.engines.titan.adapter_engine import TitanAdapters
    from forge_rl.engines.titan.train import TitanEngine

    assert isinstance(engine, TitanEngine), "make_train_engine made it"
    return TitanAdapters(engine, folder)
