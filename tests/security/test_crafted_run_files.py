"""Crafted files of a run folder: they are gone over, or refused with a clear error, and never end in a stack trace."""

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from forge_rl.data.mixture import Mixture
from forge_rl.data.task_stream import ResumableTaskStream
from forge_rl.errors import CheckpointError, ConfigError, ForgeError, TaskError
from forge_rl.metrics import RunInfo
from forge_rl.metrics.boards import WandbSink
from forge_rl.metrics.sinks import EpisodeSink, EventSink, JSONLSink
from forge_rl.metrics.trace import Trace
from forge_rl.run.records.run_dir import choose_folder, prepare_folder
from tests.staged_checkpoints import Parts, checkpointer_of, save
from tests.test_run_dir import Config

NONSENSE = {
    "deep": b"[" * 200_000 + b"\n",
    "deep in a step": b'{"step": 1, "a": ' + b"[" * 200_000 + b"\n{}\n",
    "list": b"[]\n[]\n",
    "no text": b"\xff\xfe\n\xff\n",
    "zeros": bytes(1000) + b"\n",
    "huge number": b'{"step": 1, "a": 1' + b"0" * 400 + b"}\n",
    "huge step": b'{"step": 1' + b"0" * 5000 + b"}\n{}\n",
    "other types": b'{"step": 1, "a": "x", "b": [], "c": true}\n',
    "nothing": b"",
}
nonsense = pytest.mark.parametrize("content", NONSENSE.values(), ids=NONSENSE)


def fails_clearly(action: Callable[[], object]) -> None:
    """Run what may fail with an error for the user, and with no other."""
    with contextlib.suppress(ForgeError):
        action()


@nonsense
@pytest.mark.parametrize("sink", [JSONLSink, EpisodeSink, EventSink])
def test_a_log_of_nonsense_is_refused_or_gone_over(sink: Callable[[Path], Any], content: bytes, tmp_path: Path):
    (tmp_path / "log.jsonl").write_bytes(content)

    def resume() -> None:
        log = sink(tmp_path / "log.jsonl")
        log.start(RunInfo(recipe="grpo", model="m", folder=tmp_path, steps=3, step=1))
        log.log(2, {"loss": 0.5})
        log.close()

    fails_clearly(resume)


@pytest.mark.parametrize(
    "event", [*NONSENSE.values(), b'{"ph": "X", "ts": 1, "dur": "x"}', b'{"ph": "b", "ts": 1, "id": "x"}']
)
def test_a_trace_of_nonsense_is_refused_or_cut(event: bytes, tmp_path: Path):
    trace = Trace(tmp_path / "trace.json")
    trace.counter("queue", 1)
    trace.close()
    content = (tmp_path / "trace.json").read_bytes()
    (tmp_path / "trace.json").write_bytes(content.removesuffix(b"\n]\n") + b",\n" + event + b",\n")
    fails_clearly(lambda: Trace(tmp_path / "trace.json").close())


@nonsense
@pytest.mark.parametrize("name", ["config.json", "versions.json", "summary.json"])
def test_settings_of_nonsense_are_refused_or_written_anew(name: str, content: bytes, tmp_path: Path):
    prepare_folder(tmp_path / "run", Config())
    (tmp_path / "run" / name).write_bytes(content)
    fails_clearly(lambda: choose_folder(Config(steps=9), "grpo", tmp_path / "run"))
    if name == "config.json" and not content.startswith(b"{"):
        with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
            choose_folder(Config(), "grpo", tmp_path / "run")


@pytest.mark.parametrize(
    "content",
    [
        *(NONSENSE[name] for name in ("deep", "list", "no text", "nothing")),
        *({"rollouts": rollouts} for rollouts in (None, [], "x")),
        *({"scores": scores} for scores in ([], {"x": 1}, {"1": "x"}, {"1": []}, {"1": 10**400})),
        *({"seconds": "x"}, {"updates": 7}, {"updates": []}),
        *({"live": live} for live in ([], "x", {}, {"given": {}, "schedule": {}, "reward": 3})),
    ],
    ids=repr,
)
async def test_a_controllers_state_of_nonsense_is_refused(content: bytes | dict[str, object], tmp_path: Path):
    checkpointer = checkpointer_of(Parts(), tmp_path)
    saved = await save(checkpointer)
    path = saved.folder / "controller.json"
    state = json.loads(path.read_text())
    path.write_bytes(json.dumps(state | content).encode() if isinstance(content, dict) else content)
    with pytest.raises(CheckpointError, match=r"controller\.json|training state of 0 updates") as caught:
        await checkpointer.resume(saved)
    assert f"delete {saved.folder}" in caught.value.hint


class OneSource:
    """Stands for a source of tasks."""

    def state(self) -> dict[str, object]:
        return {}

    def restore(self, state: dict[str, object]) -> None:
        assert isinstance(state, dict)


@pytest.mark.parametrize(
    ("changed", "consumed"),
    [
        ({}, [1]),
        ({}, [["a", "b", "c"]]),
        ({}, None),
        ({"weights": {"one": "x"}}, []),
        ({"owed": {"one": []}}, []),
        ({"sources": {"one": []}}, []),
        ({"sources": []}, []),
    ],
)
def test_a_place_in_the_tasks_that_is_nonsense_is_refused(changed: dict[str, object], consumed: Any):
    stream = ResumableTaskStream(Mixture({"one": cast(Any, OneSource())}))
    state = stream.state()
    stream.restore(state, [["one", "task"]])
    with pytest.raises(TaskError) as caught:
        stream.restore(state | changed, consumed)
    assert caught.value.hint


@pytest.mark.parametrize("content", [b"../../elsewhere\n", b"\xff", b"", b"a/b", b"12345678\n12345678"])
def test_a_wandb_id_that_is_none_of_ours_is_made_anew(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    requests: list[dict[str, Any]] = []
    wandb = type("Wandb", (), {"init": lambda **options: requests.append(options)})
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (tmp_path / "wandb_run_id").write_bytes(content)
    for _ in range(2):
        WandbSink("papers").start(RunInfo(recipe="grpo", model="m", folder=tmp_path, steps=3, step=1))
    assert requests[0]["id"] == requests[1]["id"]
    assert len(requests[0]["id"]) == 8
    assert requests[0]["id"].isalnum()
