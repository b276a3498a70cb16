"""Builds rewards from the flag `--reward`: bundled ones by name, user code by module or file, and weighted sums."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias, cast

import tyro

from forge_rl.errors import ConfigError, ForgeError
from forge_rl.flags.texts import split_commas, suggest
from forge_rl.flags.user_code import load, names_code
from forge_rl.rewards.answers import Exact, Match, Number
from forge_rl.rewards.auto import Auto
from forge_rl.rewards.composition import WeightedSum
from forge_rl.rewards.diversity import Diversity
from forge_rl.rewards.formats import Format, JSONSchema, Regex
from forge_rl.rewards.judge import Judge
from forge_rl.rewards.lengths import Length, Overlong
from forge_rl.rewards.maths import Maths
from forge_rl.rewards.protocol import RewardFunction, form_of
from forge_rl.rewards.reward_model import RewardModel
from forge_rl.rewards.verifiers import ReasoningGymReward

REWARDS: Mapping[str, Callable[..., RewardFunction]] = {
    "auto": Auto,
    "diversity": Diversity,
    "exact": Exact,
    "format": Format,
    "json_schema": JSONSchema,
    "judge": Judge,
    "length": Length,
    "match": Match,
    "math": Maths,
    "model": RewardModel,
    "number": Number,
    "overlong": Overlong,
    "reasoning_gym": ReasoningGymReward,
    "regex": Regex,
}
"""Bundled rewards by name, each a frozen dataclass whose fields are its options."""

RewardTexts: TypeAlias = Annotated[tuple[str, ...], tyro.conf.arg(name="reward")]
"""Type of a field of specs for `build_reward`, with the flag --reward next to the service's --reward.replicas."""

_FORM = "write --reward NAME:key=value,...*WEIGHT, MODULE:FUNCTION=WEIGHT or FILE.py:FUNCTION=WEIGHT"


def build_reward(texts: Sequence[str]) -> RewardFunction | WeightedSum:
    """Build the weighted sum of the rewards in `texts`; a single reward of weight 1 is returned unwrapped.

        build_reward(["auto"])
        build_reward(["math=1", "format=0.2"])
        build_reward(["mine.py:score", "judge:model=gpt-4o-mini,rubric=rubric.md*0.5"])

    Each text is `NAME[:key=value,...]` with a name in REWARDS, or `MODULE:NAME` or `FILE.py:NAME`, which refers to a
    function, a callable object, or a class of callable objects. A weight follows a star or, without options, an equals
    sign: any finite number, by default 1. A part of weight 0 is only a metric. Values that contain a comma, or end in a
    star and a number, must be quoted.

    Raises:
        ConfigError: a text does not have this form, names an unknown reward, option or object, or is not callable.
    """
    if not texts:
        raise ConfigError("no reward is given", hint="set --reward to at least one, such as auto")
    parts: dict[str, tuple[RewardFunction, float]] = {}
    for text in texts:
        name, function, weight = _read(text)
        same = sum(each == name or each.startswith(f"{name}_") for each in parts)
        parts[f"{name}_{same + 1}" if same else name] = (function, weight)
    [(function, weight), *others] = parts.values()
    return function if weight == 1 and not others else WeightedSum(parts)


def _read(text: str) -> tuple[str, RewardFunction, float]:
    """Return name, function and weight of one text."""
    described, weight = _split_weight(text)
    try:
        number = float(weight)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"--reward {text}: the weight {weight!r} is not a finite number", hint=_FORM)
    name, _, options = described.partition(":")
    if name in REWARDS:
        return name, _made(f"--reward {text}", REWARDS[name], _options(text, name, options)), number
    if names_code(described):
        return described.rpartition(":")[2].replace(".", "_"), _users(described), number
    raise ConfigError(
        f"--reward {text}: there is no reward {name!r}",
        hint=f"{suggest(name, REWARDS, 'bundled rewards')}; or give your own as MODULE:FUNCTION or FILE.py:FUNCTION",
    )


def _split_weight(text: str) -> tuple[str, str]:
    """Split off the weight; within an option, the text after a star is a weight only if it is a number."""
    plain, star, weight = text.rpartition("*")
    if star and (_is_number(weight) or plain in REWARDS or names_code(plain)):
        return plain, weight
    plain, equals, weight = text.rpartition("=")
    module, colon, _ = plain.rpartition(":")
    names_users = names_code(plain) and module not in REWARDS and (_is_number(weight) or module.endswith(".py"))
    if equals and (not colon or names_users):
        return plain, weight
    return text, "1"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _options(text: str, name: str, listed: str) -> dict[str, object]:
    """Parse the options of a bundled reward by the types of its fields."""
    import pydantic

    fields = [field for field in dataclasses.fields(cast(Any, REWARDS[name])) if field.init]
    kinds = typing.get_type_hints(REWARDS[name])
    found: dict[str, object] = {}
    for part in split_commas(listed):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key in found:
            said = "is given twice" if equals else "is not an option"
            raise ConfigError(f"--reward {text}: {part.strip()!r} {said}", hint=_FORM)
        names = [field.name for field in fields]
        if key not in names:
            raise ConfigError(f"--reward {text}: {name} has no option {key!r}", hint=suggest(key, names, "it has"))
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        try:
            found[key] = pydantic.TypeAdapter(kinds[key]).validate_strings(value)
        except pydantic.ValidationError as error:
            said = error.errors()[0]["msg"]
            raise ConfigError(f"--reward {text}: {key} is {value!r}: {said}", hint="set a valid value") from None
    unset = (dataclasses.MISSING, dataclasses.MISSING)
    missing = [each.name for each in fields if (each.default, each.default_factory) == unset and each.name not in found]
    if missing:
        wanted = ",".join(f"{each}=..." for each in missing)
        raise ConfigError(f"--reward {text}: {name} needs {' and '.join(missing)}", hint=f"write {name}:{wanted}")
    return found


def _users(text: str) -> RewardFunction:
    """Return a user's function, or an object of their class."""
    found = load(text, "--reward")
    if isinstance(found, type):
        found = _made(f"--reward {text}", found, {})
    try:
        form_of(found)
    except ConfigError as error:
        raise ConfigError(f"--reward {text}: {error.message}", hint=error.hint) from None
    if isinstance(found, WeightedSum):
        raise ConfigError(f"--reward {text} is a sum of rewards", hint="give each of them with its weight")
    return cast(RewardFunction, found)


def _made(flag: str, kind: Callable[..., Any], options: Mapping[str, object]) -> RewardFunction:
    try:
        return cast(RewardFunction, kind(**options))
    except ForgeError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{flag}: {getattr(kind, '__name__', kind)} cannot be created: {type(error).__name__}: {error}",
            hint="give a function, an object, or a class whose constructor takes no arguments",
        ) from error
