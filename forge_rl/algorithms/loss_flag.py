"""Builds losses from the flag `--loss`: methods by name, user code by module or file, and one for each source."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import tyro

from forge_rl.algorithms.aggregation import Aggregation
from forge_rl.algorithms.components import LossBySource
from forge_rl.algorithms.distillation import Distillation
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.algorithms.minibatch_losses import ClipCov, KlCov, M2po
from forge_rl.algorithms.policy_losses import Cispo, Dppo, Gmpo, Gspo, Reinforce, Sapo, Topr, Vespo
from forge_rl.algorithms.protocol import Loss
from forge_rl.errors import ConfigError, ForgeError
from forge_rl.flags.options import build
from forge_rl.flags.texts import FlagText, parse, suggest
from forge_rl.flags.user_code import load

_SEQUENCES = Aggregation(kind="sequence_mean")

METHODS: Mapping[str, Callable[..., Loss]] = {
    "cispo": Cispo,
    "clip_cov": ClipCov,
    "clipped": ClippedSurrogate,
    "dapo": functools.partial(ClippedSurrogate, clip_high=0.28),
    "distill": Distillation,
    "dppo": Dppo,
    "dppo_kl": functools.partial(Dppo, divergence="kl", threshold=0.05),
    "gmpo": Gmpo,
    "grpo": functools.partial(ClippedSurrogate, clip_high=0.2, aggregation=_SEQUENCES),
    "gspo": Gspo,
    "high_entropy": functools.partial(ClippedSurrogate, top_entropy_quantile=0.2),
    "kl_cov": KlCov,
    "luspo": functools.partial(Gspo, aggregation=Aggregation(kind="constant", tokens=1)),
    "m2po": M2po,
    "ppo": functools.partial(ClippedSurrogate, clip_high=0.2),
    "reinforce": Reinforce,
    "sapo": functools.partial(Sapo, aggregation=_SEQUENCES),
    "topr": Topr,
    "vespo": Vespo,
}
"""Losses by name, each a frozen dataclass whose fields are its options, some with other defaults."""

LossTexts: TypeAlias = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        help="Loss, as NAME[:KEY=VALUE,...], or your own as MODULE:NAME or FILE.py:NAME. With SOURCE= before it, the "
        "loss of a source's episodes; one without SOURCE is for all others. Names: " + ", ".join(METHODS),
    ),
]
"""Type of a field of texts for `build_loss`."""


def build_loss(texts: Sequence[str] | Loss) -> Loss:
    """Build the loss that `texts` name, or a `LossBySource` if they name sources; a loss is returned unchanged.

        build_loss(["clipped:clip_high=0.3,kl_coef=0.01"])
        build_loss(["math=dapo", "code=cispo:ratio_max=4", "gspo"])
        build_loss(["mine.py:MyLoss"])

    Each text has the form of `flags.texts.parse`, with a source as its title. A name is one of METHODS, or refers to a
    Loss, a subclass of it, or a function that returns one.

    Raises:
        ConfigError: a text does not have this form, names an unknown method, option or object, or is not a loss; two
            texts are for the same source.
    """
    if isinstance(texts, Loss):
        return texts
    losses: dict[str, Loss] = {}
    for text in texts:
        parsed = parse(text, "--loss", bundled=METHODS, takes_weight=False)
        if parsed.title in losses:
            target = f"the source {parsed.title}" if parsed.title else "all sources"
            raise parsed.wrong(f"{target} already has a loss", "name each source once, as SOURCE=NAME")
        losses[parsed.title] = _loss_of(parsed)
    if not losses:
        raise ConfigError("no loss is given", hint="set --loss to one, such as clipped")
    return losses[""] if losses.keys() == {""} else LossBySource(losses)


def _loss_of(parsed: FlagText) -> Loss:
    """Return the loss of one text."""
    if not parsed.is_code and parsed.name not in METHODS:
        hint = f"{suggest(parsed.name, METHODS, 'methods')}; or give your own as MODULE:NAME or FILE.py:NAME"
        raise parsed.wrong(f"there is no method {parsed.name!r}", hint)
    make: Any = load(parsed.name, "--loss") if parsed.is_code else METHODS[parsed.name]
    if not isinstance(make, Loss):
        try:
            make = build(parsed, make)
        except ForgeError as error:
            flag = f"--loss {parsed.name}:"  # dapo's class is called clipped
            raise type(error)(
                re.sub(r"--loss \w+:", flag, error.message), hint=re.sub(r"--loss \w+:", flag, error.hint)
            ) from None
    elif parsed.params:
        raise parsed.wrong("a loss that exists takes no options", "name its class", key=next(iter(parsed.params)))
    if not isinstance(make, Loss):
        raise parsed.wrong(f"{parsed.name} is a {type(make).__name__}, not a loss", "return a subclass of rl.Loss")
    return make
