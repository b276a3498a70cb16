"""Crafted model folders: they are data. None runs code, asks a question, or makes us read outside of it."""

import ast
import io
import json
import os
import shutil
from pathlib import Path

import pytest

from forge_rl.engines.architecture import read_architecture
from forge_rl.errors import ModelError
from forge_rl.models.bundled import bundled_model
from forge_rl.models.resolve import resolve_model
from forge_rl.tokens.tokenizer import Tokenizer
from tests.security.other_user import NOBODY, needs_root

ROOT = Path(__file__).parents[2]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(run_model: Path, tmp_path: Path) -> Path:
    """A copy of a model that opens, for a test to make hostile."""
    return shutil.copytree(run_model, tmp_path / "model")


def edit(path: Path, **values: object) -> None:
    """Change a JSON file; None removes a key."""
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def open_model(folder: Path) -> None:
    """Do what a run does with a model before it starts anything, and read the tokenizer."""
    resolved = resolve_model(str(folder), folder.parent / "cache")
    read_architecture(resolved)
    Tokenizer(resolved)


def refused(folder: Path, because: str) -> None:
    with pytest.raises(ModelError, match=because) as caught:
        open_model(folder)
    assert caught.value.hint


def test_the_model_opens_before_it_is_made_hostile(model: Path):
    open_model(model)


@pytest.mark.parametrize("module", ["evil", "somebody/evil--evil"])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_python_of_a_model_is_never_run_nor_asked_for(
    file: str, module: str, model: Path, monkeypatch: pytest.MonkeyPatch
):
    (model / "evil.py").write_text(f"import os\nos.system('touch {model / 'proof'}')\n")
    answers = io.StringIO("y\ny\ny\n")
    monkeypatch.setattr("sys.stdin", answers)
    code = {"AutoConfig": f"{module}.Config", "AutoTokenizer": [f"{module}.Tokenizer", f"{module}.Tokenizer"]}
    edit(model / "tokenizer_config.json", tokenizer_class="Evil" if file == "tokenizer_config.json" else None)
    edit(model / file, auto_map=code)
    if file == "tokenizer_config.json":
        refused(model, "cannot load a tokenizer")
    else:
        open_model(model)  # the family that config.json names is known, and needs no code
    assert not (model / "proof").exists(), "the model's code was run"
    assert answers.tell() == 0, "somebody was asked"


def test_pickled_weights_are_no_weights(model: Path):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    refused(model, "lacks weights")


@pytest.mark.parametrize("size", [0, 2**40, 2**60, 2**64 - 1])
def test_a_header_that_is_longer_than_its_file_is_refused(size: int, model: Path):
    (model / "model.safetensors").write_bytes(size.to_bytes(8, "little") + b"{}")
    refused(model, "model.safetensors cannot be read")


def test_weights_that_lie_outside_of_their_file_are_refused(model: Path):
    header = json.dumps({"weight": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    refused(model, "model.safetensors cannot be read")


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "..", "sub/a.safetensors", "x.bin", 7])
def test_an_index_that_names_anything_but_its_own_files_is_refused(name: object, model: Path):
    shutil.copytree(model, model.parent / "other")
    (model / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    refused(model, "not a safetensors file in the same folder")


@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja", "model.safetensors"]
)
def test_a_link_out_of_a_model_folder_is_refused(file: str, model: Path):
    (model / file).unlink(missing_ok=True)
    (model / file).symlink_to("/etc/passwd")
    refused(model, f"{file} links out of the model's folder, to /etc/passwd")


@pytest.mark.parametrize("file", ["", "config.json", "model.safetensors", "chat_template.jinja"])
def test_a_model_that_anybody_may_write_to_is_refused(file: str, model: Path):
    (model / "chat_template.jinja").touch()
    model.chmod(0o755)
    path = model / file
    path.chmod(path.stat().st_mode | 0o002)
    refused(model, f"{file} is world-writable")
    model.chmod(0o700)
    if file:
        assert resolve_model(str(model), model) == model, "nobody else comes there"


@needs_root
@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_of_another_user_in_a_model_is_refused(file: str, model: Path):
    os.chown(model / file, NOBODY, NOBODY)
    refused(model, f"{file} belongs to user {NOBODY}, but the folder to user 0")
    os.chown(model, NOBODY, NOBODY)
    assert resolve_model(str(model), model) == model, "a folder that is another's is named by who trusts them"


def test_a_pipe_in_a_model_is_not_waited_for(model: Path):
    (model / "generation_config.json").unlink(missing_ok=True)
    os.mkfifo(model / "generation_config.json")
    refused(model, "generation_config.json is not a regular file")


def test_links_of_the_hubs_cache_are_followed(model: Path):
    blobs, snapshot = model.parent / "blobs", model.parent / "snapshots" / "5e1c"
    model.rename(blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    open_model(snapshot)


def test_links_into_the_store_of_the_hubs_cache_are_followed(model: Path):
    from huggingface_hub.utils._shared_blobs import publish_blob_to_shared_store

    cache = model.parent / "hub"
    blobs, snapshot = (cache / "models--org--name" / place for place in ("blobs", "snapshots/5e1c"))
    shutil.copytree(model, blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    weights = blobs / "model.safetensors"
    # As the client does with each file that it fetches by hf_xet.
    size = weights.stat().st_size
    assert publish_blob_to_shared_store(blob_path=str(weights), xet_hash="ab" * 32, cache_dir=cache, expected_size=size)
    assert weights.is_symlink()
    open_model(snapshot)
    (cache.parent / "token").write_text("{}")
    (snapshot / "generation_config.json").unlink(missing_ok=True)
    (snapshot / "generation_config.json").symlink_to("../../../../token")
    refused(snapshot, "generation_config.json links out of the model's folder")


@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", INDEX]
)
@pytest.mark.parametrize("content", [b"[" * 100_000, b"[]", b"\xff\xff", b""], ids=["deep", "list", "bytes", "empty"])
def test_json_that_is_none_is_refused(content: bytes, file: str, model: Path):
    (model / file).write_bytes(content)
    refused(model, f"{file} cannot be read")


@pytest.mark.parametrize(
    ("values", "because"),
    [
        ({"hidden_size": 2**40}, "hidden_size is 1099511627776"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": 10**4}, "describes a model of [0-9]+ weights"),
        ({"vocab_size": 2**30}, "describes a model of [0-9]+ weights"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_attention_heads": 10**6, "head_dim": None}, "head_dim is 0"),
        ({"num_key_value_heads": -1}, "num_key_value_heads is -1"),
        ({"intermediate_size": 1e300}, "intermediate_size is 1e"),
        ({"vocab_size": "x" * 10**6}, "vocab_size is 'xxx"),
        ({"max_position_embeddings": True}, "max_position_embeddings is True"),
        ({"rms_norm_eps": "0"}, "rms_norm_eps is '0'"),
        ({"rope_scaling": "x"}, "rope_scaling is 'x'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, ": factor is None"),
        ({"dtype": "int8"}, "is of dtype 'int8'"),
        ({"dtype": "load"}, "is of dtype 'load'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_absurd_sizes_are_refused_before_anything_is_allocated(values: dict[str, object], because: str, model: Path):
    edit(model / "config.json", **values)
    with pytest.raises(ModelError, match=because) as caught:
        open_model(model)
    assert len(str(caught.value)) < 500


def test_a_chat_template_reaches_nothing_outside_of_itself(model: Path):
    tokenizer = Tokenizer(model)
    for template, because in (
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        (f"{{{{ cycler.__init__.__globals__.os.system('touch {model}/proof') }}}}", "unsafe"),
        (f"{{{{ raise_exception.__globals__['os'].system('touch {model}/proof') }}}}", "unsafe"),
        ("{{ '{0.__class__.__mro__}'.format('') }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% if %}", "Expected an expression"),
    ):
        tokenizer.hf.chat_template = template
        with pytest.raises(ModelError, match=because):
            tokenizer.render([{"role": "user", "content": "?"}])
    assert not (model / "proof").exists(), "the template ran a command"


def test_a_cache_that_others_may_write_to_is_not_used(tmp_path: Path):
    (tmp_path / "smollm2-135m").mkdir()
    tmp_path.chmod(0o777)
    with pytest.raises(ModelError, match="anybody may write to it"):
        bundled_model(tmp_path)


def test_the_caches_lock_is_not_written_through_a_link(tmp_path: Path):
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / ".smollm2-135m.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(ModelError, match="cannot write the bundled model"):
        bundled_model(tmp_path / "cache")
    assert (tmp_path / "precious").read_text() == "kept"


def test_every_loader_of_models_says_that_it_runs_no_code():
    loaders = {"from_pretrained", "AsyncEngineArgs"}
    values = []
    for path in (ROOT / "forge_rl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in loaders:
                keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
                values.append((path.name, keywords.get("trust_remote_code")))
    places = (
        "arguments.py",
        "bundled.py",
        "hf_folder.py",
        "reward_model.py",
        "served.py",
        "tokenizer.py",
        "transformers_model.py",
    )
    assert sorted(values) == [(place, "False") for place in places]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": 7}}'),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer_config.json", '{"added_tokens_decoder": 3}'),
        ("tokenizer_config.json", '{"chat_template": {"a": 1}, "eos_token": 3}'),
        ("tokenizer_config.json", "[1]"),
    ],
)
def test_a_crafted_tokenizer_is_a_clear_error(file: str, content: str, model: Path):
    (model / file).write_text(content)
    with pytest.raises(ModelError):
        Tokenizer(model).render([{"role": "user", "content": "?"}])


@pytest.mark.parametrize(
    "template", ["{{ 1 // 0 }}", "{{ 10 ** 400 * 1.0 }}", "{{ 'a' * 'b' }}", "{% set x = x.y.z %}"]
)
def test_a_template_that_fails_is_a_clear_error(template: str, model: Path):
    (model / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelError, match="the chat template of"):
        Tokenizer(model).render([{"role": "user", "content": "?"}])
