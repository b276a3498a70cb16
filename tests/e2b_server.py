"""A stand-in of E2B's API: sandboxes that run cells in this process, as E2B's public API descriptions say."""

import asyncio
import base64
import contextlib
import io
import json
import traceback
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from tests.served import Served


class E2BServer(Served):
    """Serves both the API and the sandboxes' ports, below /PORT/ID; `async with E2BServer() as server:`."""

    def __init__(self) -> None:
        self.sandboxes: dict[str, dict[str, Any]] = {}
        self.files: dict[tuple[str, str], bytes] = {}
        self.asked: list[tuple[str, str, Any]] = []
        self.start_began, self.may_start = asyncio.Event(), asyncio.Event()
        self.may_start.set()
        self.answers: dict[str, Response] = {}
        """Answers to give instead, by path."""

    async def answer(self, request: Request) -> Response:
        path = request.url.path
        body: Any = None
        if request.headers.get("content-type") == "application/json":
            body = await request.json()
        self.asked.append((request.method, path, body))
        if path in self.answers:
            return self.answers[path]
        match request.method, *path.strip("/").split("/"):
            case _, "49999" | "49983" as port, name, *_:
                if name not in self.sandboxes:
                    return JSONResponse({"message": "The sandbox was not found"}, 502)
                if request.headers.get("x-access-token") != f"token-of-{name}" or "x-api-key" in request.headers:
                    return JSONResponse({"message": "unauthorized"}, 401)
                return self._execute(name, body) if port == "49999" else await self._file(name, request)
            case "POST", "sandboxes" if request.headers.get("x-api-key") == "e2b-secret":
                self.start_began.set()
                await self.may_start.wait()
                name = f"i{len(self.sandboxes)}"
                self.sandboxes[name] = {}
                made = {"sandboxID": name, "templateID": body["templateID"], "clientID": "c", "envdVersion": "0.2.0"}
                return JSONResponse({**made, "envdAccessToken": f"token-of-{name}", "domain": None}, 201)
            case "POST", "sandboxes", name, "timeout" if name in self.sandboxes:
                return Response(status_code=204)
            case "DELETE", "sandboxes", name if name in self.sandboxes:
                del self.sandboxes[name]
                return Response(status_code=204)
        return JSONResponse({"code": 401, "message": "Invalid API key"}, 401)

    def _execute(self, name: str, body: dict[str, Any]) -> Response:
        async def lines() -> AsyncIterator[str]:
            if "sleep" in body["code"]:
                await asyncio.sleep(60)
            for said in (*_run(body["code"], self.sandboxes[name]), {"type": "end_of_execution"}):
                yield json.dumps(said) + "\n"

        return StreamingResponse(lines())

    async def _file(self, name: str, request: Request) -> Response:
        key = name, request.query_params["path"]
        assert request.query_params["username"] == "user"
        if request.method == "POST":
            form = await request.body()
            self.files[key] = form.partition(b"\r\n\r\n")[2].rpartition(b"\r\n--")[0]
            return JSONResponse([{"path": key[1], "name": key[1], "type": "file"}])
        if key not in self.files:
            return JSONResponse({"code": 404, "message": "file not found"}, 404)
        return Response(self.files[key])


def _run(code: str, space: dict[str, Any]) -> Iterator[dict[str, Any]]:
    *before, last = code.split("\n")
    out = io.StringIO()
    yield {"type": "number_of_executions", "execution_count": 1}
    try:
        with contextlib.redirect_stdout(out):
            exec("\n".join(before), space)
            value = eval(last, space)
    except Exception as error:
        told = {"name": type(error).__name__, "value": str(error), "traceback": traceback.format_exc()}
        yield {"type": "error", **told}
        return
    yield {"type": "stdout", "text": out.getvalue(), "timestamp": 1}
    if isinstance(value, bytes):
        png = {"png": base64.encodebytes(value).decode()}
        yield {"type": "result", "text": "<Figure>", "is_main_result": True, **png}
    else:
        yield {"type": "result", "text": repr(value), "is_main_result": True}
