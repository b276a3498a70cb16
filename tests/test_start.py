"""The start of a run and its end, with stand-ins for the services: what was started is stopped, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from forge_rl.algorithms.user_loss import call_loss
from forge_rl.errors import CheckpointError, ConfigError, LossError, ModelError, RunStopped, ServiceError, TaskError
from forge_rl.flags.user_code import load
from forge_rl.rollout.evaluation import EvalConfig
from forge_rl.run.start import assembly
from forge_rl.run.start import services as services_module
from forge_rl.run.start.checks import _evaluation_sets
from forge_rl.run.start.ending import Ending
from forge_rl.services.completion import DraftCounts
from forge_rl.services.non_finite import NonFiniteTokens
from forge_rl.services.teachers_config import TeachersConfig
from forge_rl.services.weight_store_config import WeightStoreConfig
from forge_rl.system.listeners import Listeners
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Sampling
from recipes import distill
from recipes.grpo import Config, start
from tests.tiny import bundled_folder

NAMES = {"trainer": "Trainer", "generator": "Generator", "weights": "WeightStore", "reward": "RewardService"}
NAMES["environment"] = "Environment"


class Handle:
    """Stands for the handle of any service."""

    choice = "nowhere"
    alive = True
    busy_s = 0.0
    version = updates = parameters = 0
    lr = 1e-5
    dtype = "float32"
    sampling = Sampling(max_tokens=4)
    function = None
    description = ""
    leaves = replicas = 1
    non_finite = NonFiniteTokens()
    failed_kernels: Mapping[str, str] = {"norms": "it deviates"}

    def __init__(self, name: str, stopped: list[str]) -> None:
        self.name = name
        self.stopped = stopped
        self.listeners = Listeners[[]]()
        self.replaced = Listeners[[]]()

    def engines(self) -> dict[int, int]:
        return {}

    def try_on(self, samples: object) -> None:
        """Nothing replaces the reward."""

    def drain_busy_s(self) -> list[float]:
        return []

    def drain_drafts(self) -> DraftCounts:
        return DraftCounts()

    async def publish(self, store: object, *, dtype: str) -> int:
        return 0

    async def load(self, store: object, version: int) -> int:
        return version

    async def wait_idle(self) -> int:
        return self.updates

    async def stop(self) -> None:
        self.stopped.append(self.name)


@functools.cache
def read_tokenizer(parse_control_tokens: bool) -> Tokenizer:
    return Tokenizer(bundled_folder(), parse_control_tokens=parse_control_tokens)


def shared_tokenizer(folder: Path, *, parse_control_tokens: bool, template_args: Mapping[str, object]) -> Tokenizer:
    """The bundled model's tokenizer, which takes most of a second to read."""
    assert (folder, template_args) == (bundled_folder(), {})
    return read_tokenizer(parse_control_tokens)


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], dict[str, Any]]:
    """Services that start at once: those that were stopped, and what happens instead of a start, by name."""
    stopped: list[str] = []
    instead: dict[str, Any] = {}

    def stage(name: str) -> None:
        async def begin(*_: object, **__: object) -> Handle:
            await asyncio.sleep(0)
            if name in instead:
                await instead[name]()
            return Handle(name, stopped)

        monkeypatch.setattr(getattr(services_module, NAMES[name]), "start", begin)

    for name in NAMES:
        stage(name)
    monkeypatch.setattr(assembly, "Tokenizer", shared_tokenizer)
    return stopped, instead


def config_of(out: Path) -> Config:
    return Config(
        out=out,
        display="none",
        tasks=("chain_sum",),
        evaluation=EvalConfig(every=0),
        weights=WeightStoreConfig(probes=0),
        checkpoint_every=0,
    )


def events(out: Path) -> str:
    return (out / "events.jsonl").read_text()


async def fail() -> None:
    await asyncio.sleep(0.01)
    raise ServiceError("no room", service="weights")


def test_an_open_run_is_complete_and_its_close_stops_everything_once(
    staged: tuple[list[str], dict[str, Any]], tmp_path: Path
) -> None:
    stopped, _ = staged
    with asyncio.Runner() as line:
        run = line.run(start(config_of(tmp_path)).open())
        parts = (run.trainer, run.generator, run.weights, run.reward, run.environment)
        assert [getattr(part, "name", None) for part in parts] == list(NAMES)
        assert (run.step, run.scores, run.last_batch, list(run.mixture)) == (0, {}, None, ["chain_sum"])
        assert run.rollouts._scheduler._ahead_requests == config_of(tmp_path).generator.ahead_requests
        assert stopped == []
        line.run(run.close())
        line.run(run.close())
    assert sorted(stopped) == sorted(NAMES)
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "stopped"
    assert "without its GPU kernel 'norms', more slowly: it deviates" in events(tmp_path)


def test_bad_task_files_are_refused_before_anything_starts(
    staged: tuple[list[str], dict[str, Any]], tmp_path: Path
) -> None:
    rows = [{"question": f"What is {n}?", "answer": str(n)} for n in range(12)]
    for name, part in (("train", [*rows[:9], {"question": "long " * 2000}, rows[2]]), ("test", rows[9:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    tasks, eval_tasks = (f"own={tmp_path}/train.jsonl",), (f"mine={tmp_path}/test.jsonl",)
    config = replace(config_of(tmp_path / "run"), tasks=tasks, eval_tasks=eval_tasks, evaluation=EvalConfig())

    async def check() -> None:
        async with start(config) as run:
            assert list(run.mixture) == ["own"]
            evaluated = run.mixture.eval_sets(100)
            assert sorted(str(task.truth["answer"]) for task in evaluated["mine"]) == ["10", "11", "9"]
            assert len({run.mixture.draw_from("own").id for _ in range(40)}) == 9

    asyncio.run(check())
    assert "own: 11 rows; 1 left out, as their prompts are longer than 1,008 tokens; 1 duplicates" in events(
        tmp_path / "run"
    )
    assert "evaluation mine: 3 rows" in events(tmp_path / "run")

    (tmp_path / "train.jsonl").write_text('{"question": 5}\n')
    with pytest.raises(TaskError, match="line 1: column 'question' is not text: 5"):
        asyncio.run(check())
    assert sorted(staged[0]) == sorted(NAMES), "nothing was started the second time"


@pytest.mark.parametrize("parses", [False, True])
async def test_control_tokens_in_messages_are_parsed_only_if_asked_for(
    staged: tuple[list[str], dict[str, Any]], tmp_path: Path, parses: bool
) -> None:
    async with start(replace(config_of(tmp_path), parse_control_tokens=parses)) as run:
        assert run.rollouts._dispatcher.tokenizer.parse_control_tokens is parses


async def test_a_run_that_reached_its_steps_leaves_a_summary(
    staged: tuple[list[str], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start(config_of(tmp_path)) as run:
        run.scores.update({0: 0.25, 10: 0.5})
        monkeypatch.setattr(run._checkpointer, "step", 10)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.pop("seconds") >= 0
    scores = {"score_before": 0.25, "score_after": 0.5}
    assert summary == {"outcome": "finished", **scores, "best": None, "steps": 10, "faults": []}


def test_a_failed_start_stops_the_others_and_frees_the_folder(
    staged: tuple[list[str], dict[str, Any]], tmp_path: Path
) -> None:
    stopped, instead = staged

    async def check() -> None:
        async with start(config_of(tmp_path)):
            raise AssertionError("it started")

    instead["weights"] = fail
    with pytest.raises(ServiceError, match="no room"):
        asyncio.run(check())
    assert sorted(stopped) == sorted({*NAMES} - {"weights"})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["outcome"], summary["cause"], summary["steps"]) == ("failed", "weights: no room", 0)
    instead.clear()
    with pytest.raises(AssertionError, match="it started"):
        asyncio.run(check())


def test_a_start_that_fails_leaves_the_run_what_it_was(
    staged: tuple[list[str], dict[str, Any]], tmp_path: Path
) -> None:
    async def run_for(steps: int, **changes: Any) -> None:
        async with start(replace(config_of(tmp_path), steps=steps, **changes)) as run:
            run._checkpointer.step = steps

    asyncio.run(run_for(1))
    names = ("config.json", "versions.json", "models.json", "summary.json")
    before = {name: (tmp_path / name).read_bytes() for name in names if (tmp_path / name).exists()}
    assert json.loads(before["summary.json"])["outcome"] == "finished"
    staged[1]["weights"] = fail
    for steps, changes in ((2, {}), (2, {"group_size": 4, "force_continue": True})):
        with pytest.raises(ServiceError, match="no room"):
            asyncio.run(run_for(steps, **changes))
        assert {name: (tmp_path / name).read_bytes() for name in before} == before
    staged[1].clear()
    with pytest.raises(ConfigError, match="--prometheus cannot listen"):
        asyncio.run(run_for(2, prometheus="203.0.113.7:0"))
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    asyncio.run(run_for(2))
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 2


async def test_a_model_that_cannot_be_trained_is_refused_before_anything_starts(
    staged: tuple[list[str], dict[str, Any]], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    save_file({"weight": torch.zeros(1)}, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps({"model_type": "mamba"}))

    async def check() -> None:
        async with start(replace(config_of(tmp_path / "run"), model=str(model))):
            raise AssertionError("it started")

    with pytest.raises(ModelError, match="a 'mamba' does without transformers' attention"):
        await check()
    assert staged[0] == [], "nothing was started that had to be stopped"


def test_an_environment_that_runs_code_reward_answers_is_refused(tmp_path: Path) -> None:
    config = replace(config_of(tmp_path / "run"), rewards=("unit_tests", "length:tokens=9*0.1"))
    with pytest.raises(ConfigError, match="set --env python:tool=true"):
        start(replace(config, env="python"))
    start(replace(config, env="python:tool=true"))


@pytest.mark.parametrize("when", ["while a service starts", "in the body"])
async def test_ctrl_c_says_that_it_stops_and_stops_what_was_started(
    when: str, staged: tuple[list[str], dict[str, Any]], tmp_path: Path
) -> None:
    stopped, instead = staged
    waiting = asyncio.Event()

    async def never() -> None:
        waiting.set()
        await asyncio.Event().wait()

    async def body() -> None:
        async with start(config_of(tmp_path)):
            await never()

    if when == "while a service starts":
        instead["generator"] = never
    running, signal = asyncio.create_task(body()), asyncio.create_task(waiting.wait())
    await asyncio.wait({running, signal}, return_when=asyncio.FIRST_COMPLETED)
    assert not running.done(), f"the run ended by itself: {running.exception()!r}"
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert "a second signal stops immediately" in events(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "stopped"
    assert sorted(stopped) == sorted({*NAMES} - {*instead})


@pytest.mark.parametrize("cause", ["signal", "Run.stop"])
async def test_a_stop_that_cannot_save_leaves_a_summary_and_stays_a_stop(
    cause: str, staged: tuple[list[str], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_: Ending) -> None:
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(Ending, "save", refuse)

    async def body() -> None:
        async with start(config_of(tmp_path)):
            raise asyncio.CancelledError if cause == "signal" else RunStopped("by the user")

    with pytest.raises(asyncio.CancelledError if cause == "signal" else CheckpointError):
        await body()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["outcome"], summary["cause"]) == ("failed", "step 0 could not be saved: the disk is full")
    assert ("step 0 could not be saved" in events(tmp_path)) == (cause == "signal"), "else the error says it"
    assert sorted(staged[0]) == sorted(NAMES)


@pytest.mark.parametrize("error", [ServiceError("its own", service="reward"), asyncio.CancelledError("a signal"), None])
async def test_a_service_that_cannot_stop_does_not_hide_why_the_run_ended(
    error: BaseException | None,
    staged: tuple[list[str], dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def stop(handle: Handle) -> None:
        handle.stopped.append(handle.name)
        if handle.name == "weights":
            raise ServiceError("it hangs", service="weights")

    monkeypatch.setattr(Handle, "stop", stop)

    async def body() -> None:
        async with start(config_of(tmp_path)):
            if error is not None:
                raise error

    with pytest.raises(ServiceError if error is None else type(error), match=str(error or "it hangs")) as caught:
        await body()
    assert error is None or caught.value.__notes__[-1] == "a service could not be stopped: weights: it hangs"
    assert sorted(staged[0]) == sorted(NAMES)


BAD_LOSS = """import forge_rl as rl


class Bad(rl.Loss):
    def __call__(self, inputs):
        return inputs.no_such_field
"""


async def test_a_loss_that_fails_is_recorded_with_the_users_line(
    staged: tuple[list[str], dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "badloss.py").write_text(BAD_LOSS)
    loss: Any = load(f"{tmp_path}/badloss.py:Bad", "--loss")

    async def check() -> None:
        async with start(config_of(tmp_path / "run")):
            try:
                call_loss(loss(), None)  # type: ignore[arg-type]  # as a rank of the trainer does
            except LossError as error:
                raise pickle.loads(pickle.dumps(error)) from None

    with pytest.raises(LossError):
        await check()
    (ended,) = [json.loads(line) for line in events(tmp_path / "run").splitlines() if "ended by" in line]
    assert "the loss raised AttributeError" in ended["text"]
    assert f"({tmp_path}/badloss.py:6)" in ended["text"]
    assert 'badloss.py", line 6, in __call__' in ended["text"], "the trace, which other processes' errors lose"


async def test_a_fatal_fault_ends_the_body_with_its_name(
    staged: tuple[list[str], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forge_rl.runtime.faults import Faults

    installations: list[Faults] = []
    monkeypatch.setattr(Faults, "install", lambda faults: installations.append(faults))

    async def check() -> None:
        async with start(config_of(tmp_path)):
            installations[0].record("reward", 0, "its process was ended by SIGSEGV")
            await asyncio.Event().wait()

    with pytest.raises(ServiceError, match=r"reward.*SIGSEGV"):
        await check()
    assert "stopping" not in events(tmp_path)
    assert sorted(staged[0]) == sorted(NAMES)


async def test_a_source_without_a_teacher_is_refused_at_the_start(
    staged: tuple[list[str], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, _ = staged
    arguments: list[Any] = []

    async def begin(config: object, folders: object, *_: object, policy: asyncio.Task[Any], **__: object) -> Handle:
        arguments.extend((config, folders, (await policy).name))
        return Handle("teachers", stopped)

    monkeypatch.setattr(services_module.Teachers, "start", begin)

    def config(*models: str) -> distill.Config:
        settings = {
            field: getattr(config_of(tmp_path), field) for field in ("out", "display", "tasks", "evaluation", "weights")
        }
        return distill.Config(**settings, checkpoint_every=0, teachers=TeachersConfig(models=models))

    async def check() -> None:
        for models, message in (((), "no teacher is given"), (("other=policy",), "no source is called other")):
            with pytest.raises(ConfigError, match=message):
                await distill.start(config(*models)).open()
        assert not (tmp_path / "events.jsonl").exists()
        async with distill.start(teaching := config("policy")) as run:
            assert cast(Any, run.teachers).name == "teachers"
            assert arguments == [teaching.teachers, {}, "generator"]
        async with start(config_of(tmp_path / "other")) as run:
            with pytest.raises(ConfigError, match="the run has no teachers"):
                _ = run.teachers

    await check()
    assert stopped.count("teachers") == 1


async def test_an_unknown_tool_parser_is_refused_before_anything_starts(
    staged: tuple[list[str], dict[str, Any]], tmp_path: Path
) -> None:
    async def check() -> None:
        async with start(replace(config_of(tmp_path), tool_parser="hermez")):
            raise AssertionError("it started")

    with pytest.raises(ConfigError, match=r"(?s)no tool parser 'hermez'.*set --tool-parser to one of .*hermes"):
        await check()
    assert staged[0] == [], "nothing was started that would have to be stopped"


@pytest.mark.parametrize("tools", [False, True])
async def test_a_tool_parser_is_refused_where_no_task_has_tools(
    tools: bool, staged: tuple[list[str], dict[str, Any]], tmp_path: Path
) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    rows = [{"question": f"{n} + 1?", "answer": n + 1} | ({"tools": [tool]} if tools else {}) for n in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for tasks in ((str(tmp_path / "rows.jsonl"),), *([] if tools else [("chain_sum",)])):
        config = replace(config_of(tmp_path / f"run of {len(tasks[0])}"), tasks=tasks, tool_parser="hermes")
        refused = pytest.raises(ConfigError, match="--tool-parser has no effect, as no task has tools")
        with contextlib.nullcontext() if tools else refused:
            async with start(config):
                pass
        assert bool(staged[0]) == tools


@pytest.mark.parametrize(("rows", "every", "warning_count"), [(2, 1, 1), (2, 0, 0), (100, 1, 0)])
def test_a_file_of_too_few_tasks_to_hold_some_out_is_told(
    rows: int, every: int, warning_count: int, tmp_path: Path
) -> None:
    path, warnings = tmp_path / "rows.jsonl", list[str]()
    path.write_text("".join(f'{{"question": "What is {row} + 1?", "answer": "{row + 1}"}}\n' for row in range(rows)))
    config = Config(tasks=(str(path),), evaluation=EvalConfig(every=every, tasks=1))
    mixture = config.data.build(config.tasks, seed=0)
    sets = _evaluation_sets(config, mixture, None, warnings.append)
    assert ["nothing is evaluated, as no task is held out" in text for text in warnings] == [True] * warning_count
    assert bool(sets) == (every > 0 and not warning_count)
