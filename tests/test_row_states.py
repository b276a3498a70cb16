"""Layers with a state over packed rows: each episode from its first token on, and what kernels are handed for it."""

import inspect
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.granitemoehybrid import modeling_granitemoehybrid
from transformers.models.qwen3_5 import modeling_qwen3_5

from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.degrees import check_model
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan import general_state
from forge_rl.engines.titan.mixed_rows import joined
from forge_rl.engines.titan.row_states import Call, RowStates
from forge_rl.errors import ConfigError
from forge_rl.packing.rows import Row
from tests.zoo.folders import write
from tests.zoo.packed import compare, engine_of, rows_of

QWEN, GRANITE, LFM2 = "Qwen/Qwen3.5-4B, its text model", "ibm-granite/granite-4.0-h-1b", "LiquidAI/LFM2-1.2B"


def branching_row() -> Row:
    """Return a row of two trees and padding. The first branches after tokens 1 and 6, and its branches of
    one length are not neighbours."""
    row = rows_of(share_prefixes=True)[0]
    values = {
        "positions": [0, 1, 2, 3, 4, 2, 3, 4, 4, 5, 2, 3, 4, 0, 1, 2, 0, 1, 2],
        "trees": [0] * 13 + [1] * 3 + [-1] * 3,
        "until": [13, 13, 5, 5, 5, 10, 10, 8, 10, 10, 13, 13, 13, 16, 16, 16, 17, 18, 19],
    }
    tensors = {name: torch.tensor(value, dtype=row.tensors()[name].dtype) for name, value in values.items()}
    return Row(**{name: value[:19] for name, value in row.tensors().items()} | tensors)


def paths_of(row: Row) -> list[torch.Tensor]:
    """Return the tokens of each branch of a row up to each of its ends, by the definition of `Row.until`."""
    tokens = range(int((row.trees >= 0).sum()))
    return [torch.tensor([t for t in tokens if t <= end < row.until[t]]) for end in tokens]


def accumulate(values: torch.Tensor, decays: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run s = d s + v over [T, C]."""
    outputs = []
    for value, decay in zip(values, decays, strict=True):
        state = decay * state + value
        outputs.append(state)
    return torch.stack(outputs), state


def kernel_of(calls: list[Call]) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    def kernel(
        inputs: Sequence[torch.Tensor], states: torch.Tensor | None, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        calls.append(call)
        values, logs = inputs
        parts = list(zip(values, logs, strict=True))
        if call.offsets is not None:
            lengths = call.offsets.diff().tolist()
            parts = list(zip(values[0].split(lengths), logs[0].split(lengths), strict=True))
            assert call.segment_ids[0].bincount().tolist() == lengths
        first = torch.zeros(len(parts), values.shape[-1], dtype=values.dtype) if states is None else states
        results = [accumulate(x, log.exp(), state) for (x, log), state in zip(parts, first, strict=True)]
        outputs = [output for output, _ in results]
        return (
            torch.stack(outputs) if call.offsets is None else torch.cat(outputs)[None],
            torch.stack([state for _, state in results]) if call.has_children else None,
        )

    return kernel


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("chunk", [None, 1, 8])
def test_a_recurrence_over_a_row_is_that_over_each_episode(chunk: int | None, shared: bool):
    row = branching_row()
    calls: list[Call] = []
    values, logs = torch.randn(2, 1, len(row), 3, dtype=torch.float64).requires_grad_().unbind(0)
    kernel = kernel_of(calls)
    row_states = RowStates(row=row, shared=shared)
    output = row_states.scan(kernel, [values, logs], chunk=chunk)
    expected = torch.zeros_like(values)
    for path in paths_of(row):
        states, _ = accumulate(values[0, path], logs[0, path].exp(), torch.zeros(3, dtype=torch.float64))
        expected = expected.index_put((torch.zeros(1, dtype=torch.int64), path[-1:]), states[-1:])
    assert (output - expected).abs().max() < 1e-12
    weights = torch.randn_like(output)
    gradients, references = (
        torch.autograd.grad((result * weights).sum(), [values, logs], retain_graph=True)
        for result in (output, expected)
    )
    for gradient, reference in zip(gradients, references, strict=True):
        assert (gradient - reference).abs().max() < 1e-12
    computed_tokens = sum(int((call.tokens < len(row)).sum()) for call in calls)
    assert computed_tokens == (16 if shared else 5 + 5 + 6 + 5 + 3) == 16 + row_states.recomputed_tokens
    if chunk is None:
        assert len(calls) == (3 if shared else 1)


@pytest.mark.parametrize("width", [1, 3, 4])
def test_a_convolution_over_a_row_is_that_over_each_episode(width: int):
    row = branching_row()
    values, weight = torch.randn(1, len(row), 3, dtype=torch.float64), torch.randn(width, 3, dtype=torch.float64)

    def convolve(sequence: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(sequence, (0, 0, width - 1, 0))
        return sum(padded[:, tap : tap + sequence.shape[1]] * weight[tap] for tap in range(width))

    output = RowStates(row=row, shared=True).convolve(convolve, values, width)
    for path in paths_of(row):
        assert (output[0, path[-1]] - convolve(values[:, path])[0, -1]).abs().max() < 1e-12


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("chunk", [None, 8])
def test_joined_rows_with_padding_between_them_are_as_each_alone(chunk: int | None, shared: bool):
    rows = [branching_row(), branching_row()]
    joined_row, size = joined(rows), len(rows[0])
    values, logs = torch.randn(2, 1, 2 * size, 3, dtype=torch.float64).unbind(0)
    values[0, :size] = torch.nan  # stays in its own row
    values.requires_grad_()
    output = RowStates(row=joined_row, shared=shared).scan(kernel_of([]), [values, logs], chunk=chunk)
    parts = values[:, size:], logs[:, size:]
    alone = RowStates(row=rows[1], shared=shared).scan(kernel_of([]), parts, chunk=chunk)
    assert (output[:, size:] - alone).abs().max() < 1e-12
    gradients = [torch.autograd.grad(result.square().sum(), values)[0] for result in (output[:, size:], alone)]
    assert (gradients[0] - gradients[1])[:, size:].abs().max() < 1e-12
    assert bool(gradients[0].isfinite().all())


def test_a_row_of_padding_alone_passes():
    row = rows_of(share_prefixes=True)[0]
    padding = Row(**{**row.tensors(), "trees": torch.full_like(row.trees, -1)})
    values = torch.ones(1, len(row), 3, dtype=torch.float64)
    for shared in (True, False):
        states = RowStates(row=padding, shared=shared)
        assert states.scan(kernel_of([]), [values, values], chunk=None).shape == values.shape
        assert states.convolve(lambda x: x, values, 4).shape == values.shape


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", [QWEN, GRANITE, LFM2])
def test_recomputed_prefixes_equal_transformers(name: str, tmp_path: Path):
    engine = engine_of(write(name, tmp_path / "hf"), prefix_states="recomputed")
    deviation = compare(engine, tmp_path / "hf", rows_of(share_prefixes=True))
    assert max(deviation.forward, deviation.gradient) < 1e-9, deviation


@pytest.mark.usefixtures("process_group")
def test_mixers_that_are_not_known_run_over_one_episode_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(general_state, "ROW_MIXERS", frozenset())
    engine = engine_of(write(QWEN, tmp_path / "hf"))
    deviation = compare(engine, tmp_path / "hf", rows_of(share_prefixes=True))
    assert max(deviation.forward, deviation.gradient) < 1e-9, deviation


def test_recomputed_states_are_refused_where_there_are_none(tmp_path: Path):
    settings = TrainSettings(prefix_states="recomputed")
    check_model(settings, 1, read_architecture(write(QWEN, tmp_path / "states")))
    for name, family in (("mistralai/Mistral-7B-Instruct-v0.3", "mistral"), (LFM2, "lfm2")):
        with pytest.raises(ConfigError, match=f"no layer of a '{family}' has a state that branches could share"):
            check_model(settings, 1, read_architecture(write(name, tmp_path / family)))


def install(monkeypatch: pytest.MonkeyPatch, modeling: Any, name: str, path: str, kernel: Callable[..., Any]) -> None:
    """Have one of transformers' functions find a package's kernel, as on a machine that has the package."""
    package, *_, leaf = path.split(".")
    parents = [".".join(path.split(".")[:depth]) for depth in range(1, len(path.split(".")))]
    for parent in parents:
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    for parent, child in itertools.pairwise(parents):
        setattr(sys.modules[parent], child.rpartition(".")[2], sys.modules[child])
    setattr(sys.modules[parents[-1]], leaf, kernel)
    reference = inspect.unwrap(getattr(modeling, name))
    monkeypatch.setattr(modeling, name, use_kernel_func_from_hub_with_fallback(leaf, package)(reference))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("prefix_states", ["shared", "recomputed"])
def test_flas_kernel_gets_the_offsets_of_a_rows_episodes(
    prefix_states: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With a stand-in for the kernel that has its signature and computes the reference for each sequence."""
    calls: list[tuple[int, bool, bool]] = []
    reference = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)

    def chunk_gated_delta_rule(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        cu_seqlens_cpu: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        if cu_seqlens is None:
            return reference(q, k, v, g, beta, **options)
        assert cu_seqlens.dtype == torch.int32
        assert torch.equal(cu_seqlens, cu_seqlens_cpu)
        assert len(q) == 1
        assert cu_seqlens[-1] == q.shape[1]
        calls.append((len(cu_seqlens) - 1, initial_state is not None, output_final_state))
        parts = [x.split(cu_seqlens.diff().tolist(), dim=1) for x in (q, k, v, g, beta)]
        firsts = [None] * len(parts[0]) if initial_state is None else initial_state.split(1)
        results = [
            reference(*inputs, initial_state=state, **options) for *inputs, state in zip(*parts, firsts, strict=True)
        ]
        states = torch.cat([state for _, state in results]) if output_final_state else None
        return torch.cat([output for output, _ in results], dim=1), states

    path = "fla.ops.gated_delta_rule.chunk_gated_delta_rule"
    install(monkeypatch, modeling_qwen3_5, "torch_chunk_gated_delta_rule", path, chunk_gated_delta_rule)
    engine = engine_of(write(QWEN, tmp_path / "hf"), prefix_states=prefix_states)
    rows = rows_of(share_prefixes=True)
    deviation = compare(engine, tmp_path / "hf", rows)
    assert max(deviation.forward, deviation.gradient) < 1e-9, deviation
    num_layers = sum(kind == "linear_attention" for kind in engine.model.config.layer_types)
    if prefix_states == "recomputed":
        assert len(calls) == len(rows) * num_layers
        assert {call[1:] for call in calls} == {(False, False)}
    else:
        assert {call[1:] for call in calls} == {(False, True), (True, False)}
        assert len(calls) <= 2 * len(rows) * num_layers
    assert max(count for count, _, _ in calls) > 3, "a call must serve several segments for this to be a test"


@pytest.mark.usefixtures("process_group")
def test_mambas_kernel_gets_the_segments_of_a_row_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With stand-ins for the kernels that have their signatures and compute the reference for each sequence."""
    calls: list[int] = []
    reference = inspect.unwrap(modeling_granitemoehybrid.mamba2_chunk_scan)

    def mamba_chunk_scan_combined(
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        initial_states: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
    ) -> torch.Tensor:
        options = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
        if seq_idx is None:
            return reference(x, dt, A, B, C, chunk_size, return_final_states=return_final_states, **options)
        assert initial_states is None
        assert not return_final_states
        assert seq_idx.shape == x.shape[:2]
        assert seq_idx.dtype == torch.int32
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        calls.append(len(lengths))
        parts = [value.split(lengths, dim=1) for value in (x, dt, B, C)]
        outputs = [
            reference(steps, rate, A, keys, queries, chunk_size, **options)
            for steps, rate, keys, queries in zip(*parts, strict=True)
        ]
        return torch.cat(outputs, dim=1)

    path = "mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined"
    install(monkeypatch, modeling_granitemoehybrid, "mamba2_chunk_scan", path, mamba_chunk_scan_combined)
    engine = engine_of(write(GRANITE, tmp_path / "hf"))
    rows = rows_of(share_prefixes=True)
    deviation = compare(engine, tmp_path / "hf", rows)
    assert max(deviation.forward, deviation.gradient) < 1e-9, deviation
    assert len(calls) == len(rows)
    assert max(calls) > 3
