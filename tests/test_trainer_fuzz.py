"""Random batches and settings: the trainer against plain PyTorch, and its layouts against one process, in float64."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import layouts
from benchmarks.ranks import run_ranks
from forge_rl.algorithms.advantages import batch_advantages
from forge_rl.algorithms.aggregation import Aggregation
from forge_rl.algorithms.correction import Correction
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import StepRequest, TrainSettings
from forge_rl.engines.titan.train import TitanEngine
from forge_rl.metrics import Value, merge_all, reduce
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout, PackedBatch
from forge_rl.types import Batch, Episode, Group, Score, Turn
from tests.fakes import TASK, hf_weights, make_model
from tests.plain_trainer import PlainTrainer

FAMILIES = ("llama", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3")
BOUND = 1e-9
"""AdamW divides gradients by their size, so it enlarges the rounding of tiny ones, which depends on the CPU: without
AVX-512 one case was off by 1.2e-10 of the weights' movement, and most by less than 3e-13."""
VOCAB = 43


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch and all that says how it is trained on."""

    seed: int
    batch: Batch
    estimator: Any
    loss: ClippedSurrogate
    layout: Layout
    settings: TrainSettings
    epochs: int
    temperature: float
    total_updates: int

    def packed(self, **parallel: int) -> PackedBatch:
        """Minibatches that train something, of a layout."""
        laid = pack(
            self.batch,
            batch_advantages(self.batch, estimator=self.estimator),
            replace(self.layout, **parallel),
            drop_uniform=not self.loss.kl_coef,
        ).without_uniform
        return replace(laid, minibatches=tuple(minibatch for minibatch in laid.minibatches if minibatch.rows))


def draw(seed: int, score: Callable[[list[int], float], list[float]]) -> Case:
    """Draw a case; `score` returns a policy's logprobs of a sequence's tokens but the first, at a temperature."""
    drawn = random.Random(seed)
    temperature = drawn.choice([1.0, 0.7, 1.3])
    prompts, group_size = drawn.randint(1, 5), drawn.randint(2, 4)
    valued = drawn.choice(["", "", "turns", "tokens"])

    def ids(*lengths: int) -> list[int]:
        return [drawn.randrange(VOCAB) for _ in range(drawn.choice(lengths))]

    def logprobs(history: list[int], answer: list[int]) -> list[float]:
        noisy = [
            logprob + drawn.gauss(0, drawn.choice([0.5, 0.5, 0.5, 4.0]))
            for logprob in score(history + answer, temperature)[len(history) - 1 :]
        ]
        return [drawn.choice([math.nan, -math.inf]) if drawn.random() < 0.07 else logprob for logprob in noisy]

    def episode(prompt: list[int], reward: float) -> Episode:
        history, turns = list(prompt), []
        for index in range(drawn.choice([1, 1, 2, 3])):
            if index and drawn.random() < 0.1:
                history = ids(4)  # a history that was written anew: another segment
            answer = ids(1, 1, 2, 5, 11)
            turn = Turn(
                prompt_ids=tuple(history),
                token_ids=tuple(answer),
                logprobs=tuple(logprobs(history, answer)),
                versions=tuple(sorted(drawn.randint(0, 3) for _ in answer)),
                text="",
            )
            turns.append(turn)
            history = history + answer + ids(0, 1, 2, 3)
        values: dict[str, Any] = {}
        if drawn.random() < 0.9 and valued == "turns":
            values["turns"] = tuple(drawn.choice([0.0, 1.0, 0.5]) for _ in turns)
        if drawn.random() < 0.9 and valued == "tokens":
            choices = [0.0, 1.0, 0.5, math.nan]
            values["tokens"] = tuple(
                np.array([drawn.choice(choices) for _ in turn.token_ids], np.float32) for turn in turns
            )
        return Episode(task=TASK, turns=tuple(turns), score=Score(total=reward, **values))

    groups = []
    for _ in range(prompts):
        uniform, prompt = drawn.random() < 0.35, ids(1, 1, 3, 9)
        rewards = [0.5 if uniform else drawn.choice([0.0, 1.0, 0.3]) for _ in range(group_size)]
        groups.append(Group(task=TASK, episodes=tuple(episode(prompt, reward) for reward in rewards)))
    batch = Batch(groups=tuple(groups), version=3)
    kind = drawn.choice(["token_mean", "sequence_mean", "constant"])
    kl_coef = drawn.choice([0.0, 0.0, 0.2])
    correction = Correction(proximal="recompute", mode="mask", high=drawn.choice([1.1, 5.0]))
    loss = ClippedSurrogate(
        kl_coef=kl_coef,
        kl_kind=drawn.choice(["k2", "k3"]) if kl_coef else "k2",
        correction=correction if drawn.random() < 0.4 else Correction(),
        dual_clip=drawn.choice([1.5, 3.0, math.inf]),
        clip_low=drawn.choice([0.2, 0.1]),
        aggregation=Aggregation(kind=kind, tokens=17 if kind == "constant" else 0),
    )
    minibatches, epochs = drawn.randint(1, prompts), drawn.choice([1, 1, 2])
    longest = max(len(segment.token_ids) for episode in batch.episodes for segment in episode.segments)
    seq_len = max(2, longest) + drawn.choice([0, 0, 3, 40])
    optimizer = OptimizerConfig(
        lr=3e-3,
        weight_decay=drawn.choice([0.0, 0.1]),
        max_grad_norm=drawn.choice([0.05, 1e9]),
        warmup_updates=drawn.choice([0, 2]),
        decay=drawn.choice(["constant", "linear", "cosine"]),
    )
    return Case(
        seed=seed,
        batch=batch,
        estimator=drawn.choice(["grpo", "dr_grpo"]),
        loss=loss,
        layout=Layout(seq_len=seq_len, minibatches=minibatches, share_prefixes=drawn.random() < 0.8),
        settings=TrainSettings(
            dtype="float64",
            seq_len=seq_len,
            activation_checkpointing=drawn.choice(["none", "selective", "full"]),
            frozen=drawn.choice([(), (), ("model.layers.0.*",)]),
            optimizer=optimizer,
        ),
        epochs=epochs,
        temperature=temperature,
        total_updates=minibatches * epochs + drawn.randint(0, 3),
    )


def by_turn(case: Case) -> list[list[np.ndarray]]:
    """Advantages of the tokens of each turn, by episode, as packed: float32, and right but for its rounding."""
    advantages = batch_advantages(case.batch, estimator=case.estimator)
    token_values = []
    for p, group in enumerate(case.batch.groups):
        rewards = np.array([episode.reward for episode in group.episodes])
        group_advantages = normalised([rewards], case.estimator)[0]
        turns = normalised([np.array(episode.score.turns, float) for episode in group.episodes], case.estimator)
        tokens = normalised([np.concatenate([[], *episode.score.tokens]) for episode in group.episodes], case.estimator)
        for g, episode in enumerate(group.episodes):
            lengths = [len(turn.token_ids) for turn in episode.turns]
            expected = np.full(sum(lengths), group_advantages[g])
            expected += np.repeat(turns[g], lengths) if len(turns[g]) else 0
            expected += tokens[g] if len(tokens[g]) else 0
            advantage = advantages[p][g]
            packed = (
                np.full(sum(lengths), float(advantage), np.float32)
                if isinstance(advantages, torch.Tensor)
                else np.array(advantage)
            )
            assert np.allclose(packed, expected, rtol=0, atol=64 * np.finfo(np.float32).eps)
            token_values.append(np.split(packed, np.cumsum(lengths)[:-1]))
    return token_values


def normalised(values: list[np.ndarray], estimator: str) -> list[np.ndarray]:
    """Center and scale over all values that are known, which are 0 otherwise and where all are equal."""
    finite_values = np.concatenate(values)
    finite_values = finite_values[~np.isnan(finite_values)]
    if not len(finite_values) or finite_values.max() == finite_values.min():
        return [np.zeros(len(array)) for array in values]
    divisor = finite_values.std(ddof=1) + 1e-4 if estimator == "grpo" else 1.0
    return [np.nan_to_num((array - finite_values.mean()) / divisor) for array in values]


def updates_of(engine: TitanEngine, case: Case, laid: PackedBatch, own: slice = slice(None)) -> list[dict[str, Value]]:
    step_metrics = engine.train_batch(
        [replace(minibatch, rows=minibatch.rows[own]) for minibatch in laid.minibatches],
        StepRequest(
            loss=case.loss,
            epochs=case.epochs,
            temperature=case.temperature,
            total_updates=case.total_updates,
            version=3,
        ),
    ).metrics
    assert None not in step_metrics
    return [metrics for metrics in step_metrics if metrics is not None]


def apart(found: float, expected: float) -> float:
    """Difference, relative to what is expected where that is above 1."""
    return abs(found - expected) / max(1.0, abs(expected))


def far(found: dict[str, torch.Tensor], expected: Any, start: dict[str, torch.Tensor]) -> float:
    """Distance of weights from those expected, over the way that these have gone."""
    assert found.keys() == expected.keys()
    off, way = (
        math.sqrt(sum(float((one[name] - other[name]).square().sum()) for name in start))
        for one, other in ((found, expected), (expected, start))
    )
    return off / way


def cases_of(seeds: range, model: torch.nn.Module, titan: torch.nn.Module) -> list[Case]:
    plain = PlainTrainer(model, titan, OptimizerConfig())
    with torch.no_grad():
        return [draw(seed, lambda ids, temperature: plain.logprobs(ids, temperature).tolist()) for seed in seeds]


def check_plain(family: str, seeds: range, folder: Path) -> None:
    """Train on the case of each seed as plain PyTorch does, and print how far they are apart."""
    model = make_model(folder, family)
    titan = TitanEngine(folder, TrainSettings(dtype="float64", seq_len=256)).model
    trained = 0
    for case in cases_of(seeds, model, titan):
        laid = case.packed()
        if not laid.minibatches:
            continue  # all groups are uniform
        total = [sum(counts) for counts in zip(*((m.tokens, m.sequences) for m in case_minibatches(case)), strict=True)]
        finite = [
            sum(int(np.isfinite(turn.logprobs).sum()) for turn in episode.turns) for episode in case.batch.episodes
        ]
        assert total == [sum(finite), len(finite)], "all tokens and episodes count once"
        frozen = case.settings.frozen[0].rstrip("*") if case.settings.frozen else None
        plain = PlainTrainer(model, titan, case.settings.optimizer, frozen=frozen)
        engine = TitanEngine(folder, case.settings, reference=case.loss.kl_coef > 0)
        start = hf_weights(engine.model)
        expected = plain.train_batch(
            case.batch,
            by_turn(case),
            list(laid.minibatches),
            case.loss,
            epochs=case.epochs,
            temperature=case.temperature,
            total_updates=case.total_updates,
        )
        metric_values = [reduce(metrics) for metrics in updates_of(engine, case, laid)]
        assert len(metric_values) == len(expected) == engine.updates
        gaps = [
            apart(metrics[name], value)
            for metrics, values in zip(metric_values, expected, strict=True)
            for name, value in zip(("loss", "grad_norm", "lr"), values, strict=True)
        ]
        weights = far(hf_weights(engine.model), plain.weights(folder / "plain"), start)
        print(f"{family} seed {case.seed}: metrics {max(gaps):.1e} weights {weights:.1e}")
        assert max(*gaps, weights) < BOUND, (family, case.seed, gaps, weights)
        trained += 1
    assert trained > 0.7 * len(seeds), "too few cases train anything"


LAYOUTS = {
    "TP": {"tensor_parallel_degree": 2},
    "CP": {"context_parallel_degree": 2},
    "EP": {"expert_parallel_degree": 2},
    "PP": {"pipeline_parallel_degree": 2},
    "FSDP": {},
}


def train_in_layouts(
    rank: int, folder: Path, cases: list[Case], names: list[str]
) -> list[tuple[list[dict[str, Value]], layouts.Shards]]:
    """Train on each case in each layout, as one of its two ranks; metrics of each update, and shards at the end."""
    results = []
    for case, name in itertools.product(cases, names):
        degrees = LAYOUTS[name]
        seq_len = -(-case.layout.seq_len // degrees.get("context_parallel_degree", 1))
        settings = replace(case.settings, seq_len=seq_len, **degrees)
        shares = len(settings.heads(2))
        laid = case.packed(seq_len=seq_len, shares=shares, **{k: v for k, v in degrees.items() if k[0] not in "ep"})
        engine = TitanEngine(folder, settings, reference=case.loss.kl_coef > 0)
        metrics = updates_of(engine, case, laid, slice(settings.share_of(rank, 2), None, shares))
        results.append((metrics, layouts.shards_of(engine)))
    return results


@pytest.mark.nightly
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("family", FAMILIES)
def test_random_settings_train_in_each_layout_as_in_one_process(family: str, tmp_path: Path):
    model = make_model(tmp_path, family)
    titan = TitanEngine(tmp_path, TrainSettings(dtype="float64", seq_len=256)).model
    cases = [case for case in cases_of(range(200, 206), model, titan) if case.packed().minibatches]
    names = ["TP", "CP", "PP", "EP" if "num_experts_per_tok" in layouts.FAMILIES[family] else "FSDP"]
    by_rank = run_ranks(train_in_layouts, 2, tmp_path, cases, names, deadline_s=600)
    alone: dict[int, tuple[list[dict[str, float]], dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {}
    for index, (case, name) in enumerate(itertools.product(cases, names)):
        if case.seed not in alone:
            engine = TitanEngine(tmp_path, case.settings, reference=case.loss.kl_coef > 0)
            start = hf_weights(engine.model)
            metric_values = [reduce(metrics) for metrics in updates_of(engine, case, case.packed())]
            alone[case.seed] = metric_values, start, hf_weights(engine.model)
        expected, start, end = alone[case.seed]
        parts = [results[index] for results in by_rank]
        shares = [parts[rank] for rank in TrainSettings(**LAYOUTS[name]).heads(2)]
        found = [reduce(merge_all(metrics)) for metrics in zip(*(metrics for metrics, _ in shares), strict=True)]
        gaps = [
            apart(mine[key], value)
            for mine, theirs in zip(found, expected, strict=True)
            for key, value in theirs.items()
            if not key.startswith("experts/")  # a prefix in two rows counts twice
        ]
        layout = layouts.Case(family=family, name=name, ranks=2)
        weights = far(layouts.assemble(layout, [shards for _, shards in parts]), end, start)
        print(f"{family} {name} seed {case.seed}: metrics {max(gaps):.1e} weights {weights:.1e}")
        assert max(*gaps, weights) < BOUND, (family, name, case.seed, gaps, weights)


def case_minibatches(case: Case) -> Any:
    """All minibatches, also those that train nothing."""
    advantages = batch_advantages(case.batch, estimator=case.estimator)
    return pack(case.batch, advantages, case.layout, drop_uniform=False).minibatches


@pytest.mark.usefixtures("process_group")
def test_a_few_random_settings_train_as_plain_pytorch(tmp_path: Path):
    check_plain("llama", range(4), tmp_path)


@pytest.mark.long
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("family", FAMILIES)
def test_random_settings_train_as_plain_pytorch(family: str, tmp_path: Path):
    check_plain(family, range(100, 116), tmp_path)
