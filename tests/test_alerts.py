"""Alerts and the Prometheus endpoint: what a log tells a command, a URL and a scraper, and what their failures cost."""

from __future__ import annotations

import json
import socket
import stat
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from forge_rl.errors import ConfigError
from forge_rl.metrics import Display, EventSink, Histogram, PhaseClock, RunInfo, RunLog, Sink, alerts
from forge_rl.metrics.alerts import Alerts, AlertSink
from forge_rl.metrics.prometheus import PrometheusSink
from forge_rl.run.endpoints import address_of, is_loopback, listen
from forge_rl.run.records.run_dir import as_flat_json
from forge_rl.run.run_config import RunConfig
from forge_rl.runtime.isolation import Isolation
from tests.processes import lives

CUT = {"episodes/truncated": 0.9}
WELL = {"episodes/truncated": 0.1}


@contextmanager
def log_to(folder: Path, *sinks: Sink) -> Iterator[RunLog]:
    log = RunLog(Display("none", phase_clock=PhaseClock()), EventSink(folder / "events.jsonl"), *sinks)
    log.start(RunInfo(recipe="grpo", model="tiny", folder=folder, steps=9))
    try:
        yield log
    finally:
        log.close()


def script(folder: Path, text: str) -> str:
    """A command that runs a Python script in a folder."""
    path = folder / "notify.py"
    path.write_text(f"#!{sys.executable}\nimport os, sys, time\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def events(folder: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (folder / "events.jsonl").read_text().splitlines()]


def run_badly(log: RunLog) -> None:
    """Begin an advisory, end it, and fail."""
    for step in (1, 2, 3):
        log.log(step, CUT)
    log.log(4, WELL)
    log.end("failed", "trainer: https://me:hunter22@host said s3cr3t-token")


def test_a_command_gets_each_advisory_and_the_end_as_json_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "s3cr3t-token")
    out = tmp_path / "alerts"
    command = script(tmp_path, f"open({str(out)!r}, 'a').write(sys.stdin.read() + '\\n')\nassert len(sys.argv) == 2")
    with log_to(tmp_path, AlertSink(Alerts(command=f"{command} 'two words'"))) as log:
        run_badly(log)
    alerts_written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [alert["event"] for alert in alerts_written] == ["advisory_began", "advisory_ended", "run_failed"]
    assert (alerts_written[0]["kind"], alerts_written[0]["since"], alerts_written[0]["step"]) == ("truncated", 1, 3)
    assert "--generator.max-tokens" in alerts_written[0]["text"]
    assert (alerts_written[2]["run"], alerts_written[2]["recipe"], alerts_written[2]["text"]) == (
        tmp_path.name,
        "grpo",
        "trainer: https://host said ***",
    )
    assert not any("alert" in text for text in events(tmp_path))


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"
    hangs = f"open({str(pids)!r}, 'a').write(f'{{os.fork() or os.getpid()}}\\n')\ntime.sleep(60)"
    monkeypatch.setattr(alerts, "_DEADLINE_S", 3.0)
    sink = AlertSink(Alerts(command=script(tmp_path, hangs)))
    with log_to(tmp_path, sink) as log:
        for step in (1, 2, 3):
            log.log(step, CUT)
        assert not sink._problem, "a step has waited"
        while not sink._problem:
            time.sleep(0.05)
        log.log(4, CUT)
        log.log(5, CUT)
    assert any("--alerts.command: it took longer than 3 s" in text for text in events(tmp_path))
    assert not any(lives(int(pid)) for pid in pids.read_text().split())


def test_a_command_that_fails_is_a_warning_and_too_many_alerts_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "_MOST_PER_HOUR", 1)
    out = tmp_path / "alerts"
    fails = f"open({str(out)!r}, 'a').write(sys.stdin.read() + '\\n')\nsys.exit('no such\\x1b[2J room')"
    with log_to(tmp_path, AlertSink(Alerts(command=script(tmp_path, fails)))) as log:
        run_badly(log)
    alerts_written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [alert["event"] for alert in alerts_written] == ["advisory_began", "run_failed"]
    assert alerts_written[1]["left_out"] == 1
    assert any("exit status 1: no such" in text for text in events(tmp_path))


@contextmanager
def receiver(status: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that keeps what is POSTed to it."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(status)
            self.send_header("location", "http://127.0.0.1:1/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook/secret", requests
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(("status", "warning"), [(204, ""), (302, "status 302"), (500, "status 500")])
def test_a_url_gets_the_same_and_its_errors_are_warnings_without_it(tmp_path: Path, status: int, warning: str) -> None:
    with receiver(status) as (url, requests), log_to(tmp_path, AlertSink(Alerts(webhook_url=url))) as log:
        run_badly(log)
    assert [request["event"] for request in requests] == ["advisory_began", "advisory_ended", "run_failed"]
    warnings = [text for text in events(tmp_path) if "--alerts.webhook-url" in text]
    assert bool(warnings) == bool(warning)
    assert all(warning in text and "hook" not in text.replace("webhook", "") for text in warnings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"command": "no-such-program --now"}, "'no-such-program', which is not an executable file"),
        ({"command": "'open"}, "is not a command line"),
        ({"webhook_url": "http://["}, "not a URL of http"),
        ({"webhook_url": "file:///etc/passwd"}, "not a URL of http"),
    ],
)
def test_alerts_that_cannot_work_are_refused_at_the_start(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Alerts(**settings)


def test_the_url_is_not_kept_in_the_run_folder_and_needs_a_network() -> None:
    config = RunConfig(alerts=Alerts(webhook_url="https://host/hook/secret"))
    assert "secret" not in json.dumps(as_flat_json(config))
    with pytest.raises(ConfigError, match="--private-network keeps from the run"):
        RunConfig(alerts=Alerts(webhook_url="https://host/x"), isolation=Isolation(private_network=True))


def scrape(listener: socket.socket) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def test_a_scraper_gets_metrics_advisories_and_state_of_a_live_run(tmp_path: Path) -> None:
    listener = listen("0")
    address = listener.getsockname()
    with log_to(tmp_path, PrometheusSink(listener, phase=lambda: "train", paused=lambda: True)) as log:
        for step in (1, 2, 3):
            log.log(step, CUT | {'reward/a"b\n': step / 4, "lag/hist": Histogram({0: 1}), "loss": float("nan")})
        log.event("a fault", "fault")
        page = scrape(listener)
        for line in (
            f'forge_rl_info{{folder="{tmp_path}",model="tiny",recipe="grpo"}} 1.0',
            "forge_rl_step 3.0",
            "forge_rl_steps 9.0",
            'forge_rl_phase{phase="train"} 1.0',
            "forge_rl_paused 1.0",
            "forge_rl_warnings_total 1.0",
            "forge_rl_faults_total 1.0",
            'forge_rl_advisory{kind="truncated"} 1.0',
            'forge_rl_metric{name="episodes/truncated"} 0.9',
            'forge_rl_metric{name="reward/a\\"b\\n"} 0.75',
        ):
            assert line in page.splitlines(), page
        assert "lag/hist" not in page
        assert 'name="loss"' not in page
        log.log(4, WELL)
        assert "forge_rl_advisory{" not in scrape(listener)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_clients_that_say_nothing_do_not_keep_a_scraper_out_for_long(tmp_path: Path) -> None:
    listener = listen("127.0.0.1:0")
    with log_to(tmp_path, PrometheusSink(listener)):
        silent = [socket.create_connection(listener.getsockname()) for _ in range(40)]
        until = time.monotonic() + 30
        while True:
            try:
                assert "forge_rl_step 0.0" in scrape(listener)
                break
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.5)
        for connection in silent:
            connection.close()


def test_an_address_is_a_port_of_this_machine_unless_a_host_is_named() -> None:
    assert address_of("9400") == address_of(":9400") == ("127.0.0.1", 9400)
    assert address_of("[::1]:9400") == ("::1", 9400)
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "host")] == [True] * 3 + [
        False
    ] * 2
    for text in ("", "host", "host:x", "1:70000", "1:-2", "1:²"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            address_of(text)
    with listen("0") as listener, pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1 port"):
        listen(str(listener.getsockname()[1]))
