"""Runs on given examples: which tasks make which batch, also after a stop; the loss as a score; what does not start."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from forge_rl.algorithms.components import CrossEntropy
from forge_rl.algorithms.preferences import BradleyTerry
from forge_rl.data.mixture import Mixture, as_mixture
from forge_rl.data.task_stream import ResumableTaskStream
from forge_rl.envs.single_turn import SingleTurn
from forge_rl.errors import ConfigError, ReplicaError, TaskError
from forge_rl.metrics import batch_metrics, reduce
from forge_rl.packing.rows import PackedBatch
from forge_rl.rewards.reward_flag import build_reward
from forge_rl.rollout.evaluation import EvalConfig
from forge_rl.rollout.examples import ExampleLengths, ExampleMaker, Examples
from forge_rl.run.evaluation.example_evaluation import ExampleEvaluations
from forge_rl.run.example_config import ExampleConfig
from forge_rl.run.live.control import Control
from forge_rl.run.run import Run
from forge_rl.run.run_config import RunConfig
from forge_rl.run.start import services as services_module
from forge_rl.run.start.setup import AgentPlayer, Rollouts
from forge_rl.run.start.starting import start, start_examples, start_rollouts
from forge_rl.services.teachers_config import TeachersConfig
from forge_rl.services.trainer import Trainer
from forge_rl.services.trainer_config import CriticConfig
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Batch, Episode, Score, Task, Turn
from tests.fakes import hf_weights, make_model, packed, random_batch
from tests.test_mixture import Counting
from tests.test_start import Handle
from tests.test_titan_train import engine_of, furthest, step

NOBODY = cast(Tokenizer, None)
"""The tokenizer of functions that need none."""


class Numbers(Counting):
    """A source that lets some of its tasks be unusable."""

    max_bad_rows = 0.0


def one(task: Task, tokenizer: Tokenizer) -> list[Episode]:
    """An example whose answer is as long as the task's number; tasks of thirds cannot be used."""
    number = int(task.id)
    if number % 3 == 0:
        raise TaskError(f"{number} is a multiple of three", hint="take another")
    return [Episode(task=task, turns=(Turn.given([1, 2], [3] * number, str(number)),))]


def examples_of(*, share: float = 0.5, longest: int = 1000, make: Any = one, groups: int = 3) -> Examples:
    sources = {name: Numbers(name) for name in "ab"}
    sources["a"].max_bad_rows = sources["b"].max_bad_rows = share
    mixture = Mixture(sources, {"a": 2, "b": 1})
    maker = ExampleMaker(make, NOBODY, longest=longest)
    return Examples(ResumableTaskStream(mixture), mixture.sources, maker, groups=groups)


def ids(batch: Batch) -> list[str]:
    return [f"{group.task.source}{group.task.id}" for group in batch.groups]


def next_ids(examples: Examples) -> list[str]:
    return ids(asyncio.run(examples.next_batch()))


def test_unusable_examples_are_replaced_within_their_source() -> None:
    examples = examples_of()
    first = asyncio.run(examples.next_batch())
    assert ids(first) == ["a1", "a2", "b1"]
    assert [next_ids(examples) for _ in range(2)] == [["a5", "a4", "b2"], ["a8", "a7", "b4"]]
    assert examples.metrics() == {"data/a/skipped": 2.0, "data/b/skipped": 1.0}
    assert [first.version, examples.last and examples.last.version] == [0, 2]
    lengths = {"mean": 4 / 3, "p50": 1.0, "p95": 2.0, "max": 2.0}
    assert batch_metrics(first) == {f"tokens/completion_{name}": length for name, length in lengths.items()}


def test_a_resumed_run_continues_with_the_next_batch() -> None:
    examples, expected = examples_of(), examples_of()
    batches = [next_ids(expected) for _ in range(4)]
    assert next_ids(examples) == batches[0]

    async def stopped() -> dict[str, object]:
        making = asyncio.ensure_future(examples.next_batch())
        await asyncio.sleep(0)  # its tasks are drawn
        state = examples.state()
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        return state

    within = json.loads(json.dumps(asyncio.run(stopped())))
    assert next_ids(examples) == batches[1], "the same process goes on with the tasks that it has drawn"
    for state, left in ((within, batches[1:]), (json.loads(json.dumps(examples.state())), batches[2:])):
        again = examples_of()
        asyncio.run(again.restore(state))
        assert [next_ids(again) for _ in left] == left
        assert again.last is not None
        assert again.last.version == 3
    with pytest.raises(TaskError, match="unexpected contents"):
        asyncio.run(again.restore({"mixture": {}}))


def pair(task: Task, tokenizer: Tokenizer) -> list[Episode]:
    return [*one(task, tokenizer)] * (1 if task.id == "2" else 2)


def sampled(task: Task, tokenizer: Tokenizer) -> list[Episode]:
    turn = Turn(prompt_ids=(1,), token_ids=(2,), logprobs=(0.0,), versions=(0,), text="")
    return [Episode(task=task, turns=(turn,))]


def nothing(task: Task, tokenizer: Tokenizer) -> list[Episode]:
    return []


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"share": 0.0}, TaskError, "a 3: 3 is a multiple of three"),
        (
            {"share": 0.01},
            TaskError,
            r"2 of . tasks of 'a' cannot be used, more than --data.max-bad-rows 0.01; one is ",
        ),
        ({"longest": 4, "share": 0.0}, TaskError, r"a 3: 3 is a multiple|b 4: an example of 5 tokens is longer than a"),
        ({"make": nothing, "share": 0.0}, TaskError, "a 1: it has no tokens to learn"),
        ({"make": pair}, ConfigError, "a 2 has 1 episodes, a 1 has 2"),
        ({"make": sampled}, ConfigError, "claims to be sampled"),
    ],
)
def test_what_cannot_be_trained_on_is_one_clear_message(given: dict[str, Any], error: type, said: str) -> None:
    examples = examples_of(**given)
    with pytest.raises(error, match=said):
        [next_ids(examples) for _ in range(9)]


def test_the_length_of_an_example_is_that_of_the_row_that_it_needs(small_tokenizer: Path) -> None:
    maker = ExampleMaker(one, Tokenizer(small_tokenizer), longest=10)
    lengths = ExampleLengths(maker)
    short, long = Task(id="9", source="a", messages=()), Task(id="10", source="a", messages=())
    with pytest.raises(TaskError, match="multiple of three"):
        lengths.length(short)
    assert lengths.length(long) == 2 + 10 - 1
    assert lengths.too_long(long)
    assert maker.any_length(long).episodes
    with pytest.raises(TaskError, match="an example of 11 tokens is longer than a row of 10"):
        maker.group(long)
    assert "one" in maker.name


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("seq_len", [64, 24])
def test_an_evaluation_has_the_loss_of_an_update_and_makes_none(seq_len: int, tmp_path: Path) -> None:
    make_model(tmp_path)
    engine = engine_of(tmp_path, seq_len=seq_len)
    laid = packed(random_batch(0, vocab=43), seq_len=seq_len, drop_uniform=False)
    before = hf_weights(engine.model)
    found = reduce(engine.evaluate(laid.minibatches, CrossEntropy()))
    assert furthest(before, hf_weights(engine.model)) == 0.0
    # The mean over all trained tokens of the negative logprobs.
    scored = engine.logprobs(laid.rows, temperature=1.0)
    total = -sum(float(each[row.mask].double().sum()) for each, row in zip(scored, laid.rows, strict=True))
    assert found["loss"] == pytest.approx(total / laid.trained_tokens, rel=1e-6)
    assert found["tokens/trained"] == laid.trained_tokens
    trained = reduce(step(engine, laid, loss=CrossEntropy()))
    assert {name: trained[name] for name in found} == pytest.approx(found, rel=1e-6)


@pytest.mark.usefixtures("process_group")
def test_given_tokens_have_no_gap_ratio_or_divergence(tmp_path: Path) -> None:
    make_model(tmp_path)
    engine = engine_of(tmp_path)
    batch = random_batch(0, vocab=43)

    def as_given(episode: Episode) -> Episode:
        turns = (Turn.given(turn.prompt_ids.tolist(), turn.token_ids.tolist(), "") for turn in episode.turns)
        return Episode(task=episode.task, turns=tuple(turns))

    groups = [replace(group, episodes=tuple(map(as_given, group.episodes))) for group in batch.groups]
    found = reduce(step(engine, packed(replace(batch, groups=tuple(groups)), drop_uniform=False), loss=CrossEntropy()))
    assert {name.partition("/")[0] for name in found} == {"loss", "tokens", "entropy", "grad_norm", "lr"}
    assert [name for name in found if name.startswith("loss")] == ["loss"], "one name for one series"


class Scoring(Handle):
    """Stands for the trainer's handle: its losses are 2, 1, 1/2, ..."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__("trainer", [])
        self.config = Trainer.Config()
        self.losses = (2.0 / 2**n for n in range(9))

    scored = None
    layout = Trainer.layout
    _seed = 0

    async def evaluate(self, packed: PackedBatch, loss: object) -> dict[str, float]:
        value = next(self.losses)
        return {"loss": value, "tokens/trained": float(packed.trained_tokens)}


def test_an_evaluation_of_examples_scores_the_negative_loss() -> None:
    warnings: list[str] = []
    maker = ExampleMaker(one, NOBODY, longest=10)
    evaluations = ExampleEvaluations(cast(Any, Scoring()), CrossEntropy(), maker, warn=warnings.append)
    sets = {"held_out": [Task(id=str(n), source="a", messages=()) for n in (1, 3, 4)]}
    results = []
    for at in (0, 5):
        evaluations.start(sets, at, 0)
        assert not evaluations.complete
        asyncio.run(evaluations.finish())
        assert evaluations.complete
        results.append(evaluations.pop(sets, at))
    assert [(each.score, each.tokens, each.step) for each in results] == [(-2.0, 5, 0), (-1.0, 5, 5)]
    assert results[0].metrics == {
        "eval/held_out/loss": 2.0,
        "eval/held_out/perplexity": math.exp(2.0),
        "held_out": -2.0,
    }
    assert warnings == [
        "1 of 3 tasks of the evaluation set held_out cannot be used and are left out; one is a 3: 3 is a multiple of "
        "three"
    ]
    evaluations.start({"held_out": sets["held_out"][1:2], "b": sets["held_out"]}, 6, 0)
    evaluations._packed.clear()
    with pytest.raises(TaskError, match="1 of 1 tasks of the evaluation set held_out cannot be used; one is a 3"):
        asyncio.run(evaluations.finish())


def answered(task: Task, tokenizer: Tokenizer) -> list[Episode]:
    prompt = tokenizer.render(task.messages)
    return [Episode(task=task, turns=(Turn.given(prompt, [5] * int(str(task.truth["answer"])), ""),))]


async def test_a_run_on_examples_starts_nothing_but_the_trainer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = []

    async def begin(*_: object, **given: Any) -> Scoring:
        asked.append(given)
        return Scoring()

    monkeypatch.setattr(services_module.Trainer, "start", begin)
    rows = [{"question": f"{n}?", "answer": str(n)} for n in range(1, 30)]
    config = ExampleConfig(
        out=tmp_path, display="none", checkpoint_every=0, groups_per_batch=2, evaluation=EvalConfig(tasks=3)
    )

    async with start(config, loss=CrossEntropy(), sources=rows, examples=answered) as run:
        assert await run.evaluate() == -2.0
        batch = await run.examples.next_batch()
        assert [len(group.episodes) for group in batch.groups] == [1, 1]
        logged = run.log({"loss": 1.0}, batch)
        assert not {name for name in logged if name.startswith(("reward", "lag", "queue", "rollouts"))}
        assert (run.step, run.scores, run.last_batch) == (1, {0: -2.0}, batch)
        for name in ("rollouts", "generator", "weights", "reward", "environment", "schedule"):
            with pytest.raises(ConfigError, match="given examples"):
                getattr(run, name)
        status = await Control(run, run._live, None, cast(Any, None)).status()
        assert status["rollouts"] == "batch 1: groups 0/2"
        assert (status["reward_mean"], "schedule" in status) == (None, False)
        assert "Run  step 1 of 10" in repr(run)
    assert [(each["model"].reference, each["model"].values) for each in asked] == [(False, False)]


async def test_a_trainer_that_dies_in_the_first_evaluation_is_restarted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Dying(Scoring):
        restarts = 0

        async def evaluate(self, packed: PackedBatch, loss: object) -> dict[str, float]:
            if not self.restarts:
                raise ReplicaError("killed", service="trainer")
            return await super().evaluate(packed, loss)

        async def death(self) -> str:
            return await asyncio.Event().wait() and "never"

        async def restart(self, resume: Path | None, *, cause: str) -> None:
            self.restarts += 1

    async def begin(*_: object, **__: object) -> Dying:
        return Dying()

    async def take_step(run: Run[ExampleConfig]) -> None:
        run.log({"loss": 1.0}, await run.examples.next_batch())

    monkeypatch.setattr(services_module.Trainer, "start", begin)
    rows = [{"question": f"{n}?", "answer": str(n)} for n in range(1, 30)]
    config = ExampleConfig(
        out=tmp_path, display="none", checkpoint_every=0, groups_per_batch=2, steps=1, evaluation=EvalConfig(tasks=3)
    )
    async with start(config, loss=CrossEntropy(), sources=rows, examples=answered) as run:
        await run.train(take_step)
    assert (run.step, run.scores) == (1, {0: -2.0, 1: -1.0})


def test_settings_and_arguments_of_a_start_agree(tmp_path: Path) -> None:
    loss, rows = CrossEntropy(), [{"question": "1?", "answer": "1"}]
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (RunConfig(), {}, "nothing to train on"),
        (RunConfig(), {"examples": answered}, "settings of a run on generated episodes, and start\\(\\) got examples"),
        (ExampleConfig(), {"reward": print}, "start\\(\\) got none"),
        (ExampleConfig(), {"reward": print, "examples": answered}, "the settings name none"),
        (ExampleConfig(rewards=("auto",)), {"examples": answered}, "the settings name rewards"),
    ]
    for config, given, said in refused:
        with pytest.raises(ConfigError, match=said):
            start(config, loss=loss, sources=rows, **given)
    assert ExampleConfig(trainer=Trainer.Config(seq_len=64)).trainer.longest_row == 64
    with pytest.raises(ConfigError, match="episodes can have 1024 tokens"):
        RunConfig(trainer=Trainer.Config(seq_len=64)).check_effects()
    assert RunConfig().starts_engines


def test_narrow_starts_make_the_same_run_as_start() -> None:
    loss, sources = CrossEntropy(), as_mixture([{"question": "1?", "answer": "1"}], seed=0)
    score, critic = build_reward(("auto",)), CriticConfig()
    teachers = TeachersConfig(models=("policy",))
    rollouts = Rollouts(reward=score, player=AgentPlayer(agent="mine.py:solve"), teachers=teachers)
    narrow = start_rollouts(RunConfig(), rollouts, loss=loss, sources=sources, critic=critic)
    wide = start(
        RunConfig(),
        loss=loss,
        sources=sources,
        reward=score,
        agent="mine.py:solve",
        teachers=teachers,
        critic=critic,
    )
    assert narrow.setup == wide.setup
    for config, reward in ((ExampleConfig(), None), (ExampleConfig(rewards=("auto",)), score)):
        narrow_examples = start_examples(config, answered, loss=loss, sources=sources)
        wide_examples = start(config, loss=loss, sources=sources, examples=answered, reward=reward)
        assert narrow_examples.setup == wide_examples.setup
        assert (narrow_examples.setup.rollouts is None) == (reward is None)
    with pytest.raises(ConfigError, match="a value model gives no answers"):
        start_examples(ExampleConfig(rewards=("auto",)), answered, loss=BradleyTerry(), sources=sources)
    with pytest.raises(ConfigError, match="settings of a run on examples"):
        start_rollouts(ExampleConfig(), rollouts, loss=loss, sources=sources)


def test_a_self_playing_environment_replaces_agent_and_reward() -> None:
    class Played:
        reward = staticmethod(build_reward(("auto",)))

        async def agent(self, task: Task, policy: object) -> Score:
            return Score(total=1.0)

        def serving(self, logs: Path) -> contextlib.AbstractAsyncContextManager[None]:
            return contextlib.nullcontext()

    world: Any = Played()
    sources = as_mixture([{"question": "1?", "answer": "1"}], seed=0)
    started = start(RunConfig(), loss=CrossEntropy(), sources=sources, environment=world)
    rollouts = started.setup.rollouts
    assert rollouts == Rollouts.played_by(world)
    assert rollouts is not None
    assert (rollouts.world, rollouts.environment, rollouts.uses_tools) == (world, None, True)
    alone = Rollouts(reward=world.reward)
    assert (alone.environment, alone.uses_tools) == (SingleTurn, False)
