"""Ours beside every peer that is installed, in one run, with the machine's ceilings: `regard bench`."""

from regard.bench.attention import Shape, bench_attention
from regard.bench.growth import bench_growth
from regard.bench.measuring import Ceilings, Row
from regard.bench.report import Report
from regard.bench.training import TrainingShape, bench_training

__all__ = [
    "Ceilings",
    "Report",
    "Row",
    "Shape",
    "TrainingShape",
    "bench_attention",
    "bench_growth",
    "bench_training",
]
