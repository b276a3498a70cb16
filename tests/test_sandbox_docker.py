"""Sandboxes of a Docker daemon: the pool against a stand-in of Docker's API. A daemon itself was never asked."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.responses import JSONResponse, Response

from forge_rl.sandbox import DockerPool, Limits, SandboxError, SandboxPool
from tests.docker_server import DockerServer

LIMITS = Limits(wall_s=60, output_bytes=100, transfer_bytes=1 << 16)
_KILLED = """import asyncio, os, sys
from forge_rl.sandbox import DockerPool
async def work():
    await DockerPool(image="it:1", socket=sys.argv[1]).open()
    os.kill(os.getpid(), 9)
asyncio.run(work())"""


def pool_of(server: DockerServer, image: str = "it:1", **options: object) -> DockerPool:
    return DockerPool(image=image, limits=LIMITS, socket=server.socket, **options)  # type: ignore[arg-type]


async def test_commands_files_and_errors_come_back_as_from_a_pool(tmp_path: Path):
    async def use(pool: SandboxPool) -> None:
        async with pool.session() as session, pool.session() as other:
            await session.run("echo 6 > x")
            await session.put("a/b c", b"\x00\r\n" * 9)
            assert await session.get("a/b c") == b"\x00\r\n" * 9
            for path, message in (("none", r"could not transfer none \(404\)"), ("a", "a is not a file")):
                with pytest.raises(SandboxError, match=message):
                    await session.get(path)
            result = await session.run("cat x; echo oops >&2; exit 3")
            assert (result.stdout, result.stderr, result.status, result.error) == ("6\n", "oops\n", 3, None)
            long = await session.run("yes | head -c 200")
            assert (len(long.stdout), long.cut) == (100, True)
            assert (await other.run("cat x")).status == 1

    async with DockerServer(tmp_path) as server:
        async with pool_of(server, "it:2", runtime="runsc") as pool:
            session = await pool.open()
            made = server.containers[session.name]
            await use(pool)
        assert server.containers == {}
    confined = {"NetworkMode": "none", "CapDrop": ["ALL"], "SecurityOpt": ["no-new-privileges"], "Runtime": "runsc"}
    bounds = {"Memory": LIMITS.memory_bytes, "NanoCpus": 10**9, "PidsLimit": LIMITS.processes, "AutoRemove": True}
    assert (made["Image"], made["Cmd"]) == ("it:2", ["7200"])
    assert made["HostConfig"].items() >= (confined | bounds).items()


async def test_a_pool_has_a_connection_for_each_command_and_none_between(tmp_path: Path):
    """A data set has a pool for each image: idle connections would take all descriptors."""
    async with DockerServer(tmp_path) as server, pool_of(server, sessions=64) as pool:
        connections = pool.client._client._transport._pool  # type: ignore[attr-defined]
        async with pool.session() as session:
            await session.run("true")
            assert connections.connections == []
        assert connections._max_connections == 128


async def test_containers_of_a_killed_program_end_with_the_next_pool_and_those_of_others_stay(tmp_path: Path):
    async with DockerServer(tmp_path) as server, pool_of(server) as other:
        living = await other.open()
        command = [sys.executable, "-c", _KILLED, server.socket]
        await asyncio.to_thread(subprocess.run, command, check=False)
        assert len(server.containers) == 2
        elsewhere = {"Labels": {"forge-rl.owner": "another machine pid 1 1"}}
        server.containers |= {"e" * 64: elsewhere, "f" * 64: {"Labels": {"of": "others"}}}
        async with pool_of(server) as pool, pool.session() as session:
            assert set(server.containers) == {living.name, session.name, "e" * 64, "f" * 64}


async def test_a_command_that_takes_too_long_ends_its_container_and_frees_its_place(tmp_path: Path):
    async with DockerServer(tmp_path) as server, pool_of(server, sessions=1) as pool:
        async with pool.session() as session:
            with pytest.raises(SandboxError, match="all 1 sessions are open"):
                await pool.open(wait_s=0.01)
            late = await session.run("sleep 60", wall_s=0.2)
            assert (late.error.name, session.alive, server.containers) == ("CellOverrun", False, {})
            with pytest.raises(SandboxError, match="the session has ended"):
                await session.run("true")
        async with pool.session() as session:
            server.containers.clear()  # it ran out of memory, or of its time
            with pytest.raises(SandboxError, match=r"refused \(404\)"):
                await session.run("true")
        with pytest.raises(SandboxError, match="no earlier state"):
            await pool.open(undo=True)


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("containers/create", JSONResponse({"message": "no space left"}, 500), r"refused \(500\).*no space left"),
        ("containers/create", Response(b"[]"), "JSON object"),
        ("containers/create", Response(b'{"Id": "../x"}'), "names no container"),
        ("containers/create", Response(b" " * (5 << 20)), "more than"),
        ("containers/json", Response(b"{}"), "list of containers"),
        ("containers/.*/start", JSONResponse({"message": "no runsc"}, 400), "no runsc"),
        ("containers/.*/exec", Response(b'{"Id": 1}', 201), "names no command"),
        ("exec/.*/start", Response(b"\x07\0\0\0\0\0\0\1x"), "something else than streams"),
        ("exec/.*/json", JSONResponse({"ExitCode": None}), "no exit status"),
    ],
)
async def test_an_answer_is_not_trusted(tmp_path: Path, path: str, answer: Response, message: str):
    async with DockerServer(tmp_path) as server, pool_of(server) as pool:
        server.answers[path] = answer
        with pytest.raises(SandboxError, match=message):
            async with pool.session() as session:
                await session.run("true")
        assert server.containers == {}


async def test_no_daemon_and_no_image_are_told(tmp_path: Path):
    async with DockerPool(image="it:1", socket=str(tmp_path / "none.sock")) as pool:
        with pytest.raises(SandboxError, match=r"none\.sock does not exist.*\n.*start the daemon"):
            await pool.open()
    async with DockerServer(tmp_path) as server, pool_of(server, "none:1") as pool:
        with pytest.raises(SandboxError, match="cannot pull none:1: manifest unknown"):
            await pool.open()
