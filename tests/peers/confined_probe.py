"""Runs programs in the confined runtime of verifiers' worker and prints what they could do; see test_envs_verifiers."""

import asyncio
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from confined_runtime import ConfinedRuntime, confine
from verifiers.v1.runtimes import SubprocessConfig, make_runtime

ATTACKS = """import ctypes, json, os, socket, subprocess, sys
def tried(what):
    try:
        return repr(what())
    except Exception as error:
        return type(error).__name__
port, other, secret, pid = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
def ask(port):
    with socket.create_connection(("127.0.0.1", port), 5) as to:
        to.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
        return to.makefile("rb").read()
def unix():
    with socket.socket(socket.AF_UNIX) as to:
        to.connect(os.environ["UNIX"])
libc = ctypes.CDLL(None, use_errno=True)
print(json.dumps({
    "endpoint": tried(lambda: ask(port)),
    "other port": tried(lambda: ask(other)),
    "secret": tried(lambda: open(secret).read()),
    "shadow": tried(lambda: open("/etc/shadow").read()),
    "kill": tried(lambda: os.kill(pid, 0)),
    "environ": tried(lambda: open(f"/proc/{pid}/environ").read()),
    "variable": os.environ.get("PRIVATE", ""),
    "unix socket": tried(unix),
    "uid": os.getuid(),
    "processes": sum(name.isdigit() for name in os.listdir("/proc")) < 12,
    "mount": libc.mount(b"none", b"/mnt", b"tmpfs", 0, None),
    "unshare": libc.unshare(0x10000000),
    "bpf": libc.syscall(321, 0, 0, 0),
    "write": tried(lambda: open("/usr/x", "w")),
    "own": tried(lambda: open("kept", "w").close()),
}))
"""


async def main() -> None:
    confine(sys.argv[2])
    runtime = make_runtime(SubprocessConfig())
    assert isinstance(runtime, ConfinedRuntime)
    await runtime.start()
    await runtime.write("attacks.py", ATTACKS.encode())

    async def answer(reader, writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nhello")
        await writer.drain()
        writer.close()

    servers = [await asyncio.start_server(answer, "127.0.0.1", 0) for _ in range(2)]
    ports = [str(server.sockets[0].getsockname()[1]) for server in servers]
    secret = Path(sys.argv[3])
    listening = await asyncio.start_unix_server(answer, secret.with_name("control.sock"))
    await runtime.prepare_execution([f"http://127.0.0.1:{ports[0]}/v1"])
    os.environ["PRIVATE"] = "1"
    env = {"UNIX": str(secret.with_name("control.sock"))}
    done = await runtime.run([sys.executable, "attacks.py", *ports, str(secret), str(os.getpid())], env)
    found = json.loads(done.stdout) if done.exit_code == 0 else {"error": done.stdout + done.stderr}
    await runtime.run(["sh", "-c", f"ln -s {secret} link; ln -s {secret.parent} there; echo kept > ~/x"], {})
    for name, work in {"read link": runtime.read("link"), "write link": runtime.write("there/new", b"1")}.items():
        try:
            found[name] = repr(await work)
        except Exception as error:
            found[name] = type(error).__name__
    await runtime.write("given", b"1\n")
    found["kept"] = (await runtime.run(["sh", "-c", "cat given ~/x kept"], {})).stdout
    found["new"] = secret.with_name("new").exists()
    state = runtime._state
    await runtime.stop()
    found["left"] = state.exists() or runtime.workdir.exists()
    for server in (*servers, listening):
        server.close()
    print(json.dumps(found))


asyncio.run(main())
