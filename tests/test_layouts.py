"""Layouts of the trainer: each trains as one process does; one that cannot work is refused before anything starts."""

import itertools
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import layouts
from benchmarks.ranks import run_ranks
from benchmarks.report import BenchmarkError
from forge_rl.algorithms.aggregation import Aggregation
from forge_rl.algorithms.components import LossSum
from forge_rl.algorithms.correction import Correction
from forge_rl.algorithms.logprobs import Scoring, TokenScores, token_scores
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.algorithms.minibatch_losses import ClipCov, KlCov, M2po
from forge_rl.algorithms.policy_losses import Cispo, Dppo, Gmpo, Gspo, Reinforce, Sapo, Topr, Vespo
from forge_rl.algorithms.protocol import Loss, LossInputs
from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.degrees import check_model
from forge_rl.engines.protocol import LoadBalancer, TrainSettings
from forge_rl.errors import ConfigError
from forge_rl.run.run_config import RunConfig
from forge_rl.services.trainer import Trainer
from tests.commands import Command, actor_of, metrics, tiny_run
from tests.dense_masks import dense_mask
from tests.fakes import make_model, packed, random_batch
from tests.tiny import bundled_folder, make_tiny_model

FAMILIES = tuple(layouts.FAMILIES)
UPDATES = 2
"""Updates in each layout: the second depends on the optimizer's moments."""


@dataclass(frozen=True, kw_only=True)
class SequenceRatios(ClippedSurrogate):
    """A loss that is no sum over tokens: a soft ratio of a segment, as GSPO's, multiplies all of its tokens' losses."""

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, sums = super().__call__(inputs)
        keys = torch.where(inputs.mask, inputs.episodes * 10 + inputs.segments, -1)
        for key in keys.unique():
            if key >= 0:
                is_key = keys == key
                ratio = (inputs.logprobs[is_key] - inputs.behaviour[is_key]).mean().sigmoid()
                loss = loss - ratio * (inputs.weights * inputs.advantages)[is_key].sum()
        return loss, sums


def check(folder: Path, cases: list[layouts.Case], loss: Loss | None = None) -> None:
    """Train in each layout, and in one process."""
    families = sorted({case.family for case in cases})
    layouts.make_models(folder, families)
    options = {} if loss is None else {"loss": loss}
    alone = list(dict.fromkeys(map(layouts.alone, cases)))
    expected = dict(zip(alone, layouts.train(folder, alone, UPDATES, **options), strict=True))
    for ranks in sorted({case.ranks for case in cases}):
        together = [case for case in cases if case.ranks == ranks]
        for case, case_results in zip(together, layouts.train(folder, together, UPDATES, **options), strict=True):
            deviation = layouts.compare(case_results, expected[layouts.alone(case)])
            assert max(deviation.worst, deviation.of_way) < 1e-10, (case, deviation)
            if computed_tokens(case) == computed_tokens(layouts.alone(case)):  # a prefix in two rows counts twice
                first = expected[layouts.alone(case)].metrics[0]
                routed = {name: value for name, value in first.items() if name.startswith("experts/")}
                assert {name: case_results.metrics[0][name] for name in routed} == pytest.approx(routed, rel=1e-9), case
            for name, start in case_results.start.items():
                is_frozen = name.endswith("e_score_correction_bias")
                assert is_frozen or (case_results.weights[name] - start).norm() > 1e-3 * start.norm(), (
                    f"{name} is trained"
                )


def computed_tokens(case: layouts.Case) -> int:
    """Count the tokens of the first batch in a layout's rows, without padding."""
    (minibatch,) = layouts.packed(case, layouts.batches(1)[0]).minibatches
    return sum(int((row.trees >= 0).sum()) for row in minibatch.rows)


def balanced(family: str, ranks: int, balancer: LoadBalancer, **settings: int | str) -> layouts.Case:
    """Make a case of rows that are split in one way; "auto" is in the layouts."""
    settings |= {"context_parallel_degree": ranks, "context_parallel_load_balancer": balancer}
    return layouts.Case(family=family, name=f"CP, {balancer}", ranks=ranks, degrees=tuple(settings.items()))


def test_layouts_of_two_ranks_train_as_one_process(tmp_path: Path):
    ways = [balanced("gpt_oss", 2, "none"), balanced("gpt_oss", 2, "headtail")]
    ways += [balanced("qwen3_moe", 2, "ptrr", activation_checkpointing="full", router_replay=True)]
    # Llama's are in the next test; Qwen3 differs in norms that Qwen3-MoE has, Seed-OSS in biases of gpt-oss.
    check(
        tmp_path,
        [
            *layouts.cases([name for name in FAMILIES if name not in ("llama", "qwen3", "seed_oss")], most_ranks=2),
            *ways,
        ],
    )


REJECTING = Correction(proximal="loglinear", mode="truncate", level="geometric", high=1.5, reject="seq_mean_k1:0.4_2.5")


def test_losses_and_their_statistics_are_of_all_rows_on_all_ranks(tmp_path: Path):
    losses: dict[str, Loss] = {
        "m2po": M2po(m2_bound=2.0),
        "clip_cov": ClipCov(cov_ratio=0.05, cov_low=0.1, correction=Correction.presets["sequence_tis"]),
        "kl_cov": KlCov(cov_ratio=0.05),
        "gspo": Gspo(clip_high=0.5, top_entropy_quantile=0.5, entropy_coef=0.01),
        "gmpo": Gmpo(),
        "topr": Topr(),
        "vespo": Vespo(k_positive=0.2, lambda_positive=0.01, k_negative=0.1, lambda_negative=0.01),
        "cispo": Cispo(),
        "dppo": Dppo(),
        "sapo": Sapo(aggregation=Aggregation(kind="sequence_mean")),
        "reinforce": Reinforce(off_policy_bound=0.5, correction=REJECTING),
    }
    check(tmp_path, layouts.cases(["llama"], most_ranks=2), LossSum(losses))


@pytest.mark.nightly
def test_products_of_layouts_train_as_one_process(tmp_path: Path):
    products = ("TP x CP", "FSDP x EP x TP", "PP x FSDP")  # of the other families; benchmarks.layouts has all
    cases = [case for case in layouts.cases(FAMILIES) if case.ranks > 2]
    cases = [case for case in cases if case.family == "qwen3_moe" or case.name in products]
    check(tmp_path, [*layouts.cases(["llama", "qwen3", "seed_oss"], most_ranks=2), *cases])


@pytest.mark.long
def test_a_loss_over_whole_sequences_has_one_gradient_where_rows_are_split(tmp_path: Path):
    cases = [
        case for case in layouts.cases(["llama"], most_ranks=4) if dict(case.degrees).get("context_parallel_degree")
    ]
    assert len(cases) > 1
    check(tmp_path, [*cases, balanced("llama", 4, "headtail"), balanced("llama", 4, "ptrr")], SequenceRatios())


def relay(rank: int, folder: Path, first: layouts.Case, then: layouts.Case) -> layouts.Shards:
    """Train an update in one layout, save, load in another one, and train the others."""
    from forge_rl.engines.titan.train import TitanEngine

    saved = folder / f"{first.family}, {first.name} to {then.name}"
    batches = layouts.batches(UPDATES)
    engine = TitanEngine(folder / first.family, first.settings)
    layouts.update(engine, first, batches[0], rank, UPDATES)
    if rank == 0:
        for part in ("model", "training"):
            (saved / part).mkdir(parents=True)
    torch.distributed.barrier()
    engine.save(saved, folder / first.family, version=1).result()
    torch.distributed.barrier()
    other = TitanEngine(folder / then.family, then.settings)
    assert other.load_training_state(saved / "training") == 1
    for batch in batches[1:]:
        layouts.update(other, then, batch, rank, UPDATES)
    return layouts.shards_of(other)


def relays(rank: int, folder: Path, pairs: list[tuple[layouts.Case, layouts.Case]]) -> list[layouts.Shards]:
    return [relay(rank, folder, first, then) for first, then in pairs]


@pytest.mark.parametrize(
    ("ranks", "order"),
    [
        (2, ("FSDP", "EP", "PP", "TP", "CP", "FSDP")),
        pytest.param(4, ("FSDP x CP", "FSDP x EP", "PP x EP", "FSDP x EP x TP", "HSDP"), marks=pytest.mark.nightly),
    ],
)
@pytest.mark.long
def test_training_continues_in_another_layout_as_in_the_first(ranks: int, order: tuple[str, ...], tmp_path: Path):
    families = ("qwen3_moe", "gpt_oss")
    layouts.make_models(tmp_path, families)
    pairs = []
    for family in families:
        named = {case.name: case for case in layouts.cases([family]) if case.ranks == ranks}
        pairs += [(named[first], named[then]) for first, then in itertools.pairwise(order)]
    alone = [layouts.alone(pairs[index][0]) for index in (0, -1)]
    trained = layouts.train(tmp_path, alone, UPDATES)
    expected = dict(zip(families, trained, strict=True))
    by_rank = run_ranks(relays, ranks, tmp_path, pairs)
    for index, (first, then) in enumerate(pairs):
        assembled_weights = layouts.assemble(then, [parts[index] for parts in by_rank])
        end = expected[first.family].weights
        off = sum(float((assembled_weights[name] - end[name]).norm() ** 2) for name in end)
        assert (off / sum(float(weight.norm() ** 2) for weight in end.values())) ** 0.5 < 1e-10, (first.name, then.name)


SCORING = Scoring(temperature=0.7, entropy_gradient=True, squares=True)


def scores_of(scores: TokenScores, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Scores, and a gradient of both logprobs and entropy by the logits."""
    logprobs, entropy, squares, _ = scores
    weights = torch.arange(len(entropy))
    total = (logprobs * torch.tensor([1, -0.5]) * weights[:, None]).sum() + (weights * entropy).sum()
    return logprobs.detach(), entropy.detach(), squares, *torch.autograd.grad(total, logits)


def split_logprobs(rank: int, vocab: int) -> tuple[torch.Tensor, ...]:
    """Scores and gradient of the logits of two ranks' parts of a vocabulary, put together."""
    from forge_rl.engines.titan.vocabulary import split_token_scores

    logits, targets = logits_of(vocab)
    first = -(-vocab // 2)
    part = logits[:, :first] if rank == 0 else logits[:, first:]
    part = part.clone().requires_grad_()
    return scores_of(split_token_scores(part, targets, SCORING, init_device_mesh("cpu", (2,)), vocab), part)


def logits_of(vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 20 * torch.randn(100, vocab, generator=generator, dtype=torch.float64)
    logits[3] *= 100  # the others have a probability of 0
    logits[7, :5] = -torch.inf
    return logits, torch.randint(5, vocab, (100, 2), generator=generator)


def test_logprobs_of_a_split_vocabulary_are_those_of_the_whole():
    vocab = 43  # no even number: the second part is shorter
    logits, targets = logits_of(vocab)
    logits.requires_grad_()
    *scores, gradient = scores_of(token_scores(logits, targets, SCORING), logits)
    ranks = run_ranks(split_logprobs, 2, vocab)
    for rank_results in ranks:
        for value, other in zip(rank_results[:3], scores, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.cat([rank_results[3] for rank_results in ranks], dim=1), gradient, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("balancer", ["none", "headtail", "ptrr"])
def test_a_part_of_a_row_has_its_part_of_the_mask(balancer: LoadBalancer, tmp_path: Path):
    from forge_rl.engines.titan.balance import split_row
    from forge_rl.engines.titan.masks import attention_mask

    make_model(tmp_path)
    (row,) = packed(random_batch(0, vocab=43, groups=3), seq_len=256, context_parallel_degree=4).rows
    split = split_row(row, 4, balancer, read_architecture(tmp_path))
    assert (split.order is None) == (balancer == "none")
    masks = torch.zeros(4, len(row) // 4, len(row), dtype=torch.bool)
    for part, tokens in zip(masks, split.tokens, strict=True):
        first = 0
        for tree in attention_mask(row, tokens):
            for queries, keys, bias in tree.blocks(torch.float32):
                part_mask = part[first:][queries, tree.first :]
                part_mask[:, keys] = (
                    torch.ones_like(part_mask[:, keys]).tril(keys.stop - queries.stop)
                    if bias is None
                    else bias[0, 0] == 0
                )
            first += tree.queries
        assert first == len(tokens), "each query is in one mask"
    assert torch.equal(masks.flatten(0, 1), dense_mask(row)[split.tokens.flatten()])


RUNS = {
    "tensor": ("llama", {"num_key_value_heads": 2}, "--trainer.tensor-parallel-degree", "2"),
    "pipeline": (
        "llama",
        {},
        *("--trainer.pipeline-parallel-degree", "2"),
        *("--job", "process:2", "--placement", "trainer=host0+host1;generator=host0;environment=host0"),
    ),
    "context": ("llama", {}, "--trainer.context-parallel-degree", "2", "--trainer.seq-len", "160"),
    "expert": (
        "qwen3_moe",
        {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 64},
        *("--trainer.expert-parallel-degree", "2", "--trainer.expert-balance", "least_loaded"),
        "--trainer.router-replay",
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNS)
def test_a_whole_run_in_a_layout_outlives_the_death_of_a_rank(
    name: str, commands: list[Command], tmp_path: Path
) -> None:
    family, config, *flags = RUNS[name]
    model = make_tiny_model(tmp_path / "model", bundled_folder(), family=family, **config)
    out = tmp_path / "run"
    tasks = ("--groups-per-batch", "4", "--evaluation.every", "0", "--checkpoint-every", "4")
    command = tiny_run(commands, model, out, "--steps", "100000", *tasks, *flags)
    command.wait_for("step +6/")
    actor_of(command, "trainer").kill()
    command.wait_for("trainer/0 failed.*SIGKILL")
    command.wait_for("trainer/0 has recovered")
    back = int(command.wait_for("the run continues from step [0-9]+$").rpartition(" ")[2])
    command.wait_for(f"the run continues from step(.|\n)*step +{back + 3}/", whole=True)
    command.process.send_signal(signal.SIGINT)
    command.end()
    rows = metrics(out)
    if "updates" not in rows[-1]:
        rows.pop()  # interrupted before the trainer's metrics came
    limits = [row["tokens/completion_mean"] * 16 + 0.01 for row in rows]
    assert all(0 < row["tokens/trained"] <= limit for row, limit in zip(rows, limits, strict=True)), "peers count once"
    if name == "pipeline":
        assert {row["pipeline/idle_share"] for row in rows if "loss" in row} <= {1 / (n + 1) for n in range(1, 99)}
    assert all(row.get("logprob_gap", 0) < 1e-4 for row in rows), "engines have the weights that the ranks trained"
    if "--trainer.router-replay" in flags:
        assert {row["experts/replayed"] for row in rows} == {1.0}
        assert all(row["experts/rank_max_over_mean"] < 1.11 for row in rows)
        pairs = [(row["experts/rank_max_over_mean/plain"], row["experts/rank_max_over_mean"]) for row in rows]
        assert any(plain > 1.05 * computed for plain, computed in pairs), ("experts were lent", pairs)
    assert command.strays() == []


@pytest.mark.parametrize(
    ("degrees", "ranks", "shares"),
    [
        ({}, 1, 1),
        ({"ranks": 4}, 4, 4),
        ({"tensor_parallel_degree": 3}, 3, 1),
        ({"tensor_parallel_degree": 2, "context_parallel_degree": 2}, 4, 1),
        ({"ranks": 8, "tensor_parallel_degree": 2, "context_parallel_degree": 2}, 8, 2),
        ({"data_parallel_replicate_degree": 2}, 2, 2),
        ({"data_parallel_replicate_degree": 2, "context_parallel_degree": 3, "ranks": 12}, 12, 4),
        ({"pipeline_parallel_degree": 3}, 3, 1),
        ({"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "ranks": 8}, 8, 2),
        ({"expert_parallel_degree": 2}, 2, 2),
        ({"expert_parallel_degree": 4, "context_parallel_degree": 2}, 4, 2),
        ({"expert_parallel_degree": 2, "tensor_parallel_degree": 2, "data_parallel_replicate_degree": 2}, 4, 2),
    ],
)
def test_parallel_flags_alone_raise_the_ranks_to_what_they_need(degrees: Mapping[str, int], ranks: int, shares: int):
    config = Trainer.Config(**degrees)
    assert (config.ranks, config.shares) == (ranks, shares)


@pytest.mark.parametrize(
    ("degrees", "message", "works"),
    [
        ({"ranks": 3, "tensor_parallel_degree": 2}, "3 ranks", "to 2 or a multiple"),
        (
            {"ranks": 4, "data_parallel_replicate_degree": 2, "context_parallel_degree": 4},
            "--trainer.context-parallel-degree 4",
            "to 8 or a multiple",
        ),
        ({"ranks": 2, "pipeline_parallel_degree": 4}, "--trainer.pipeline-parallel-degree 4", "to 4 or a multiple"),
        ({"ranks": 6, "expert_parallel_degree": 4}, "--trainer.expert-parallel-degree 4", "to 4 or a multiple"),
        ({"tensor_parallel_degree": 0}, "--trainer.tensor-parallel-degree is 0", "1 or more"),
    ],
)
def test_ranks_that_cannot_be_laid_out_are_refused(degrees: Mapping[str, int], message: str, works: str):
    with pytest.raises(ConfigError) as error:
        Trainer.Config(**degrees)
    assert message in error.value.message
    assert works in error.value.hint


def test_a_model_that_cannot_be_split_is_refused_with_valid_numbers(tmp_path: Path):
    make_model(tmp_path, hidden_size=72, intermediate_size=96, num_attention_heads=9, num_key_value_heads=3)
    architecture = read_architecture(tmp_path)
    check_model(TrainSettings(tensor_parallel_degree=3, context_parallel_degree=2), 6, architecture)
    for settings, message, works in (
        (
            TrainSettings(tensor_parallel_degree=2),
            "9 heads and 3 key heads",
            "--trainer.tensor-parallel-degree to 1 or 3",
        ),
        (
            TrainSettings(tensor_parallel_degree=9),
            "9 heads and 3 key heads",
            "--trainer.tensor-parallel-degree to 1 or 3",
        ),
        (
            TrainSettings(expert_parallel_degree=2),
            "the model has no experts",
            "leave --trainer.expert-parallel-degree out",
        ),
        (
            TrainSettings(context_parallel_load_balancer="ptrr"),
            "each rank has whole rows",
            "set --trainer.context-parallel-degree",
        ),
    ):
        with pytest.raises(ConfigError) as error:
            check_model(settings, 2, architecture)
        assert message in error.value.message
        assert works in error.value.hint


def test_episodes_too_long_to_train_are_refused_with_both_flags():
    with pytest.raises(ConfigError) as error:
        RunConfig(trainer=Trainer.Config(seq_len=512)).check_devices()
    assert "--trainer.seq-len" in error.value.hint
    assert "--trainer.context-parallel-degree to 2 or more" in error.value.hint
    split = RunConfig(trainer=Trainer.Config(seq_len=512, context_parallel_degree=2))
    split.check_devices()
    assert split.trainer.ranks == 2


def test_a_rank_that_is_killed_is_reported_at_once():
    with pytest.raises(BenchmarkError, match="rank 0 of 2 ended with exit code -9"):
        run_ranks(die, 2)


def die(rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_every_gloo_group_has_one_thread():
    # Two would free the name of the last collective twice (torch 2.13).
    assert run_ranks(gloo_threads, 2) == [[1, 1, 1]] * 2


def gloo_threads(rank: int) -> list[int]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    groups = [dist.group.WORLD, dist.new_group(backend="gloo"), mesh.get_group("b")]
    for group in groups:
        dist.barrier(group)
    return [group._get_backend(torch.device("cpu")).options._threads for group in groups]
