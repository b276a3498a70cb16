"""Data configs: from flags to a mixture."""

from __future__ import annotations

import pytest

from forge_rl.data.data_config import ONE_DIGIT_ADDITION, DataConfig
from forge_rl.errors import ConfigError, TaskError


def test_a_seed_repeats_questions_instruction_and_system_message():
    data = DataConfig(instruction=" Answer briefly.", system="You add.")
    mixtures = [data.build([ONE_DIGIT_ADDITION], seed=seed) for seed in (1, 1, 2)]
    first, second_draws, other = ([mixture.draw_from("basic_arithmetic") for _ in range(6)] for mixture in mixtures)
    assert first == second_draws != other
    system, user = first[0].messages
    assert system["content"] == "You add."
    assert user["content"].endswith(" Answer briefly.")


def test_weights_are_written_behind_the_tasks():
    mixture = DataConfig().build(["chain_sum:max_terms=3*3", "leg_counting"], seed=0)
    assert mixture.shares == {"chain_sum": 0.75, "leg_counting": 0.25}


@pytest.mark.parametrize(
    ("tasks", "error", "message"),
    [
        ([], ConfigError, "--tasks"),
        (["chain_summ"], TaskError, "chain_sum"),
        (["chain_sum", "chain_sum"], TaskError, "twice"),
    ],
)
def test_tasks_that_make_no_mixture_are_an_error(tasks: list[str], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        DataConfig().build(tasks, seed=0)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_that_holds_out_nothing_or_all_names_its_flag(share: float):
    with pytest.raises(ConfigError, match=r"--data\.held-out-share"):
        DataConfig(held_out_share=share)
