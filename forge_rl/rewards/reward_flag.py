"""Builds rewards from the flag `--reward`: bundled ones by name, user code by module or file, and weighted sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, TypeAlias, cast

import tyro

from forge_rl.errors import ConfigError
from forge_rl.flags.categories import Category
from forge_rl.flags.options import build
from forge_rl.flags.texts import FlagText, parse, suggest
from forge_rl.flags.user_code import load
from forge_rl.rewards.composition import WeightedSum
from forge_rl.rewards.peers import as_reward
from forge_rl.rewards.protocol import RewardFunction, Shaping
from forge_rl.system.lazy import LazyNames

REWARDS: LazyNames[Callable[..., RewardFunction]] = LazyNames(
    {
        "adaptive_length": "forge_rl.rewards.shaping:AdaptiveLength",
        "auto": "forge_rl.rewards.auto:Auto",
        "choice": "forge_rl.rewards.choice:Choice",
        "cosine": "forge_rl.rewards.shaping:CosineLength",
        "diversity": "forge_rl.rewards.answers:Diversity",
        "exact": "forge_rl.rewards.answers:Exact",
        "format": "forge_rl.rewards.formats:Format",
        "function_calls": "forge_rl.harness.function_calls:FunctionCalls",
        "ifeval": "forge_rl.harness.ifeval:IFEval",
        "json_schema": "forge_rl.rewards.formats:JSONSchema",
        "judge": "forge_rl.rewards.judge:Judge",
        "length": "forge_rl.rewards.lengths:Length",
        "match": "forge_rl.rewards.answers:Match",
        "math": "forge_rl.rewards.maths:Maths",
        "model": "forge_rl.rewards.reward_model:RewardModel",
        "number": "forge_rl.rewards.answers:Number",
        "overlong": "forge_rl.rewards.lengths:Overlong",
        "programs": "forge_rl.worlds.programs:Programs",
        "reasoning_gym": "forge_rl.rewards.verifiers:ReasoningGymReward",
        "regex": "forge_rl.rewards.formats:Regex",
        "stop_properly": "forge_rl.rewards.shaping:StopProperly",
        "unit_tests": "forge_rl.worlds.unit_tests:UnitTests",
    }
)
"""Bundled rewards by name, each a frozen dataclass whose fields are its options."""

RewardTexts: TypeAlias = Annotated[
    tuple[str, ...],
    Category.TUNABLE,
    tyro.conf.arg(
        name="reward",
        help="Rewards, as NAME[:KEY=VALUE,...][*WEIGHT], or your own as MODULE:FUNCTION[*WEIGHT] or "
        "FILE.py:FUNCTION[*WEIGHT]; several are summed. auto compares with the task's answer; other names: "
        + ", ".join(name for name in REWARDS if name != "auto"),
    ),
]
"""Type of a field of texts for `build_reward`, with the flag --reward next to the service's --reward.replicas."""


def build_reward(texts: Sequence[str]) -> RewardFunction | WeightedSum:
    """Build the weighted sum of the rewards in `texts`; a single reward of weight 1 is returned unwrapped.

        build_reward(["auto"])
        build_reward(["math=1", "format=0.2"])
        build_reward(["mine.py:score", "judge:model=gpt-4o-mini,rubric=rubric.md*0.5"])

    Each text has the form of `flags.texts.parse`: a name in REWARDS, or `MODULE:NAME` or `FILE.py:NAME`, which refers
    to a function, a callable object, or a class of callable objects; a title is its name in the metrics. A weight is
    any finite number; a part of weight 0 is only a metric. Values that end in a star and a number must be quoted.

    Raises:
        ConfigError: a text does not have this form, names an unknown reward, option or object, or is not callable.
    """
    if not texts:
        raise ConfigError("no reward is given", hint="set --reward to at least one, such as auto")
    parts: dict[str, tuple[RewardFunction, float]] = {}
    for text in texts:
        name, function, weight = _read(text)
        # The second reward of a name becomes NAME_2, so that metrics tell them apart.
        duplicates = sum(part_name == name or part_name.startswith(f"{name}_") for part_name in parts)
        parts[f"{name}_{duplicates + 1}" if duplicates else name] = (function, weight)
    [(function, weight), *other_parts] = parts.values()
    # A part that shapes needs the sum around it, which checks that it has something to depend on.
    is_single = weight == 1 and not other_parts and not isinstance(function, Shaping)
    return function if is_single else WeightedSum(parts)


def _read(text: str) -> tuple[str, RewardFunction, float]:
    """Return name, function and weight of one text."""
    parsed = parse(text, "--reward", bundled=REWARDS)
    name = parsed.name
    if parsed.is_code:
        name = name.rpartition(":")[2].replace(".", "_")
        return parsed.title or name, _users(parsed), parsed.weight
    if name in REWARDS:
        return parsed.title or name, build(parsed, REWARDS[name]), parsed.weight
    bundled = suggest(name, REWARDS, "bundled rewards")
    raise parsed.wrong(
        f"there is no reward {name!r}", f"{bundled}; or give your own as MODULE:FUNCTION or FILE.py:FUNCTION"
    )


def _users(parsed: FlagText) -> RewardFunction:
    """Return a user's function or object, or an object of their class, made with the options."""
    reward = load(parsed.name, "--reward")
    if isinstance(reward, type):
        reward = build(parsed, reward)
    else:
        for key in parsed.params:
            raise parsed.wrong("a function takes no options", "leave them out, or name a class", key=key)
    try:
        reward = as_reward(cast(RewardFunction, reward))
    except ConfigError as error:
        raise ConfigError(f"--reward {parsed.name}: {error.message}", hint=error.hint) from None
    if isinstance(reward, WeightedSum):
        raise ConfigError(f"--reward {parsed.name} is a sum of rewards", hint="give each of them with its weight")
    return reward
