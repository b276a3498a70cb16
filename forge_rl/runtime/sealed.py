"""Requests over TCP between processes that share a key in a file: authenticated both ways, not encrypted.

The server sends its nonce. The client sends its own and the request, the server its reply, each with an HMAC-SHA256
under a key of both nonces, so that nothing of another connection is accepted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

NONCE_BYTES = 32
"""Length of a nonce, in hexadecimal digits."""
_MAC_BYTES = 64


def nonce() -> bytes:
    """Make a nonce, as hexadecimal digits."""
    return secrets.token_hex(NONCE_BYTES // 2).encode()


class SealedChannel:
    """One connection's messages.

    Args:
        key: the shared key.
        server: the server's nonce.
        client: the client's nonce.
    """

    def __init__(self, key: bytes, server: bytes, client: bytes) -> None:
        self._key = hmac.digest(key, b"%b %b" % (server, client), hashlib.sha256)

    def seal(self, kind: str, body: bytes) -> bytes:
        """Return a message with its authentication code; `kind` names the type of message, such as "request"."""
        return self._code(kind, body) + body

    def open(self, kind: str, message: bytes) -> bytes:
        """Return the body of a message.

        Raises:
            PermissionError: it was made without the key, for another connection, or as another kind.
        """
        code, body = message[:_MAC_BYTES], message[_MAC_BYTES:]
        if not hmac.compare_digest(code, self._code(kind, body)):
            raise PermissionError("a message was made without the run's key")
        return body

    def _code(self, kind: str, body: bytes) -> bytes:
        return hmac.new(self._key, kind.encode() + b" " + body, hashlib.sha256).hexdigest().encode()
