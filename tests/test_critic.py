"""A critic in a run: values by episode, checkpoints and rollbacks with the policy, its flags, deaths of its ranks."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from forge_rl.engines.architecture import read_architecture
from forge_rl.errors import CheckpointError, ConfigError
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout, PackedBatch
from forge_rl.packing.unpacking import values_of_episodes
from forge_rl.run.plan.defaults import check_critic
from forge_rl.run.plan.memory import check_state_fits, plan_run
from forge_rl.run.run_models import RunModels
from forge_rl.run.start.ending import Ending
from forge_rl.services.trainer_config import CriticConfig
from forge_rl.types import Batch
from recipes.ppo import Config
from tests.commands import Command, actor_of, metrics, tiny_run
from tests.fakes import make_model, random_batch
from tests.staged_checkpoints import Parts, checkpointer_of, save
from tests.test_checkpointing import Stopped


def numbered(batch: Batch) -> tuple[PackedBatch, list[torch.Tensor], list[np.ndarray]]:
    """A packed batch, values that number the tokens of each turn, and those by episode."""
    numbers = [
        np.concatenate([1000 * e + 100 * t + np.arange(len(turn.token_ids)) for t, turn in enumerate(episode.turns)])
        for e, episode in enumerate(batch.episodes)
    ]
    arrays = iter(array.astype(np.float32) for array in numbers)
    columns = {"numbers": [[next(arrays) for _ in group.episodes] for group in batch.groups]}
    laid = pack(batch, torch.zeros(batch.rewards.shape), Layout(seq_len=64), drop_uniform=False, columns=columns)
    return laid, [row.columns["numbers"] for row in laid.rows], numbers


def test_values_are_regrouped_by_episode_and_turn_after_rewrites():
    batch = random_batch(0, vocab=43, groups=3, turns=4)

    def rewritten(episode: Any) -> Any:
        first, second, third, fourth = episode.turns
        return replace(episode, turns=(first, replace(third, prompt_ids=[41, 42]), second, fourth))

    groups = [replace(g, episodes=tuple(map(rewritten, g.episodes))) for g in batch.groups]
    batch = replace(batch, groups=tuple(groups))
    assert all(len(episode.segments) > 1 for episode in batch.episodes)
    laid, values, numbers = numbered(batch)
    episode_values = values_of_episodes(batch, laid, values)
    assert all(values.dtype == np.float32 for values in episode_values)
    assert [values.tolist() for values in episode_values] == [values.tolist() for values in numbers]


def test_a_token_that_is_not_trained_has_the_value_before_it():
    batch = random_batch(1, vocab=43, groups=1, group_size=3, turns=1)
    lost_turns = [[False, True, True], [True, False, True], [True, True, True]]
    episodes = []
    for episode, is_lost in zip(batch.groups[0].episodes, lost_turns, strict=True):
        (turn,) = episode.turns
        logprobs = np.where(is_lost, np.nan, -1.0)
        turn = replace(turn, token_ids=[1, 2, 3], logprobs=logprobs, versions=[0, 0, 0])
        episodes.append(replace(episode, turns=(turn,)))
    batch = replace(batch, groups=(replace(batch.groups[0], episodes=tuple(episodes)),))
    laid, values, _ = numbered(batch)
    episode_values = values_of_episodes(batch, laid, values)
    assert [values.tolist() for values in episode_values] == [[0, 0, 0], [1001, 1001, 1001], [0, 0, 0]]


async def test_a_rollback_restores_the_critic_with_the_policy(tmp_path: Path) -> None:
    policy, critic = Parts(), Parts()
    critic.name = "critic"
    checkpointer = checkpointer_of(policy, tmp_path)
    services = replace(checkpointer._services, critic=cast(Any, critic))
    checkpointer._services = services
    checkpointer._note()
    critic.updates += 3
    assert checkpointer.trained, "the critic is trained alone at first"
    policy.step(checkpointer)
    saved = await save(checkpointer)
    assert (policy.done, critic.done) == (["devices to the trainer", "save", "saved"], ["save", "saved"])
    assert [(path / "updates").read_text() for path in (saved.training, saved.critic)] == ["2", "3"]
    assert saved.damage() == ""
    policy.step(checkpointer)
    critic.updates += 3
    assert await checkpointer.rollback() == 1
    assert (policy.updates, critic.updates) == (2, 3)
    assert not checkpointer.trained

    resumed_checkpointer = checkpointer_of(policy, tmp_path)
    resumed_checkpointer._services = services
    await resumed_checkpointer.resume(saved)
    assert resumed_checkpointer.step == 1
    critic.updates = 2
    with pytest.raises(CheckpointError, match="holds a critic of 2 updates, but a controller state of 3"):
        await resumed_checkpointer.resume(saved)


async def test_a_stop_between_policy_and_critic_saves_no_half_step(tmp_path: Path) -> None:
    policy, critic = Parts(), Parts()
    critic.name = "critic"
    checkpointer = checkpointer_of(policy, tmp_path)
    checkpointer._services = replace(checkpointer._services, critic=cast(Any, critic))
    events: list[str] = []
    run = Stopped(checkpointer)
    monitor = SimpleNamespace(log=SimpleNamespace(event=events.append))
    ending = Ending(cast(Any, run), checkpointer._services, checkpointer, cast(Any, monitor))
    critic.updates += 3
    policy.step(checkpointer)
    await save(checkpointer)
    critic.updates += 3
    policy.step(checkpointer)
    policy.updates += 2
    await ending.save()
    assert events == [
        "step 3 is not saved, as only the trainer took updates in it; the same command resumes from step 1"
    ]
    assert (run.step, checkpointer.saved) == (2, 1)
    critic.updates += 3
    await ending.save()
    saved = checkpointer.checkpoints.latest()
    assert saved is not None
    assert (run.step, saved.step) == (3, 3)
    assert [(path / "updates").read_text() for path in (saved.training, saved.critic)] == ["6", "9"]
    assert (saved.controller_state()["updates"], saved.controller_state()["critic_updates"]) == (6, 9)


def test_errors_of_a_critics_flags_name_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        CriticConfig(minibatches=0)
    assert (caught.value.message, caught.value.hint) == (
        "--critic.minibatches is 0",
        "set --critic.minibatches to 1 or more",
    )
    with pytest.raises(ConfigError, match="--value-clip is 0"):
        Config(value_clip=0.0)
    make_model(tmp_path)
    architecture = read_architecture(tmp_path)
    for critic, message in (
        (CriticConfig(minibatches=9), "8 groups cannot be split into 9"),
        (CriticConfig(seq_len=16), "a row of the critic only 16"),
        (CriticConfig(ranks=2, expert_parallel_degree=2), "--critic.expert-parallel-degree is 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_critic(Config(), critic, architecture)
    check_critic(Config(), CriticConfig(), architecture)


@pytest.mark.usefixtures("process_group")
def test_a_plan_counts_the_critic(tmp_path: Path) -> None:
    make_model(tmp_path, vocab_size=3000, max_position_embeddings=1024)
    config = Config(model=str(tmp_path), critic=CriticConfig(ranks=2))
    alone = plan_run(config, RunModels(policy=tmp_path))
    models = RunModels(policy=tmp_path, critic=config.critic)
    needs = plan_run(config, models)
    assert [need.who for need in needs] == ["trainer rank", "critic rank", "engine", "store of weights"]
    assert [*needs[:1], *needs[2:]] == alone
    (critic,) = (need for need in needs if need.who == "critic rank")
    # A head of one output for 3000, over two ranks.
    weights = alone[0].parts["weights, float32"] - 4 * 24 * (3000 - 1)
    assert (critic.count, critic.parts["weights, float32"]) == (2, weights // 2)
    check_state_fits(config, models)


ARGUMENTS = ("--tasks", "chain_sum:min_terms=2,max_terms=2,min_digits=4,max_digits=4", "--groups-per-batch", "2")
ARGUMENTS += ("--group-size", "4", "--evaluation.every", "0", "--reward", "tests.tiny:share_of_vowels")
ARGUMENTS += ("--critic.epochs", "2", "--critic.ranks", "2", "--value-pretraining-steps", "2")
ARGUMENTS += ("--checkpoint-every", "3")


def updates_of(out: Path) -> list[tuple[int, int, int]]:
    """Step, updates of the policy and of the critic, of each step after the policy's first."""
    rows = [(row["step"], row.get("updates"), row["critic/updates"]) for row in metrics(out)]
    return [row for row in rows if row[0] > 2]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_run_survives_deaths_of_critic_trainer_and_controller(
    commands: list[Command], tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = tiny_run(commands, tiny_model, out, "--steps", "100000", *ARGUMENTS, recipe="recipes.ppo")
    command.wait_for("step +4/")
    for name in ("critic", "trainer"):
        step = metrics(out)[-1]["step"]
        command.wait_for(f"step +{step + 2}/")
        actor_of(command, name).kill()
        command.wait_for(f"{name}/0 failed.*SIGKILL")
        line = command.wait_for(f"the {name} was restarted; the run continues from step [0-9]+$")
        back = int(line.rpartition(" ")[2])
        assert back % 3 == 0
        assert back > 0
        command.wait_for(f"{name} was restarted(.|\n)*step +{back + 3}/", whole=True)
    command.process.kill()
    command.end()
    assert "Traceback" not in command.output
    last = metrics(out)[-1]["step"]
    resumed_run = tiny_run(commands, tiny_model, out, "--steps", str(last + 2), *ARGUMENTS, recipe="recipes.ppo")
    resumed_run.wait_for("continued from")
    assert resumed_run.end(240) == 0, resumed_run.output
    rows = updates_of(out)
    # The policy takes one update for each step but the first two, the critic two: both were rolled back together.
    assert rows == [(step, step - 2, 2 * step) for step, *_ in rows]
    assert [row[0] for row in rows] == list(range(3, last + 3))
    state = json.loads((out / "checkpoints" / f"step-{last + 2:06d}" / "controller.json").read_text())
    assert (state["updates"], state["critic_updates"]) == (last, 2 * last + 4)
