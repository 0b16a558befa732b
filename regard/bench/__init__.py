"""`regard bench`: Regard against the installed peer libraries, relative to the limits of the machine."""

from regard.bench.attention import AttentionShape, bench_attention
from regard.bench.decoding import DecodingShape, bench_decoding
from regard.bench.growth import bench_growth
from regard.bench.measuring import Ceilings, Measurement
from regard.bench.recording import RecordingShape, bench_recording
from regard.bench.report import BenchReport
from regard.bench.scores import ScoreMeasurement, ScoreReport, bench_scores
from regard.bench.training import TrainingShape, bench_training

__all__ = [
    "AttentionShape",
    "BenchReport",
    "Ceilings",
    "DecodingShape",
    "Measurement",
    "RecordingShape",
    "ScoreMeasurement",
    "ScoreReport",
    "TrainingShape",
    "bench_attention",
    "bench_decoding",
    "bench_growth",
    "bench_recording",
    "bench_scores",
    "bench_training",
]
