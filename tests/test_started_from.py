"""A resumed run keeps the models that it began with, or refuses others; folders here hold no real weights."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from forge_rl.errors import ConfigError
from forge_rl.models.digests import _READ_WHOLE, file_digest
from forge_rl.run.records.run_dir import check_same, code_digests, prepare_folder
from forge_rl.run.records.started_from import ModelKeeper, read_records


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run that starts from a model."""

    model: str
    steps: int = 4
    force_continue: bool = False


def model_folder(folder: Path, weights: str, template: str = "{{ messages }}") -> Path:
    """A checkpoint's folder with a model in it."""
    (folder / "model").mkdir(parents=True)
    for name, text in (("config.json", "{}"), ("model.safetensors", weights), ("chat_template.jinja", template)):
        (folder / "model" / name).write_text(text)
    return folder


def started(tmp_path: Path) -> tuple[Path, Path, Settings]:
    """A run with a checkpoint that began from a link, which leads to another checkpoint by now."""
    first, second = (model_folder(tmp_path / f"step-{step}", f"weights of {step}") for step in (1, 2))
    link, run = tmp_path / "best", tmp_path / "run"
    link.symlink_to(first)
    settings = Settings(model=str(link))
    os.close(prepare_folder(run, settings))
    (run / "checkpoints" / "step-000002").mkdir(parents=True)
    link.unlink()
    link.symlink_to(second)
    return run, link, settings


def kept(run: Path, link: Path, lines: list[str], *, weights: bool = True, force: bool = False) -> Path:
    current = (link / "model").resolve()
    keeper = ModelKeeper(run=run, resumes=True, force=force, tell=lines.append)
    return keeper.keep("--model", str(link), current, weights=weights).parent


def test_a_resumed_run_keeps_the_folder_that_a_link_led_to(tmp_path: Path):
    run, link, settings = started(tmp_path)
    (line,) = check_same(run, settings, {})
    assert f"--model {link} leads to {tmp_path}/step-2/model and led to {tmp_path}/step-1/model" in line
    os.close(prepare_folder(run, settings))
    lines: list[str] = []
    assert kept(run, link, lines) == tmp_path / "step-1"
    assert "the run keeps" in lines[0]
    assert read_records(run)["--model"].folder == str(tmp_path / "step-1" / "model"), "also the next time"


def test_a_missing_reference_is_refused_unless_forced(tmp_path: Path):
    run, link, _ = started(tmp_path)
    (tmp_path / "step-1" / "model" / "model.safetensors").write_text("trained further, in place")
    with pytest.raises(ConfigError, match=r"is not the model that this run began with, .*model\.safetensors changed"):
        kept(run, link, [])
    assert kept(run, link, [], weights=False) == tmp_path / "step-2", "config, tokenizer and template are the same"
    (tmp_path / "step-1" / "model" / "chat_template.jinja").unlink()
    (tmp_path / "step-2" / "model" / "chat_template.jinja").write_text("{{ tools }}")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja changed"):
        kept(run, link, [], weights=False)
    assert kept(run, link, lines := [], force=True) == tmp_path / "step-2"
    assert "is another model than the run began with" in lines[0]
    assert kept(run, link, lines := []) == tmp_path / "step-2"
    assert not lines, "it is the run's from now on"


def test_a_model_that_was_moved_or_never_recorded_is_taken(tmp_path: Path):
    run, link, settings = started(tmp_path)
    (tmp_path / "step-1").rename(tmp_path / "elsewhere")
    link.unlink()
    link.symlink_to(tmp_path / "elsewhere")
    assert check_same(run, settings, {}) == []
    assert kept(run, link, lines := []) == tmp_path / "elsewhere"
    (run / "models.json").unlink()  # a run of before
    link.unlink()
    link.symlink_to(tmp_path / "step-2")
    assert kept(run, link, lines) == tmp_path / "step-2"
    assert not lines


def test_a_large_file_is_told_from_another_by_blocks(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    content = bytearray(3 * _READ_WHOLE)
    path.write_bytes(content)
    before = file_digest(path)
    content[_READ_WHOLE + 1000 : 2 * _READ_WHOLE] = b"x" * (_READ_WHOLE - 1000)
    path.write_bytes(content)
    assert file_digest(path) != before


def test_the_files_of_a_rewards_model_are_part_of_what_a_run_is(tmp_path: Path):
    @dataclass
    class Reward:
        model_folder: Path

    rewards = Reward(model_folder(tmp_path / "a", "1") / "model"), Reward(model_folder(tmp_path / "b", "2") / "model")
    digests = code_digests(*rewards)
    weights = [digest for name, digest in digests.items() if name.endswith("of a reward: model.safetensors")]
    assert len(set(weights)) == 2
