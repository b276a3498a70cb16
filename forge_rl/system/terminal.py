"""Makes untrusted text safe to print on a terminal."""

from __future__ import annotations

import re

_ACTS = re.compile(
    # Control characters except newlines and tabs, direction marks and overrides, line separators, lone surrogates,
    # annotations and tags.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    r"""Escape characters that a terminal would act on or hide, as Python does: ESC becomes `\x1b`; keeps \n and \t."""
    return _ACTS.sub(lambda found: ascii(found[0])[1:-1], text)
