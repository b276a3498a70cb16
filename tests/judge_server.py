"""An OpenAI-compatible endpoint that answers as it is told, well or badly."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class JudgeServer:
    """Takes the answers that are left, one for each request, and repeats the last one."""

    answers: list[Callable[[BaseHTTPRequestHandler], None]]
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    most_at_once: int = 0
    url: str = ""


def reply(text: str, tokens: int = 30) -> Callable[[BaseHTTPRequestHandler], None]:
    """A well-formed completion."""
    message = {"role": "assistant", "content": text}
    body = {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        "usage": {"prompt_tokens": tokens - 1, "completion_tokens": 1, "total_tokens": tokens},
    }
    return raw(200, json.dumps(body))


def raw(status: int, body: str, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    """Any status and body, in JSON's name."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        sent = {"Content-Type": "application/json", "Content-Length": str(len(body.encode()))}
        for name, value in (sent | {key.replace("_", "-"): value for key, value in headers.items()}).items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body.encode())

    return answer


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    """Close the connection without a word."""
    handler.close_connection = True
    handler.connection.close()


def drip(handler: BaseHTTPRequestHandler) -> None:
    """Send a byte now and then, for ever."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    with contextlib.suppress(OSError):
        for _ in range(200):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.05)


@contextlib.contextmanager
def judge_server(*answers: Callable[[BaseHTTPRequestHandler], None], delay_s: float = 0.0) -> Iterator[JudgeServer]:
    """Serve these answers on a port of this machine."""
    served = JudgeServer(list(answers))
    lock, running = threading.Lock(), [0]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                running[0] += 1
                served.most_at_once = max(served.most_at_once, running[0])
                served.requests.append(body)
                served.keys.append(self.headers.get("Authorization", ""))
                answer = served.answers.pop(0) if len(served.answers) > 1 else served.answers[0]
            time.sleep(delay_s)
            with lock:
                running[0] -= 1
            with contextlib.suppress(ConnectionError):
                answer(self)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    serving.start()
    try:
        served.url = f"http://127.0.0.1:{server.server_port}/v1"
        yield served
    finally:
        server.shutdown()
        server.server_close()
        serving.join()
