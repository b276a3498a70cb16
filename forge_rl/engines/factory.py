"""Makes the engines: the one place that names their backends, which are imported when an engine is made."""

from __future__ import annotations

from forge_rl.engines.protocol import DecodeEngine, DecodeSettings, TrainEngine, TrainSettings
from forge_rl.engines.vllm.environment import environment as decode_environment

__all__ = ["decode_environment", "make_train_engine", "start_decode_engine"]


async def start_decode_engine(settings: DecodeSettings) -> DecodeEngine:
    """Start a decode engine in a process whose environment is `decode_environment`'s.

    Raises:
        ModelError: it does not start with this model.
    """
    from forge_rl.engines.vllm.engine import VLLMEngine

    return await VLLMEngine.start(settings)


def make_train_engine(settings: TrainSettings) -> TrainEngine:
    """Make this rank's train engine; the process group must be initialised (`init_distributed`).

    Raises:
        ModelError: the folder holds no model that can be trained.
        ConfigError: `settings.frozen` matches nothing, or everything.
    """
    from forge_rl.engines.titan.train import TitanEngine

    return TitanEngine(settings)
