"""Adapters of a run on a real trainer: what each gets alone, what a failure costs, and what a restart brings back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

import forge_rl as rl
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.algorithms.protocol import LossInputs
from forge_rl.engines.adapter_settings import AdapterPass
from forge_rl.errors import CheckpointError, ConfigError
from forge_rl.packing.rows import PackedBatch
from forge_rl.run.adapters import RunAdapters, with_adapters
from forge_rl.services.trainer_adapters import Pass
from tests.fakes import make_model, packed, random_batch
from tests.test_trainer import open_trainer

pytestmark = pytest.mark.usefixtures("nothing_left")

LORA = rl.LoRAConfig(rank=4)
SYNCHRONOUS = rl.ScheduleConfig(kind="synchronous")
LOSS = ClippedSurrogate()
STEPS = 3


@dataclass(frozen=True)
class NotANumber(ClippedSurrogate):
    """A loss whose every value is NaN."""

    def __call__(self, inputs: LossInputs) -> Any:
        values, metrics = super().__call__(inputs)
        return values * torch.nan, metrics


class Engines:
    """What engines were given last, by adapter."""

    def __init__(self) -> None:
        self.loaded: dict[str, bytes] = {}

    async def load_adapter(self, name: str, folder: Path) -> None:
        self.loaded[name] = (folder / "adapter_model.safetensors").read_bytes()


def batch(seed: int) -> PackedBatch:
    return packed(random_batch(seed, vocab=30))


def read(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    files = {f"{path.parent.name}/{path.name}": load_file(path) for path in folder.rglob("*.safetensors")}
    return dict(sorted(files.items()))


async def saved(adapters: RunAdapters, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Factors and moments of all adapters, as a checkpoint has them."""
    await adapters.save(folder)
    return read(folder)


def of(name: str, files: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    prefix = f"{name}/"
    return {
        f"{file}:{key}": tensor
        for file, part in files.items()
        if file.startswith(prefix)
        for key, tensor in part.items()
    }


async def test_a_failure_of_one_adapter_leaves_the_others_as_alone_and_a_restart_brings_back_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "hf", "qwen3")
    config = with_adapters(rl.RunConfig(lora=LORA, schedule=SYNCHRONOUS, steps=2 * STEPS), LOSS, ["a", "b"])
    warnings: list[str] = []
    checkpoints: list[Path] = []
    left_out: list[list[str]] = []

    async with open_trainer(tmp_path, ranks=1, lora=LORA, dtype="float32") as (trainer, _):

        async def opened(*names: str) -> tuple[RunAdapters, Engines, Any]:
            engines, rollouts = Engines(), SimpleNamespace(adapters={}, leave_out=left_out.append)
            adapters = RunAdapters(
                config,
                trainer,
                cast(Any, engines),
                cast(Any, rollouts),
                folder=tmp_path,
                checkpoint=lambda: checkpoints[-1] if checkpoints else None,
                warn=warnings.append,
            )
            await adapters.open(*names)
            return adapters, engines, rollouts

        async def trained(
            adapters: RunAdapters, names: str, losses: dict[str, Any] | Any = LOSS, *, mix_rows: bool = False
        ) -> dict[str, float]:
            stats: dict[str, float] = {}
            for step in range(STEPS):
                batches = {name: batch(10 * step + "ab".index(name)) for name in names}
                stats = await adapters.step(batches, losses, mix_rows=mix_rows)
                await adapters.publish()
            return stats

        alone, _, _ = await opened("a")
        await trained(alone, "a")
        expected = of("a", await saved(alone, tmp_path / "alone"))
        assert expected
        await trainer.adapters.drop("a")

        beside, engines, rollouts = await opened("a", "b")
        assert rollouts.adapters == {"a": "a", "b": "b"}
        first = engines.loaded["b"]
        stats = await trained(beside, "ab", {"a": LOSS, "b": NotANumber()})
        files = await saved(beside, tmp_path / "beside")
        actual = of("a", files)
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[key], expected[key]) for key in expected), "bit for bit as alone"
        assert (beside["a"].updates, beside["a"].version, beside["a"].failure) == (STEPS, STEPS, "")
        assert (beside["b"].updates, beside["b"].version) == (0, 0)
        assert "not finite" in beside["b"].failure
        assert "adapter b is trained no more" in warnings[-1]
        assert engines.loaded["b"] == first, "engines keep what it had"
        assert left_out[-4:] == [[], [], [], ["b"]], "no episodes are generated for it from then on"
        assert (stats["a/updates"], stats["b/updates"], stats["b/skipped"]) == (STEPS, 0, STEPS)
        assert stats["tokens/trained"] == stats["a/tokens/trained"] > 0
        with pytest.raises(rl.ForgeError, match="no adapter is left to train"):
            await beside.step({"b": batch(1)}, NotANumber())

        # A restart of the ranks: what the checkpoint holds comes back, with the counts that the run noted with it.
        checkpoints.append(tmp_path / "beside")
        noted = beside.state_dict()
        await beside.step({"a": batch(99)}, LOSS)
        await beside.publish()
        later = engines.loaded["a"]
        await trainer.restart(None)
        beside.load_state_dict(noted)
        await beside.restore()
        assert left_out[-1] == ["b"], "as the checkpoint has it"
        assert engines.loaded["a"] != later
        again = of("a", await saved(beside, tmp_path / "again"))
        assert all(torch.equal(again[key], expected[key]) for key in expected)
        assert (trainer.updates, trainer.version) == (0, 0), "the trainer's own adapter was never trained"
        beside.load_state_dict({"a": {"updates": STEPS}})
        await beside.restore()
        assert left_out[-1] == [], "the checkpoint is of before its failure"
        beside.load_state_dict({"a": {"updates": STEPS + 1}})
        with pytest.raises(CheckpointError, match="holds 3 updates of adapter 'a', but a state of 4"):
            await beside.restore()

        # A step that was interrupted between its pass and its update leaves nothing to the next one.
        checkpoints.clear()
        await trainer.adapters.drop("a")
        interrupted, _, _ = await opened("a")
        reached = asyncio.Event()

        async def hang(*_: object) -> None:
            reached.set()
            await asyncio.sleep(3600)

        # Before its pass has ended, nothing is lost by saving the steps before it.
        for call, is_stepping in (("run", False), ("step", True)):
            reached.clear()
            with monkeypatch.context() as patch:
                patch.setattr(trainer.adapters, call, hang)
                stepping = asyncio.create_task(interrupted.step({"a": batch(77)}, LOSS))
                await reached.wait()
                stepping.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await stepping
            assert (interrupted.stepping, interrupted.updates) == (is_stepping, 0)
        await trained(interrupted, "a")
        assert (interrupted.stepping, interrupted.updates) == (False, STEPS)
        trained_files = of("a", await saved(interrupted, tmp_path / "interrupted"))
        assert all(torch.equal(trained_files[key], expected[key]) for key in expected)

        # Rows in common: the same within rounding.
        await trainer.adapters.drop("a")
        mixed, _, _ = await opened("a", "b")
        counts: list[int] = []
        run_many = trainer.adapters.run_many

        async def counted(passes: Sequence[AdapterPass]) -> list[Pass | rl.ForgeError]:
            counts.append(len(passes))
            return await run_many(passes)

        monkeypatch.setattr(trainer.adapters, "run_many", counted)
        await trained(mixed, "ab", mix_rows=True)
        assert counts == [2] * STEPS
        close = of("a", await saved(mixed, tmp_path / "mixed"))
        factors = [key for key in expected if "adapter_model" in key]
        torch.testing.assert_close(
            [close[key] for key in factors], [expected[key] for key in factors], rtol=0, atol=2e-3
        )


@pytest.mark.parametrize(
    ("settings", "loss", "message"),
    [
        ({"lora": rl.LoRAConfig()}, "clipped", "--lora.rank is 0"),
        ({"schedule": rl.ScheduleConfig()}, "clipped", "--schedule.kind pipelined"),
        ({"generator": rl.GeneratorConfig(temperature=0.7)}, "clipped", "--generator.temperature is 0.7"),
        ({}, "clipped:kl_coef=0.1", "a frozen reference"),
        ({}, "clipped", "'../b' cannot name an adapter"),
    ],
)
def test_settings_that_allow_no_adapters_by_name_are_refused(settings: dict[str, Any], loss: str, message: str) -> None:
    config = rl.RunConfig(**{"lora": LORA, "schedule": SYNCHRONOUS, **settings})
    with pytest.raises(ConfigError, match=message):
        with_adapters(config, rl.build_loss([loss]), ["a", "../b"] if "name" in message else ["a"])


def test_engines_get_room_for_all_adapters() -> None:
    config = with_adapters(rl.RunConfig(lora=rl.LoRAConfig(rank=32), schedule=SYNCHRONOUS), LOSS, ["a", "b", "a"])
    assert (config.generator.max_loras, config.generator.max_lora_rank) == (2, 32)


def test_a_batch_is_split_by_its_sources() -> None:
    whole = random_batch(1, vocab=30, groups=3)
    parts = whole.by_source
    assert [group for part in parts.values() for group in part.groups] == list(whole.groups)
    assert all(group.task.source == source for source, part in parts.items() for group in part.groups)
