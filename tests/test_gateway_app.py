"""The gateway's program: signals end it cleanly. What it serves of a real engine: test_generator.py."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from apps.gateway import KEY_VARIABLE, Config, _key, main
from forge_rl.errors import ConfigError
from forge_rl.flags.command_line import parse
from forge_rl.services.generator import Generator
from tests.conftest import ROOT
from tests.security.other_user import can_make_networks

ENGINE = Generator.Config(dtype="float32", max_model_len=256, kv_cache_gib=0.25)
HI: Any = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--agent-deadline-s 5", "--agent-deadline-s has no effect: it is of the sessions of a run's agents"),
        ("--generator.temperature 0.5", "--generator.temperature has no effect: requests set"),
        ("--generator.max-replicas 3", "--generator.max-replicas has no effect: no trainer lends devices"),
        ("--max-adapters 3", "--max-adapters has no effect: no adapters are served"),
        ("--max-adapters 3 --adapter-folders .", ""),
        ("--generator.max-tokens 99 --max-concurrent 9 --tool-parser hermes", ""),
    ],
)
def test_flags_without_an_effect_are_refused_by_name(flags: str, message: str) -> None:
    config = parse(Config, "gateway", flags.split())
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        config.check_effects()


def test_a_key_of_the_environment_is_taken_out_of_it_and_refused_with_a_line_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    assert _key(Config(out=tmp_path)) == ("secret", f"${KEY_VARIABLE}")
    assert KEY_VARIABLE not in os.environ
    monkeypatch.setenv(KEY_VARIABLE, "secret\n")  # as a file of secrets gives it; no client could send it
    with pytest.raises(ConfigError, match=f"{KEY_VARIABLE} starts or ends with white space"):
        _key(Config(out=tmp_path))


@pytest.mark.long
@pytest.mark.parametrize(
    ("sent", "status", "isolation"),
    [(signal.SIGTERM, 143, []), (signal.SIGINT, 130, ["--private-network", "--strict-isolation"])],
)
def test_a_signal_ends_the_server_with_a_request_in_flight(
    sent: signal.Signals, status: int, isolation: list[str], tiny_model: Path, tmp_path: Path, nothing_left: None
) -> None:
    if isolation and not can_make_networks():
        pytest.skip("this machine does not let its users make networks of their own")
    run = tmp_path / "tiny"
    shutil.copytree(tiny_model, run / "checkpoints" / "step-000001" / "model")
    command = [sys.executable, "-m", "apps.gateway", "--model", str(run), "--port", "0", "--out", str(tmp_path)]
    flags = [*isolation, "--generator.max-model-len", "256", "--generator.kv-cache-gib", "0.25"]
    environment = {**os.environ, "FORGE_RL_API_KEY": "secret"}
    server = subprocess.Popen([*command, *flags], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        url = next(line.split()[-1] for line in server.stdout if line.startswith("serving tiny at "))
        printed = ""
        while "Ctrl-C" not in printed:
            printed += server.stdout.readline()
        assert '-H @<(echo "authorization: Bearer $FORGE_RL_API_KEY")' in printed
        assert "secret" not in printed
        assert httpx.get(f"{url}/models").status_code == 401
        with OpenAI(base_url=url, api_key="secret", max_retries=0) as client:
            stream = client.chat.completions.create(model="tiny", messages=[HI], stream=True, max_tokens=200)
            next(stream)
            server.send_signal(sent)
            assert server.wait(60) == status
    finally:
        server.kill()
        server.wait()


async def test_a_port_in_use_is_told_before_engines_start(tiny_model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}: Address already in use"):
            await main(Config(model=str(tiny_model), port=port, generator=ENGINE, out=tmp_path))
        assert not (tmp_path / "logs").exists()
