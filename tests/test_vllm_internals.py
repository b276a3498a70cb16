"""vLLM's private names: one that is gone is named, with the version."""

from types import SimpleNamespace

import pytest

from forge_rl.errors import ForgeError

pytestmark = pytest.mark.processes  # importing vLLM takes as long as starting some


def test_a_private_name_that_is_gone_is_named() -> None:
    import vllm

    from forge_rl.engines.vllm.internals import check_names

    worker = SimpleNamespace(model_runner=SimpleNamespace(kv_caches=[]))
    check_names(worker, ("model_runner.kv_caches", "model_runner"))
    with pytest.raises(ForgeError, match=f"vLLM {vllm.__version__} lacks .*'kv_cache_pages'") as caught:
        check_names(worker, ("model_runner", "model_runner.kv_cache_pages"))
    assert "install vLLM 0.32.0" in caught.value.hint
