"""The titan model against transformers, and packed rows against sequences alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.families import FAMILIES
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan.masks import attention_mask
from forge_rl.engines.titan.shards import named_weights
from forge_rl.engines.titan.train import TitanEngine
from forge_rl.packing.rows import Row
from forge_rl.packing.unpacking import unpack
from tests.fakes import make_model, packed, random_batch
from tests.plain_trainer import in_float64, logits_of

pytestmark = pytest.mark.usefixtures("process_group")

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 32}
MODELS = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, as many key heads": ("llama", {"num_key_value_heads": 4}),
    "llama, one key head, wide heads": ("llama", {"num_key_value_heads": 1, "head_dim": 16}),
    "llama, head_dim from dim": ("llama", {"head_dim": None, "hidden_size": 32}),
    "llama, scaled rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, another theta and eps": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "rms_norm_eps": 0.1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3, tied, wide heads": ("qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "seed_oss": ("seed_oss", {}),
    "seed_oss, tied, wide heads": ("seed_oss", {"tie_word_embeddings": True, "head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, scores as they are": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
    "qwen3_moe, a dense layer": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "qwen3_moe, every second layer": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss, as many key heads, tighter": ("gpt_oss", {"num_key_value_heads": 4, "swiglu_limit": 0.5}),
    "gpt_oss, rope as it is": ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}),
    "gpt_oss, windows in every layer": ("gpt_oss", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3, one matrix for q, one group": (
        "deepseek_v3",
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "deepseek_v3, scaled rope of halves": (
        "deepseek_v3",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}, "rope_interleave": False},
    ),
    "deepseek_v3, scaled rope, wide values": (
        "deepseek_v3",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "v_head_dim": 20},
    ),
    "deepseek_v3, all layers sparse": ("deepseek_v3", {"first_k_dense_replace": 0, "n_shared_experts": 1}),
    "gpt_oss, no windows": ("gpt_oss", {"layer_types": ["full_attention"] * 2}),
}


def row_of(token_ids: torch.Tensor) -> Row:
    """One sequence alone."""
    length = len(token_ids)
    zeros = torch.zeros(length, dtype=torch.int32)
    return Row(
        token_ids=token_ids,
        positions=torch.arange(length),
        trees=zeros,
        until=zeros + len(token_ids),
        targets=torch.zeros(length, dtype=torch.int64),
        mask=torch.zeros(length, dtype=torch.bool),
        behaviour=torch.zeros(length),
        advantages=torch.zeros(length),
        versions=zeros - 1,
        episodes=zeros - 1,
        segments=zeros - 1,
        turns=zeros - 1,
        lengths=zeros + 1,
        observed=torch.zeros(length, dtype=torch.bool),
    )


def titan_logits(folder: Path, token_ids: torch.Tensor, model: torch.nn.Module | None = None) -> torch.Tensor:
    """[L, V] float64, of a folder's model, which is built where it is not given."""
    row = row_of(token_ids)
    masks = attention_mask(row, window=read_architecture(folder).window)
    model = model or engine_of(folder, len(row)).model
    with torch.no_grad():
        return model(row.token_ids[None], positions=row.positions[None], attention_masks=masks)[0]


def engine_of(folder: Path, seq_len: int = 128) -> TitanEngine:
    settings = TrainSettings(dtype="float64", seq_len=seq_len, optimizer=OptimizerConfig())
    return TitanEngine(folder, settings)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path):
    family, config = MODELS[name]
    reference = make_model(tmp_path, family, **config)
    token_ids = torch.randint(0, 43, (150,), generator=torch.Generator().manual_seed(1))
    titan = engine_of(tmp_path, len(token_ids)).model
    with torch.no_grad():
        expected = logits_of(in_float64(reference, titan), token_ids)
    assert expected.std() > 0.2, "the model must tell tokens apart for this to be a test"
    assert (titan_logits(tmp_path, token_ids, titan) - expected).abs().max() < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_transformers(family: str, tmp_path: Path):
    reference = make_model(tmp_path, family)
    model = engine_of(tmp_path).model
    reference = in_float64(reference, model)
    token_ids = torch.randint(0, 43, (60,), generator=torch.Generator().manual_seed(2))
    row = row_of(token_ids)
    masks = attention_mask(row, window=read_architecture(tmp_path).window)
    model_logits = model(row.token_ids[None], positions=row.positions[None], attention_masks=masks)[0]
    pull = torch.randn(model_logits.shape, generator=torch.Generator().manual_seed(3))
    for logits in (model_logits, logits_of(reference, token_ids)):
        (logits * pull).sum().backward()
    theirs = {name: weight.grad for name, weight in reference.named_parameters()}
    compared = 0
    for name, weight in named_weights(model):
        for part in model.names.parts(name, weight.shape):
            # transformers stacks what most families' files keep apart.
            if part.name in theirs:
                assert weight.grad is not None, name
                expected = theirs[part.name]
                error = (part.of(weight.grad) - expected).abs().max() / expected.abs().max()
                assert error < 1e-10, part.name
                compared += 1
    assert compared > 9


@pytest.mark.parametrize("name", MODELS)
def test_what_is_exported_is_the_folder_that_it_came_from(name: str, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    family, config = MODELS[name]
    for part in ("training", "model"):
        (tmp_path / "saved" / part).mkdir(parents=True)
    reference = make_model(tmp_path, family, **config)
    engine_of(tmp_path).save(tmp_path / "saved", tmp_path, version=0).result()
    folder = tmp_path / "saved" / "model"
    exported, origin = (load_file(folder / "model.safetensors") for folder in (folder, tmp_path))
    assert exported.keys() == origin.keys()
    assert all(torch.equal(exported[name], origin[name]) for name in origin)
    opened = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    token_ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(opened(token_ids).logits, reference(token_ids).logits)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers(temperature: float, tmp_path: Path):
    reference = make_model(tmp_path, "qwen3")
    engine = engine_of(tmp_path)
    reference = in_float64(reference, engine.model)
    batch = random_batch(3, vocab=43)
    laid = packed(batch)
    engine_logprobs = unpack(laid, engine.logprobs(laid.rows, temperature=temperature))
    for index, episode in enumerate(batch.episodes):
        (segment,) = episode.segments
        ids = torch.tensor(segment.token_ids, dtype=torch.int64)
        with torch.no_grad():
            logprobs = (logits_of(reference, ids) / temperature).log_softmax(-1)
        expected = logprobs[:-1].gather(1, ids[1:, None])[:, 0][torch.tensor(segment.trained[1:])]
        assert (engine_logprobs[index] - expected).abs().max() < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_episode_has_the_logprobs_that_it_has_alone(family: str, tmp_path: Path):
    make_model(tmp_path, family)
    engine = engine_of(tmp_path)
    batch = random_batch(5, vocab=43, groups=3, group_size=4)
    shared, alone = packed(batch, seq_len=128), packed(batch, seq_len=32, share_prefixes=False)
    assert shared.packed_tokens < alone.packed_tokens
    assert len(alone.rows) > len(shared.rows)
    together = unpack(shared, engine.logprobs(shared.rows, temperature=1.0))
    apart = unpack(alone, engine.logprobs(alone.rows, temperature=1.0))
    assert together.keys() == apart.keys() == set(range(12))
    assert all((together[i] - apart[i]).abs().max() < 1e-12 for i in together)


def test_padding_changes_nothing(tmp_path: Path):
    make_model(tmp_path)
    engine = engine_of(tmp_path)
    (row,) = packed(random_batch(6, vocab=43, groups=1)).rows
    length = len(row)
    fill = {"trees": -1, "versions": -1, "episodes": -1, "segments": -1, "until": length + 9}
    padded = replace(
        row,
        **{
            name: torch.cat([value, torch.full((9,), fill.get(name, 0), dtype=value.dtype)])
            for name, value in row.tensors().items()
        },
    )
    plain, more = (engine.logprobs([r], temperature=1.0)[0] for r in (row, padded))
    assert (more[:length] - plain).abs().max() < 1e-13
    assert not more[length:].any()


def test_a_row_without_targets_has_no_logprobs(tmp_path: Path):
    make_model(tmp_path)
    (logprobs,) = engine_of(tmp_path).logprobs([row_of(torch.arange(5))], temperature=1.0)
    assert logprobs.tolist() == [0] * 5
