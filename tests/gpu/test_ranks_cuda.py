"""Ranks on GPUs of their own: none makes a context on another's, whatever its threads do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.ranks import run_ranks
from tests.fakes import make_model, packed, random_batch, train_batch


def gpus_of(pid: int) -> set[str]:
    """Ids of the GPUs on which a process has a context, as nvidia-smi sees it."""
    query = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    return {
        uuid.strip() for pid_text, _, uuid in (line.partition(",") for line in lines) if pid_text.strip() == str(pid)
    }


def train_and_save(rank: int, folder: Path, saved: Path) -> int:
    from forge_rl.engines.protocol import TrainSettings
    from forge_rl.engines.titan.train import TitanEngine

    engine = TitanEngine(folder, TrainSettings(dtype="bfloat16", seq_len=256))
    batch = random_batch(0, vocab=43, groups=4)
    train_batch(engine, packed(batch, seq_len=256, pad_multiple=128, shares=2))
    if rank == 0:
        for name in ("training", "model"):
            (saved / name).mkdir(parents=True)
    torch.distributed.barrier()
    list(engine.local_shards())
    engine.save(saved, folder, version=1).result()
    engine.offload()
    engine.onload()
    return len(gpus_of(os.getpid()))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_rank_has_a_context_on_its_own_gpu_alone(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "qwen3", hidden_size=256, num_attention_heads=4, head_dim=64)
    assert run_ranks(train_and_save, 2, tmp_path / "model", tmp_path / "saved", deadline_s=300) == [1, 1]
