"""Ours beside every peer that is installed, in one run, with the machine's ceilings: `regard bench`."""

from regard.bench.attention_speed import Shape, bench_attention
from regard.bench.bench_report import Report
from regard.bench.decoding_speed import DecodingShape, bench_decoding
from regard.bench.length_scaling import bench_growth
from regard.bench.measurement import Ceilings, Row
from regard.bench.recording_cost import RecordingShape, bench_recording
from regard.bench.score_comparison import ScoreReport, ScoreRow, bench_scores
from regard.bench.training_speed import TrainingShape, bench_training

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
