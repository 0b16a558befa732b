"""Benchmark of training on a tiny model."""

import sys

import pytest
import torch

from regard.bench import TrainingShape, bench_training
from regard.bench import training_speed as bench
from regard.bench.training_speed import PEERS, BenchRun

TINY = TrainingShape(width=16, heads=2, layers=1, feedforward=32, vocabulary=50, length=8, tokens=64)


def test_regard_runs_in_a_separate_process(monkeypatch):
    monkeypatch.setattr(bench, "_make_runs", lambda *_: [BenchRun("regard", "Regard")])
    (row,) = bench_training("cpu", shape=TINY, steps=1).rows
    assert row.is_regard
    assert row.rate == pytest.approx(2 * 64 / row.seconds)
    assert row.share > 0


@pytest.mark.parametrize("name", ["marian", "nn.Transformer"])
def test_peer_trains(name):
    assert bench._train_peer(BenchRun(name, name), TINY, torch.device("cpu"), steps=1) > 0


def test_flops_match_the_matrices_of_a_model(monkeypatch):
    """Matrices of nn.Transformer; biases, norms and position embeddings need no matrix products."""
    model, _ = PEERS["nn.Transformer"](TINY)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "positions" not in name)
    assert TINY.flops == 6 * 64 * matrices


def test_runs_of_installed_peers(monkeypatch):
    monkeypatch.setattr(bench, "is_installed", lambda peer: peer == "transformers")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    names = [run.label for run in bench._make_runs(torch.device("cpu"), "bfloat16", True)]
    assert names == [
        "Regard, defaults (bfloat16)",
        *(f"transformers' Marian, 2 {variant}" for variant in ("threads", "processes", "processes, bfloat16")),
        *(f"nn.Transformer, 2 {variant}" for variant in ("threads", "processes", "processes, bfloat16")),
    ]
    gpu_runs = bench._make_runs(torch.device("cuda"), "bfloat16", True)
    assert [run.compiled for run in gpu_runs] == [False, False, True, False, True]


def test_failure_is_a_measurement_with_a_note(monkeypatch):
    monkeypatch.setattr(bench, "_make_runs", lambda *_: [BenchRun("unknown", "unknown")])
    monkeypatch.setattr(sys, "executable", "/bin/false")
    (row,) = bench_training("cpu", shape=TINY, steps=1).rows
    assert row.note == "the process ended without a message"
