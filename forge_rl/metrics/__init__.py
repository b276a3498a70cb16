"""Metrics: mergeable values, the phase clock, the trace, and sinks."""

from forge_rl.metrics.batch import batch_metrics, rewards_by_source
from forge_rl.metrics.boards import TensorBoardSink, WandbSink
from forge_rl.metrics.display.console import Display, Mode
from forge_rl.metrics.logger import RunLog
from forge_rl.metrics.phases import PhaseClock
from forge_rl.metrics.sinks import EpisodeSink, EventSink, JSONLSink, Level, Metric, RunInfo, Sink
from forge_rl.metrics.status import RolloutStatus
from forge_rl.metrics.trace import Trace
from forge_rl.metrics.values import (
    EffectiveShare,
    ExplainedVariance,
    Histogram,
    Max,
    Mean,
    Sum,
    Tail,
    Value,
    lag_histogram,
    merge_all,
    reduce,
)

__all__ = [
    "Display",
    "EffectiveShare",
    "EpisodeSink",
    "EventSink",
    "ExplainedVariance",
    "Histogram",
    "JSONLSink",
    "Level",
    "Max",
    "Mean",
    "Metric",
    "Mode",
    "PhaseClock",
    "RolloutStatus",
    "RunInfo",
    "RunLog",
    "Sink",
    "Sum",
    "Tail",
    "TensorBoardSink",
    "Trace",
    "Value",
    "WandbSink",
    "batch_metrics",
    "lag_histogram",
    "merge_all",
    "reduce",
    "rewards_by_source",
]
