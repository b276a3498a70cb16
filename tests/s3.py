"""A stand-in for S3 on this machine: moto's server, which checks signatures, and fails and lags as a test tells it."""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from moto import settings
from moto.iam.models import iam_backends
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import make_server

ACCOUNT = "123456789012"
_ALL = '{"Version": "2012-10-17", "Statement": {"Effect": "Allow", "Action": "*", "Resource": "*"}}'
_CODES = {"SlowDown": "503 Service Unavailable", "InternalError": "500 Internal Server Error"}


class S3:
    """Serves buckets until it is closed.

        s3.fails("PUT", "model/weights", "SlowDown", times=2)  # the next two of these requests

    Attributes:
        struck: kinds of the failures so far.
        lags: whether each listing is answered as it was the first time, since this was set.
    """

    def __init__(self) -> None:
        settings.INITIAL_NO_AUTH_ACTION_COUNT = 0  # check all requests
        users = iam_backends[ACCOUNT]["aws"]
        users.create_user("us-east-1", "tests")
        users.put_user_policy("tests", "all", _ALL)
        key = users.create_access_key("tests")
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=_Quiet)
        self._server.log = lambda *_: None  # type: ignore[method-assign]  of connections that were reset
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.port}",
            "AWS_ACCESS_KEY_ID": key.access_key_id,
            "AWS_SECRET_ACCESS_KEY": key.secret_access_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_MAX_ATTEMPTS": "2",
        }
        self.forget()

    def forget(self) -> None:
        """Empty all buckets, of which "bucket" is left, and let nothing fail."""
        s3_backends[ACCOUNT]["aws"].reset()
        s3_backends[ACCOUNT]["aws"].create_bucket("bucket", "us-east-1")
        self.struck: list[str] = []
        self.lags = False
        self._faults: list[tuple[str, str, str]] = []
        self._listings: dict[str, tuple[Any, Any, bytes]] = {}

    def fails(self, method: str, path: str, kind: str, *, times: int = 1) -> None:
        """Let the next requests fail whose path and query have `path` in them.

        Args:
            kind: an error code of S3, or "reset" for a connection that is reset in the middle of the request's body, or
                of the answer's if it is a GET.
        """
        self._faults += [(method, path, kind)] * times

    def fails_no_more(self) -> None:
        self._faults.clear()

    def buckets(self) -> list[str]:
        """Names of the buckets."""
        return [*s3_backends[ACCOUNT]["aws"].buckets]

    def uploads(self) -> int:
        """Number of uploads in parts that were neither completed nor aborted."""
        return sum(len(bucket.multiparts) for bucket in s3_backends[ACCOUNT]["aws"].buckets.values())

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, url = environ["REQUEST_METHOD"], f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        fault = next(
            (listed_fault for listed_fault in self._faults if listed_fault[0] == method and listed_fault[1] in url),
            None,
        )
        if fault is None:
            if "list-type=2" not in url or not self.lags:
                return self._moto(environ, start_response)
            if url not in self._listings:
                head: list[Any] = []
                body = b"".join(self._moto(environ, lambda *given: head.extend(given[:2])))
                self._listings[url] = (*head, body)
            status, headers, body = self._listings[url]
            start_response(status, headers)
            return [body]
        self._faults.remove(fault)
        self.struck.append(kind := fault[2])
        if kind != "reset":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(_CODES[kind], [("Content-Type", "application/xml")])
            return (
                [] if method == "HEAD" else [f"<Error><Code>{kind}</Code><Message>told to</Message></Error>".encode()]
            )
        if method != "GET":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0) // 2)
            _reset(environ["werkzeug.socket"])
        return self._half(b"".join(self._moto(environ, start_response)), environ["werkzeug.socket"])

    def _half(self, answer: bytes, connection: socket.socket) -> Iterator[bytes]:
        yield answer[: len(answer) // 2]
        _reset(connection)


class _Quiet(MotoRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the connection was reset
            super().handle()

    def log(self, *_: object) -> None:
        pass


def _reset(connection: socket.socket) -> NoReturn:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    os.close(connection.detach())
    raise ConnectionResetError
