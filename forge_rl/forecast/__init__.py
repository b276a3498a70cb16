"""Forecast: plans of a run on machines that are not at hand: a layout that fits, and the time of a step.

    show_forecast(config)  # python -m recipes.grpo --plan --on 8xH100-80G

Names are imported on first use. The core reaches them by the flags --plan --on.
"""

from forge_rl.system.lazy import lazy_package

__all__, __getattr__ = lazy_package(__name__, __file__)
