"""Tasks with images whose containers a provider runs, against stand-ins of the providers' services."""

import asyncio
import inspect
import json
import logging
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from forge_rl.envs.env_flag import build_environment, sources_of
from forge_rl.envs.protocol import reset_env, step_env
from forge_rl.errors import ConfigError, ForgeError
from forge_rl.sandbox import Limits, SandboxError
from forge_rl.sandbox.providers.containers import RentedSession, container_provider
from forge_rl.sandbox.providers.owners import this_owner
from forge_rl.sandbox.providers.roots import UnreadableRootError
from forge_rl.sandbox.providers.sdk import Sweeper
from forge_rl.system.variables import api_key
from tests.container_machine import ContainerMachine, container_machine, machine_image
from tests.daytona_server import KEY as DAYTONA_KEY
from tests.daytona_server import DaytonaServer
from tests.docker_server import DockerServer
from tests.e2b_task_server import KEY as E2B_KEY
from tests.e2b_task_server import E2BTaskServer
from tests.harbor_tasks import FILES, TASKS, TRICKS, write_tasks
from tests.modal_package import ModalPackage
from tests.swebench_tasks import SHELL_TEST


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[ContainerMachine]:
    """A machine with an image of the tasks' files."""
    image = machine_image(tmp_path / "made", FILES | {"testbed/answer": "", "testbed/kept": ""})
    (tmp_path / "made" / "files" / "files" / "app" / "run.sh").chmod(0o644)
    try:
        async with container_machine(tmp_path / "made", {"task:1": image}) as machine:
            yield machine
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture
async def server(
    request: pytest.FixtureRequest, machine: ContainerMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Any]:
    """A stand-in of the provider that is the parameter, by the machine's containers, with the variables set for it."""
    match request.param:
        case "docker":
            (tmp_path / "d").mkdir()
            async with DockerServer(tmp_path / "d", machine) as docker:
                monkeypatch.setenv("DOCKER_HOST", f"unix://{docker.socket}")
                yield docker
        case "daytona":
            pytest.importorskip("daytona", reason="the package daytona is not installed", exc_type=ImportError)
            async with DaytonaServer(machine) as daytona:
                monkeypatch.setenv("DAYTONA_API_KEY", DAYTONA_KEY)
                monkeypatch.setenv("DAYTONA_API_URL", f"{daytona.url}/api")
                yield daytona
        case "e2b":
            pytest.importorskip("e2b", reason="the package e2b is not installed", exc_type=ImportError)
            async with E2BTaskServer(machine) as e2b:
                variables = {"E2B_API_KEY": E2B_KEY, "E2B_API_URL": e2b.url, "E2B_SANDBOX_URL": f"{e2b.url}/envd"}
                for name, value in {**variables, "E2B_HTTP_VERSION": "1.1"}.items():
                    monkeypatch.setenv(name, value)
                yield e2b
        case "modal":
            package = ModalPackage(machine)
            monkeypatch.setenv("MODAL_TOKEN_ID", "modal-id")
            monkeypatch.setenv("MODAL_TOKEN_SECRET", MODAL_SECRET)
            monkeypatch.setitem(sys.modules, "modal", package)  # type: ignore[arg-type]
            yield package


DOCKER = pytest.mark.parametrize("server", ["docker"], indirect=True)
PROVIDERS = pytest.mark.parametrize(
    "server",
    [
        "docker",
        "modal",
        pytest.param("daytona", marks=pytest.mark.nightly),
        pytest.param("e2b", marks=pytest.mark.nightly),
    ],
    indirect=True,
)
"""Those whose packages CI does not have are nightly."""
MODAL_SECRET = "modal-secret"


def name_of(server: Any) -> str:
    kinds = {DockerServer: "docker", DaytonaServer: "daytona", E2BTaskServer: "e2b", ModalPackage: "modal"}
    return kinds[type(server)]


def left(server: Any) -> dict[str, Any]:
    containers: dict[str, Any] = server.containers if isinstance(server, DockerServer) else server.sandboxes
    return containers


async def rewards(environment: str, commands: Mapping[str, str]) -> dict[str, float]:
    """Play an episode of each task that is named at the same time; return the rewards."""
    factory = build_environment(environment)
    [source] = sources_of(factory, 0).values()
    tasks = {task.id: task for task in (source.draw() for _ in factory.tasks)}

    async def play(name: str) -> float:
        env = factory(tasks[name])
        try:
            await reset_env(env)
            for text in (f"```sh\n{commands[name]}\n```", "Done."):
                step = await step_env(env, text, parsed=(text, ()))
            assert step.reward is not None
            return step.reward
        finally:
            await env.close()

    return dict(zip(commands, await asyncio.gather(*map(play, commands)), strict=True))


async def check_tasks(folder: Path, provider: str, *, few: bool = False) -> None:
    """Check that solutions are rewarded, and neither nothing nor a trick.

    Args:
        few: play three tasks, and one trick beside a solution.
    """
    write_tasks(folder / "tasks", "task:1")
    flag = f"harbor:{folder / 'tasks'},held_out_share=0,provider={provider}"
    names = ["sort", "link", "clean"] if few else [*TASKS]
    solutions = {name: f"cd /app\n{TASKS[name][1]}" for name in names}
    assert await rewards(flag, solutions) == dict.fromkeys(names, 1.0)
    assert await rewards(flag, dict.fromkeys(names, "true")) == dict.fromkeys(names, 0.0)
    for trick in () if few else TRICKS.values():
        assert await rewards(flag, dict.fromkeys(names, trick)) == dict.fromkeys(names, 0.0), trick
    assert await rewards(flag, {"sort": f"{solutions['sort']}\n{TRICKS['a program on the way']}"}) == {"sort": 1.0}


@DOCKER
async def test_tasks_of_harbor_in_containers_of_docker(server: DockerServer, tmp_path: Path):
    await check_tasks(tmp_path, "docker", few=True)
    assert server.containers == {}


@pytest.mark.long
@DOCKER
async def test_ten_tasks_of_harbor_in_containers_of_docker(server: DockerServer, tmp_path: Path):
    await check_tasks(tmp_path, "docker")
    assert server.containers == {}


@DOCKER
@pytest.mark.parametrize(
    ("commands", "reward"),
    [("true", 0.0), ("echo 42 > answer", 1.0), ("echo 42 > answer; rm kept", 0.0), ("echo 41 > answer", 0.0)],
)
async def test_a_row_of_swebench_in_containers_of_docker(
    server: DockerServer, tmp_path: Path, commands: str, reward: float
):
    row = {"instance_id": "a__b-1", "repo": "a/b", "problem_statement": "Answer.", "image": "task:1"}
    row |= {"FAIL_TO_PASS": ["t::fixed"], "PASS_TO_PASS": ["t::kept"], "eval_script": SHELL_TEST}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    flag = f"swebench:{tmp_path / 'rows.jsonl'},memory_mib=256,provider=docker,held_out_share=0"
    assert await rewards(flag, {"a__b-1": commands}) == {"a__b-1": reward}
    assert server.containers == {}


@PROVIDERS
async def test_a_session_runs_commands_and_its_changes_are_applied_elsewhere(
    server: Any, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    provider = container_provider(name_of(server))
    limits = Limits(output_bytes=1000)
    try:
        async with await RentedSession.open(provider, "task:1", limits, watched=True) as session:
            result = await session.run("echo $A; pwd; exit 3", env={"A": "b c"}, folder="/opt/v2")
            assert (result.stdout, result.status, result.error) == ("b c\n/opt/v2\n", 3, None)
            late = await session.run("sleep 60", wall_s=1)
            assert (late.error and late.error.name, session.alive) == ("CellOverrun", True)
            long = await session.run(["seq", "1000"])
            assert (len(long.stdout), long.cut) == (1000, True)
            await session.put("/app/binary", bytes(range(256)))
            await session.run("sleep 600 & rm log; rm -r data; echo x > data; ln -s v2 /opt/link; mkdir -p new/deep")
            changes = await session.changes()
            async with await RentedSession.open(provider, "task:1", limits, watched=False) as fresh:
                await fresh.apply(changes.changes)
                assert await fresh.get("/app/binary") == bytes(range(256))
                listing = await fresh.run("ls -d *; cat data; cat /opt/link/name; ls new; stat -c %a run.sh")
                for path in ("/none", "/app"):
                    with pytest.raises(SandboxError):
                        await fresh.get(path)
                assert (fresh.alive, fresh.lost) == (True, "")
        with pytest.raises(SandboxError, match="the session has ended"):
            await session.run("true")
        with pytest.raises(SandboxError):
            await RentedSession.open(provider, "none:1", limits, watched=False)
    finally:
        await provider.close()
    assert listing.stdout == "binary\ndata\nnew\nnumbers.txt\nrun.sh\nx\ntwo\ndeep\n644\n"
    assert not left(server)
    assert not [secret for secret in (DAYTONA_KEY, E2B_KEY, MODAL_SECRET) if secret in caplog.text]


@PROVIDERS
async def test_containers_of_a_killed_program_end_with_the_next_provider(server: Any):
    code = "from forge_rl.sandbox.providers.owners import this_owner; print(this_owner())"
    program = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    dead = (await program.communicate())[0].decode().strip()
    owners = {"a" * 64: dead, "b" * 64: this_owner(), "c" * 64: "another machine pid 1 1", "d" * 64: ""}
    for box, owner in owners.items():
        label = {"forge-rl-owner": owner} if owner else {}
        match server:
            case DockerServer():
                server.containers[box] = {"Labels": {"forge-rl.owner": owner} if owner else {}}
            case DaytonaServer():
                server.sandboxes[box] = server.sandbox(box, {"labels": label})
            case E2BTaskServer():
                server.sandboxes[box] = {"templateID": "t", "metadata": label}
            case _:
                server.sandboxes[box] = label
    provider = container_provider(name_of(server))
    try:
        async with await RentedSession.open(provider, "task:1", Limits(), watched=False):
            assert owners.keys() - left(server).keys() == {"a" * 64}
    finally:
        await provider.close()


async def test_containers_that_another_process_ends_first_stop_no_start():
    dead = this_owner().rpartition(" ")[0] + " 1"
    ended = list[str]()

    async def listed() -> list[tuple[str, str]]:
        return [("gone", dead), ("left", dead), ("own", this_owner())]

    async def end(name: str) -> None:
        ended.append(name)
        if name == "gone":
            raise SandboxError("the service has no such container")

    await Sweeper().sweep(listed, end)
    assert ended == ["gone", "left"]


async def test_a_container_whose_start_is_cancelled_is_ended():
    began, ready, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Container:
        async def close(self) -> None:
            ended.set()

    class Provider:
        async def start(self, image: str, limits: Limits) -> Container:
            began.set()
            await ready.wait()
            return Container()

    provider: Any = Provider()
    opening = asyncio.create_task(RentedSession.open(provider, "task:1", Limits(), watched=False))
    await began.wait()
    opening.cancel()
    await asyncio.sleep(0)
    ready.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert ended.is_set()


def test_keys_that_no_header_may_have_are_refused_without_naming_them(monkeypatch: pytest.MonkeyPatch):
    for key in ("secret-key\n", " secret-key", "secret\x7fkey", "secret\r\nkey"):
        monkeypatch.setenv("E2B_API_KEY", key)
        with pytest.raises(ConfigError, match="E2B_API_KEY starts or ends with white space") as caught:
            api_key("provider=e2b", "E2B_API_KEY")
        assert "secret" not in f"{caught.value} {caught.value.hint}"


@DOCKER
async def test_what_a_command_breaks_costs_the_episode_its_reward_only(server: DockerServer):
    provider = container_provider("docker")
    try:
        for commands in ("rm /usr/bin/find", "for p in find stat tar; do echo 'yes' > /usr/bin/$p; done"):
            async with await RentedSession.open(provider, "task:1", Limits(), watched=True) as session:
                await session.run(commands)
                with pytest.raises(UnreadableRootError):
                    await session.changes()
                assert session.lost == ""
        async with await RentedSession.open(provider, "task:1", Limits(), watched=True) as session:
            server.containers.clear()  # its first process was killed
            result = await session.run("true")
            assert (result.error and result.error.name, session.alive, session.lost) == ("OutOfMemory", False, "")
    finally:
        await provider.close()


@pytest.mark.nightly
@pytest.mark.parametrize("server", ["modal", "daytona", "e2b"], indirect=True)
async def test_ten_tasks_of_harbor_in_rented_containers(server: Any, tmp_path: Path):
    await check_tasks(tmp_path, name_of(server))
    assert not left(server)


@pytest.mark.nightly
@pytest.mark.parametrize("server", ["modal"], indirect=True)
async def test_the_stand_in_of_modal_is_called_as_the_package_allows(server: ModalPackage):
    provider = container_provider("modal")
    async with await RentedSession.open(provider, "task:1", Limits(), watched=True) as session:
        await session.changes()
    del sys.modules["modal"]
    real = pytest.importorskip("modal", reason="the package modal is not installed", exc_type=ImportError)
    from modal.sandbox._filesystem import _SandboxFilesystem

    for name, args, options in server.calls:
        owner, _, method = name.partition(".")
        holder = _SandboxFilesystem if owner == "filesystem" else getattr(real, owner)
        function = getattr(holder, method)
        inspect.signature(getattr(function, "aio", function)).bind(*args, **options)
    for error in ("SandboxFilesystemError", "NotFoundError", "ConflictError"):
        assert issubclass(getattr(real.exception, error), Exception)


def test_other_providers_and_images_of_this_machine_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_tasks(tmp_path, "oci:/layout")
    with pytest.raises(ConfigError, match="provider=cloud is not a provider"):
        build_environment(f"harbor:{tmp_path},provider=cloud")
    with pytest.raises(ForgeError, match="names the image 'oci:/layout'"):
        sources_of(build_environment(f"harbor:{tmp_path},provider=docker,local=true"), 0)
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match="only unix:// sockets"):
        container_provider("docker")
    monkeypatch.setitem(sys.modules, "modal", ModalPackage(None))  # type: ignore[arg-type]
    monkeypatch.delenv("MODAL_TOKEN_ID", raising=False)
    with pytest.raises(ConfigError, match="MODAL_TOKEN_ID is not set"):
        container_provider("modal")
