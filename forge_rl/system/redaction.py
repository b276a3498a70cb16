"""Redaction: recognises secrets by the names of settings and variables, and removes credentials from URLs."""

from __future__ import annotations

import re

_CREDENTIALS = re.compile(r"://[^/?#\s]*@")
# At the end of a name: a last word such as token or api_key, also with a number, or a compound such as database_url.
_SECRET = re.compile(
    r"((^|[_-])(api|access|secret|private)?(key|token|pat|pass|auth|jwt|bearer|cookie|dsn)([_-]?\d+)?"
    r"|(api|access|secret|auth|bearer|hf)[_-]?(keys|tokens|key[_-]?id)"
    r"|apikey|secrets?|passw(or)?d|passphrase|credentials?|authorization|connection_string|webhook_url|database_url)$",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Return True if the name of a setting or variable suggests a secret value, as OPENAI_API_KEY does."""
    return _SECRET.search(name) is not None


def without_credentials(text: str) -> str:
    """Remove user and password from URLs: `https://me:secret@host/v1` becomes `https://host/v1`."""
    return _CREDENTIALS.sub("://", text)
