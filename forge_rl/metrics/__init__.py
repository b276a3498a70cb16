"""Metrics: values that merge, the clock of the phases, and where both go."""

from forge_rl.metrics.boards import TensorBoardSink, WandbSink
from forge_rl.metrics.console import Display, Mode
from forge_rl.metrics.logger import RunLog
from forge_rl.metrics.sinks import EpisodeSink, EventSink, JSONLSink, Level, RunInfo, Sink
from forge_rl.metrics.timer import PhaseClock
from forge_rl.metrics.values import Max, Mean, Min, Sum, Value, merge, merge_all, reduce

__all__ = [
    "Display",
    "EpisodeSink",
    "EventSink",
    "JSONLSink",
    "Level",
    "Max",
    "Mean",
    "Min",
    "Mode",
    "PhaseClock",
    "RunInfo",
    "RunLog",
    "Sink",
    "Sum",
    "TensorBoardSink",
    "Value",
    "WandbSink",
    "merge",
    "merge_all",
    "reduce",
]
