"""Frozen weights: what is trained, saved and published beside them."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from forge_rl.engines.families import FAMILIES
from forge_rl.engines.families.qwen import QWEN3_MOE
from forge_rl.engines.titan.blocks import SavePlanner, copied, training_state
from forge_rl.engines.titan.export import Export
from forge_rl.engines.titan.index import TensorWriter
from forge_rl.engines.titan.shards import freeze, local_shards, named_weights, specs
from forge_rl.errors import CheckpointError, ConfigError
from forge_rl.weights.fingerprints import fingerprint
from forge_rl.weights.slices import TensorSlice
from tests.fake_host import forget
from tests.fakes import hf_weights, make_model
from tests.test_titan_state import engine_of, publish, read_whole, same, save, train

pytestmark = pytest.mark.usefixtures("process_group")


def test_a_stack_of_experts_is_exported_a_few_at_a_time(tmp_path: Path):
    model = Stacked()
    counts: dict[str, int] = {}
    dcp.save(
        copied(training_state(model, torch.optim.AdamW(model.parameters()), counts)),
        storage_writer=TensorWriter(tmp_path / "training"),
        planner=SavePlanner(),
    )
    for folder in ("hf", "model"):
        (tmp_path / folder).mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"quantization_config": {}}')
    save_file({"lm_head.weight": torch.ones(1)}, tmp_path / "hf" / "model.safetensors")  # of a tied model: left out
    parts = QWEN3_MOE.names.parts
    export = Export(tmp_path / "training", tmp_path / "hf", torch.float32, parts, file_bytes=3 * 3 * 8 * 4)
    export.write(tmp_path / "model")
    files = [load_file(path) for path in sorted((tmp_path / "model").glob("*.safetensors"))]
    assert sorted(sorted(name.split(".")[5] for name in file if "experts" in name) for file in files) == [
        ["0", "1", "2"],
        ["3"],
    ]
    stack = dict(named_weights(model))["layers.0.moe.routed_experts.inner_experts.w1_EFD"]
    for file in files:
        for name, tensor in file.items():
            if "experts" in name:
                assert torch.equal(tensor, stack[int(name.split(".")[5])])
    assert json.loads((tmp_path / "model" / "config.json").read_text()) == {"dtype": "float32"}


FROZEN = ("model.embed_tokens.*", "model.layers.[01].self_attn.*", "model.layers.0.mlp.up_proj.weight")


def is_frozen(name: str) -> bool:
    return "embed_tokens" in name or "self_attn" in name or name == "model.layers.0.mlp.up_proj.weight"


def test_frozen_weights_stay_and_have_no_optimizer_state(tmp_path: Path):
    make_model(tmp_path / "hf")
    engine = engine_of(tmp_path / "hf", frozen=FROZEN)
    before = hf_weights(engine.model)
    train(engine, range(2))
    after = hf_weights(engine.model)
    assert {name for name in before if torch.equal(before[name], after[name])} == set(filter(is_frozen, before))
    trained = [parameter for parameter in engine.model.parameters() if parameter.requires_grad]
    assert set(engine.optimizer.state) == set(trained)
    assert set(trained) == {weight for group in engine.optimizer.param_groups for weight in group["params"]}
    assert [spec.name for spec in engine.specs() if not spec.changed] == list(filter(is_frozen, before))


def test_a_run_with_frozen_weights_continues_bit_by_bit(tmp_path: Path):
    make_model(tmp_path / "hf")
    through = engine_of(tmp_path / "hf", frozen=FROZEN)
    train(through, range(2))
    save(through, tmp_path / "saved", tmp_path / "hf")
    resumed = engine_of(tmp_path / "hf", frozen=FROZEN)
    resumed.load_training_state(tmp_path / "saved" / "training")
    assert set(resumed.optimizer.state) == {p for p in resumed.model.parameters() if p.requires_grad}
    for engine in (through, resumed):
        train(engine, range(2, 4))
    assert same(hf_weights(resumed.model), hf_weights(through.model))
    export = load_file(tmp_path / "saved" / "model" / "model.safetensors")
    assert export.keys() == hf_weights(through.model).keys(), "an export lacks frozen weights"


@pytest.mark.parametrize(("saved", "frozen"), [(FROZEN, ()), ((), FROZEN), (FROZEN, FROZEN[:2])])
def test_a_training_state_with_other_frozen_weights_is_refused(
    saved: tuple[str, ...], frozen: tuple[str, ...], tmp_path: Path
):
    make_model(tmp_path / "hf")
    save(engine_of(tmp_path / "hf", frozen=saved), tmp_path / "saved", tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"of a run that trained \d+ weights, this one trains \d+") as caught:
        engine_of(tmp_path / "hf", frozen=frozen).load_training_state(tmp_path / "saved" / "training")
    assert "--trainer.frozen" in caught.value.hint


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("model.norm.*", "layers.*"), "no weight of the model matches 'layers.*'"),
        (("lm_head.weight",), "no weight of the model matches 'lm_head.weight'"),
        (("",), "no weight of the model matches ''"),
        (("*",), "every weight of the model is frozen"),
        (("model.[en]*", "model.layers.*"), "every weight of the model is frozen"),
    ],
)
def test_patterns_that_freeze_nothing_or_everything_are_refused(
    patterns: tuple[str, ...], message: str, tmp_path: Path
):
    make_model(tmp_path / "hf", tie_word_embeddings=True)
    with pytest.raises(ConfigError) as caught:
        engine_of(tmp_path / "hf", frozen=patterns)
    assert caught.value.message == message
    assert "--trainer.frozen" in caught.value.hint


class Stacked(torch.nn.Module):
    """A router and a stack of experts, named as torchtitan does."""

    names = FAMILIES["qwen3_moe"].names

    def __init__(self) -> None:
        super().__init__()
        experts = torch.nn.Module()
        experts.w1_EFD = torch.nn.Parameter(torch.randn(4, 3, 8))
        router = torch.nn.Module()
        router.gate = torch.nn.Linear(8, 4, bias=False)
        moe = torch.nn.ModuleDict({"routed_experts": torch.nn.ModuleDict({"inner_experts": experts}), "router": router})
        self.layers = torch.nn.ModuleDict({"0": torch.nn.ModuleDict({"moe": moe})})


def test_a_stack_of_experts_is_frozen_as_one_or_not_at_all():
    model = Stacked()
    with pytest.raises(ConfigError, match="2 of its 4 experts would be frozen"):
        freeze(model, ["model.layers.0.mlp.experts.[01].*"])
    model = Stacked()
    freeze(model, ["model.layers.*.mlp.experts.*"])
    assert {spec.name for spec in specs(model) if spec.changed} == {"model.layers.0.mlp.gate.weight"}
    assert len(specs(model)) == 5


def test_a_stack_of_experts_is_published_as_views_of_each():
    model = Stacked()
    stack = dict(named_weights(model))["layers.0.moe.routed_experts.inner_experts.w1_EFD"]
    shards = {shard.name: shard for shard in local_shards(model, range(1))}
    assert len(shards) == 5
    for expert in range(4):
        shard = shards[f"model.layers.0.mlp.experts.{expert}.gate_proj.weight"]
        assert shard.tensor_slice == TensorSlice.whole((3, 8))
        assert torch.equal(shard.values, stack[expert])
        assert shard.values.data_ptr() == stack[expert].data_ptr()


def test_a_publish_with_frozen_weights_writes_the_others_only(tmp_path: Path):
    make_model(tmp_path / "hf")
    engine = engine_of(tmp_path / "hf", frozen=FROZEN)
    first = publish(engine, tmp_path)
    train(engine, range(1))
    second = publish(engine, tmp_path, base=first)
    rewritten = {entry.name for key in (bucket.key for bucket in second.written) for entry in second.entries[key]}
    assert rewritten == {name for name in hf_weights(engine.model) if not is_frozen(name)}
    tensors = read_whole(second)
    assert same(tensors, {name: tensor.bfloat16() for name, tensor in hf_weights(engine.model).items()})
    assert all(entry.fingerprint == fingerprint(tensors[entry.name], entry.shape) for entry in second.tensors)
    forget(second)
