"""The summary at a run's end, and numbers and sparklines as people read them."""

import math
from dataclasses import replace

import pytest
from rich.cells import cell_len

from forge_rl.errors import Fault
from forge_rl.metrics import Histogram
from forge_rl.metrics.display.curve import Curve
from forge_rl.metrics.display.format import duration, number, sparkline
from tests.test_display import STEP, Bench


def test_a_histogram_is_no_number_for_the_console() -> None:
    bench = Bench()
    bench.display.log(3, STEP | {"lag/hist": Histogram({0: 1})})
    assert bench.lines()[-1].startswith("step  3/20  reward 0.453")
    assert "hist" not in bench.lines()[-1]


def test_the_summary_has_faults_and_recoveries_in_order_of_time() -> None:
    bench = Bench(width=100)
    killed = Fault(
        service="generator", replica=1, cause="its process was ended by SIGKILL", phase="rollout", at_s=3725.0
    )
    bench.display.summary(
        faults=[
            replace(killed, recovered_s=12.34),
            replace(killed, service="environment", replica=None, at_s=5.0, cause="hung → stopped", phase=""),
            replace(killed, service="trainer", replica=0, at_s=4000.0, fatal=True),
        ]
    )
    assert [line.rstrip() for line in bench.lines()[1:]] == [
        "",
        "     at  fault of     phase    recovered  cause",
        "   5.0s  environment                  no  hung → stopped",
        "1:02:05  generator/1  rollout      12.3s  its process was ended by SIGKILL",
        "1:06:40  trainer/0    rollout      fatal  its process was ended by SIGKILL",
        "",
        "steps      0 of 20",
        "wall time  0.00s",
        "faults     3, 1 recovered",
    ]


def test_episodes_that_were_lost_stand_beside_the_faults() -> None:
    bench = Bench(width=100)
    failed_outcomes = {"outcomes/environment_error": 3.0, "outcomes/judge_error": 0.0, "outcomes/completed": 9.0}
    for step in (1, 2):
        bench.display.log(step, STEP | failed_outcomes)
    bench.display.log(2, STEP | {"outcomes/judge_error": 1.0})
    bench.display.summary()
    assert bench.lines()[-1] == "faults     0; episodes lost: 6 environment errors, 1 judge error"
    bench.display.rollback(1)
    bench.display.summary()
    assert bench.lines()[-1] == "faults     0; episodes lost: 6 environment errors, 1 judge error"


@pytest.mark.parametrize("width", [60, 80])
def test_a_long_cause_is_told_whole_in_a_narrow_summary(width: int) -> None:
    bench = Bench(width=width)
    cause = "died 5 times in a row; the last: ImportError: no module named something_with_a_long_name [red]x[/red]"
    bench.display.summary(faults=[Fault(service="reward", replica=12, cause=cause, phase="evaluate", at_s=1.0)])
    table = bench.lines()[2 : bench.lines().index("", 2)]
    assert max(cell_len(line) for line in table) <= width
    column = table[0].index("cause")
    assert "".join(line[column:].rstrip() for line in table[1:]).replace(" ", "") == cause.replace(" ", "")


def test_the_summary_tells_before_after_and_where_things_lie() -> None:
    bench = Bench(width=40)
    bench.display.log(0, {"held_out": 0.5})
    bench.display.event("generator/1 died", "fault")
    bench.display.log(20, {"held_out": 0.91})
    bench.seconds += 125.0
    place = "/runs/a/with/a/long/path/to/checkpoints/step-20"
    command = "tensorboard --logdir /runs/a/with/a/long/path/tensorboard"
    bench.display.summary({"checkpoint": place, "see curves": command})
    assert bench.lines()[-7:] == [
        "",
        "held-out    0.50 -> 0.91 (+0.41)",
        "steps       20 of 20",
        "wall time   2:05",
        "faults      1",
        f"checkpoint  {place}",
        f"see curves  {command}",
    ]


def test_a_curve_of_any_length_is_a_few_points_of_its_whole_length() -> None:
    curve = Curve()
    for step in range(1, 100_001):
        curve = curve.extended(step, math.nan if step % 10 == 0 else step / 1000)
    assert (curve.first, curve.low, curve.high) == (0.001, 0.001, 99.999)
    assert math.isnan(curve.last)
    assert 256 <= len(curve.means) <= 512
    assert sparkline(curve.means, 8) == "▁▂▃▄▅▆▇█"
    before = curve.cut(40_000)
    assert before.high == pytest.approx(40.0, abs=0.3)
    assert len(before.extended(40_001, 7.0).means) - len(before.means) in (0, 1)
    assert Curve().extended(3, 1.0).cut(2) == Curve()


def test_a_sparkline_goes_from_the_lowest_to_the_highest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([-1.0, 0.0, 1.0], 10) == "▁▅█"
    assert sparkline([0.3, 0.3], 10) == "▄▄"
    assert sparkline([], 10) == ""
    assert sparkline([1.0], 0) == ""


def test_a_sparkline_averages_what_does_not_fit() -> None:
    assert sparkline([0, 2, 4, 6, 7, 9], 3) == "▁▅█"  # means 1, 5, 8: the middle one is 4/7 of the way
    assert len(sparkline([float(i) for i in range(1000)], 37)) == 37


def test_a_sparkline_leaves_out_what_is_not_finite() -> None:
    assert sparkline([0.0, math.nan, 1.0], 3) == "▁·█"
    assert sparkline([0.0, math.nan, 1.0, math.inf], 2) == "▁█"
    assert sparkline([math.nan], 3) == "·"


def test_numbers_read_as_a_person_writes_them() -> None:
    assert [duration(s) for s in (0.04, 2.14, 59.96, 65, 3723)] == ["0.04s", "2.1s", "1:00", "1:05", "1:02:03"]
    assert [number(v) for v in (0.4531, 0.5, -0.0, -0.00002, 123456.0)] == ["0.453", "0.5", "0", "-2e-05", "1.23e+05"]
    assert number(math.nan) == "nan"
