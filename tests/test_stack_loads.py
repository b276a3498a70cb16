"""Stacks of experts, each loaded as one: vLLM's own loads of the folders, tensor by tensor, are the reference."""

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forge_rl.engines.factory import decode_environment
from forge_rl.errors import AttestationError
from forge_rl.weights.manifest import combine_shards
from tests.fakes import make_model
from tests.test_families_engine import LARGE, OWN

pytestmark = pytest.mark.processes
EXPERTS = 8
FAMILIES: dict[str, dict[str, object]] = {
    "qwen3_moe": {"num_experts": EXPERTS},
    "deepseek_v3": {"n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1},
    "gpt_oss": {"num_local_experts": EXPERTS},
    "mixtral": {"num_local_experts": EXPERTS},  # on transformers' own modelling code
}
LAYOUTS = {"tensor_parallel": {}, "expert_parallel": {"enable_expert_parallel": True}}


def workers_reports(scratch: Path, cases: list[dict[str, object]], ranks: int) -> list[list[dict[str, Any]]]:
    """What each rank reports of each case."""
    (scratch / "cases.json").write_text(json.dumps(cases))
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.stack_loads", str(scratch), str(rank), str(ranks)],
            env=os.environ | decode_environment(0, replicas=1, devices=ranks),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [worker.communicate(timeout=600)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert not any(worker.returncode for worker in workers), [output[-3000:] for output in outputs]
    return [pickle.loads((scratch / f"{rank}.pickle").read_bytes()) for rank in range(ranks)]


def check_attestation(reports: list[dict[str, Any]]) -> None:
    """The workers together hold the version, and one with a mistake in an expert is refused by the expert's name."""
    manifest, name = reports[0]["manifest"], reports[0]["spoiled"]
    shards = [shard for report in reports for shard in report["shards"]]
    manifest.attest(combine_shards(shards, version=1), "the workers")
    spoiled = [shard for report in reports for shard in report["spoiled_shards"]]
    with pytest.raises(AttestationError) as raised:
        manifest.attest(combine_shards(spoiled, version=2), "the workers")
    assert raised.value.message.endswith(f" 1 of {len(manifest.tensors)} tensors differ: {name}")


def test_stacks_load_as_their_experts_do_one_by_one(tmp_path: Path) -> None:
    folders = {family: tmp_path / family for family in FAMILIES}
    for family, folder in folders.items():
        make_model(folder, family, **(LARGE | OWN.get(family, {}) | FAMILIES[family]))
    cases = [{"folder": str(folder), "dtype": "bfloat16"} for folder in folders.values()]
    (reports,) = workers_reports(tmp_path, cases, 1)
    for family, report in zip(folders, reports, strict=True):
        assert not report["differing"], family
        check_attestation([report])
        manifest = report["manifest"]
        runs = {(_stack_name(entry.name), entry.bucket) for entry in manifest.tensors if ".experts." in entry.name}
        experts = sum(".experts." in entry.name for entry in manifest.tensors)
        if family == "gpt_oss":
            assert report["load_calls"] == 0, "its files hold stacks"
        else:
            assert experts == report["start_calls"] > 2 * len(runs)
            assert len({stack for stack, _ in runs}) < len(runs), "some stacks are in several buckets"
            assert report["load_calls"] == 2 * len(runs), "each run is seen twice: on the meta device, and for good"


@pytest.mark.long
def test_workers_load_their_slices_of_stacks(tmp_path: Path) -> None:
    folder = tmp_path / "qwen3_moe"
    make_model(folder, "qwen3_moe", **(LARGE | OWN["qwen3_moe"] | {"num_experts": 6, "moe_intermediate_size": 64}))
    cases = [
        {"folder": str(folder), "dtype": "bfloat16", "tensor_parallel_size": 2, **layout} for layout in LAYOUTS.values()
    ]
    first, second = workers_reports(tmp_path, cases, 2)
    for layout, *reports in zip(LAYOUTS, first, second, strict=True):
        assert not any(report["differing"] for report in reports), layout
        check_attestation(reports)
        assert all(report["load_calls"] < report["start_calls"] for report in reports), layout


def _stack_name(name: str) -> str:
    """The name that all experts of a stack share."""
    return re.sub(r"(\.experts\.)\d+", r"\1{}", name)
