"""Makes the engines: the one place that names their backends, which are imported when an engine is made."""

from __future__ import annotations

from pathlib import Path

from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.memory import TrainMemory
from forge_rl.engines.platform import cpu_cores, device_type
from forge_rl.engines.protocol import DecodeEngine, DecodeSettings, TrainEngine, TrainSettings
from forge_rl.runtime.cluster import visible_gpu


def thread_environment(sharers: int) -> dict[str, str]:
    """Return the environment of a process that computes on its share of the machine's cores.

    Threads that wait for one another sleep at once. libgomp, which torch loads, else lets them spin for milliseconds,
    and beside another busy program each barrier then costs that long. GOMP_SPINCOUNT is the few microseconds that a
    barrier of an idle machine takes, so that nothing is lost there.

    Args:
        sharers: processes that share the cores.
    """
    return {
        "OMP_NUM_THREADS": str(max(1, cpu_cores() // sharers)),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "300",
    }


def train_environment(ranks: int) -> dict[str, str]:
    """Return the environment of one of so many trainer ranks on this machine.

    A step frees and allocates the same sizes again and again. glibc would return large blocks to the kernel, and get
    them back page by page, zeroed. Here they stay in the heap, until `release_memory` returns them after a step, where
    memory is short. An update of SmolLM2-135M in float32 takes a sixth less time this way, and 0.5 GiB more at its
    peak, which the plan counts (`TrainMemory.heap`).
    """
    return thread_environment(ranks) | {
        "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
        "MALLOC_TOP_PAD_": str(64 << 20),
    }


def decode_environment(place: int, *, replicas: int, devices: int = 1, first_gpu: int = 0) -> dict[str, str]:
    """Return the environment of a decode engine's process.

    Args:
        place: number of the engine; on CUDA it has the GPUs after those of the engines before it.
        replicas: engines that share the machine's cores.
        devices: number of devices of each engine.
        first_gpu: number of the first engine's first GPU.
    """
    env = {
        # In one process with its worker, where it has one alone, an engine starts sooner and needs no inner messages.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device_type() == "cuda":
        # A forked worker inherits the threads' locks of this process, and no CUDA context survives a fork. vLLM would
        # leave one thread, which then takes the fingerprints of all that it repacks.
        names = [visible_gpu(first_gpu + place * devices + number) for number in range(devices)]
        env |= thread_environment(replicas * devices)
        return env | {"CUDA_VISIBLE_DEVICES": ",".join(names), "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    # vLLM's sampler has two one-line functions compiled, even when nothing else is: half a minute of the first rollout,
    # to save 3 ms a step.
    return (
        env
        | thread_environment(replicas * devices)
        | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
    )


async def start_decode_engine(folder: Path, settings: DecodeSettings, *, seed: int) -> DecodeEngine:
    """Start a decode engine in a process whose environment is `decode_environment`'s.

    Args:
        folder: Hugging Face model folder; its weights are the engine's until the first load.
        settings: the engine's.
        seed: of requests that bring none.

    Raises:
        ModelError: it does not start with this model.
    """
    from forge_rl.engines.vllm.engine import VLLMEngine

    return await VLLMEngine.start(folder, settings, seed)


def plan_training(
    folder: Path, settings: TrainSettings, *, ranks: int, reference: bool, tokens: int | None = None
) -> TrainMemory:
    """Count the memory that each rank of a train engine takes for a full row, without loading anything.

    Args:
        folder: Hugging Face model folder.
        settings: the engine's.
        ranks: processes that share the policy.
        reference: as for `make_train_engine`.
        tokens: of a row on one device; by default as many as the settings allow.
    """
    from forge_rl.engines.titan.plan import plan_training

    return plan_training(read_architecture(folder), settings, ranks=ranks, reference=reference, tokens=tokens)


def make_train_engine(folder: Path, settings: TrainSettings, *, reference: bool = False) -> TrainEngine:
    """Make this rank's train engine; the process group must be initialised (`init_distributed`).

    Args:
        folder: Hugging Face model folder that the policy starts from.
        settings: the engine's.
        reference: keep a frozen copy of the starting weights, for a KL penalty.

    Raises:
        ModelError: the folder holds no model that can be trained.
        ConfigError: `settings.frozen` matches nothing, or everything.
    """
    from forge_rl.engines.titan.train import TitanEngine

    return TitanEngine(folder, settings, reference=reference)
