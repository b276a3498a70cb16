"""Writes folders of small random models as published checkpoints have them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from forge_rl.weights.names import ROUTER_BIASES
from tests.zoo.checkpoints import CHECKPOINTS, FAMILIES, FP8, Checkpoint
from tests.zoo.general import GENERAL, GENERAL_FAMILIES

SIZES: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "transformers_version": "4.51.0",
    "use_cache": True,
}
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}STOP\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write(name: str, folder: Path, **values: object) -> Path:
    """Write the folder of a checkpoint, with some values of its config.json replaced."""
    checkpoint = (CHECKPOINTS | GENERAL)[name]
    folder.mkdir(parents=True)
    tokens = _write_tokenizer(checkpoint, folder)
    stops = [tokens[stop] for stop in checkpoint.stops]
    config: dict[str, Any] = {
        **SIZES,
        "model_type": checkpoint.family,
        **(FAMILIES | GENERAL_FAMILIES)[checkpoint.family],
        **checkpoint.config,
        "vocab_size": len(tokens) + checkpoint.padding,
        "bos_token_id": 0,
        "eos_token_id": stops[-1],
        "torch_dtype": checkpoint.dtype,
        **values,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    settings = {"bos_token_id": 0, "do_sample": True, "eos_token_id": stops, "temperature": 0.6, "top_p": 0.95}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    state = _random_weights(folder)
    _add_extras(checkpoint, config, state)
    if checkpoint.quantized:
        config["quantization_config"] = _quantize(checkpoint, state)
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    _write_shards(folder, state, checkpoint.shards)
    return folder


def write_for_ranks(name: str, folder: Path) -> Path:
    """Write the folder of a checkpoint with enough heads for two tensor-parallel ranks."""
    values = {"num_global_key_value_heads": 2} if GENERAL[name].family == "gemma4_text" else {}
    return write(name, folder, num_key_value_heads=2, **values)


def transformers_config(folder: Path) -> Any:
    """Load a folder's config as transformers has it, which knows Kimi K2 as a DeepSeek-V3."""
    from transformers import AutoConfig

    values = json.loads((folder / "config.json").read_text())
    if values["model_type"] != "kimi_k2":
        return AutoConfig.from_pretrained(folder)
    return AutoConfig.for_model(**{**values, "model_type": "deepseek_v3"})


def transformers_folder(folder: Path) -> Path:
    """Return a folder as transformers has it, see `transformers_config`: the folder itself, or one of links to it."""
    if json.loads((folder / "config.json").read_text())["model_type"] != "kimi_k2":
        return folder
    linked = folder.parent / f"{folder.name}-deepseek_v3"
    if not linked.exists():
        linked.mkdir()
        for path in folder.iterdir():
            if path.name != "config.json":
                (linked / path.name).symlink_to(path.resolve())
        transformers_config(folder).save_pretrained(linked)
    return linked


def _random_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Make weights large enough to tell tokens apart, in the files' dtype, under the names that transformers saves."""
    from transformers import AutoModelForCausalLM

    config = transformers_config(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    dtype = getattr(torch, json.loads((folder / "config.json").read_text())["torch_dtype"])
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        state = load_file(Path(saved) / "model.safetensors")
    return {name: values if name.endswith(ROUTER_BIASES) else values.to(dtype) for name, values in state.items()}


def _add_extras(checkpoint: Checkpoint, config: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    embedding = next(state[name] for name in state if name.endswith(("embed_tokens.weight", "embeddings.weight")))
    layers = config["num_hidden_layers"]
    for name in state:
        if name.endswith(ROUTER_BIASES):
            state[name] = torch.randn(state[name].shape, generator=torch.Generator().manual_seed(1)) * 0.2
        if name.endswith("layer_scalar"):
            state[name] = torch.full_like(state[name], 0.75)
    if checkpoint.head != "as configured":
        state["lm_head.weight"] = embedding.clone()
    if checkpoint.head == "own":
        state["lm_head.weight"] += 0.2 * torch.randn(embedding.shape, generator=torch.Generator().manual_seed(2))
    if checkpoint.buffers:
        for layer in range(layers):
            state[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.rand(16)
    if checkpoint.predicting:
        last, added = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
        state |= {added + name.removeprefix(last): state[name].clone() for name in list(state) if name.startswith(last)}
        state[added + "embed_tokens.weight"] = embedding.clone()
        state[added + "shared_head.head.weight"] = state["lm_head.weight"].clone()
        for name in ("enorm", "hnorm", "shared_head.norm"):
            state[f"{added}{name}.weight"] = torch.ones(embedding.shape[1], dtype=embedding.dtype)
        state[added + "eh_proj.weight"] = torch.full((embedding.shape[1], 2 * embedding.shape[1]), 0.1).to(embedding)


def _quantize(checkpoint: Checkpoint, state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Replace the weights that the published one has quantised; returns quantization_config."""
    generator = torch.Generator().manual_seed(3)
    if checkpoint.quantized == "mxfp4":
        for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, inputs, outputs = state.pop(name).shape
            for kind, values, rest in (("blocks", (0, 256), (16,)), ("scales", (122, 126), ())):
                size = (experts, outputs, inputs // 32, *rest)
                state[f"{name}_{kind}"] = torch.randint(*values, size, dtype=torch.uint8, generator=generator)
        left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        return {"quant_method": "mxfp4", "modules_to_not_convert": left}
    for name in [name for name in state if name.endswith("_proj.weight") and "eh_proj" not in name]:
        rows, columns = state[name].shape
        scales = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) / 64 + 1 / 64
        state[name] = torch.randn(rows, columns, generator=generator).mul(12).to(torch.float8_e4m3fn)
        state[f"{name}_scale_inv"] = scales
    return FP8


def _write_shards(folder: Path, state: dict[str, torch.Tensor], count: int) -> None:
    names = list(state)
    files = ["model.safetensors"]
    if count > 1:
        files = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
    placed = {name: files[index * count // len(names)] for index, name in enumerate(names)}
    for file in files:
        part = {name: state[name].contiguous() for name in names if placed[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    if count > 1:
        size = sum(values.nbytes for values in state.values())
        index = {"metadata": {"total_size": size}, "weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_tokenizer(checkpoint: Checkpoint, folder: Path) -> dict[str, int]:
    """Write a vocabulary of bytes and control tokens, with the chat template; returns the tokens' ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = sorted(bytes_to_unicode().values())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    control = ["<|start|>", *checkpoint.stops]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokens = tokenizer.get_vocab()
    config: dict[str, Any] = {
        "added_tokens_decoder": {
            str(tokens[token]): {
                "content": token,
                "special": True,
                "normalized": False,
                "lstrip": False,
                "rstrip": False,
                "single_word": False,
            }
            for token in control
        },
        "clean_up_tokenization_spaces": False,
        "eos_token": checkpoint.stops[-1],
        "model_max_length": 131072,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    if checkpoint.tokenizer == "tokenizer.model":
        config |= {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "unk_token": "<unk>", "legacy": False}
        config.pop("added_tokens_decoder")
        tokens = _train_sentencepiece(folder / "tokenizer.model")
    elif checkpoint.tokenizer == "vocab.json":
        config["tokenizer_class"] = "Qwen2Tokenizer"
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        (folder / "merges.txt").write_text("#version: 0.2\n")
    else:
        tokenizer.save(str(folder / "tokenizer.json"))
    _write_template(checkpoint, folder, config)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False))
    return tokens


def _train_sentencepiece(path: Path) -> dict[str, int]:
    import sentencepiece

    settings: dict[str, Any] = {"model_type": "bpe", "byte_fallback": True, "hard_vocab_limit": False, "minloglevel": 2}
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["user assistant 2+3?"]), model_writer=file, vocab_size=280, **settings
        )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return {processor.id_to_piece(token): token for token in range(processor.vocab_size())}


def _write_template(checkpoint: Checkpoint, folder: Path, config: dict[str, Any]) -> None:
    """Write the chat template to the folder, or into the tokenizer's config."""
    template = TEMPLATE.replace("STOP", checkpoint.stops[0])
    tools = "{{ tools | tojson }}" + template
    match checkpoint.template:
        case "inline":
            config["chat_template"] = template
        case "list":
            named = {"default": template, "tool_use": tools}
            config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
        case "file":
            (folder / "chat_template.jinja").write_text(template)
        case "folder":
            (folder / "chat_template.jinja").write_text(template)
            (folder / "additional_chat_templates").mkdir()
            (folder / "additional_chat_templates" / "tool_use.jinja").write_text(tools)
