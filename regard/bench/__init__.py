"""`regard bench`: Regard against the installed peer libraries, relative to the limits of the machine."""

from regard.bench.attention_speed import AttentionShape, bench_attention
from regard.bench.bench_report import BenchReport
from regard.bench.decoding_speed import DecodingShape, bench_decoding
from regard.bench.length_scaling import bench_growth
from regard.bench.measurement import Ceilings, Measurement
from regard.bench.recording_cost import RecordingShape, bench_recording
from regard.bench.training_speed import TrainingShape, bench_training

__all__ = [
    "AttentionShape",
    "BenchReport",
    "Ceilings",
    "DecodingShape",
    "Measurement",
    "RecordingShape",
    "TrainingShape",
    "bench_attention",
    "bench_decoding",
    "bench_growth",
    "bench_recording",
    "bench_training",
]
