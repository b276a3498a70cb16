"""A stand-in of Docker's Engine API on a Unix socket: containers are folders, whose commands run on this machine, or
sessions of images of this machine's sandbox."""

import asyncio
import contextlib
import io
import json
import os
import re
import signal
import socket
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.container_machine import ContainerMachine


class DockerServer:
    """Serves the requests that `DockerPool` makes; `async with DockerServer(folder) as server:`.

    Args:
        machine: whose images and containers it has, instead of folders.
    """

    def __init__(self, folder: Path, machine: ContainerMachine | None = None) -> None:
        self.folder, self.socket = folder, str(folder / "docker.sock")
        self.machine = machine
        self.images = {"it:1"} if machine is None else set(machine.images)
        self.containers: dict[str, dict[str, Any]] = {}
        self.commands: dict[str, dict[str, Any]] = {}
        self.processes: list[tuple[str, asyncio.subprocess.Process]] = []
        self.answers: dict[str, Response] = {}
        """Answers to give instead, by a pattern of the path."""

    async def __aenter__(self) -> "DockerServer":
        methods = ["GET", "POST", "PUT", "DELETE"]
        app = Starlette(routes=[Route("/v1.41/{path:path}", self._answer, methods=methods)])
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.socket)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        await self._serving

    async def _answer(self, request: Request) -> Response:
        path = request.path_params["path"]
        for pattern, answer in self.answers.items():
            if re.fullmatch(pattern, path):
                return answer
        match request.method, *path.split("/"):
            case "GET", "images", *name, "json":
                return JSONResponse({}, 200 if "/".join(name) in self.images else 404)
            case "POST", "images", "create":
                name = request.query_params["fromImage"]
                if name != "it:2":
                    return Response(b'{"status": "Pulling"}\r\n{"error": "manifest unknown"}\r\n')
                self.images.add(name)
                return Response(b'{"status": "Pulling"}\r\n{"status": "Done"}\r\n')
            case "POST", "containers", "create":
                name = os.urandom(32).hex()
                self.containers[name] = {**await request.json(), "running": False}
                (self.folder / name).mkdir()
                return JSONResponse({"Id": name, "Warnings": []}, 201)
            case "GET", "containers", "json":
                label = json.loads(request.query_params["filters"])["label"][0]
                items = [{"Id": name, "Labels": container["Labels"]} for name, container in self.containers.items()]
                return JSONResponse([item for item in items if label in item["Labels"]])
            case "DELETE", "containers", name if name in self.containers:
                del self.containers[name]
                await self._kill(name)
                return Response(status_code=204)
            case _, "containers", name, *_ if name not in self.containers:
                return JSONResponse({"message": f"No such container: {name}"}, 404)
            case "POST", "containers", name, "start":
                self.containers[name]["running"] = True
                if self.machine is not None:
                    await self.machine.start(name, self.containers[name]["Image"])
                return Response(status_code=204)
            case "POST", "containers", name, "exec" if self.containers[name]["running"]:
                command = os.urandom(32).hex()
                self.commands[command] = {"folder": self.folder / name, "name": name, **await request.json()}
                return JSONResponse({"Id": command}, 201)
            case "POST", "exec", command, "start":
                return StreamingResponse(self._output(self.commands[command]))
            case "GET", "exec", command, "json":
                return JSONResponse({"ExitCode": self.commands[command].get("status")})
            case "PUT", "containers", name, "archive" if self.machine is not None:
                await self.machine.unpack(name, await request.body())
                return Response()
            case "GET", "containers", name, "archive" if self.machine is not None:
                path = request.query_params["path"]
                return self._archive(path.rpartition("/")[2], await self.machine.get(name, path))
            case "PUT", "containers", name, "archive":
                with tarfile.open(fileobj=io.BytesIO(await request.body())) as archive:
                    archive.extractall(self.folder / name, filter="data")
                return Response()
            case "GET", "containers", name, "archive":
                return self._packed(self.folder / name / request.query_params["path"].lstrip("/"))
        return JSONResponse({"message": "page not found"}, 404)

    async def _kill(self, name: str) -> None:
        if self.machine is not None:
            await self.machine.end(name)
        for container, process in self.processes:
            if container == name:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()

    async def _output(self, command: dict[str, Any]) -> AsyncIterator[bytes]:
        outputs: tuple[bytes, ...]
        if self.machine is not None:
            command["status"], *outputs = await self.machine.run(command["name"], command["Cmd"])
        else:
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(
                *command["Cmd"], cwd=command["folder"], stdout=pipe, stderr=pipe, start_new_session=True
            )
            self.processes.append((command["folder"].name, process))
            outputs = await asyncio.shield(process.communicate())
            command["status"] = process.returncode
        for stream, output in enumerate(outputs, start=1):
            frame = bytes([stream, 0, 0, 0]) + len(output).to_bytes(4, "big") + output
            step = max(5, len(frame) // 100)
            for start in range(0, len(frame), step):  # frames come in any parts
                yield frame[start : start + step]

    def _archive(self, name: str, data: bytes | None) -> Response:
        if data is None:
            return JSONResponse({"message": f"Could not find the file {name}"}, 404)
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as archive:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        return Response(file.getvalue())

    def _packed(self, path: Path) -> Response:
        if not path.exists():
            return JSONResponse({"message": f"Could not find the file {path.name}"}, 404)
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as archive:
            archive.add(path, path.name)
        return Response(file.getvalue())
