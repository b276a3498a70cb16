"""The platform: number formats, devices, and ranks that cannot meet."""

import socket

import pytest
import torch
import torch.distributed as dist

from forge_rl.engines import platform
from forge_rl.engines.platform import init_distributed, local_device, resolve_dtype
from forge_rl.errors import ConfigError


@pytest.mark.parametrize(("name", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_named_format_is_taken(name: str, dtype: torch.dtype):
    assert resolve_dtype(name) is dtype


@pytest.mark.parametrize(("device", "dtype"), [("cuda", torch.bfloat16), ("cpu", torch.float32)])
def test_auto_takes_bfloat16_on_cuda_only(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platform, "device_type", lambda: device)
    assert resolve_dtype("auto") is dtype


@pytest.mark.parametrize(
    ("name", "device", "supported", "warned"),
    [
        ("bfloat16", "cpu", False, True),
        ("bfloat16", "cpu", True, False),
        ("auto", "cpu", False, False),
        ("bfloat16", "cuda", False, False),
    ],
)
def test_a_cpu_without_bfloat16_warns(
    name: str, device: str, supported: bool, warned: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(platform, "device_type", lambda: device)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    assert ("--trainer.dtype" in platform.slow_format(name)) is warned  # type: ignore[arg-type]


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platform, "device_type", lambda: "cuda")
    assert [local_device(rank).index for rank in range(3)] == [0, 1, 2]


def test_on_a_cpu_every_rank_has_the_same_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platform, "device_type", lambda: "cpu")
    assert local_device(3) == torch.device("cpu")


def test_a_port_that_is_taken_is_an_error_with_its_flag():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot meet at 127.0.0.1:{port}") as caught:
            init_distributed(0, 2, "127.0.0.1", port)
    assert "--trainer.port" in caught.value.hint


def test_a_world_of_one_needs_no_network(process_group: None):
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    value = torch.tensor([3.0])
    dist.all_reduce(value)
    assert float(value) == 3
