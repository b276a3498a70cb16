"""Text of others on a terminal: what would act on it is written out."""

from __future__ import annotations

import re

_ACTS = re.compile(
    # Control characters but line ends and tabs, marks and overrides of direction, line separators, halves of surrogate
    # pairs, annotations and tags.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    r"""Write out what a terminal would obey or hide, as Python does: ESC becomes `\x1b`; lines and tabs stay."""
    return _ACTS.sub(lambda found: ascii(found[0])[1:-1], text)
