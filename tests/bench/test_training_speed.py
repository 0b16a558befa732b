"""Training beside its peers: every entrant in a process of its own, on a shape of no weight."""

import sys

import pytest
import torch

from regard.bench import TrainingShape, bench_training
from regard.bench import training_speed as bench
from regard.bench.training_speed import PEERS, Order

TINY = TrainingShape(width=16, heads=2, layers=1, feedforward=32, vocabulary=50, length=8, tokens=64)


def test_ours_in_a_process_of_its_own(monkeypatch):
    monkeypatch.setattr(bench, "_orders", lambda *_: [Order("regard", "Regard")])
    (row,) = bench_training("cpu", shape=TINY, steps=1).rows
    assert row.ours
    assert row.rate == pytest.approx(2 * 64 / row.seconds)
    assert row.share > 0


@pytest.mark.parametrize("name", ["marian", "nn.Transformer"])
def test_a_peer_takes_a_step(name):
    assert bench._peer(Order(name, name), TINY, torch.device("cpu"), steps=1) > 0


def test_weights_are_counted(monkeypatch):
    """What is multiplied in a step of nn.Transformer, biases, norms and embeddings being no products."""
    model, _ = PEERS["nn.Transformer"](TINY)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "positions" not in name)
    assert TINY.flops == 6 * 64 * matrices


def test_who_is_asked(monkeypatch):
    monkeypatch.setattr(bench, "installed", lambda peer: peer == "transformers")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    names = [order.says for order in bench._orders(torch.device("cpu"), "bfloat16", True)]
    assert names == [
        "Regard, as by default (bfloat16)",
        *(f"transformers' Marian, 2 {way}" for way in ("threads", "processes", "processes, bfloat16")),
        *(f"nn.Transformer, 2 {way}" for way in ("threads", "processes", "processes, bfloat16")),
    ]
    on_gpu = bench._orders(torch.device("cuda"), "bfloat16", True)
    assert [order.compiled for order in on_gpu] == [False, False, True, False, True]


def test_a_failure_is_a_row(monkeypatch):
    monkeypatch.setattr(bench, "_orders", lambda *_: [Order("nobody", "nobody")])
    monkeypatch.setattr(sys, "executable", "/bin/false")
    (row,) = bench_training("cpu", shape=TINY, steps=1).rows
    assert row.note == "it ended without a word"
