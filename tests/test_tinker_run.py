"""The Tinker API as its users see it: the unmodified client and cookbook, in an environment of their own."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.peer_environments import TINKER
from forge_rl.system.variables import handed_on
from forge_rl.tinker.server import NOT_HERE
from forge_rl.token_arrays import TokenIds
from forge_rl.types import Sampling, Turn
from tests.commands import Command, actor_of
from tests.peer_pythons import peer_python
from tests.test_tinker import KEYS as SERVED_KEYS
from tests.test_tinker import Client, serving
from tests.tinker_fakes import FakeEngines

KEYS = {name: f"tml-{name * 24}" for name in "abc"}
SEEDS = {"a": 1, "b": 2, "c": 3}
STEPS = 12
LOOP_STEPS = {"supervised": 20, "rl": 3, "dpo": 3, "distillation": 3}
LOSS = re.compile(r"loss (\S+)")
STATE = re.compile("state tinker://(.*)/weights/last")
pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("nothing_left")]


@pytest.fixture(scope="module")
def client_python() -> Path:
    """The Python of an environment with tinker and its cookbook, made once."""
    return peer_python(TINKER)


def serve(commands: list[Command], model: Path, out: Path, *flags: str, port: int = 0) -> tuple[Command, str]:
    keys = out.with_suffix(".keys")
    keys.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    keys.chmod(0o600)
    limits = ("--generator.max-model-len", "256", "--generator.kv-cache-gib", "0.25", "--trainer.seq-len", "256")
    folders = ("--model", str(model), "--out", str(out), "--keys", str(keys))
    command = Command("apps.tinker", *folders, *limits, "--lora.rank", "4", "--port", str(port), *flags)
    commands.append(command)
    url = command.wait_for("^serving .* at http").rpartition(" ")[2]
    return command, url


def client(commands: list[Command], python: Path, script: str, *arguments: str, key: str = "a") -> Command:
    place = Path(__file__).parent / "peers" / script
    command = Command(
        str(place),
        *arguments,
        program=("/usr/bin/env", f"TINKER_API_KEY={KEYS[key]}", "TINKER_TELEMETRY=0", str(python)),
    )
    commands.append(command)
    return command


def tenant(commands: list[Command], python: Path, url: str, model: Path, name: str) -> Command:
    return client(commands, python, "tinker_tenant.py", url, str(model), name, str(SEEDS[name]), str(STEPS), key=name)


def weights(out: Path, command: Command) -> tuple[bytes, bytes]:
    """The factors and moments that a tenant saved at its end."""
    assert command.end(timeout_s=600) == 0, command.output
    match = STATE.search(command.output)
    assert match is not None, command.output
    assert f"step {STEPS - 1} updates {STEPS} " in command.output
    folder = out / "models" / match[1] / "weights" / "last"
    return (folder / "adapter_model.safetensors").read_bytes(), (folder / "training.safetensors").read_bytes()


def test_tenants_get_what_each_would_alone_through_deaths_of_trainer_engine_and_server(
    client_python: Path, tiny_model: Path, tmp_path: Path, commands: list[Command]
):
    alone = tmp_path / "alone"
    server, url = serve(commands, tiny_model, alone)
    expected = {}
    for name in KEYS:
        expected[name] = weights(alone, tenant(commands, client_python, url, tiny_model, name))
    server.clean_up()
    out = tmp_path / "together"
    server, url = serve(commands, tiny_model, out)
    tenants = {name: tenant(commands, client_python, url, tiny_model, name) for name in KEYS}
    for name, command in tenants.items():
        command.wait_for(f"{name} step 1 ")
    actor_of(server, "trainer").kill()
    for name, command in tenants.items():
        command.wait_for(f"{name} step 4 ")
    actor_of(server, "generator").kill()
    for name, command in tenants.items():
        command.wait_for(f"{name} step 7 ")
    server.clean_up()  # with SIGKILL, first of all the server
    serve(commands, tiny_model, out, port=int(url.rpartition(":")[2]))
    assert {name: weights(out, command) for name, command in tenants.items()} == expected


def test_rows_of_two_tenants_share_passes_and_each_gets_what_it_would_alone(
    client_python: Path, tiny_model: Path, tmp_path: Path, commands: list[Command]
):
    server, url = serve(commands, tiny_model, tmp_path / "alone")
    alone = {name: tenant(commands, client_python, url, tiny_model, name) for name in "ab"}
    for name, command in alone.items():
        weights(tmp_path / "alone", command)
        assert set(re.findall(r"adapters (\d+)", command.output)) == {"1"}, name
    server.clean_up()
    _, url = serve(commands, tiny_model, tmp_path / "mixed", "--mix-rows")
    mixed = {name: tenant(commands, client_python, url, tiny_model, name) for name in "ab"}
    for name, command in mixed.items():
        weights(tmp_path / "mixed", command)
        assert "2" in re.findall(r"adapters (\d+)", command.output), "no pass had rows of both"
        # Step by step, Adam makes more of what was rounded otherwise.
        expected, actual = ([float(text) for text in LOSS.findall(one.output)] for one in (alone[name], command))
        assert len(actual) == len(expected) == STEPS
        assert actual[0] == pytest.approx(expected[0], rel=1e-6)
        assert actual == pytest.approx(expected, rel=1e-3, abs=1e-4)


async def test_what_the_client_can_ask_for_is_served_or_listed_as_refused(client_python: Path, tmp_path: Path):
    script = Path(__file__).parent / "peers" / "tinker_surface.py"
    output = await asyncio.to_thread(subprocess.check_output, [client_python, script], text=True)
    surface = json.loads(output)

    def path(route: str) -> str:
        return re.sub(r"\{\w+\}", "x", route.replace("{checkpoint_id}", "x/x"))

    async with serving(tmp_path) as server:
        ann = Client(server.url, "ann")

        async def answers(route: str) -> str:
            """Return what the server says that it has no such route, or one that it refuses; "" if it serves it."""
            for method in ("GET", "POST", "DELETE"):
                text = (await ann.http.request(method, path(route), json={})).text
                if "is the wrong method" not in text:
                    return text if "is not supported here" in text else ""
            raise AssertionError(f"{route} takes no method")

        problems = {route: await answers(route) for route in surface["routes"]}
        refusals = {route for route, text in problems.items() if text}
        assert {path(route) for route in refusals} <= {path(route) for route in NOT_HERE}
    page = (Path(__file__).parent.parent / "docs" / "running" / "tinker.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (`.*) \|$", page, flags=re.MULTILINE)
    listed = {f"{client}.{name}" for client, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert surface["methods"]["TrainingClient.forward_backward"] == ["forward_backward"]
    refusals -= {"join_sampling_session", "retrieve_futures", "auth/token"}  # which the client is told not to use
    without_route = {"RestClient.whoami"}  # it reads the token that auth/token would return
    assert {name for name, routes in surface["methods"].items() if refusals & set(routes)} | without_route == listed


async def test_the_client_goes_on_after_its_mistakes_and_asks_for_no_more_than_it_may(
    client_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class SlowEngines(FakeEngines):
        async def generate(self, prompt_ids: TokenIds, sampling: Sampling) -> Turn:
            await asyncio.sleep(0.2)
            return await super().generate(prompt_ids, sampling)

    monkeypatch.setattr("tests.test_tinker.FakeEngines", SlowEngines)
    script = Path(__file__).parent / "peers" / "tinker_mistakes.py"
    environment = handed_on({"TINKER_API_KEY": SERVED_KEYS["ann"], "TINKER_TELEMETRY": "0"})
    async with serving(tmp_path, max_concurrent=8, max_tokens_in_flight=4000) as server:
        command = [client_python, script, server.url]
        output = await asyncio.to_thread(subprocess.check_output, command, text=True, env=environment)
    result = json.loads(output.splitlines()[-1])
    assert len(result["errors"]) == 4
    assert (result["outputs"], result["sequences"]) == (3000, 40)


@pytest.mark.parametrize("kinds", [("supervised", "rl"), ("dpo", "distillation")])
def test_two_tenants_run_the_cookbooks_loops(
    client_python: Path, tiny_model: Path, tmp_path: Path, commands: list[Command], kinds: tuple[str, str]
):
    _, url = serve(commands, tiny_model, tmp_path / "out")
    loops = list[Command]()
    for kind, key in zip(kinds, KEYS, strict=False):
        arguments = (kind, str(tiny_model), url, str(tmp_path / kind), str(LOOP_STEPS[kind]))
        loops.append(client(commands, client_python, "tinker_loops.py", *arguments, key=key))
    for loop in loops:
        assert loop.end(timeout_s=600) == 0, loop.output
        assert "raining completed successfully" in loop.output
    usage = json.loads((tmp_path / "out" / "usage.json").read_text())
    assert all(usage[key]["trained_tokens"] > 0 for key in "ab")
    if "supervised" in kinds:
        lines = (tmp_path / "supervised" / "log" / "metrics.jsonl").read_text().splitlines()
        losses = [row["train_mean_nll"] for row in map(json.loads, lines) if "train_mean_nll" in row]
        assert len(losses) == LOOP_STEPS["supervised"]
        # An epoch of four steps has all rows, so the first and the last are of the same ones. The head, which has no
        # adapter, leaves little room: the mean falls from 10.5, where ln 49152 = 10.8 is that of a guess, to 10.0.
        assert sum(losses[-4:]) / 4 < sum(losses[:4]) / 4 - 0.3, losses
