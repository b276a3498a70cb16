"""The reason why vLLM does not start, as its errors and its processes word it."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError, model_validator

from forge_rl.engines.vllm.causes import start_cause

CORE = "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': 1}"
LOG = """\
(EngineCore pid=7) ERROR 11-23 20:01:02 [core.py:946] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-23 20:01:02 [core.py:946]   File "kv_cache_utils.py", line 693, in check_enough
(EngineCore pid=7) ERROR 11-23 20:01:02 [core.py:946] ValueError: 2.0 GiB of KV cache is needed, 1.0 GiB is available.
(EngineCore pid=7) Process EngineCore:
RuntimeError: Engine core initialization failed. See root cause above.
"""


class Model(BaseModel):
    length: int

    @model_validator(mode="after")
    def check(self) -> "Model":
        raise ValueError(f"User-specified max_model_len ({self.length}) is greater than the derived max_model_len")


def validation_error() -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        Model(length=99999)
    return caught.value


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "log", "cause"),
    [
        (validation_error(), "", "User-specified max_model_len (99999) is greater than the derived max_model_len"),
        (RuntimeError(CORE), LOG, "ValueError: 2.0 GiB of KV cache is needed, 1.0 GiB is available."),
        (caused(RuntimeError(CORE), ValueError("no such kernel\n")), LOG, "no such kernel"),
        (
            ValueError("first\nNo available memory for the cache blocks.\n\n"),
            "",
            "No available memory for the cache blocks.",
        ),
        (RuntimeError(CORE), "", "RuntimeError"),
        (RuntimeError(), "nothing", "RuntimeError"),
    ],
)
def test_the_line_that_says_why_is_found(error: BaseException, log: str, cause: str) -> None:
    assert start_cause(error, log) == cause


def test_a_log_is_read_from_its_end(tmp_path: Path) -> None:
    program = (
        f"import sys; from forge_rl.engines.vllm.causes import own_log; sys.stderr.write({LOG!r}); sys.stderr.flush()"
    )
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(
            [sys.executable, "-c", f"{program}; print(own_log())"], stderr=log, stdout=subprocess.PIPE, text=True
        )
    assert done.stdout.strip() == LOG.strip()
