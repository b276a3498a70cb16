"""A stand-in of Daytona's API, and of its toolbox in each sandbox, for Daytona's own package."""

import itertools
import re
import shlex
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.container_machine import ContainerMachine
from tests.served import Served

KEY = "daytona-secret"


class DaytonaServer(Served):
    """Serves what the package asks for; `async with DaytonaServer(machine) as server:`."""

    def __init__(self, machine: ContainerMachine) -> None:
        self.machine = machine
        self.sandboxes: dict[str, dict[str, Any]] = {}
        self._numbers = itertools.count()
        self.answers: dict[str, Response] = {}
        """Answers to give instead, by a pattern of the path."""

    def sandbox(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return what the API says of a sandbox."""
        about = {"id": name, "name": name, "toolboxProxyUrl": f"{self.url}/toolbox", "buildInfo": None}
        return {**_SANDBOX, **body, **about}

    async def answer(self, request: Request) -> Response:
        path = request.url.path.strip("/")
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"statusCode": 401, "message": "Unauthorized"}, 401)
        for pattern, answer in self.answers.items():
            if re.fullmatch(pattern, path):
                return answer
        match request.method, *path.split("/"):
            case "POST", "api", "sandbox":
                body = await request.json()
                name = f"box-{next(self._numbers)}"
                [image] = re.findall(r"(?m)^FROM (\S+)$", body["buildInfo"]["dockerfileContent"])
                if image not in self.machine.images:
                    return JSONResponse({"statusCode": 400, "message": f"image {image} not found"}, 400)
                await self.machine.start(name, image)
                self.sandboxes[name] = self.sandbox(name, body)
                return JSONResponse(self.sandboxes[name])
            case "GET", "api", "sandbox":
                return JSONResponse({"items": list(self.sandboxes.values()), "nextCursor": None})
            case _, "api" | "toolbox", *rest if not set(rest) & self.sandboxes.keys():
                return JSONResponse({"statusCode": 404, "message": "Sandbox not found"}, 404)
            case "GET", "api", "sandbox", name:
                return JSONResponse(self.sandboxes[name])
            case "DELETE", "api", "sandbox", name:
                await self.machine.end(name)
                return JSONResponse({**self.sandboxes.pop(name), "state": "destroying"})
            case "POST", "toolbox", name, "process", "execute":
                command = shlex.split((await request.json())["command"])
                status, out, err = await self.machine.run(name, command)
                return JSONResponse({"exitCode": status, "result": (out + err).decode("utf-8", "replace")})
            case "POST", "toolbox", name, "files", "bulk-upload":
                form = await request.form(max_part_size=1 << 30)
                await self.machine.put(name, str(form["files[0].path"]), await form["files[0].file"].read())  # type: ignore[union-attr]
                return JSONResponse({})
            case "POST", "toolbox", name, "files", "bulk-download":
                [file] = (await request.json())["paths"]
                data = await self.machine.get(name, file)
                kind, content = "application/octet-stream", data
                if data is None:
                    kind, content = "application/json", b'{"message": "file not found", "statusCode": 404}'
                head = f'--b\r\nContent-Disposition: form-data; name="{"error" if data is None else "file"}"; '
                head += f'filename="{file}"\r\nContent-Type: {kind}\r\n\r\n'
                return Response(
                    head.encode() + content + b"\r\n--b--\r\n", media_type="multipart/form-data; boundary=b"
                )
        return JSONResponse({"statusCode": 404, "message": f"{request.method} {path}"}, 404)


_SANDBOX: dict[str, Any] = {
    "organizationId": "o",
    "user": "root",
    "env": {},
    "labels": {},
    "public": False,
    "networkBlockAll": True,
    "kvm": False,
    "target": "here",
    "cpu": 1,
    "gpu": 0,
    "memory": 1,
    "disk": 1,
    "state": "started",
}
