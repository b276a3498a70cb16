"""Resolves vLLM's configuration of our engines on a mocked H200, for all families.

python -m tools.check_cuda.config
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import layouts
from forge_rl.engines.families import FAMILIES
from forge_rl.engines.protocol import DecodeSettings
from tools.check_cuda.libcuda import load_libcuda
from tools.check_cuda.report import report

CASES: Sequence[tuple[str, dict[str, Any]]] = (
    *((family, {}) for family in FAMILIES),
    *((family, {"tensor_parallel_size": 2}) for family in FAMILIES),
    *(
        (family, {"data_parallel_size": 2, "enable_expert_parallel": True})
        for family in FAMILIES
        if layouts.is_mixture(family)
    ),
    ("qwen3_moe", {"routed_experts": True}),
    ("qwen3", {"enforce_eager": True}),
)
"""Families, and engine settings that differ from the defaults."""


def main() -> int:
    """Resolve the configuration of each case for two processes, and print what vLLM chose."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "WARNING"}
    load_libcuda()
    mock_h200()
    counts = Counter[str]()
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        layouts.make_models(Path(folder), list(FAMILIES))
        for family, settings in CASES:
            name = " ".join([family, *settings])
            try:
                configuration = resolve(Path(folder) / family, DecodeSettings(max_model_len=64, **settings))
                print(f"{name}: {configuration}", flush=True)
                counts[configuration] += 1
            except Exception as error:  # vLLM may raise anything, and the other cases are still worth checking
                failures.append(f"{name}: {type(error).__name__}: {error}")
    return report({"configurations": counts.total(), **counts}, failures)


def mock_h200() -> None:
    """Make vLLM and our engines see eight H200s on this machine."""
    import torch
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    from forge_rl.engines import devices, platform
    from forge_rl.engines.vllm import arguments, engine, register

    class H200(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def has_device_capability(cls, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
            return (capability if isinstance(capability, int) else 10 * capability[0] + capability[1]) <= 90

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H200"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 141 << 30

        @classmethod
        def get_device_uuid(cls, device_id: int = 0) -> str:
            return f"GPU-{device_id}"

    h200 = H200()
    vllm.platforms._current_platform = h200
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("vllm") and "current_platform" in vars(module):
            module.current_platform = h200  # type: ignore[attr-defined]
    torch.cuda.device_count = torch.accelerator.device_count = lambda: 8
    for module in (devices, platform, arguments, engine):
        module.device_type = lambda: "cuda"  # type: ignore[attr-defined]
    register()


def resolve(folder: Path, settings: DecodeSettings) -> str:
    """Resolve the engine's configuration for two processes; return vLLM's choices.

    Raises:
        AssertionError: the configuration is wrong for an engine on a GPU, or differs between processes.
    """
    from forge_rl.engines.vllm.arguments import engine_arguments
    from forge_rl.engines.vllm.transfer import Owner

    configs = []
    for pid in (7, 8):
        arguments = engine_arguments(folder, settings, pid)
        arguments.skip_tokenizer_init = True
        arguments.additional_config = Owner(pid)
        configs.append(arguments.create_engine_config())
    first, second = configs
    graphs = first.compilation_config.cudagraph_mode.name
    assert first.compute_hash() == second.compute_hash(), "what an engine compiled would not serve the next"
    assert first.model_config.enable_sleep_mode, "a colocated engine could not give its memory back"
    assert str(first.model_config.head_dtype) == "torch.float32", "logits would be rounded"
    assert (graphs == "NONE") == settings.enforce_eager, graphs
    assert first.parallel_config.world_size_across_dp == settings.devices
    runner = "V2" if first.use_v2_model_runner else "V1"
    return f"model runner {runner}, graphs {graphs}, blocks of {first.cache_config.block_size}"


if __name__ == "__main__":
    sys.exit(main())
