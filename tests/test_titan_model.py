"""The titan model against transformers, packed rows against sequences alone, and configs that are refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_rl.algorithms.logprobs import Scoring, token_scores
from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.families import FAMILIES
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan import cpu_attention as attention
from forge_rl.engines.titan import head as titan_head
from forge_rl.engines.titan.cpu_attention import TreeAttention
from forge_rl.engines.titan.head import FloatHead
from forge_rl.engines.titan.loading import load_weights
from forge_rl.engines.titan.masks import attention_mask
from forge_rl.engines.titan.model import build_model
from forge_rl.engines.titan.shards import named_weights
from forge_rl.engines.titan.train import TitanEngine
from forge_rl.errors import ModelError
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout, Row
from forge_rl.packing.unpacking import unpack
from tests.dense_masks import dense_mask
from tests.fakes import empty_row, make_model, packed, random_batch
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
    found = model(row.token_ids[None], positions=row.positions[None], attention_masks=masks)[0]
    pull = torch.randn(found.shape, generator=torch.Generator().manual_seed(3))
    for logits in (found, logits_of(reference, token_ids)):
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


@pytest.mark.parametrize("pad_multiple", [1, 64])
@pytest.mark.parametrize("mask_bytes", [1 << 20, 4 * 7 * 20])
def test_attention_by_tree_and_in_blocks_is_attention_under_the_whole_mask(
    pad_multiple: int, mask_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attention, "MASK_BYTES", mask_bytes)
    laid = pack(
        batch := random_batch(0, vocab=43, groups=3),
        torch.ones(batch.rewards.shape),
        Layout(seq_len=1024, pad_multiple=pad_multiple),
        drop_uniform=False,
    )
    (row,) = laid.rows
    masks = attention_mask(row)
    trees = row.trees.tolist()
    assert [len(mask.until) for mask in masks] == [trees.count(tree) for tree in dict.fromkeys(trees)]
    assert len(masks) >= 3
    sizes = [bias.nbytes for mask in masks for _, _, bias in mask.blocks(torch.float32) if bias is not None]
    assert max(sizes) <= mask_bytes
    assert len(sizes) > 3 or mask_bytes > 1000
    generator = torch.Generator().manual_seed(0)
    found, expected = (
        [torch.randn(1, len(row), heads, 8, generator=generator.manual_seed(heads)) for heads in (4, 2, 2)]
        for _ in range(2)
    )
    for inputs in (found, expected):
        for x in inputs:
            x.requires_grad_()
    q, k, v = (x.transpose(1, 2) for x in expected)
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(row), enable_gqa=True)
    by_tree = TreeAttention(TreeAttention.Config())(*found, attention_masks=masks, enable_gqa=True)
    torch.testing.assert_close(by_tree, whole.transpose(1, 2))
    (by_tree.square().sum() + whole.square().sum()).backward()
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("window", [None, 4])
def test_sinks_and_windows_over_trees_are_a_softmax_with_one_more_score(window: int | None):
    from torchtitan.models.gpt_oss.model import apply_attention_sink_rescale

    (row,) = packed(random_batch(0, vocab=43, groups=3), seq_len=1024).rows
    mask = dense_mask(row)
    if window is not None:
        mask &= row.positions[:, None] - row.positions < window
    torch.manual_seed(0)
    given = [3 * torch.randn(size, dtype=torch.float64) for size in ((1, len(row), n, 8) for n in (4, 2, 2))]
    given.append(3 * torch.randn(4, dtype=torch.float64))
    found, expected = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    masks = attention_mask(row, window=4)
    own = masks["basic_mask" if window is None else "sliding_window_mask"]
    sinks = found.pop()
    attention = TreeAttention(TreeAttention.Config())(
        *found,
        attention_masks=own,
        scale=0.3,
        enable_gqa=True,
        out_transform=lambda out, sums: apply_attention_sink_rescale(out, sums, sinks),
    )
    found.append(sinks)
    q, k, v, scores_of_sinks = expected
    k, v = (x.repeat_interleave(2, dim=2) for x in (k, v))
    scores = torch.einsum("bqnh,bknh->bnqk", q, k).mul(0.3).masked_fill(~mask, -torch.inf)
    column = scores_of_sinks[None, :, None, None].expand(1, 4, len(row), 1)
    shares = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    whole = torch.einsum("bnqk,bknh->bqnh", shares, v)
    torch.testing.assert_close(attention, whole)
    (attention.square().sum() + whole.square().sum()).backward()
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("queries", [slice(0, 23), slice(20, 46), slice(46, 92), slice(91, 92)])
def test_attention_of_a_part_of_a_row_to_all_its_keys_is_that_of_the_whole(
    queries: slice, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attention, "MASK_BYTES", 1400)
    trees = ([0] * 50, [1] * 30, [2] * 7, [-1] * 5)
    until = ([50] * 20, [30] * 10, [50] * 20, [80] * 30, [87] * 7, [92] * 5)
    row = replace(
        empty_row(),
        token_ids=torch.zeros(92),
        trees=torch.tensor([each for part in trees for each in part]),
        until=torch.tensor([each for part in until for each in part]),
    )
    q, k, v = (torch.randn(1, heads, 92, 8) for heads in (4, 2, 2))
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(row), enable_gqa=True)
    part, _ = attention.attend_trees(q[:, :, queries], k, v, attention.tree_masks(row, queries), None)
    torch.testing.assert_close(part, whole[:, :, queries])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("queries", [slice(0, 90), slice(37, 90), slice(89, 90)])
def test_a_long_branch_is_split_for_all_threads_and_one_key_head_at_a_time(
    threads: int, heads: int, key_heads: int, queries: slice, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attention, "_LEAST_BLOCK", 12)
    monkeypatch.setattr(attention, "_GROUP_BYTES", 90 * heads * 8 * 8 - 1)  # all 90 keys are too many
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    until = torch.tensor([90] * 90 + [95] * 5)
    row = replace(empty_row(), token_ids=torch.zeros(95), trees=(until > 90).int(), until=until)
    given = [torch.randn(1, h, 95, 8, dtype=torch.float64) for h in (heads, key_heads, key_heads)]
    found, expected = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    out, sums = attention.attend_trees(
        found[0][:, :, queries], *found[1:], attention.tree_masks(row, queries), scale=0.7
    )
    q, k, v = expected
    k, v = (x.repeat_interleave(heads // key_heads, dim=1) for x in (k, v))
    scores = (0.7 * q @ k.mT).masked_fill(~dense_mask(row), -torch.inf)[:, :, queries]
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    torch.testing.assert_close(sums, scores.logsumexp(-1))
    ((scores.softmax(-1) @ v).square().sum() + scores.logsumexp(-1).square().sum()).backward()
    (out.square().sum() + sums.square().sum()).backward()
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("size", [4096, 6000])
def test_a_row_of_one_branch_has_no_mask_and_keeps_none(size: int):
    at = torch.arange(size)

    def mask_of(*, branched: bool, window: int | None = None) -> attention.TreeMask:
        until = torch.full((size,), size, dtype=torch.int32)
        return attention.TreeMask(first=0, until=until, queries=size, branched=branched, positions=at, window=window)

    mask = mask_of(branched=False, window=size)
    assert [bias for _, _, bias in mask.blocks(torch.float32)] == [None]
    assert all(bias is not None for *_, bias in mask_of(branched=False, window=size - 1).blocks(torch.float32))
    branched = mask_of(branched=True)
    biases = [bias for _, _, bias in branched.blocks(torch.float32) if bias is not None]
    assert sum(bias.numel() for bias in biases) < size * size * 0.8, "keys past a block are left out"
    assert branched._kept == {}


def test_a_chunked_head_gives_the_same_logprobs_and_gradients(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    head = FloatHead(FloatHead.Config(in_features=8, out_features=43)).double()
    hidden, targets = torch.randn(10, 8, dtype=torch.float64), torch.randint(0, 43, (10,))
    results, product = [], titan_head._product
    for chunk in (10, 4):
        monkeypatch.setattr(titan_head, "HEAD_CHUNK_BYTES", chunk * 43 * 4)
        given = hidden.clone().requires_grad_()
        sizes: list[int] = []
        monkeypatch.setattr(
            titan_head,
            "_product",
            lambda hidden, *args, sizes=sizes: sizes.append(len(hidden)) or product(hidden, *args),
        )
        logprobs, entropy, *_ = head(given, targets, Scoring(temperature=0.7))
        gradients = torch.autograd.grad(logprobs.exp().sum(), [given, head.weight])
        results.append((logprobs, entropy, *gradients))
        assert sizes == ([10] if chunk == 10 else [4, 4, 2, 2, 4, 4]), (
            "the backward pass computes chunks again, last first"
        )
    expected = token_scores(hidden @ head.weight.T, targets, Scoring(temperature=0.7))
    torch.testing.assert_close(results[0][:2], expected[:2])
    torch.testing.assert_close(results[1], results[0])


def test_chunks_of_a_bfloat16_head_add_up_as_exactly_as_one(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    head = FloatHead(FloatHead.Config(in_features=16, out_features=200)).to(torch.bfloat16)
    hidden, targets = torch.randn(2048, 16).bfloat16(), torch.randint(0, 200, (2048,))
    weight = head.weight.detach().double().requires_grad_()
    scores = (hidden.double() @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (exact,) = torch.autograd.grad((scores * torch.linspace(-1, 1, 2048)).sum(), weight)
    off = []
    for tokens in (2048, 16):
        monkeypatch.setattr(titan_head, "HEAD_CHUNK_BYTES", tokens * 200 * 4)
        logprobs, *_ = head(hidden, targets)
        (found,) = torch.autograd.grad((logprobs * torch.linspace(-1, 1, 2048)).sum(), head.weight)
        assert found.dtype == torch.bfloat16
        off.append(float((found - exact).norm() / exact.norm()))
    assert off[1] < 1.01 * off[0], "the gradient of all chunks is rounded once"


def test_weights_spread_over_several_files_are_found(tmp_path: Path):
    reference = make_model(tmp_path / "one")
    reference.save_pretrained(tmp_path / "many", max_shard_size="8KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    token_ids = torch.arange(20)
    assert torch.equal(titan_logits(tmp_path / "many", token_ids), titan_logits(tmp_path / "one", token_ids))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers(temperature: float, tmp_path: Path):
    reference = make_model(tmp_path, "qwen3")
    engine = engine_of(tmp_path)
    reference = in_float64(reference, engine.model)
    batch = random_batch(3, vocab=43)
    laid = packed(batch)
    found = unpack(laid, engine.logprobs(laid.rows, temperature=temperature))
    for index, episode in enumerate(batch.episodes):
        (segment,) = episode.segments
        ids = torch.tensor(segment.token_ids, dtype=torch.int64)
        with torch.no_grad():
            logprobs = (logits_of(reference, ids) / temperature).log_softmax(-1)
        expected = logprobs[:-1].gather(1, ids[1:, None])[:, 0][torch.tensor(segment.trained[1:])]
        assert (found[index] - expected).abs().max() < 1e-10


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
    (found,) = engine_of(tmp_path).logprobs([row_of(torch.arange(5))], temperature=1.0)
    assert found.tolist() == [0] * 5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": ["llama"]}, "model_type"),
        ({"model_type": None}, "model_type None"),
        ({"attention_bias": True}, "asks for attention_bias"),
        ({"mlp_bias": True}, "asks for mlp_bias"),
        ({"use_sliding_window": True}, "asks for use_sliding_window"),
        ({"hidden_act": "gelu"}, "asks for hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "asks for rope_type 'longrope'"),
        ({"rope_parameters": YARN | {"mscale": 0.7}}, "asks for YaRN with mscale"),
        ({"quantization_config": {"quant_method": "hqq"}}, "asks for quant_method 'hqq'"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "asks for quant_method 'mxfp4'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "asks for 3 bits"),
        ({"quantization_config": {"quant_method": "awq", "version": "gemv"}}, "asks for AWQ's 'gemv' packing"),
        ({"attention_bias": True, "mlp_bias": True}, "asks for attention_bias, mlp_bias"),
        ({"dtype": "float7"}, "float7"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers is 2147483647, not a whole number from 1 to 10000"),
    ],
)
def test_a_config_that_is_not_supported_is_refused(change: dict, said: str, tmp_path: Path):
    make_model(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=said) as caught:
        engine_of(tmp_path)
    assert str(path) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("gpt_oss", {"attention_bias": False}, "asks for attention_bias false"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "asks for swiglu_alpha 1.5"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit is 0, not a number above 0"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, r"layer_types is \['full_attention'\], not"),
        ("gpt_oss", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types is"),
        ("gpt_oss", {"sliding_window": -1}, "sliding_window is -1"),
        ("gpt_oss", {"rope_parameters": YARN | {"attention_factor": 1.0}}, "asks for YaRN with attention_factor"),
        ("gpt_oss", {"rope_parameters": YARN | {"factor": None}}, "factor is None, not a number above 0"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy', and the trainer supports 'noaux_tc'"),
        ("deepseek_v3", {"scoring_func": None}, "scoring_func is None, and the trainer supports 'sigmoid'"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "asks for fewer key heads than heads"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "asks for moe_layer_freq 2"),
        ("deepseek_v3", {"n_group": 3}, "asks for 8 experts in 3 groups, 3 of 2 groups"),
        ("deepseek_v3", {"topk_group": 1}, "asks for 8 experts in 4 groups, 3 of 1 groups"),
        ("deepseek_v3", {"first_k_dense_replace": 9}, "first_k_dense_replace is 9, not a number of layers"),
        ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0}}, "asks for YaRN whose mscale"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "asks for fp8 without weight_block_size"),
        ("deepseek_v3", {"attention_bias": True}, "asks for attention_bias"),
    ],
)
def test_what_a_family_does_not_support_is_refused(family: str, change: dict, said: str, tmp_path: Path):
    make_model(tmp_path, family)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=said) as caught:
        read_architecture(tmp_path)
    assert str(path) in caught.value.message
    assert caught.value.hint


def test_native_modelling_refuses_another_family_with_those_that_it_has(tmp_path: Path):
    make_model(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "mistral"}))
    with pytest.raises(ModelError) as caught:
        read_architecture(tmp_path, "native")
    assert all(repr(family) in caught.value.message for family in FAMILIES)


@pytest.mark.parametrize("old", [{"type": "dynamic", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}])
def test_the_older_name_of_rope_scaling_is_read_too(old: dict, tmp_path: Path):
    make_model(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps(config | {"rope_scaling": old, "rope_theta": 10000.0}))
    with pytest.raises(ModelError, match="asks for rope_type"):
        engine_of(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "", "3", '{"model_type": "llama"}'])
def test_a_broken_config_is_an_error_with_its_path(text: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=str(tmp_path / "config.json")):
        read_architecture(tmp_path)


def test_a_missing_config_is_an_error_with_its_path(tmp_path: Path):
    with pytest.raises(ModelError, match=str(tmp_path / "config.json")):
        read_architecture(tmp_path)


def drop_a_weight(state: dict[str, torch.Tensor]) -> None:
    del state["model.layers.1.mlp.up_proj.weight"]


def cut_a_weight(state: dict[str, torch.Tensor]) -> None:
    state["model.norm.weight"] = state["model.norm.weight"][:-1].clone()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (drop_a_weight, "lacks the weight 'model.layers.1.mlp.up_proj.weight'"),
        (cut_a_weight, r"'model.norm.weight' in .* has shape \(23,\), config.json says \(24,\)"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(damage: Callable, said: str, tmp_path: Path):
    make_model(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    damage(state)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=said):
        engine_of(tmp_path)


def test_all_weights_are_checked_before_any_is_read(tmp_path: Path):
    make_model(tmp_path)
    model = build_model(read_architecture(tmp_path), TrainSettings(dtype="float32", seq_len=16))
    with torch.no_grad():
        model.init_states()
        for parameter in model.parameters():
            parameter.fill_(7)
    state = load_file(tmp_path / "model.safetensors")
    cut_a_weight(state)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"config\.json says"):
        load_weights(model, tmp_path, tied=model.enable_weight_tying)
    assert all(bool((parameter == 7).all()) for parameter in model.parameters())


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3"])
def test_a_weight_of_a_dtype_that_torch_cannot_read_is_refused_by_name(dtype: str, tmp_path: Path):
    make_model(tmp_path)
    state, path = load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors"
    shape = state["model.layers.0.mlp.up_proj.weight"].shape
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    size = shape.numel() * int(dtype[1]) // 8
    contents = b""
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if name == "model.layers.0.mlp.up_proj.weight":
            entry["dtype"], values = dtype, bytes(size)
        else:
            values = state[name].numpy().tobytes()
        entry["data_offsets"] = [len(contents), len(contents) + len(values)]
        contents += values
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + contents)
    with pytest.raises(ModelError, match=r"'model.layers.0.mlp.up_proj.weight' in .*model.safetensors cannot be read"):
        engine_of(tmp_path)


def test_an_index_that_names_the_wrong_file_is_refused(tmp_path: Path):
    make_model(tmp_path / "one").save_pretrained(tmp_path, max_shard_size="8KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], index["weight_map"]["model.norm.weight"])
    path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-.*safetensors cannot be read: .*does not contain"):
        engine_of(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path):
    make_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no safetensors file"):
        engine_of(tmp_path)


def test_a_broken_weights_file_is_refused(tmp_path: Path):
    make_model(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read"):
        engine_of(tmp_path)


def test_a_missing_part_of_the_weights_is_refused(tmp_path: Path):
    make_model(tmp_path / "one").save_pretrained(tmp_path, max_shard_size="8KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-.*cannot be read"):
        engine_of(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index_of_the_weights_is_refused(text: str, tmp_path: Path):
    make_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"model.safetensors.index.json cannot be read"):
        engine_of(tmp_path)
