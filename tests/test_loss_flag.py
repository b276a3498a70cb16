"""Losses named by flags: methods, options, sources, and a user's own."""

from pathlib import Path
from typing import Any

import pytest

from forge_rl.algorithms.aggregation import Aggregation
from forge_rl.algorithms.components import LossBySource
from forge_rl.algorithms.correction import Correction
from forge_rl.algorithms.loss_flag import METHODS, build_loss
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.algorithms.policy_losses import Cispo, Gspo
from forge_rl.algorithms.user_loss import try_loss
from forge_rl.errors import ConfigError

OWN = """
import forge_rl as rl
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mine(rl.ClippedSurrogate):
    scale: float = 2.0


made = Mine(scale=3.0)
nothing = 7


def make(**options):
    return Mine(**options)
"""


@pytest.mark.parametrize("name", METHODS)
def test_each_method_is_accepted_by_the_trainer(name: str):
    try_loss(build_loss([name]))


def test_options_are_the_fields_of_a_loss():
    loss = build_loss(
        [
            "clipped:clip_high=0.3,kl_coef=0.01,correction=tis,correction.high=3,aggregation.kind=constant,aggregation.tokens=9"
        ]
    )
    tis = Correction(proximal="recompute", mode="truncate", high=3.0)
    constant = Aggregation(kind="constant", tokens=9)
    assert loss == ClippedSurrogate(clip_high=0.3, kl_coef=0.01, correction=tis, aggregation=constant)
    assert build_loss(["grpo:clip_low=0.1"]) == ClippedSurrogate(
        clip_low=0.1, clip_high=0.2, aggregation=Aggregation(kind="sequence_mean")
    )
    assert build_loss(loss) is loss


def test_options_of_a_field_start_from_the_methods_default():
    assert build_loss(["luspo:aggregation.tokens=9"]).aggregation == Aggregation(kind="constant", tokens=9)
    with pytest.raises(ConfigError, match="sequence_mean has a divisor of 9"):
        build_loss(["gspo:aggregation.tokens=9"])


def test_criteria_of_a_correction_are_chained_in_the_text():
    loss: Any = build_loss(["math=clipped:correction=geometric,correction.reject=seq_mean_k1:0.9_1.1+token_k3:0.1"])
    correction = loss.losses["math"].correction
    assert [criterion[:2] for criterion in correction.criteria] == [("seq_mean", "k1"), ("token", "k3")]
    assert correction.proximal == "recompute"


def test_each_source_may_have_its_own():
    loss = build_loss(["math=gspo", "code=cispo:ratio_max=4", "clipped"])
    assert loss == LossBySource({"math": Gspo(), "code": Cispo(ratio_max=4.0), "": ClippedSurrogate()})
    try_loss(loss, ["math", "code", "games"])
    with pytest.raises(ConfigError, match="no source is called math"):
        try_loss(loss, ["maths", "code"])
    with pytest.raises(ConfigError, match="the source games has no loss"):
        try_loss(build_loss(["math=gspo"]), ["math", "games"])


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "no loss is given"),
        (["cipso"], "did you mean cispo"),
        (["cispo:ratio=3"], "cispo has no option 'ratio'"),
        (["cispo:ratio_max=a"], "ratio_max is 'a'"),
        (["cispo:ratio_max=-1"], "--loss: ratio_max is -1.0\n  cispo:ratio_max=-1\n        ^^^^^^^^^^^^"),
        (["math=dapo:clip_low=0.1,clip_high=-1"], "  math=dapo:clip_low=0.1,clip_high=-1\n" + " " * 25 + "^"),
        (["dapo:clip_high=-1"], "set clip_high to 0 or more"),
        (["kl_cov:kl_coef=-1"], "--loss: kl_coef is -1"),
        (["clipped:correction.low=-1"], "low is -1.0\n  clipped:correction.low=-1\n          ^"),
        (["clipped:aggregation.size=1"], "no option 'aggregation.size'"),
        (["clipped:correction=tsi"], "did you mean tis"),
        (["clipped:correction.mode=mask"], "no effect while correction.proximal is behaviour"),
        (["clipped:correction.reject=seq_mean_k1"], "correction.reject has 'seq_mean_k1'"),
        (["clipped:aggregation=token_mean"], "aggregation is 'token_mean'"),
        (["clipped:clip_low.x=1"], "no option 'clip_low.x'"),
        (["clipped:aggregation.kind=constant"], "divisor of 0 tokens"),
        (["gspo", "cispo"], "all sources already has a loss"),
        (["a=gspo", "a=cispo"], "the source a already has a loss"),
    ],
)
def test_what_names_no_loss_says_why(texts: list[str], message: str):
    with pytest.raises(ConfigError) as caught:
        build_loss(texts)
    assert message in str(caught.value)


@pytest.mark.parametrize(("text", "scale"), [("Mine", 2), ("Mine:scale=5", 5), ("made", 3), ("make:scale=4", 4)])
def test_a_users_loss_is_a_class_a_loss_or_a_function(text: str, scale: float, tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    loss: Any = build_loss([f"{tmp_path}/own.py:{text}"])
    assert loss.scale == scale


@pytest.mark.parametrize(
    ("text", "message"),
    [("nothing", "from which nothing can be made"), ("made:scale=1", "takes no options"), ("make:a=1", "TypeError")],
)
def test_what_is_no_loss_of_a_user_says_why(text: str, message: str, tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(ConfigError, match=message):
        build_loss([f"{tmp_path}/own.py:{text}"])
