"""Environment of a vLLM engine's process; importing this imports no vLLM."""

from __future__ import annotations

from forge_rl.engines.platform import cpu_cores, device_type, gpus


def environment(place: int, *, replicas: int) -> dict[str, str]:
    """Variables to set before vLLM is imported.

    In one process with its worker, an engine starts sooner and needs no inner messages.

    Args:
        place: number of the engine; on CUDA its GPU is the one at this place, in turn.
        replicas: engines that share the machine's cores.
    """
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device_type() == "cuda":
        return env | {"CUDA_VISIBLE_DEVICES": str(place % gpus())}
    threads = max(1, cpu_cores() // replicas)
    return env | {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
