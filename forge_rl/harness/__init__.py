"""Harness: well-known benchmarks by name, EleutherAI's lm-evaluation-harness, and the scores of evaluations.

    source = benchmark_source("gsm8k")

Names are imported on first use. The core reaches the rewards by the flag --reward.
"""

from forge_rl.system.lazy import lazy_package

__all__, __getattr__ = lazy_package(__name__, __file__)
