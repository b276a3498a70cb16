"""Finds the file of a Hugging Face folder that holds each weight, and completes folders whose weights are written."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_rl.errors import ModelError

if TYPE_CHECKING:
    import torch
    from safetensors import safe_open

_AGAIN = "download or export the model again"
_COPIED = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_INDEX = "model.safetensors.index.json"
RECORD = "forge_rl.json"
"""File that a run writes with each model that it exports: the run's flags, data, versions and scores."""
_NOT_COPIED = (_INDEX, RECORD, "hf_quant_config.json", "adapter_config.json", "base_model.json")
"""Files about the source's own weights, and about an adapter next to them: with these, vLLM would take a copy's weights
for quantised, and transformers would look for the adapter's."""
TEMPLATES = "additional_chat_templates/*.jinja"
"""Named chat templates other than the default one."""
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken", TEMPLATES)
"""A model's files to fetch from the hub: weights (safetensors only), configs, tokenizer and chat templates."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Files of which a tokenizer has at least one."""
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "*.model", "*.tiktoken", "chat_template.jinja", "chat_template.json", TEMPLATES),
)
"""Files of a tokenizer and its chat templates."""
OTHER_FORMATS = "consolidated*"
"""Files that hold the same weights under the names of Llama's or Mistral's authors."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED_ROWS = 8192
_FILES_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of tokenizers that read tokenizer.json without changes."""
_PROBE = "Hello world, it's 2 + 3 = 12345.\n\n\tdef f(x):\n    return x_1  # na\u00efve \u4f60\u597d\r\nI'M"
"""Text in which ways of splitting differ: digits, blanks, contractions and letters beyond ASCII."""


def tensor_files(folder: Path) -> dict[str, Path]:
    """Map each weight to the safetensors file that holds it.

    Raises:
        ModelError: the folder holds no weights, or a file cannot be read.
    """
    index = folder / _INDEX
    if index.exists():
        try:
            return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(f"{index} cannot be read: {error}", hint=_AGAIN) from error
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        # Mistral's folders hold the same weights twice, under other names.
        if path.match(OTHER_FORMATS):
            continue
        with open_weights(path) as file:
            files |= dict.fromkeys(file.keys(), path)
    if not files:
        raise ModelError(f"{folder} holds no safetensors file", hint="give a Hugging Face model folder")
    return files


def stored_bytes(folder: Path) -> int:
    """Return the size of a model's weights on disk; most models are stored in bfloat16."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors") if not path.match(OTHER_FORMATS))


def open_weights(path: Path) -> safe_open:
    """Open a safetensors file; raises ModelError if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}", hint=_AGAIN) from error


def read_object(path: Path, *, hint: str = _AGAIN) -> dict[str, Any]:
    """Read a JSON object; raises ModelError with a hint if the file does not hold one."""
    try:
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError("it does not hold a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}", hint=hint) from error
    return value


def has_own_head(folder: Path) -> bool:
    """Return True if a model's files hold an output projection that differs from the input embedding.

    Transformers and vLLM use such a head even if config.json has tie_word_embeddings, and ignore a copy of the
    embedding. Files of tied models, such as Qwen3's, often hold a copy.

    Raises:
        ModelError: the folder holds no weights, or they cannot be read.
    """
    files = tensor_files(folder)
    if not {EMBEDDING, HEAD} <= files.keys():
        return False
    paths = files[EMBEDDING], files[HEAD]
    try:
        return _differ(*paths, *(path.stat().st_mtime_ns for path in paths))
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error}", hint=_AGAIN) from error


@functools.lru_cache(maxsize=16)
def _differ(embedding: Path, head: Path, *modified_ns: int) -> bool:
    """Compare embedding and head, which are gigabytes in large models; done once for each state of the files."""
    import torch
    from safetensors import SafetensorError

    with open_weights(embedding) as embeddings, open_weights(head) as heads:
        try:
            pair = embeddings.get_slice(EMBEDDING), heads.get_slice(HEAD)
        except SafetensorError as error:
            raise ModelError(f"{embedding.parent} cannot be read: {error}", hint=_AGAIN) from error
        shape = pair[0].get_shape()
        # A head of another shape cannot be the embedding's copy.
        if pair[1].get_shape() != shape or not shape:
            return True
        for first in range(0, shape[0], _COMPARED_ROWS):
            left, right = (tensor[first : first + _COMPARED_ROWS] for tensor in pair)
            # One may be stored in float32 and still be equal in value.
            wide = torch.promote_types(left.dtype, right.dtype)
            if not torch.equal(left.to(wide), right.to(wide)):
                return True
    return False


def complete_folder(
    source: Path,
    target: Path,
    *,
    dtype: str,
    weight_map: Mapping[str, str],
    total_bytes: int,
    valued: bool = False,
    untied: bool = False,
) -> None:
    """Copy config and tokenizer from another folder with the same model, and write an index if there are several files.

    Args:
        dtype: dtype of the weights, such as "bfloat16", unquantised.
        weight_map: name of the file that holds each weight.
        total_bytes: bytes of all weights.
        valued: the weights are a value model's, which transformers reads with AutoModelForSequenceClassification.
        untied: the weights have an output projection of their own, even if the other folder's config.json ties it.
    """
    for path in (*source.iterdir(), *source.glob(TEMPLATES)):
        if path.is_file() and path.suffix in _COPIED and path.name not in _NOT_COPIED:
            copy = target / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)  # without the mode: the source may be read-only
    config = json.loads((target / "config.json").read_text())
    # Of the source's weights: the new ones have one plain dtype, under the newer key.
    for stale in ("torch_dtype", "quantization_config"):
        config.pop(stale, None)
    if valued:
        classes = [name.replace("ForCausalLM", "ForSequenceClassification") for name in config.get("architectures", [])]
        labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}  # of which transformers takes their number
        config |= {"architectures": classes, "tie_word_embeddings": False, **labels}
    if untied:
        config["tie_word_embeddings"] = False
    (target / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")
    if (tokenizer_config := corrected_tokenizer_config(source)) is not None:
        (target / "tokenizer_config.json").write_text(tokenizer_config)
    if len(set(weight_map.values())) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (target / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def corrected_tokenizer_config(folder: Path) -> str | None:
    """Return the text of a tokenizer_config.json with another class, if transformers would split text otherwise than a
    folder's tokenizer.json says; None if it does not.

    Classes of transformers 5 replace how the file splits text: by its LlamaTokenizer, DeepSeek-R1-Distill-Llama, whose
    file is of bytes, would lose all blanks.

    Raises:
        ModelError: tokenizer_config.json is malformed.
    """
    paths = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not all(path.is_file() for path in paths):
        return None
    return _corrected_tokenizer_config(folder, *(path.stat().st_mtime_ns for path in paths))


@functools.lru_cache(maxsize=8)
def _corrected_tokenizer_config(folder: Path, *modified_ns: int) -> str | None:
    config = read_object(folder / "tokenizer_config.json")
    if config.get("tokenizer_class") in _FILES_CLASSES:
        return None
    import tokenizers
    from transformers import AutoTokenizer

    try:
        hf = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, mistral_format=False)
        backends = hf.backend_tokenizer, tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        class_ids, file_ids = (backend.encode(_PROBE, add_special_tokens=False).ids for backend in backends)
    except Exception:  # third-party files can be malformed in any way; `tokens.Tokenizer` says what is wrong
        return None
    if class_ids == file_ids:
        return None
    return json.dumps(config | {"tokenizer_class": _FILES_CLASSES[0]}, indent=2) + "\n"


def save_weights(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file; raises OSError if that fails, such as on a full disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a folder's tokenizer and chat templates, sorted by name."""
    return sorted({path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()})


def model_files(folder: Path) -> list[Path]:
    """Return the files of a model's folder that are used, sorted by name."""
    return sorted({path for pattern in MODEL_FILES for path in folder.glob(pattern) if not path.match(OTHER_FORMATS)})
