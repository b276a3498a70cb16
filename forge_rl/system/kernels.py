"""Which of our GPU kernels run: all but those that the user turned off, or that a check at start found wrong."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

from forge_rl.errors import ConfigError
from forge_rl.system.variables import value_of

EAGER = "FORGE_RL_EAGER"
"""Environment variable: comma-separated kernels to replace by torch's own operations; `all` for all of them."""
KERNELS = (
    "scores",
    "norms",
    "rope",
    "swiglu",
    "attention",
    "head",
    "experts",
    "expert_gradients",
    "products",
    "logits",
)
_FAILURES: dict[str, str] = {}


def is_on(kernel: str) -> bool:
    """Return whether a kernel of KERNELS may run in this process.

    Raises:
        ConfigError: EAGER names a kernel that does not exist.
    """
    return kernel not in _FAILURES and kernel not in _named(value_of(EAGER))


def turn_off(kernel: str, failure: str) -> None:
    """Have torch's own operations run in place of a kernel from now on, in this process.

    Args:
        failure: "" if the kernel is right, but slower than they are.
    """
    assert kernel in KERNELS, kernel
    _FAILURES[kernel] = failure


def failures() -> Mapping[str, str]:
    """Return why kernels were turned off in this process, by kernel, without those that the user turned off."""
    return MappingProxyType({kernel: failure for kernel, failure in _FAILURES.items() if failure})


@functools.cache
def _named(value: str) -> frozenset[str]:
    names = frozenset(name.strip() for name in value.split(",") if name.strip())
    if unknown_names := names - {*KERNELS, "all"}:
        raise ConfigError(
            f"{EAGER} names unknown kernels: {', '.join(sorted(unknown_names))}",
            hint=f"choose from {', '.join(KERNELS)}, or all",
        )
    return frozenset(KERNELS) if "all" in names else names
