"""Parameters that vLLM holds under two names: a version brings the first name's values, and both follow."""

import contextlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_rl.errors import WeightsError
from forge_rl.weights.fingerprints import fingerprint
from forge_rl.weights.manifest import TensorEntry

pytestmark = pytest.mark.processes  # importing vLLM takes as long as starting some


@dataclass(frozen=True)
class Bucket:
    values: dict[str, torch.Tensor]

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        return tuple(
            TensorEntry(name=name, shape=tuple(values.shape), dtype="float32", bucket="1/0", offset=0)
            for name, values in self.values.items()
        )

    @contextlib.contextmanager
    def open(self) -> Iterator[dict[str, torch.Tensor]]:
        yield self.values


class Experts(torch.nn.Module):
    """As vLLM's: it registers the biases of its router."""

    def __init__(self, bias: torch.nn.Parameter) -> None:
        super().__init__()
        self.e_score_correction_bias = bias
        self.w = torch.nn.Parameter(torch.zeros(3), requires_grad=False)


class Mixture(torch.nn.Module):
    """As AFMoE's: the biases are its own, by a name that reloads set aside."""

    def __init__(self) -> None:
        super().__init__()
        self.expert_bias = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self.experts = Experts(self.expert_bias)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        names, parameters = set(), dict(self.named_parameters())
        for name, values in weights:
            getattr(parameters[name], "weight_loader", default_weight_loader)(parameters[name], values)
            names.add(name)
        return names


def engine_of(model: Mixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from forge_rl.engines.vllm import cpu
    from forge_rl.engines.vllm.transfer import BucketTransferEngine

    monkeypatch.setattr(cpu, "patch", lambda model: None)
    record_metadata_for_reloading(model)
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(node_rank=0),
        additional_config=None,
        model_config=SimpleNamespace(word_embeddings_untied_by_checkpoint=False, dtype=torch.float32),
    )
    return BucketTransferEngine(SimpleNamespace(), config, torch.device("cpu"), model)  # type: ignore[arg-type]


def load(engine: Any, values: dict[str, torch.Tensor]) -> None:
    from forge_rl.engines.vllm.transfer import BucketUpdateInfo

    engine.start_weight_update()
    engine.receive_weights(BucketUpdateInfo(version=1, bucket=pickle.dumps(Bucket(values))))
    engine.finish_weight_update()


def test_both_names_follow_each_version_which_is_attested(monkeypatch: pytest.MonkeyPatch):
    model = Mixture()
    engine = engine_of(model, monkeypatch)
    for seed in (1, 2):
        torch.manual_seed(seed)
        version = {"expert_bias": torch.randn(4), "experts.w": torch.randn(3)}
        load(engine, version)
        assert torch.equal(model.experts.e_score_correction_bias, version["expert_bias"]), "what the router reads"
        assert torch.equal(model.expert_bias, version["expert_bias"])
        shards = {shard.name: shard for shard in engine.report().shards}
        assert shards.keys() == version.keys()
        for name, values in version.items():
            assert shards[name].fingerprint == fingerprint(values, tuple(values.shape), shards[name].tensor_slice)


def test_a_version_without_the_first_name_is_refused(monkeypatch: pytest.MonkeyPatch):
    engine = engine_of(Mixture(), monkeypatch)
    with pytest.raises(WeightsError, match=r"leaves 1 of the engine's weights unchanged: \['expert_bias'\]"):
        load(engine, {"experts.w": torch.randn(3)})


@pytest.mark.parametrize(("name", "culprit"), [("", "the first tensor"), ("wrong", r"wrong of shape \(3,\)")])
def test_a_tensor_that_does_not_fit_is_named(name: str, culprit: str, monkeypatch: pytest.MonkeyPatch):
    class Broken(Mixture):
        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
            if not name:
                raise ValueError("no such layer")
            return super().load_weights(weights)

    engine = engine_of(Broken(), monkeypatch)
    with pytest.raises(WeightsError, match=f"version 1 does not fit the engine's model: {culprit} led to "):
        load(engine, {name or "experts.w": torch.randn(3)})


def test_a_second_name_that_does_not_follow_is_refused(monkeypatch: pytest.MonkeyPatch):
    """As an own copy of the values would be, such as that of another version of vLLM."""
    from forge_rl.engines.vllm import internals

    model, finish = Mixture(), internals.finish_reload
    engine = engine_of(model, monkeypatch)

    def finish_apart(*arguments: Any, **options: Any) -> None:
        finish(*arguments, **options)
        model.experts.e_score_correction_bias = torch.nn.Parameter(torch.zeros(4), requires_grad=False)

    monkeypatch.setattr(internals, "finish_reload", finish_apart)
    with pytest.raises(WeightsError, match=r"leaves \['experts.e_score_correction_bias'\] unchanged"):
        load(engine, {"expert_bias": torch.randn(4), "experts.w": torch.randn(3)})
