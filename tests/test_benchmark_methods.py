"""The benchmark of methods: what it compares, how it is continued, and what it concludes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import pytest

from benchmarks.methods.__main__ import Config, Curve, Finished, write_results
from benchmarks.methods.catalogue import catalogue
from benchmarks.report import BenchmarkError, Report
from forge_rl import Estimator, RoleBaselines, build_loss
from forge_rl.algorithms.loss_flag import METHODS

METHODS_BY_NAME = catalogue(RoleBaselines())


def curve(method: str, seed: int, after: float) -> Curve:
    return Curve(method, seed, 0.5, after, rewards=[0.3, after], entropies=[1.0, 0.5], gap=1e-6, seconds=30.0)


def test_every_loss_and_estimator_is_compared_by_its_name() -> None:
    needs_a_teacher = {"distill"}
    assert METHODS.keys() - needs_a_teacher <= METHODS_BY_NAME.keys()
    for name, method in METHODS_BY_NAME.items():
        assert method.kind != "loss" or method.loss == name or name == "ppo_critic"
        needs = build_loss([method.loss]).needs
        assert not {"values", "teacher", "observations"} & set(needs), name
    assert {method.advantages for method in METHODS_BY_NAME.values()} == set(get_args(Estimator))


def test_finished_runs_are_kept_and_those_of_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    first = Finished(Config(runs=path))
    first.add(curve("gspo", 1, 0.75), start_s=20.0)
    first.add(curve("rloo", 0, 0.5), start_s=0.0)
    second_results = Finished(Config(runs=path, seeds=(1,)))
    assert {key: asdict(curve) for key, curve in second_results.curves.items()} == {
        ("gspo", 1): asdict(curve("gspo", 1, 0.75)),
        ("rloo", 0): asdict(curve("rloo", 0, 0.5)),
    }
    assert second_results.seconds == 80.0
    with pytest.raises(BenchmarkError, match="'lr': "):
        Finished(Config(runs=path, lr=1.0))
    path.write_text(path.read_text() + '{"method": "gs')
    with pytest.raises(BenchmarkError, match=r"line 3 of .* is not a run"):
        Finished(Config(runs=path))
    with pytest.raises(BenchmarkError, match="--only names 'gpso'"):
        Config(only=("gpso",))


def test_a_method_learns_if_its_mean_gain_over_the_seeds_is_a_tenth() -> None:
    config = Config(seeds=(0, 1))
    done = Finished(config)
    for method, afters in (("gspo", (0.55, 0.75)), ("rloo", (0.5, 0.625))):
        for seed, after in enumerate(afters):
            done.add(curve(method, seed, after), start_s=0.0)
    report = Report("methods", config)
    write_results(report, {name: METHODS_BY_NAME[name] for name in ("gspo", "rloo")}, config, done)
    assert report.results == pytest.approx(
        {"methods": 2, "methods_that_learn": 1, "gain_worst": 0.0625, "gain_median": 0.10625, "minutes": 2.0}
    )
    (gspo, rloo) = report.rows
    assert (gspo["gain"], gspo["gain_worst_seed"], gspo["after"]) == pytest.approx((0.15, 0.05, 0.65))
    assert (rloo["kind"], rloo["loss"], rloo["advantages"]) == ("advantages", "clipped", "rloo")
    assert json.loads(json.dumps(gspo["runs"]))[1]["rewards"] == [0.3, 0.75]
