"""Decoding on vLLM: the only place that imports it. Importing this package alone does not."""

import contextlib

BACKEND = "forge_rl"
"""Name of our weight transfer in vLLM."""


def register() -> None:
    """Make our weight transfer known to vLLM, which calls this in each of its processes (see pyproject.toml)."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # this process has it already
        WeightTransferEngineFactory.register_engine(BACKEND, f"{__name__}.transfer", "BucketTransferEngine")
