"""Ours beside every peer that is installed, in one run, with the machine's ceilings: `regard bench`."""

from regard.bench.attention import Shape, bench_attention
from regard.bench.growth import bench_growth
from regard.bench.measuring import Ceilings, Row
from regard.bench.report import Report

__all__ = ["Ceilings", "Report", "Row", "Shape", "bench_attention", "bench_growth"]
