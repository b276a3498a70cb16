"""Engines of several devices: experts that workers share, and workers that are killed."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from forge_rl.services.generator import Generator
from forge_rl.services.service_start import ServiceStart
from forge_rl.services.weight_store import WeightStore
from forge_rl.types import Sampling, Turn
from tests.commands import Command, actor_of, forgotten, metrics, shared_memory, tiny_run
from tests.engine_conformance import LONG_PROMPT
from tests.fake_actors import cluster
from tests.fakes import make_model
from tests.processes import below
from tests.stack_loads import in_trainers_order
from tests.test_generator import gap, publish

pytestmark = pytest.mark.long


def make_moe(folder: Path, tokenizer_from: Path) -> torch.nn.Module:
    """A random Qwen3-MoE of 8 experts with the bundled model's tokenizer."""
    sizes = {"vocab_size": 49152, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    model = make_model(folder, "qwen3_moe", **sizes, **heads, **tokens, num_experts=8, tie_word_embeddings=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(tokenizer_from / name, folder / name)
    return model


def as_published(model: torch.nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """Weights under the names of checkpoints, each expert by itself: transformers stacks them in memory."""
    model.save_pretrained(folder)  # type: ignore[operator]
    return in_trainers_order(load_file(folder / "model.safetensors"))


def check_routing(model: torch.nn.Module, turn: Turn) -> None:
    """The engine says the experts that transformers chooses, of a prompt that is in the prefix cache too."""
    ids = torch.tensor(tuple(turn.context))
    with torch.no_grad():
        logits = model(ids[None], output_router_logits=True).router_logits
    expected = torch.stack([layer.topk(2).indices for layer in logits], dim=1).sort(-1).values
    assert turn.routed is not None
    assert turn.routed.dtype == np.uint8
    assert np.sort(turn.routed, axis=-1).tolist() == expected[:-1].tolist()


@pytest.mark.parametrize(
    "devices",
    [
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.nightly),
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        {"data_parallel_size": 2, "enable_expert_parallel": True},
    ],
    ids=lambda devices: "-".join(devices),
)
async def test_workers_that_share_experts_compute_what_one_does(
    devices: dict[str, int], tiny_model: Path, tmp_path: Path, nothing_left: None
) -> None:
    model = make_moe(tmp_path / "moe", tiny_model)
    config = Generator.Config(
        dtype="float32",
        max_model_len=256,
        kv_cache_gib=0.25,
        routed_experts=True,
        **devices,  # type: ignore[arg-type]
    )
    async with cluster(tmp_path) as (meshes, faults):
        start = ServiceStart(cluster=meshes, faults=faults, deadline_s=300)
        generator = await Generator.start(config, start, model=tmp_path / "moe", seed=0)
        store = await WeightStore.start(WeightStore.Config(), meshes, faults, deadline_s=120)
        try:
            for version in (1, 2):
                with torch.no_grad():
                    for weight in model.parameters():
                        weight.mul_(1 + 0.2 * torch.randn_like(weight))
                manifest = await publish(store, as_published(model, tmp_path / "changed"), version)
                assert await generator.load(store) == version
                turns = [await generator.generate(LONG_PROMPT, Sampling(max_tokens=16, seed=9))]
                turns += await asyncio.gather(
                    *[generator.generate(LONG_PROMPT, Sampling(max_tokens=16, seed=seed)) for seed in range(6)]
                )
                assert max(gap(model, turn) for turn in turns) < 1e-4
                assert {version for turn in turns for version in turn.versions} == {version}
                for turn in turns:
                    check_routing(model, turn)
            (load,) = generator.last_load
            assert len(load.bytes_read) == config.devices
            assert sum(load.bytes_read) < config.data_parallel_size * 1.02 * manifest.bytes
        finally:
            faults.closing = True
            await generator.stop()
            await store.stop()


def workers_of(command: Command) -> list[psutil.Process]:
    """vLLM's workers of the first engine."""
    return below(actor_of(command, "generator"), "Worker_TP")


@pytest.mark.nightly
def test_a_run_goes_on_when_a_worker_of_its_engine_is_killed(
    commands: list[Command], tiny_model: Path, tmp_path: Path, shm: Path
) -> None:
    before = shared_memory()
    arguments = ("--steps", "40", "--generator.tensor-parallel-size", "2", "--weights.shm", str(shm))
    command = tiny_run(commands, tiny_model, tmp_path / "run", *arguments)
    command.wait_for("step +2/")
    first, second = workers_of(command)
    second.kill()
    command.wait_for("generator/0 failed.*vLLM engine process died")
    command.wait_for("generator/0 has recovered")
    assert not first.is_running()
    assert command.end(400) == 0, command.output
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(41))
    assert all(row.get("logprob_gap", 0) < 1e-4 for row in rows)
    (fault,) = json.loads((tmp_path / "run" / "summary.json").read_text())["faults"]
    assert "vLLM engine process died" in str(fault)
    assert command.strays() == []
    assert not forgotten(before)
