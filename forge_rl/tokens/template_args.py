"""Variables of a chat template that a user sets for a whole run, such as enable_thinking."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeAlias

import tyro

from forge_rl.errors import ConfigError
from forge_rl.flags.texts import option_value

TemplateArgTexts: TypeAlias = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        help="Variables of the model's chat template, as NAME=VALUE, such as enable_thinking=false or "
        "reasoning_effort=high, the same in training, evaluation and serving. Requests to a gateway may set others."
    ),
]
"""Type of the field behind --template-args."""

_RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "tokenize", "chat_template", "conversation", "documents"}
)
"""Names that are the renderer's own."""


def read_template_args(texts: Sequence[str]) -> dict[str, object]:
    """Read NAME=VALUE texts, with values as in the options of other flags.

        read_template_args(["enable_thinking=false", "reasoning_effort=high"])

    Raises:
        ConfigError: a text has another form, or names a variable of the renderer.
    """
    args: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--template-args has {text!r}", hint="write NAME=VALUE, such as enable_thinking=false")
        if name in _RESERVED or name.endswith("_token"):
            raise ConfigError(
                f"--template-args sets {name}, which is not the user's to set", hint="name a variable of the template"
            )
        args[name] = option_value(value)
    return args


def check_template_args(args: Mapping[str, object], template: str) -> None:
    """Refuse variables that the chat template does not have, as they would have no effect.

    Raises:
        ConfigError: names the variable.
    """
    if not args:
        return
    import jinja2  # not for --help

    try:
        # The lexer yields names inside of Jinja's tags alone, so a word in the template's prose does not count as a
        # variable.
        words = {word for _, kind, word in jinja2.Environment().lex(template) if kind == "name"}
    except jinja2.TemplateSyntaxError:
        words = set(re.findall(r"\w+", template))
    for name in args:
        if name not in words:
            raise ConfigError(
                f"--template-args sets {name}, which the model's chat template does not use",
                hint="leave it out, or use another name: the variables are in the model's chat_template.jinja",
            )
