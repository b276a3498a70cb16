"""Losses of pairs against their formulas in float64, by transformers' logits, however the episodes lie in rows."""

import asyncio
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.ranks import run_ranks
from forge_rl.algorithms.preferences import BradleyTerry, Dpo, PreferenceLoss
from forge_rl.algorithms.user_loss import try_loss
from forge_rl.data.examples import comparison_episodes
from forge_rl.engines.titan.train import TitanEngine
from forge_rl.errors import ConfigError
from forge_rl.metrics import merge_all, reduce
from forge_rl.packing.rows import PackedBatch
from forge_rl.packing.unpacking import unpack
from forge_rl.rewards.reward_model import RewardModel
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Batch, Episode, Group, Task
from tests.commands import Command, metrics, tiny_run
from tests.fakes import hf_weights, make_model, packed, random_batch, train_batch
from tests.plain_trainer import InFloat64, in_float64, logits_of
from tests.test_titan_train import engine_of as policy_of
from tests.test_values import OPTIMIZER, engine_of, make_value_model

pytestmark = pytest.mark.usefixtures("process_group")

LOSSES: list[PreferenceLoss] = [
    Dpo(beta=0.7),
    Dpo(beta=0.7, label_smoothing=0.2),
    Dpo(beta=0.7, kind="ipo"),
    BradleyTerry(center=0.3),
]


def pairs(groups: int = 3) -> Batch:
    return random_batch(3, vocab=43, groups=groups, group_size=2, turns=2)


def scattered_pairs() -> Batch:
    """Pairs whose episodes have two segments each, which rows of 40 tokens split."""
    groups = []
    for group in pairs().groups:
        episodes = []
        for episode in group.episodes:
            first, second = episode.turns
            second = replace(second, prompt_ids=[41, 42, *second.prompt_ids[:4]])
            episodes.append(replace(episode, turns=(first, second)))
        groups.append(replace(group, episodes=tuple(episodes)))
    return Batch(groups=tuple(groups), version=0)


def plain_scores(model: Any, head: torch.Tensor | None, batch: Batch) -> list[torch.Tensor]:
    """Logprob of each episode's trained tokens by transformers, or, with a value head, the value before each."""
    pair_scores = []
    for episode in batch.episodes:
        parts = []
        for segment in episode.segments:
            ids = torch.tensor(np.asarray(segment.token_ids), dtype=torch.int64)
            if head is None:
                scores = logits_of(model, ids)[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            else:
                with InFloat64():
                    scores = model.model(ids[None]).last_hidden_state[0, :-1] @ head[0]
            parts.append(scores[torch.tensor(np.asarray(segment.trained))[1:]])
        pair_scores.append(torch.cat(parts))
    return pair_scores


def expected(loss: PreferenceLoss, scores: list[torch.Tensor]) -> torch.Tensor:
    """The loss of each pair from the log ratios, or values, of each episode's tokens."""
    losses = []
    for chosen_scores, rejected in zip(scores[::2], scores[1::2], strict=True):
        if isinstance(loss, BradleyTerry):
            c, r = chosen_scores.mean(), rejected.mean()
            losses.append((1 + (r - c).exp()).log() + loss.center * (c + r) ** 2)
        elif isinstance(loss, Dpo) and loss.kind == "ipo":
            losses.append((chosen_scores.mean() - rejected.mean() - 1 / (2 * loss.beta)) ** 2)
        elif isinstance(loss, Dpo):
            margin, e = loss.beta * (chosen_scores.sum() - rejected.sum()), loss.label_smoothing
            losses.append((1 - e) * (1 + (-margin).exp()).log() + e * (1 + margin.exp()).log())
    return torch.stack(losses)


def gradients(engine: TitanEngine) -> list[torch.Tensor]:
    """The gradients of the next updates, filled in as they happen."""
    gradients_of_steps: list[torch.Tensor] = []
    engine.optimizer.register_step_pre_hook(
        lambda *_: gradients_of_steps.extend(p.grad.clone() for p in engine.model.parameters())
    )
    return gradients_of_steps


def laid(batch: Batch, seq_len: int, **layout: Any) -> PackedBatch:
    return packed(batch, seq_len=seq_len, drop_uniform=False, **layout)


def engine_for(loss: PreferenceLoss, folder: Path, *, seq_len: int = 256) -> TitanEngine:
    optimizer = replace(OPTIMIZER, weight_decay=0.0)
    if isinstance(loss, BradleyTerry):
        return engine_of(folder, optimizer=optimizer, seq_len=seq_len)
    return policy_of(folder, reference=True, optimizer=optimizer, seq_len=seq_len)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_pairs_have_the_formulas_gradient_in_any_layout_of_rows(loss: PreferenceLoss, tmp_path: Path) -> None:
    head = None
    if isinstance(loss, BradleyTerry):
        model, head = make_value_model(tmp_path)
    else:
        model = make_model(tmp_path)
    batch = scattered_pairs()
    scattered = []
    for seq_len in (256, 40):
        engine = engine_for(loss, tmp_path, seq_len=seq_len)
        rows = laid(batch, seq_len)
        scattered.append(sorted(rows.minibatches[0].scattered))
        reference = in_float64(model, engine.model)
        weight = None if head is None else head.double().requires_grad_()
        if isinstance(loss, Dpo):
            frozen = [scores.detach() for scores in plain_scores(reference, None, batch)]
            train_batch(engine, rows, loss)  # from its first update on, the policy is not the reference
            reference.load_state_dict(hf_weights(engine.model))
            scores = [
                policy_scores - other
                for policy_scores, other in zip(plain_scores(reference, None, batch), frozen, strict=True)
            ]
        else:
            scores = plain_scores(reference, weight, batch)
        losses = expected(loss, scores)
        losses.mean().backward()
        step_gradients = gradients(engine)
        metrics = reduce(train_batch(engine, rows, loss))
        assert metrics["loss"] == pytest.approx(float(losses.mean().detach()), rel=1e-10)
        theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
        if weight is not None:
            theirs["score.weight"] = weight.grad
        compared = 0
        for (name, weights), grad in zip(engine.model.named_parameters(), step_gradients, strict=True):
            for part in engine.model.names.parts(name, weights.shape):
                expected_grad = theirs[part.name]
                assert expected_grad.abs().max() > 1e-6
                assert (part.of(grad) - expected_grad).abs().max() / expected_grad.abs().max() < 1e-10, part.name
                compared += 1
        assert compared > 10
        scale = loss.beta if isinstance(loss, Dpo) else 1.0
        total = torch.stack([scale * (e.sum() if loss in LOSSES[:2] else e.mean()) for e in scores]).detach()
        chosen_totals, rejected = total[::2], total[1::2]
        rewards = {
            "chosen": chosen_totals.mean(),
            "rejected": rejected.mean(),
            "margin": (chosen_totals - rejected).mean(),
            "accuracy": (chosen_totals > rejected).double().mean(),
        }
        for name, value in rewards.items():
            assert metrics[f"loss/rewards/{name}"] == pytest.approx(float(value), rel=1e-9), name
    assert scattered == [[], ["episode", "group"]]


def train_as_rank(rank: int, folder: Path) -> list[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    results = []
    for loss in (LOSSES[0], LOSSES[3]):
        engine = engine_for(loss, folder, seq_len=40)
        rows = laid(scattered_pairs(), 40, shares=2)
        results.append((train_batch(engine, rows, loss, epochs=2), hf_weights(engine.model)))
    return results


def test_pairs_over_two_ranks_train_as_on_one(tmp_path: Path) -> None:
    make_value_model(tmp_path)
    ranks = run_ranks(train_as_rank, 2, tmp_path)
    for place, loss in enumerate((LOSSES[0], LOSSES[3])):
        alone = engine_for(loss, tmp_path)
        metrics = reduce(train_batch(alone, laid(scattered_pairs(), 256), loss, epochs=2))
        together = reduce(merge_all(rank[place][0] for rank in ranks))
        assert together == pytest.approx(metrics, rel=1e-8, abs=1e-12)
        weights = hf_weights(alone.model)
        for rank in ranks:
            assert max(float((rank[place][1][name] - weights[name]).abs().max()) for name in weights) < 1e-10


def test_losses_of_pairs_refuse_other_groups_and_bad_settings() -> None:
    for loss in LOSSES:
        try_loss(loss)
        assert loss.keeps_uniform
    for wrong in ({"beta": 0.0}, {"label_smoothing": 0.5}, {"kind": "hinge"}, {"kind": "ipo", "label_smoothing": 0.1}):
        with pytest.raises(ConfigError, match=next(reversed(wrong)).replace("_", "[-_ ]")):
            Dpo(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="center is -1"):
        BradleyTerry(center=-1)


async def test_an_exported_reward_model_gives_the_scores_that_were_trained(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "base")
    template = folder / "chat_template.jinja"
    # Its conversations end with a token that is also padding, so the score is read before it.
    template.write_text(template.read_text().replace("'<|im_end|>' + '\n'", "'<|im_end|>'"))
    tokenizer = Tokenizer(folder)
    assert tokenizer.pad_id == tokenizer.render([{"role": "user", "content": "?"}], add_generation_prompt=False)[-1]
    tools = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)
    tasks = [
        Task(
            id=str(n),
            source="sums",
            messages=({"role": "user", "content": f"{n} + {n}?"},),
            truth={"chosen": f"{2 * n}", "rejected": f"It is {2 * n + 1}, I am quite sure."},
            tools=tools[: n % 2],
        )
        for n in range(4)
    ]
    groups = [Group(task=task, episodes=comparison_episodes(task, tokenizer)) for task in tasks]
    batch = Batch(groups=tuple(groups), version=0)
    rows = laid(batch, 256)
    assert rows.trained_tokens == len(batch.episodes)
    engine = engine_of(folder, dtype="float32", seq_len=256, optimizer=replace(OPTIMIZER, lr=1e-2))
    losses = [reduce(train_batch(engine, rows, BradleyTerry(), total_updates=100)) for _ in range(15)]
    assert losses[0]["loss"] == pytest.approx(math.log(2)), "a new head has the value 0"
    assert losses[-1]["loss"] < 0.3
    assert losses[-1]["loss/rewards/accuracy"] == 1
    for part in ("training", "model"):
        (tmp_path / part).mkdir()
    engine.save(tmp_path, folder, version=0).result()
    values = unpack(rows, engine.values(rows.rows))
    model = RewardModel(path=tmp_path / "model", batch=3)

    model.load()
    answers = [
        (task, Episode(task=task, turns=(), output=str(task.truth[name])))
        for task in tasks
        for name in ("chosen", "rejected")
    ]
    totals = [score.total for score in await asyncio.gather(*(model(*answer) for answer in answers))]
    assert np.std(totals) > 1
    assert totals == pytest.approx([float(values[place]) for place in range(len(batch.episodes))], abs=1e-4)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_recipes_of_pairs_learn_a_preference_or_a_reward_model(
    commands: list[Command], tiny_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{n} + {n}?", "chosen": str(2 * n), "rejected": f"I do not know {n}."} for n in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--tasks", str(path), "--steps", "12", "--trainer.optimizer.lr", "0.003", "--evaluation.every", "12")
    for name in ("dpo", "reward_model"):
        command = tiny_run(commands, tiny_model, tmp_path / name, *flags, recipe=f"recipes.{name}")
        assert command.end(240) == 0, command.output
        metric_rows = metrics(tmp_path / name)
        assert metric_rows[1]["loss"] == pytest.approx(math.log(2), rel=1e-3)
        assert metric_rows[-1]["eval/held_out/rewards/accuracy"] == 1
        assert metric_rows[-1]["eval/held_out/loss"] < 0.5
    folder = tmp_path / "reward_model" / "checkpoints" / "step-000012" / "model"
    model, task = (
        RewardModel(path=folder),
        Task(id="1", source="s", messages=({"role": "user", "content": "70 + 70?"},)),
    )

    answers = ("140", "I do not know 70.")
    right, other = [(await model(task, Episode(task=task, turns=(), output=answer))).total for answer in answers]
    assert right > other
