"""Rented sandboxes: the pool of E2B against a stand-in of E2B's API. The service itself was never asked."""

import asyncio
import logging

import pytest
from starlette.responses import JSONResponse, Response

from forge_rl.errors import ConfigError
from forge_rl.sandbox import E2BPool, Limits, SandboxError, SandboxPool
from tests.e2b_server import E2BServer

LIMITS = Limits(wall_s=20, output_bytes=100, transfer_bytes=1 << 16)
PNG = b"\x89PNG\r\n\x1a\n..."


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", "e2b-secret")


def pool_of(server: E2BServer, **options: object) -> E2BPool:
    url = f"{server.url}/{{port}}/{{id}}"
    return E2BPool(limits=LIMITS, api_url=server.url, sandbox_url=url, **options)  # type: ignore[arg-type]


async def test_cells_files_images_and_errors_come_back_as_from_a_pool(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)

    async def use(pool: SandboxPool):
        async with pool.session() as session, pool.session() as other:
            await session.run("x = 6\n0")
            await other.run("x = 7\n0")
            await session.put("a b/c", b"\x00\r\n" * 9)
            assert await session.get("a b/c") == b"\x00\r\n" * 9
            with pytest.raises(SandboxError, match=r"could not transfer none \(404\): .*file not found"):
                await session.get("none")
            cells = ("print('y' * 200)\nx", "1 / 0", repr(PNG))
            return [await session.run(code) for code in cells], await other.run("x")

    async def work():
        async with E2BServer() as server:
            async with pool_of(server) as pool:
                answers = await use(pool)
            return *answers, server.sandboxes, server.asked

    (first, error, image), other, left, asked = await work()
    assert (first.value, first.stdout, first.cut, other.value) == ("6", "y" * 100, True, "7")
    assert (error.error.name, error.value, "1 / 0" in error.error.message) == ("ZeroDivisionError", None, False)
    assert (image.image.media_type, image.image.data) == ("image/png", PNG)
    assert left == {}
    new = {"templateID": "code-interpreter-v1", "secure": True, "allow_internet_access": False, "timeout": 300}
    assert asked[0] == ("POST", "/sandboxes", new)
    assert "e2b-secret" not in caplog.text + repr(asked)
    assert "token-of" not in caplog.text


async def test_a_sandbox_lives_longer_than_its_cell_may_take():
    async with E2BServer() as server, pool_of(server, idle_s=50) as pool, pool.session() as session:
        await session.run("1", wall_s=1)
        await session.run("1", wall_s=1000)
        await session.run("1", wall_s=1000)
        result = [body["timeout"] for _, path, body in server.asked if path.endswith("timeout")]
    assert result == [1055]


async def test_a_cell_that_takes_too_long_ends_its_sandbox_and_frees_its_place():
    async with E2BServer() as server, pool_of(server, sessions=1) as pool:
        async with pool.session() as session:
            with pytest.raises(SandboxError, match="all 1 sessions are open"):
                await pool.open(wait_s=0.01)
            late = await session.run("sleep", wall_s=0.2)
            assert not session.alive
            assert server.sandboxes == {}
            with pytest.raises(SandboxError, match="the session has ended"):
                await session.run("1")
        async with pool.session() as other:
            cell = asyncio.create_task(other.run("sleep"))
            await asyncio.sleep(0.1)
            cell.cancel()
            await asyncio.wait([cell])
            assert server.sandboxes == {}
        async with pool.session() as third:
            server.sandboxes.clear()  # E2B has ended it
            with pytest.raises(SandboxError, match=r"refused|failed"):
                await third.run("1", wall_s=900)
        result = late.error
    assert result.name == "CellOverrun"


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/sandboxes", b"[]", "JSON object"),
        ("/sandboxes", b"{" * 9999, "JSON object"),
        ("/sandboxes", b" " * (2 << 20), "more than"),
        ("/sandboxes", b'{"sandboxID": "../x"}', "names no sandbox"),
        ("/sandboxes", b'{"sandboxID": "x", "domain": "evil.example/?"}', "strange domain"),
        ("/sandboxes", b'{"sandboxID": "x", "envdAccessToken": "a\\r\\nb: c"}', "not a token"),
        ("/sandboxes", Response(status_code=307, headers={"location": "http://127.0.0.1:1"}), r"refused \(307\)"),
        ("/49999/i0/execute", b"", "too early"),
        ("/49999/i0/execute", b'{"type": "stdout", "text": "x"}\n', "too early"),
        ("/49999/i0/execute", b"[]\n", "JSON objects"),
        ("/49999/i0/execute", b"x" * (3 << 20), "too large"),
        ("/49999/i0/execute", b'{"type": "result", "png": "PGI+"}\n', "not of its type"),
        ("/49999/i0/execute", b'{"type": "result", "png": "?"}\n', "not base64"),
        ("/49999/i0/execute", JSONResponse({}, 500), r"failed \(500\)"),
    ],
)
async def test_an_answer_is_not_trusted(path: str, answer: bytes | Response, message: str):
    async with E2BServer() as server, pool_of(server) as pool:
        server.answers[path] = answer if isinstance(answer, Response) else Response(answer, 201)
        with pytest.raises(SandboxError, match=message) as error:
            async with pool.session() as session:
                await session.run("1")
        result = f"{error.value} {error.value!r}"
        deleted = [asked_path for method, asked_path, _ in server.asked if method == "DELETE"]
    assert "e2b-secret" not in result
    # Whatever else the answer says, the sandbox that it names is paid for.
    assert ("/sandboxes/x" in deleted) == (message in ("strange domain", "not a token"))


async def test_a_sandbox_whose_start_is_cancelled_is_ended():
    async with E2BServer() as server, pool_of(server) as pool:
        server.may_start.clear()
        opening = asyncio.create_task(pool.open())
        await server.start_began.wait()
        opening.cancel()
        await asyncio.sleep(0)
        server.may_start.set()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert [method for method, *_ in server.asked] == ["POST", "DELETE"]
        assert server.sandboxes == {}


async def test_what_e2b_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch):
    async with E2BServer() as server, pool_of(server) as pool:
        with pytest.raises(SandboxError, match="no earlier state"):
            await pool.open(undo=True)
        async with pool.session() as session:
            for refused in (session.fork(), session.restore(), session.run("1", cpu_s=1)):
                with pytest.raises(SandboxError, match="E2B"):
                    await refused
            with pytest.raises(SandboxError, match="transfer_bytes is 65536"):
                await session.put("x", bytes(1 << 17))
        monkeypatch.setenv("OTHER", "wrong")
        async with pool_of(server, api_key_env="OTHER") as other:
            with pytest.raises(SandboxError, match=r"refused \(401\)"):
                await other.open()
    monkeypatch.delenv("E2B_API_KEY")
    with pytest.raises(ConfigError, match="E2B_API_KEY is not set"):
        E2BPool()
