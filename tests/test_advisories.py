"""Advisories: each condition is caused, with the step since when it holds and the flag to change."""

import ast
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from forge_rl.metrics import Display, EventSink, PhaseClock, RunLog, batch_metrics
from forge_rl.metrics.advisories import _CONDITIONS, Advisories, advisories_of
from forge_rl.metrics.effects import EFFECTS
from forge_rl.types import Batch, Episode, Group, Score, Task, ToolCall, Turn

Row = dict[str, object]
STEADY: Row = {
    "groups/uniform": 0.3,
    "episodes/truncated": 0.1,
    "episodes/repeated": 0.0,
    "logprob_gap": 0.01,
    "logprob_drift": 0.05,
    "entropy": 1.0,
    "ratio/p99": 1.3,
    "loss/clipped": 0.05,
    "lag/mean": 0.5,
    "seconds/step": 10.0,
    "seconds/rollout": 6.0,
    "queue/engine/mean": 1.0,
    "queue/decoding/mean": 64.0,
    "generator/kv_cache_usage": 0.8,
    "generator/preemptions": 0.0,
    "generator/request_limit": 64.0,
    "reward_parts/correct": 0.5,
    "reward_parts/brief": 0.2,
    "tokens/completion_mean": 200.0,
    "reward/mean": 0.5,
    "reward/max": 1.0,
    "reward/min": 0.0,
    "held_out": 0.5,
    "tools/errors": 0.05,
    "outcomes/infrastructure_error": 0.0,
    "updates/skipped": 0.0,
    "grad_norm": 0.5,
}
"""Metrics of a step with nothing to object to."""
CAUSES: dict[str, tuple[Sequence[Row], str]] = {
    "diverged": (
        [{"entropy": 9.0, "grad_norm": 40.0, "tokens/completion_mean": 900.0, "episodes/truncated": 1.0, "lr": 1e-2}],
        "entropy went from 1 to 9, grad_norm went from 0.5 to 40, tokens/completion_mean went from 200 to 900: "
        "first lower --trainer.optimizer.lr, now 0.01, tenfold",
    ),
    "uniform": ([{"groups/uniform": 1.0}], "--group-size"),
    "truncated": ([{"episodes/truncated": 0.6}], "60% of the episodes are truncated: raise --generator.max-tokens"),
    "gap": ([{"logprob_gap": 0.1}], "--trainer.dtype"),
    "drift": ([{"logprob_drift": 0.6}], "--schedule.max-lag"),
    "entropy": ([{"entropy": 0.05}], "collapsed from 1 to 0.05"),
    "ratio": ([{"ratio/p99": 9.0}], "--loss NAME:correction=PRESET"),
    "clipped": ([{"loss/clipped": 0.4}], "40% of the tokens are clipped"),
    "lag": ([{"lag/mean": 3.9}], "at its bound of 4"),
    "stall": (
        [{"seconds/step": 60.0, "seconds/rollout": 55.0}],
        "a step took 60 s, usual are 10 s, most of it in phase",
    ),
    "queued": ([{"queue/engine/mean": 200.0}], "--generator.max-num-seqs"),
    "cache": (
        [{"generator/kv_cache_usage": 0.98, "generator/preemptions": 7.0, "generator/request_limit": 20.0}],
        "98% in use, 7 times a request lost its place and was computed again; an engine gets 20 requests at a time",
    ),
    "part": ([{"reward_parts/correct": 0.0, "reward_parts/brief": 0.9}], "brief is 100% of the reward"),
    "longer": ([{"tokens/completion_mean": 500.0}], "grown from 200 to 500 tokens"),
    "shorter": ([{"tokens/completion_mean": 40.0}], "shrunk from 200 to 40 tokens"),
    "variance": ([{"reward/max": 0.0}], "all rewards of a batch are 0"),
    "repeated": ([{"episodes/repeated": 0.5}], "50% of the answers end in a loop"),
    "worse": ([{"held_out": 0.3}], "the score held_out is 0.3, below the base model's 0.5"),
    "tools": ([{"tools/errors": 0.8}], "80% of the tool calls end in an error"),
    "failing": ([{"outcomes/infrastructure_error": 3.0}], "9 in the last 5 steps by infrastr"),
    "skipped": ([{"updates/skipped": 1.0}], "--trainer.dtype float32"),
    "gradient": ([{"grad_norm": 50.0}], "--trainer.optimizer.max-grad-norm"),
}
STEADY_STEPS = 8
LATER = dict.fromkeys(("gap", "drift", "entropy", "longer", "shorter"), 2) | {"failing": 1}
"""Steps that some conditions need to be seen, as they are of several steps."""


def run_of(kind: str) -> list[Row]:
    """Steady steps, then eight with the cause."""
    causes = CAUSES[kind][0]
    bad_rows = [causes[min(index, len(causes) - 1)] for index in range(8)]
    return [{"step": index + 1, **STEADY, **row} for index, row in enumerate([{}] * STEADY_STEPS + bad_rows)]


def test_every_condition_has_a_cause_here() -> None:
    assert CAUSES.keys() == _CONDITIONS.keys()
    assert advisories_of([{"step": step, **STEADY} for step in range(1, 200)], max_lag=4) == []
    page = (Path(__file__).parent.parent / "docs" / "running" / "see.md").read_text()
    kinds = re.findall(r"^\| (`.*?`) \|", page.partition("## Advisories")[2].partition("## ")[0], re.M)
    assert {kind.strip("`") for cell in kinds for kind in cell.split(", ")} == _CONDITIONS.keys() | EFFECTS.keys(), (
        "as documented"
    )


@pytest.mark.parametrize("kind", CAUSES)
def test_a_condition_is_named_with_its_first_step(kind: str) -> None:
    begun = []
    watch = Advisories(max_lag=4)
    for row in run_of(kind):
        begun += watch.look_at(int(str(row["step"])), {name: value for name, value in row.items() if name != "step"})
    advisory = next(advisory for advisory in begun if advisory.kind == kind)
    assert advisory.since == STEADY_STEPS + 1 + LATER.get(kind, 0)
    assert CAUSES[kind][1] in advisory.text
    assert "--" in advisory.text or "forge-rl" in advisory.text
    assert [advisory.kind for advisory in begun].count(kind) == 1, "it is returned once"
    side_effects = {"variance": {"uniform"}}
    assert {advisory.kind for advisory in begun} - {kind} <= side_effects.get(kind, set())


@pytest.mark.parametrize(("usage", "preemptions", "full"), [(0.98, 0, False), (0.995, 0, True), (0.7, 1, True)])
def test_a_cache_counts_as_full_by_its_use_or_by_preemptions(usage: float, preemptions: int, full: bool) -> None:
    row = {"generator/kv_cache_usage": usage, "generator/preemptions": preemptions}
    advisories = advisories_of([{"step": step, **row} for step in range(1, 4)])
    assert [advisory.kind for advisory, _ in advisories] == ["cache"] * full


@pytest.mark.parametrize(("counts", "begins"), [([3, 0, 2, 0, 4, 0], [3]), ([3, 0, 0, 0, 0, 0], []), ([0] * 6, [])])
def test_alternating_failures_are_reported_and_a_single_step_is_not(counts: list[int], begins: list[int]) -> None:
    rows = [{"step": step, "outcomes/environment_error": float(count)} for step, count in enumerate(counts, 1)]
    assert [advisory.since for advisory, end in advisories_of(rows) if end is None] == begins


def test_divergence_at_step_two_hides_the_advisories_that_follow() -> None:
    broken: Row = {"entropy": 0.02, "logprob_drift": 4.0, "ratio/p99": 300.0, "tokens/completion_mean": 1024.0}
    broken |= {"episodes/truncated": 1.0, "groups/uniform": 1.0, "reward/max": 0.0, "episodes/repeated": 0.9}
    rows = [{"step": step, **STEADY, **(broken if step > 1 else {})} for step in range(1, 40)]
    ((advisory, end),) = advisories_of([*rows, {"step": 39, "held_out": 0.5}])
    assert (advisory.kind, advisory.since, end) == ("diverged", 2, None)
    assert "--trainer.optimizer.lr" in advisory.text
    assert advisories_of([*rows, {"step": 40, **STEADY}])[0] == (advisory, 40)


def test_a_learning_rate_a_thousand_times_too_high_is_named() -> None:
    # recipes.grpo with the bundled model and --trainer.optimizer.lr 3e-2: the third batch teaches nothing.
    usual: Row = {"entropy": 2.17, "ratio/p99": 1.0, "grad_norm": 2.02, "tokens/completion_mean": 14.1, "lr": 0.03}
    broken: Row = {"entropy": 0.508, "ratio/p99": 4.9e8, "grad_norm": 0.12, "tokens/completion_mean": 15.8, "lr": 0.03}
    untrained: Row = {"tokens/completion_mean": 16.0, "updates": 2.0, "episodes/truncated": 1.0, "groups/uniform": 1.0}
    cut: Row = {"episodes/truncated": 0.97, "logprob_drift": 17.2, "groups/uniform": 0.875}
    rows = [usual | {"episodes/truncated": 0.72}, broken | cut, *[untrained] * 5]
    ((advisory, end),) = advisories_of([{"step": step, **row} for step, row in enumerate(rows, 1)])
    assert (advisory.kind, advisory.since, end) == ("diverged", 2, None)
    assert "first lower --trainer.optimizer.lr, now 0.03" in advisory.text


def test_slow_changes_and_one_kind_of_sign_are_no_divergence() -> None:
    slow = [STEADY | {"entropy": 0.97**step, "tokens/completion_mean": 200 * 1.03**step} for step in range(100)]
    stale = [STEADY | ({"logprob_drift": 1.0, "ratio/p99": 80.0} if step > 9 else {}) for step in range(20)]
    for rows in (slow, stale):
        advisories = advisories_of([{"step": step, **row} for step, row in enumerate(rows, 1)])
        assert "diverged" not in {advisory.kind for advisory, _ in advisories}
        assert advisories, "but by its own name"


def test_an_advisory_ends_and_a_rollback_forgets() -> None:
    rows = [*run_of("truncated"), {"step": 17, **STEADY}]
    ((advisory, end),) = advisories_of(rows)
    assert (advisory.kind, advisory.since, end) == ("truncated", 9, 17)
    watch = Advisories()
    for step in (1, 2):
        assert watch.look_at(step, {"episodes/truncated": 0.9}) == []
    watch.rollback()
    assert watch.look_at(2, {"episodes/truncated": 0.9}) == []
    assert watch.look_at(3, {"entropy": float("nan"), "lag/hist": {}}) == []
    assert watch.look_at(3, {"episodes/truncated": 0.9}) == []
    assert [str(advisory) for advisory in watch.look_at(4, {"episodes/truncated": 0.9})] == [
        "since step 2: 90% of the episodes are truncated: raise --generator.max-tokens"
    ]


ASKED: dict[str, tuple[Row, Row, Row]] = {
    "drafts": ({"generator.speculation": "ngram"}, {"rollout/drafted": 0.0}, {"rollout/drafted": 9.0}),
    "lent_experts": (
        {"trainer.expert_balance": "least_loaded"},
        {"experts/rank_max_over_mean": 1.5, "experts/rank_max_over_mean/plain": 1.5},
        {"experts/rank_max_over_mean": 1.1, "experts/rank_max_over_mean/plain": 1.5},
    ),
    "replayed_experts": (
        {"trainer.router_replay": True},
        {"experts/load_max_over_mean": 1.0},
        {"experts/replayed": 0.9},
    ),
    "shared_prefixes": (
        {"group_size": 8},
        {"tokens/train": 100.0, "tokens/packed": 100.0},
        {"tokens/train": 100.0, "tokens/packed": 60.0},
    ),
    "cached_tools": ({}, {"tools/cache_hits": 0.0}, {"tools/cache_hits": 0.1}),
    "dynamic_sampling": (
        {"schedule.dynamic_sampling": True},
        {"outcomes/completed": 8.0},
        {"outcomes/completed": 8.0, "groups/replaced_uniform": 1.0},
    ),
    "curriculum": (
        {"curriculum.pools": "solve_rate"},
        {"curriculum/new": 8.0, "curriculum/passed_over": 0.0},
        {"curriculum/new": 2.0, "curriculum/passed_over": 5.0},
    ),
    "adapted_mixture": (
        {"mixture.adapt": "success"},
        {"data/mixture_shift": 0.0},
        {"data/mixture_shift": 0.1},
    ),
    "recomputed_prefixes": (
        {"trainer.prefix_states": "recomputed"},
        {"states/recomputed_tokens": 0.0},
        {"states/recomputed_tokens": 40.0},
    ),
    "transferred_caches": (
        {"generator.kv_transfer_config": '{"kv_connector": "OffloadingConnector"}'},
        {"generator/prefix_hits": 0.5},
        {"generator/prefix_hits": 0.5, "generator/transferred_tokens": 64.0},
    ),
    "over_sampling": (
        {"schedule.over_sampling": 1.5},
        {"outcomes/completed": 8.0, "groups/overtaken": 0.0},
        {"outcomes/completed": 8.0, "groups/overtaken": 2.0},
    ),
    "spares": ({"generator.spares": 1}, {"generator/spares": 0.0}, {"generator/spares": 1.0}),
    "guests": (
        {"generator.guests": 1, "generator.urls": ["http://a"]},
        {"busy/generator/0": 0.9, "busy/generator/1": 0.0, "busy/generator/2": 0.9},
        {"busy/generator/0": 0.9, "busy/generator/1": 0.2, "busy/generator/2": 0.9},
    ),
    "compactions": (
        {"env": "tools:compact_above_chars=800"},
        {"episodes/segments": 1.0},
        {"episodes/segments": 1.5},
    ),
    "offloaded_activations": (
        {"trainer.enable_activation_offload": True},
        {"grad_norm": 0.5},
        {"grad_norm": 0.5, "activations/offloaded_bytes": 4096.0},
    ),
    "quantized_weights": (
        {"generator.quantization": "fp8"},
        {"generator/quantized_bytes": 0.0},
        {"generator/quantized_bytes": 4096.0},
    ),
    "warm_sessions": ({}, {"sandbox/warm": 0.0, "sandbox/fresh": 64.0}, {"sandbox/warm": 60.0, "sandbox/fresh": 4.0}),
    "served_adapters": (
        {"generator.adapters": "served"},
        {"generator/served_versions": 0.0},
        {"generator/served_versions": 2.0},
    ),
    "quantized_base": ({"lora.base_format": "nf4"}, {"lora/base_share": 1.1}, {"lora/base_share": 0.4}),
    "published_adapters": ({"lora.rank": 8}, {"weights/written_share": 1.0}, {"weights/written_share": 0.02}),
    "mirrored_changes": (
        {"weights.mirror": "s3://a/b"},
        {"weights/mirrored_share": 1.0},
        {"weights/mirrored_share": 0.1},
    ),
}
"""Of each effect, settings that ask for it, metrics of a step without it, and of one with it."""


@pytest.mark.parametrize("kind", EFFECTS)
def test_a_flag_without_effect_is_reported_until_it_has_one(kind: str) -> None:
    settings, without, having = ASKED[kind]
    steps = EFFECTS[kind].steps
    rows = [{"step": step, **without} for step in range(1, steps + 1)]
    assert advisories_of(rows[:-1], settings=settings) == []
    ((advisory, end),) = advisories_of(rows, settings=settings)
    assert (advisory.kind, advisory.since, end) == (kind, 1, None)
    assert advisory.text.startswith(f"{EFFECTS[kind].flag} had no effect in {steps} steps: ")
    ((_, end),) = advisories_of([*rows, {"step": steps + 1, **having}], settings=settings)
    assert end == steps + 1
    assert advisories_of([{**row, **having} for row in rows], settings=settings) == []
    assert not settings or advisories_of(rows, settings={}) == [], "nobody asked for it"


def test_the_metrics_page_names_each_effect_and_a_whole_run_that_shows_it() -> None:
    root = Path(__file__).parent.parent
    table = (root / "docs" / "running" / "metrics.md").read_text().partition("## Effects of flags")[2]
    rows = [line.split("|") for line in table.splitlines() if "`tests/" in line]
    kinds = {kind for row in rows for kind in re.findall(r"`(\w+)`", row[4])}
    assert kinds == EFFECTS.keys()
    for row in rows:
        ((file, test),) = re.findall(r"`(tests/\w+\.py)`: `(\w+)`", row[5])
        functions = [node for node in ast.parse((root / file).read_text()).body if isinstance(node, ast.FunctionDef)]
        (source,) = (ast.unparse(node) for node in functions if node.name == test)
        metric_names = re.findall(r"`(\w+/[\w/]+)`", row[3])
        assert any(name in source for name in metric_names), f"{file}: {test} looks at none of {metric_names}"
        of_gpus = {"`offloaded_activations`", "`transferred_caches`"}
        assert "tiny_run(" in source or row[4].strip() in of_gpus, f"{file}: {test} is no whole run"


def test_the_log_warns_of_advisories(tmp_path: Path) -> None:
    log = RunLog(Display("none", phase_clock=PhaseClock()), EventSink(tmp_path / "events.jsonl"))
    for step in range(1, 9):
        log.log(step, {"episodes/truncated": 0.9})
    log.close()
    (event,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (event["level"], event["text"].partition(":")[0]) == ("warning", "since step 1")


def test_loops_and_tool_errors_of_a_batch_are_counted() -> None:
    def episode(ids: list[int], *errors: str) -> Episode:
        calls = tuple(ToolCall(id="", name="add", arguments="", error=error) for error in errors)
        turn = Turn(
            prompt_ids=[1], token_ids=ids, logprobs=[0.0] * len(ids), versions=[0] * len(ids), text="", calls=calls
        )
        return Episode(task=task, turns=(turn,), score=Score(total=0.0))

    task = Task(id="1", source="s", messages=())
    loop, short, other = [9, *[1, 2, 3] * 40], [1] * 20, list(range(100))
    episodes = (episode(loop), episode(short), episode(other, "failed", ""), episode([1] * 100, "", ""))
    values = batch_metrics(Batch(groups=(Group(task=task, episodes=episodes),), version=0))
    assert values["episodes/repeated"] == 0.5
    assert values["tools/errors"] == 0.25
