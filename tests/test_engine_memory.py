"""Memory of CPU tensors, given back while the tensors live."""

import os

import pytest
import torch

pytestmark = pytest.mark.processes  # importing vLLM takes as long as starting some

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def test_freed_pages_come_back_as_zeros_until_they_are_written() -> None:
    from forge_rl.engines.vllm.cpu import release

    kept_tensor = torch.ones(1 << 20)
    tensors = [torch.ones(64 << 20, dtype=torch.uint8) for _ in range(2)]
    full = resident_bytes()
    release([tensors[0], tensors[0][5:], tensors[1].view(1024, -1)])
    assert full - resident_bytes() > 120 << 20
    assert all(tensor[PAGE:-PAGE].eq(0).all() for tensor in tensors)
    for tensor in tensors:
        tensor.fill_(3)
        assert tensor.eq(3).all()
    assert kept_tensor.eq(1).all()


def test_what_shares_a_page_with_others_is_left() -> None:
    from forge_rl.engines.vllm.cpu import release

    tensor = torch.ones(PAGE // 2, dtype=torch.uint8)
    release([tensor])
    assert tensor.eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lazy_zeros_take_no_memory_until_they_are_written_nor_after_a_release(dtype: torch.dtype) -> None:
    from forge_rl.engines.vllm.cpu import lazy_zeros, release

    torch.full((64 << 20,), torch.nan)  # memory that another tensor would get
    before = resident_bytes()
    values = lazy_zeros((64, 1 << 20), dtype)
    assert (values.shape, values.dtype, values.is_contiguous()) == ((64, 1 << 20), dtype, True)
    assert resident_bytes() - before < 16 << 20
    assert values.eq(0).all()
    values.fill_(torch.nan)
    assert resident_bytes() - before > 100 << 20
    release([values])
    assert resident_bytes() - before < 16 << 20
    assert values.eq(0).all()
