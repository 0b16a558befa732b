"""Ours beside every peer that is installed, in one run, with the machine's ceilings: `regard bench`."""

from regard.bench.attention import Shape, bench_attention
from regard.bench.decoding import DecodingShape, bench_decoding
from regard.bench.growth import bench_growth
from regard.bench.measuring import Ceilings, Row
from regard.bench.recording import RecordingShape, bench_recording
from regard.bench.report import Report
from regard.bench.scores import ScoreReport, ScoreRow, bench_scores
from regard.bench.training import TrainingShape, bench_training

__all__ = [
    "Ceilings",
    "DecodingShape",
    "RecordingShape",
    "Report",
    "Row",
    "ScoreReport",
    "ScoreRow",
    "Shape",
    "TrainingShape",
    "bench_attention",
    "bench_decoding",
    "bench_growth",
    "bench_recording",
    "bench_scores",
    "bench_training",
]
