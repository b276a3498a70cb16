"""Adaptive entropy control: hand-worked coefficients, its state, and settings."""

import math

import pytest

from forge_rl.algorithms.components import CrossEntropy
from forge_rl.algorithms.entropy import AdaptiveEntropy
from forge_rl.algorithms.policy_losses import Cispo
from forge_rl.errors import ConfigError


def test_the_coefficient_follows_the_entropy_and_is_off_above_the_target():
    entropy = AdaptiveEntropy(target=0.2, delta=0.25, largest=0.6)
    coefficients = []
    for measured in (0.1, 0.2, 0.1, 0.3, 0.1, 0.5, 0.5, 0.5, math.nan, 0.1):
        entropy.update(measured)
        coefficients.append(entropy.coefficient)
    # c: 0.25, 0.5, 0.6 (bound), 0.35, 0.6 (bound), 0.35, 0.1, 0 (bound), unchanged, 0.25
    assert coefficients == pytest.approx([0.25, 0.5, 0.6, 0, 0.6, 0, 0, 0, 0, 0.25])


def test_a_loss_gets_the_coefficient_and_its_needs():
    entropy = AdaptiveEntropy(delta=0.01)
    assert not entropy.loss(Cispo(ratio_max=4.0)).needs
    entropy.update(0.0)
    loss = entropy.loss(Cispo(ratio_max=4.0))
    assert loss == Cispo(ratio_max=4.0, entropy_coef=0.01, measures_uniform=True)
    assert list(loss.needs) == ["entropy_gradient"]
    entropy.update(9.0)
    assert entropy.loss(Cispo()).keeps_uniform, "what adapts it is the entropy of all tokens"
    coefficient = entropy.coefficient
    entropy.update({}.get("entropy"))
    assert entropy.coefficient == coefficient, "a step without trained tokens has no entropy"
    with pytest.raises(ConfigError, match="CrossEntropy has no entropy_coef"):
        entropy.loss(CrossEntropy())


@pytest.mark.parametrize("last", [0.1, 0.9])
def test_a_state_goes_on_where_it_was(last: float):
    first, second = AdaptiveEntropy(), AdaptiveEntropy()
    for measured in (0.1, 0.1, last):
        first.update(measured)
    second.load_state_dict(first.state_dict())
    assert (second.coefficient, second.state_dict()) == (first.coefficient, first.state_dict())
    with pytest.raises(ConfigError, match="malformed"):
        second.load_state_dict({"coefficient": 0.1})


@pytest.mark.parametrize("settings", [{"target": 0.0}, {"delta": math.nan}, {"initial": 2.0}, {"largest": math.inf}])
def test_settings_out_of_range_are_refused(settings: dict[str, float]):
    with pytest.raises(ConfigError, match="target is"):
        AdaptiveEntropy(**settings)
