"""benchmarks.conformance without its peers: batches, the table of comparisons, and what counts as a deviation."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.conformance import __main__ as conformance
from benchmarks.conformance.batches import GROUP_SIZE, KINDS, draw
from benchmarks.conformance.ours import LossOf, loss_of, minibatch_deviation
from benchmarks.conformance.packed import packed_batch
from benchmarks.conformance.table import COMPARISONS, TRL_DIVERGENCES, TRL_LOSSES, VERL_LOSSES, Comparison
from benchmarks.peer_environments import TRL, Peer, set_up
from benchmarks.peers.exchange import Job, read_batch, read_jobs, read_result, write_jobs, write_result
from benchmarks.report import BenchmarkConfig, BenchmarkError, Report
from forge_rl.algorithms.losses import ClippedSurrogate, PolicyLoss

SEEDS = (0, 1)


def theirs(comparison: Comparison) -> conformance.Results:
    """Compute our side as if it were the peer's."""
    return [comparison.ours(draw(kind, seed)) for kind in comparison.batches for seed in SEEDS]


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda each: f"{each.method} {each.peer} {each.function}")
def test_our_side_of_every_comparison_is_finite_and_reproducible(comparison: Comparison) -> None:
    assert set(comparison.batches) <= set(KINDS)
    json.dumps(comparison.settings)
    found = conformance.compare(comparison, SEEDS, theirs(comparison))
    assert set(found.values()) == {0.0}
    assert found.keys() >= {"loss", "gradient"} or found.keys() >= {"advantages"}


@pytest.mark.parametrize(
    "comparison",
    [comparison for comparison in COMPARISONS if isinstance(comparison.ours, LossOf)],
    ids=lambda comparison: f"{comparison.method} {comparison.peer} {comparison.function}",
)
def test_each_of_two_minibatches_is_as_if_its_groups_were_alone(comparison: Comparison) -> None:
    assert isinstance(comparison.ours, LossOf)
    batch = draw(comparison.batches[-1], 0)
    assert minibatch_deviation(comparison.ours, batch, conformance.deviation) < conformance.BOUND


def test_sparing_uniform_groups_changes_no_gradient() -> None:
    batch, compared = draw("token_advantages", 0), 0
    for comparison in TRL_LOSSES + VERL_LOSSES:
        loss = comparison.ours.loss if isinstance(comparison.ours, LossOf) else None
        if isinstance(loss, PolicyLoss) and not loss.keeps_uniform:
            spared, full = (loss_of(form)(batch) for form in (loss, replace(loss, measures_uniform=True)))
            assert conformance.deviation(spared["gradient"], full["gradient"]) < 1e-9, comparison.method
            compared += 1
    assert compared > 20


def test_batches_become_multi_turn_episodes_with_unscored_tokens() -> None:
    batch, loss = draw("masked", 0), ClippedSurrogate()
    packed = packed_batch(batch, loss, {}, group_size=GROUP_SIZE, minibatches=1)
    (minibatch,) = packed.minibatches
    assert minibatch.tokens == batch["mask"].sum() == packed.trained_tokens
    assert minibatch.sequences == len(batch["mask"])
    assert 0 < minibatch.uniform_rows < len(minibatch.rows)
    assert minibatch.observations > 0
    assert packed.unscored_tokens > 0
    assert {int(turn) for row in minibatch.rows for turn in row.turns[row.mask]} == {0, 1}


def test_batches_hold_what_methods_stumble_over() -> None:
    batch = draw("extreme", 0)
    lengths = batch["mask"].sum(axis=1)
    assert (lengths == 0).any()
    assert len(set(lengths.tolist())) > 5
    assert 10 < abs(batch["logprobs"] - batch["behaviour"])[batch["mask"]].max() < 20
    assert abs(draw("far", 0)["logprobs"] - draw("far", 0)["behaviour"]).max() > 25
    groups = batch["rewards"].reshape(-1, GROUP_SIZE)
    assert (groups.max(axis=1) == groups.min(axis=1)).any()
    assert np.isnan(draw("missing_parts", 0)["parts"]).any()
    assert all(np.array_equal(draw("plain", 3)[name], each) for name, each in draw("plain", 3).items())
    assert not np.array_equal(draw("plain", 3)["logprobs"], draw("plain", 4)["logprobs"])


@pytest.mark.parametrize("losses", [TRL_LOSSES, TRL_DIVERGENCES, VERL_LOSSES], ids=["TRL", "divergences", "verl"])
def test_batches_tell_methods_apart(losses: tuple[Comparison, ...]) -> None:
    """A setting that no batch reaches would make two methods equal."""
    by_name = {each.method: each.ours for each in losses if not each.differs}
    by_name.pop("token mean", None)  # by another path of the peer, but the same loss of ours as the plain clip
    batches = [draw(kind, seed) for kind in ("masked", "extreme") for seed in SEEDS]
    found: dict[str, np.ndarray] = {}
    for name, ours in by_name.items():
        results = [ours(batch) for batch in batches]
        found[name] = np.stack(
            [[each["gradient"], each.get("entropy_gradient", 0 * each["gradient"])] for each in results]
        )
    by_name.pop("REINFORCE (CISPO on-policy)", None)
    for one, other in itertools.combinations(by_name, 2):
        assert not np.allclose(found[one], found[other], rtol=1e-3, atol=0), f"{one} and {other}"


def test_a_difference_in_one_small_element_is_found() -> None:
    comparison = replace(
        COMPARISONS[0], ours=loss_of(ClippedSurrogate(dual_clip=math.inf)), batches=("extreme",), differs=""
    )
    results = [dict(each) for each in theirs(comparison)]
    gradient = results[0]["gradient"] = results[0]["gradient"].copy()
    size = np.median(abs(gradient[gradient != 0]))
    assert abs(gradient).max() > 1e4 * size  # which would hide the difference if it were the scale of all
    gradient[np.unravel_index(abs(abs(gradient) - size).argmin(), gradient.shape)] *= 1.01
    assert conformance.compare(comparison, SEEDS, results)["gradient"] == pytest.approx(0.0099, rel=0.01)
    plain = replace(comparison, batches=("plain",))
    other = replace(plain, ours=loss_of(ClippedSurrogate(clip_high=0.281, dual_clip=math.inf)))
    assert conformance.compare(other, SEEDS, theirs(plain))["loss"] > conformance.BOUND


def test_a_deviation_is_relative_to_the_element_or_to_the_median() -> None:
    assert conformance.deviation(np.array([1.0, 2.0, 400.0]), np.array([1.0, 2.0, 404.0])) == pytest.approx(4 / 404)
    assert conformance.deviation(np.array([0.0, 2.0, 2.0]), np.array([0.02, 2.0, 2.0])) == pytest.approx(0.01)
    assert conformance.deviation(np.zeros(2), np.zeros(2)) == 0
    assert conformance.deviation(np.array(np.nan), np.array(np.nan)) == np.inf
    assert conformance.deviation(np.zeros(2), np.zeros((2, 1))) == np.inf


def test_a_report_has_the_worst_deviation_and_refuses_stale_excuses(monkeypatch: pytest.MonkeyPatch) -> None:
    equal = replace(COMPARISONS[0], batches=("plain",))
    differs = replace(equal, method="another", differs="by 1%")
    wrong = replace(equal, method="a third")
    factors = {equal.method: 1 + 1e-9, "another": 1.01, "a third": 1.1}

    def run_peer(name: str, own: list[Comparison], seeds: range) -> tuple[list[conformance.Results], dict[str, str]]:
        results = [
            [{k: v * factors[each.method] for k, v in each.ours(draw("plain", seed)).items()} for seed in seeds]
            for each in own
        ]
        return results, {name: "1"}

    monkeypatch.setattr(conformance, "run_peer", run_peer)
    report = Report("conformance", BenchmarkConfig())
    conformance.measure(conformance.Config(draws=1), report, [equal, differs, wrong])
    assert report.results["methods_compared"] == 2
    assert report.results["worst_deviation"] == pytest.approx(0.1 / 1.1)
    assert [row["differs_on_purpose"] for row in report.rows] == ["", "by 1%", ""]
    assert report.rows[1]["loss"] == pytest.approx(0.01 / 1.01)
    factors["another"] = 1.0
    with pytest.raises(BenchmarkError, match="is said to differ from TRL's, and does not"):
        conformance.measure(conformance.Config(draws=1), Report("conformance"), [equal, differs])


def test_jobs_batches_and_results_keep_their_values_in_files(tmp_path: Path) -> None:
    job = Job(function="f", settings={"a": [1, 2]}, batch="b")
    write_jobs(tmp_path, [job], {"b": draw("plain", 0)})
    assert read_jobs(tmp_path) == [job]
    assert all(np.array_equal(draw("plain", 0)[name], each) for name, each in read_batch(tmp_path, "b").items())
    write_result(tmp_path, 0, {"loss": np.array(1.5)})
    assert read_result(tmp_path, 0) == {"loss": 1.5}


def test_a_peer_that_cannot_be_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("benchmarks.peer_environments.ROOT", tmp_path)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(BenchmarkError, match="TRL cannot be installed"):
        set_up(TRL)
    assert Peer(name="TRL", packages=()).folder == tmp_path / ".bench" / "trl"
