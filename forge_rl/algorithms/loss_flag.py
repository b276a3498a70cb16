"""Builds losses from the flag `--loss`: methods by name, user code by module or file, and one for each source."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import tyro

from forge_rl import algorithms
from forge_rl.algorithms.components import LossBySource
from forge_rl.algorithms.protocol import Loss
from forge_rl.errors import ConfigError, ForgeError
from forge_rl.flags.options import build
from forge_rl.flags.texts import FlagText, parse, suggest
from forge_rl.flags.user_code import load

_MODULES = ("distillation", *(m.name for m in pkgutil.iter_modules(algorithms.__path__) if m.name.endswith("losses")))
"""Modules with losses that have names: each file whose name ends in `losses`, and distillation."""


def _methods() -> Iterator[tuple[str, Callable[..., Loss]]]:
    """Yield each name that a loss gives itself, and what makes the loss with that name's defaults."""
    for module in (importlib.import_module(f"{algorithms.__name__}.{name}") for name in _MODULES):
        for kind in vars(module).values():
            # Imported classes belong to another module; `vars` leaves out inherited names.
            if isinstance(kind, type) and issubclass(kind, Loss) and kind.__module__ == module.__name__:
                for name, defaults in vars(kind).get("flag_names", {}).items():
                    yield name, functools.partial(kind, **defaults) if defaults else kind


METHODS: Mapping[str, Callable[..., Loss]] = dict(sorted(_methods()))
"""Losses by name, each a frozen dataclass whose fields are its options, some with other defaults; see
`Loss.flag_names`."""

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
            raise parsed.refused(error) from None
    elif parsed.params:
        raise parsed.wrong("a loss that exists takes no options", "name its class", key=next(iter(parsed.params)))
    if not isinstance(make, Loss):
        raise parsed.wrong(f"{parsed.name} is a {type(make).__name__}, not a loss", "return a subclass of rl.Loss")
    return make
