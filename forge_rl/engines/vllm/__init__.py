"""Decoding on vLLM. This is the only package in `engines` that imports vLLM, and importing the package itself does
not."""

import contextlib

BACKEND = "forge_rl"
"""Name of forge_rl's weight transfer backend in vLLM."""


def register() -> None:
    """Register forge_rl's weight transfer and change how vLLM starts and answers; each vLLM process calls this (see
    pyproject.toml)."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # already registered in this process
        WeightTransferEngineFactory.register_engine(BACKEND, f"{__name__}.transfer", "BucketTransferEngine")

    from forge_rl.engines.devices import device_type
    from forge_rl.engines.vllm.internals import hand_over_in_pieces, inspect_models_here

    hand_over_in_pieces()
    if device_type() == "cpu":  # a class may open a GPU, which only the worker should
        inspect_models_here()
