"""The test of counts by which engines' samples are judged: its false alarms, and what it notices."""

import numpy as np

from tests.multinomial import multinomial_p_value

LOGITS = np.linspace(0, 9, 27)
"""Of 600 counts, 16 of these 27 cells expect fewer than five."""


def p_values(temperature: float) -> list[float]:
    generator = np.random.default_rng(1)
    probs, sampled = (np.exp(LOGITS / divisor) for divisor in (1.0, temperature))
    tables = generator.multinomial(600, sampled / sampled.sum(), size=200)
    return [multinomial_p_value(counts, probs / probs.sum(), num_tables=999) for counts in tables]


def test_right_counts_are_refused_as_often_as_the_bound_says() -> None:
    values = np.array(p_values(1.0))
    for bound in (0.01, 0.1, 0.5):
        share = (values <= bound).mean()
        assert abs(share - bound) < 3 * np.sqrt(bound * (1 - bound) / 200)


def test_counts_of_another_temperature_are_noticed() -> None:
    for temperature in (0.7, 1.4):
        assert (np.array(p_values(temperature)) <= 0.001).mean() > 0.9
