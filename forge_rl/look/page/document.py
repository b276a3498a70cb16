"""The page's HTML: one document with its scripts and styles, which holds a run's data or asks a server for them.

Data are JSON in which no character can end a script. The page lists hashes of its scripts and styles; no others apply.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib import resources

_SCRIPTS = (
    *("core", "store", "charts", "curves", "episodes", "episode", "groups", "timeline", "tasks", "faults", "compare"),
    "main",
)
"""Files of the script, in order; they share one scope."""
_HARMLESS = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def opening(*, live: bool = False) -> str:
    """Return the HTML up to the data.

    Args:
        live: the page asks its server for data, instead of holding blocks of them.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(live=live)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">\n'
        f"<title>forge_rl</title>\n<style>{_style()}</style>\n</head>\n<body{' data-live' * live}>\n"
        '<div id="app"></div>\n<noscript>The page needs JavaScript.</noscript>\n'
    )


def closing() -> str:
    """Return the HTML that follows the data."""
    return f"<script>{_script()}</script>\n</body>\n</html>\n"


def data_block(name: str, text: str) -> str:
    """Return a block of data; `text` comes from `encoded`."""
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def encoded(value: object) -> str:
    """Return a value as ASCII JSON that is safe inside a script element."""
    # NaN is not JSON: a browser would refuse the whole block.
    return json.dumps(value, separators=(",", ":"), allow_nan=False).translate(_HARMLESS)


def policy(*, live: bool = False) -> str:
    """Return the content security policy: nothing is loaded, and only the page's own script and style apply."""
    connect = " connect-src 'self';" if live else ""
    return (
        f"default-src 'none'; script-src '{_hash(_script())}'; style-src '{_hash(_style())}'; img-src data:;{connect} "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@cache
def _script() -> str:
    page_script = "\n".join(_asset(f"{name}.js") for name in _SCRIPTS)
    return f'{_asset("vendor/uPlot.iife.min.js")}\n(() => {{\n"use strict";\n{page_script}}})();\n'


@cache
def _style() -> str:
    return f"{_asset('vendor/uPlot.min.css')}\n{_asset('page.css')}"


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")
