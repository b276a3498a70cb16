"""A stand-in of E2B's API and of the daemon in its sandboxes (envd), for E2B's own package."""

import base64
import itertools
import json
import re
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from tests.container_machine import ContainerMachine
from tests.served import Served

KEY = "e2b_" + "0" * 40
_ENDED = 2
"""Flag of the last message of a Connect stream."""


class E2BTaskServer(Served):
    """Serves what the package asks for; `async with E2BTaskServer(machine) as server:`."""

    def __init__(self, machine: ContainerMachine) -> None:
        self.machine = machine
        self.templates: dict[str, str] = {}
        """Image of each template, by name."""
        self.sandboxes: dict[str, dict[str, Any]] = {}
        self._numbers = itertools.count()
        self.answers: dict[str, Response] = {}
        """Answers to give instead, by a pattern of the path."""

    async def answer(self, request: Request) -> Response:
        path = request.url.path.strip("/")
        for pattern, answer in self.answers.items():
            if re.fullmatch(pattern, path):
                return answer
        if path.startswith("envd"):
            name = request.headers.get("x-access-token", "").removeprefix("token-of-")
            if name not in self.sandboxes or "x-api-key" in request.headers:
                return JSONResponse({"code": "unauthenticated", "message": "The sandbox was not found"}, 502)
            return await self._in_sandbox(name, path, request)
        if request.headers.get("x-api-key") != KEY:
            return JSONResponse({"code": 401, "message": "Invalid API key"}, 401)
        match request.method, *path.split("/"):
            case "GET", "templates", "aliases", name:
                if name in self.templates:
                    return JSONResponse({"templateID": name, "public": False})
                return JSONResponse({"code": 404, "message": "Template not found"}, 404)
            case "POST", "v3", "templates":
                name = (await request.json())["name"]
                about = {"templateID": name, "buildID": "1", "public": False, "names": [name], "tags": []}
                return JSONResponse({**about, "aliases": [name]}, 202)
            case "POST", "v2", "templates", name, "builds", "1":
                self.templates[name] = (await request.json())["fromImage"]
                return Response(status_code=202)
            case "GET", "templates", name, "builds", "1", "status":
                is_there = self.templates[name] in self.machine.images
                reason = {} if is_there else {"reason": {"message": f"no image {self.templates[name]}"}}
                about = {"templateID": name, "buildID": "1", "logs": [], "logEntries": []}
                return JSONResponse({**about, **reason, "status": "ready" if is_there else "error"})
            case "POST", "v2", "sandboxes":
                body = await request.json()
                name = f"i{next(self._numbers)}"
                await self.machine.start(name, self.templates[body["templateID"]])
                self.sandboxes[name] = body
                about = {"sandboxID": name, "templateID": body["templateID"], "clientID": "c", "envdVersion": "0.5.7"}
                return JSONResponse({**about, "envdAccessToken": f"token-of-{name}", "domain": None}, 201)
            case "GET", "v2", "sandboxes":
                return JSONResponse([_listed(name, body) for name, body in self.sandboxes.items()])
            case "DELETE", "sandboxes", name if name in self.sandboxes:
                del self.sandboxes[name]
                await self.machine.end(name)
                return Response(status_code=204)
        return JSONResponse({"code": 404, "message": f"{request.method} {path}"}, 404)

    async def _in_sandbox(self, name: str, path: str, request: Request) -> Response:
        match request.method, path:
            case "GET", "envd/health":
                return Response(status_code=204)
            case "POST", "envd/process.Process/Start":
                process = json.loads((await request.body())[5:])["process"]
                command = [process["cmd"], *process["args"]]
                return StreamingResponse(self._output(name, command), media_type="application/connect+json")
            case "POST", "envd/files":
                place = request.query_params["path"]
                form = await request.form(max_part_size=1 << 30)
                await self.machine.put(name, place, await form["file"].read())  # type: ignore[union-attr]
                return JSONResponse([{"path": place, "name": place.rpartition("/")[2], "type": "file"}])
            case "GET", "envd/files":
                data = await self.machine.get(name, request.query_params["path"])
                return JSONResponse({"code": 404, "message": "file not found"}, 404) if data is None else Response(data)
        return JSONResponse({"code": "unimplemented", "message": path}, 404)

    async def _output(self, name: str, command: list[str]) -> AsyncIterator[bytes]:
        yield _event("start", {"pid": 7})
        status, out, err = await self.machine.run(name, command)
        for stream, data in (("stdout", out), ("stderr", err)):
            for start in range(0, len(data), 1 << 15):
                yield _event("data", {stream: base64.b64encode(data[start : start + (1 << 15)]).decode()})
        yield _event("end", {"exitCode": status, "exited": True, "status": f"exit status {status}"})
        yield _envelope(_ENDED, b"{}")


def _event(kind: str, about: dict[str, Any]) -> bytes:
    return _envelope(0, json.dumps({"event": {kind: about}}).encode())


def _envelope(flags: int, data: bytes) -> bytes:
    return bytes([flags]) + len(data).to_bytes(4, "big") + data


def _listed(name: str, body: dict[str, Any]) -> dict[str, Any]:
    times = {"startedAt": "2026-01-01T00:00:00Z", "endAt": "2026-01-01T01:00:00Z"}
    sizes = {"cpuCount": 1, "memoryMB": 512, "diskSizeMB": 512, "state": "running", "envdVersion": "0.5.7"}
    about = {"sandboxID": name, "templateID": body["templateID"], "clientID": "c", "metadata": body["metadata"]}
    return {**about, **times, **sizes}
