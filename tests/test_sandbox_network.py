"""Named network addresses of sessions: what they reach, and that they reach nothing else."""

import asyncio
import http.server
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from forge_rl.errors import ConfigError
from forge_rl.sandbox import Pool
from forge_rl.sandbox import network as network_module
from forge_rl.sandbox.network import SessionNetwork, _may_lead_to, named_addresses
from tests.sandbox_pool import SharedPool

FETCH = """
import urllib.request
def fetch(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read()
"""
RAW = """
import os, socket
for fd in range(3, 256):
    try: channel = socket.socket(fileno=os.dup(fd))
    except OSError: continue
    if channel.type == socket.SOCK_SEQPACKET: break
"""


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"x" * (3 << 20) if self.path == "/large" else self.path.encode())

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_a_session_and_its_forks_reach_the_named_address_only(sandbox: SharedPool, port: int):
    async def work():
        async with sandbox.pool.session(network=[f"127.0.0.1:{port}", f"localhost:{port}"], undo=True) as session:
            await session.run(FETCH)
            url = f"http://127.0.0.1:{port}"
            good = [await session.run(f"fetch('{url}/a')"), await session.run(f"len(fetch('{url}/large'))")]
            await session.run("import os; os._exit(0)")
            await session.restore()
            good.append(await session.run(f"fetch('{url}/b')"))
            async with await session.fork() as fork:
                good += [await one.run(f"fetch('{url}/c')") for one in (fork, session)]
            others = (f"127.0.0.1:{port + 1}", f"127.1:{port}", "example.com:80", f"[::1]:{port}", f"localhost:{port}")
            bad = [await session.run(f"fetch('http://{other}/')") for other in others]
            bad.append(await session.run("import _socket; _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)"))
            return good, bad

    good, bad = sandbox.run(work())
    assert [one.value for one in good] == ["b'/a'", "3145728", "b'/b'", "b'/c'", "b'/c'"], good[0].error
    assert {one.error.name for one in bad} <= {"URLError", "PermissionError"}
    assert "network=" in bad[0].error.message
    assert "private addresses" in bad[4].error.message


def test_who_was_given_nothing_reaches_nothing(sandbox: SharedPool, port: int):
    result = sandbox.cell(f"{FETCH}\nfetch('http://127.0.0.1:{port}/')")
    assert result.error.name == "URLError"
    assert "Operation not permitted" in result.error.message


@pytest.mark.parametrize(
    "request_",
    ["b'10.0.0.1:1'", "b'\\xff' * 400", "b'127.0.0.1:PORT\\0'", "b'127.0.0.1:PORT@x:1'", "b'0x7f000001:PORT'", "b' '"],
)
def test_a_request_for_anything_else_is_refused(sandbox: SharedPool, port: int, request_: str):
    async def work():
        async with sandbox.pool.session(network=[f"127.0.0.1:{port}"]) as session:
            code = f"{RAW}\nchannel.send({request_.replace('PORT', str(port))})\nsocket.recv_fds(channel, 512, 4)[:2]"
            refused = await session.run(code)
            return refused, await session.run(f"{FETCH}\nfetch('http://127.0.0.1:{port}/d')")

    refused, after = sandbox.run(work())
    assert "is not one of the session" in refused.value
    assert "[]" in refused.value
    assert after.value == "b'/d'"


def test_connections_are_bounded_and_end_with_the_session(sandbox: SharedPool, port: int):
    async def work():
        async with sandbox.pool.session(network=[f"127.0.0.1:{port}"]) as session:
            code = f"import socket\nopen_ones = [socket.create_connection(('127.0.0.1', {port})) for _ in range(16)]"
            assert (await session.run(code)).error is None
            more = await session.run(f"socket.create_connection(('127.0.0.1', {port}))")
            flooded = await session.run(f"{RAW}\nchannel.setblocking(False)\nwhile True: channel.send(b'x')")
            network = session._body.network
            assert len(network._relays) == 16
        return more, flooded, network._relays, network._serving.done()

    more, flooded, left, ended = sandbox.run(work())
    assert "16 open connections" in more.error.message
    assert flooded.error.name in ("BlockingIOError", "BrokenPipeError", "ConnectionResetError")
    assert (left, ended) == (set(), True)


def test_names_lead_to_public_addresses_only():
    for address in ("10.0.0.5", "127.0.0.1", "169.254.169.254", "::1", "fe80::1%eth0", "fd00::1", "::ffff:10.0.0.5"):
        assert not _may_lead_to("name.example", address)
        assert _may_lead_to("10.0.0.5", address)
    for address in ("64:ff9b::a00:5", "2002:a00:5::", "224.0.0.1", "ff0e::1", "0.0.0.0", "100.64.0.1"):
        assert not _may_lead_to("name.example", address)
    assert _may_lead_to("name.example", "93.184.215.14")
    assert _may_lead_to("name.example", "2606:4700::1111")


async def test_a_host_whose_first_address_does_not_answer_is_reached_at_another(
    port: int, monkeypatch: pytest.MonkeyPatch
):
    def lead_to(*ports: int) -> None:
        async def getaddrinfo(host: str, port: int, *, type: int) -> list[tuple[object, ...]]:
            return [(socket.AF_INET, type, 0, "", ("127.0.0.1", number)) for number in ports]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)

    monkeypatch.setattr(network_module, "_may_lead_to", lambda host, address: True)
    network = SessionNetwork(named_addresses(["two.example:80"]))
    try:
        with network.theirs, socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))  # it does not listen: connections are refused
            lead_to(deaf.getsockname()[1], port)
            with await network._dial("two.example:80") as outside:
                assert outside.getpeername()[1] == port
            lead_to(deaf.getsockname()[1])
            with pytest.raises(network_module._RefusedConnectionError, match="cannot be reached: Connection refused"):
                await network._dial("two.example:80")
    finally:
        await network.close()


def test_addresses_are_hosts_with_ports():
    assert named_addresses(["Example.org.:443", "[::1]:080"]) == {"example.org:443", "::1:80"}
    for wrong in ("example.org", "https://example.org:443", "a:0", "a:65536", "*:80", "a b:80", ":80", "a:\u0661"):
        with pytest.raises(ConfigError, match="network="):
            named_addresses([wrong])


def test_a_command_and_those_of_forks_reach_the_named_address_only(process_pool: SharedPool, port: int):
    fetch = "exec 3<>/dev/tcp/{} && printf 'GET /{} HTTP/1.0\\r\\n\\r\\n' >&3 && tail -c 9 <&3"
    names = [f"127.0.0.1:{port}", f"10.1.2.3:{port}", "[2001:db8::5]:80", f"localhost.example:{port}"]

    async def work():
        async with process_pool.pool.session(network=names, undo=True) as session:
            good = [await session.run(fetch.format(f"127.0.0.1/{port}", "large"))]
            async with await session.fork() as fork:
                for one in (fork, session):
                    good.append(await one.run(fetch.format(f"127.0.0.1/{port}", "named")))
            others = (f"127.0.0.1/{port + 1}", f"127.0.0.2/{port}", "localhost.example/81", "other.example/80")
            bad = [await session.run(fetch.format(other, "x")) for other in (*others, f"localhost.example/{port}")]
            many = f"for n in $(seq 40); do exec {{n}}<>/dev/tcp/127.0.0.1/{port} || exit 1; done; sleep 100"
            cut = await session.run(many, wall_s=1)
            good.append(await session.run(fetch.format(f"127.0.0.1/{port}", "after")))
            return good, bad, cut, len(session._body.network._relays)

    good, bad, cut, relays = process_pool.run(work())
    assert [one.stdout[-5:] for one in good] == ["xxxxx", "named", "named", "after"], good
    assert all(one.status and not one.stdout for one in bad), bad
    assert [text in one.stderr for text, one in zip(["refused"] * 3 + ["not known", "reset"], bad, strict=True)], bad
    assert cut.error.name == "CellOverrun"
    assert relays <= 16


async def test_the_owner_takes_only_connections_from_a_session():
    """The process that sends them could have been taken over: a pipe, or a connection that blocks, holds up nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as outside:
        name = f"127.0.0.1:{outside.getsockname()[1]}"
        network = SessionNetwork(frozenset([name]))
        read, write = os.pipe()
        pair = socket.socketpair()
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        for fds in ([read], [write, read], [pair[0].fileno()], [datagrams.fileno()]):
            socket.send_fds(network.theirs, [name.encode()], fds)
        socket.send_fds(network.theirs, [name.encode()], [accepted.fileno()])
        loop = asyncio.get_running_loop()
        outside.setblocking(False)
        there, _ = await loop.sock_accept(outside)
        with there:
            there.send(b"hello")
            client.setblocking(False)
            assert await loop.sock_recv(client, 16) == b"hello"
            accepted.setblocking(True)  # of the owner's descriptor too
            client.send(b"back")
            there.setblocking(False)
            assert await loop.sock_recv(there, 16) == b"back"
        socket.send_fds(network.theirs, [b"127.0.0.1:1"], [accepted.fileno()])
        await network.close()
        assert os.write(write, b"x") == 1
        for one in (*pair, datagrams, client, accepted, network.theirs):
            one.close()
        os.close(read)
        os.close(write)


async def test_commands_have_room_for_so_many_addresses():
    with pytest.raises(ConfigError, match="has 65 addresses"):
        await Pool(profile="process", sessions=1).open(network=[f"10.0.0.1:{port}" for port in range(1, 66)])
