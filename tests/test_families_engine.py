"""Each family in a real engine: it starts on a folder, and takes the weights that the trainer exports."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forge_rl.engines.factory import decode_environment
from forge_rl.engines.families import FAMILIES
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan.train import TitanEngine
from tests.fakes import add_predicting_layer, make_model, packed, random_batch, train_batch
from tests.tiny import bundled_folder

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("process_group")]

LARGE = {"vocab_size": 49152, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
"""vLLM's kernels on CPU take heads of 32 at least, and experts of multiples of 32."""
OWN: dict[str, dict[str, object]] = {
    "qwen2": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen3_moe": {"moe_intermediate_size": 32},
    "gpt_oss": {"head_dim": 64},
    "deepseek_v3": {
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 32,
    },
}
ENGINE_DTYPE = {"deepseek_v3": "bfloat16"}
"""vLLM's latent attention on CPU has no float32 where there is AMX; float32 elsewhere."""


# Llama whose head is its own: test_engine_conformance; folders as published, of the families that differ most: test_zoo
@pytest.mark.parametrize(("family", "tied"), [(family, family == "llama") for family in FAMILIES])
def test_an_engine_serves_a_family_and_loads_what_the_trainer_exports(family: str, tied: bool, tmp_path: Path):
    folder, saved = tmp_path / "hf", tmp_path / "saved"
    make_model(folder, family, **(LARGE | OWN.get(family, {}) | {"tie_word_embeddings": tied}))
    if family == "deepseek_v3":
        add_predicting_layer(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_folder() / name, folder / name)
    engine = TitanEngine(folder, TrainSettings(dtype="float32", seq_len=128, optimizer=OptimizerConfig(lr=1e-2)))
    train_batch(engine, packed(random_batch(0, vocab=43)))
    for part in ("training", "model"):
        (saved / part).mkdir(parents=True)
    engine.save(saved, folder, version=1).result()
    dtype = ENGINE_DTYPE.get(family, "float32")
    command = [
        sys.executable,
        "-m",
        "tests.family_engine",
        *map(str, (folder, saved / "model", tmp_path / "scratch")),
        dtype,
    ]
    ended = subprocess.run(
        command,
        env=os.environ | decode_environment(0, replicas=1),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:] + ended.stdout[-2000:]
    gaps = json.loads(ended.stdout.splitlines()[-1])
    assert gaps["version"] == 1
    max_gap, least_changed = (
        (1, 300) if dtype == "float32" else (2, 20)
    )  # bfloat16 rounds elsewhere than in transformers
    assert gaps["changed"] > least_changed, "the two versions must differ for this to be a test"
    assert bool(gaps["expert_mistakes"]) == (family in ("qwen3_moe", "gpt_oss"))
    for mistake, error in gaps["expert_mistakes"].items():
        assert error.endswith(f"tensors differ: {mistake.partition(', ')[0]}"), (mistake, error)
    assert max(gaps["started"], gaps["loaded"]) < max_gap, gaps
