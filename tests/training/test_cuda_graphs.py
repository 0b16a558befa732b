"""When updates of several ranks are captured as CUDA graphs, with stand-ins for the functions of a GPU."""

import contextlib
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from regard.data.batching.pair_batches import IGNORE_INDEX, Batch
from regard.layers.packed import pack
from regard.training.cuda_graphs import WARM_UP, GraphedUpdate, ReplayTimer
from regard.training.losses import LossParts

RESULT = LossParts(*torch.ones(3))


class Graph:
    """Instead of kernels, `replay` notes the targets of the batch that it would run on."""

    def replay(self):
        self.replayed.append(self.batch.targets.tolist())


@pytest.fixture
def run(monkeypatch):
    """Makes a GraphedUpdate that notes its eager, captured and replayed updates; `decisions` are the agreements."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, query=lambda: True))
    notes = SimpleNamespace(eager=0, captured=0, replayed=[], errors=[], is_capturing=False)

    @contextlib.contextmanager
    def capture(graph, pool, capture_error_mode):
        notes.is_capturing, graph.replayed, notes.graph = True, notes.replayed, graph
        try:
            yield
        finally:
            notes.is_capturing = False

    def make(decisions=None, fails=lambda: False):
        def update(batches):
            if fails():
                raise RuntimeError("out of memory")
            if notes.is_capturing:
                notes.captured, notes.graph.batch = notes.captured + 1, batches[0]
                assert batches[0].sentences
            else:
                notes.eager += 1
            return RESULT

        def agree(error):
            notes.errors.append(error)
            return decisions.pop(0)

        return GraphedUpdate(update, None if decisions is None else agree), notes

    monkeypatch.setattr(torch.cuda, "graph", capture)
    return make


def batch(length=2, sentences=1):
    ids = pack([[5] * length])
    return Batch((ids,), torch.full((length,), 7), sentences, length)


@pytest.mark.parametrize("decisions", [None, [True, True]])
def test_a_shape_is_captured_after_its_warm_up(run, decisions):
    update, notes = run(decisions)
    for _ in range(WARM_UP + 2):
        assert update([batch()]) == RESULT
    assert (notes.eager, notes.captured, notes.replayed) == (WARM_UP, 1, [[7, 7]] * 2)


@pytest.mark.parametrize("decisions", [[False], [True, False]])
def test_nothing_is_captured_after_a_disagreement(run, decisions):
    """Graphs of other shapes are still replayed, as the other ranks do."""
    update, notes = run([True, True, *decisions])
    for length in (2, 3, 4):
        for _ in range(WARM_UP + 1):
            update([batch(length)])
    update([batch(2)])
    assert notes.eager == 3 * WARM_UP + 2
    assert notes.replayed == [[7, 7]] * 2


def test_an_error_in_the_capture_is_shared_with_other_ranks(run):
    update, notes = run([True, False], fails=lambda: notes.is_capturing)
    for _ in range(WARM_UP + 2):
        update([batch()])
    assert [str(error) for error in notes.errors] == ["None", "out of memory"]
    assert notes.eager == WARM_UP + 2


def test_a_repeated_update_counts_once(run):
    """A rank that repeats an update in parts captures the shape at the same update as the others."""
    failures = [True, False, False, False]
    update, notes = run([True, True], fails=lambda: failures.pop(0))
    with pytest.raises(RuntimeError):
        update([batch()])
    for _ in range(WARM_UP):
        update([batch()])
    assert (notes.eager, notes.captured) == (WARM_UP, 0)
    update([batch()])
    assert notes.captured == 1


def test_padding_for_a_rank_without_a_sequence_has_no_targets(run):
    update, notes = run([True, True])
    for sentences in [1] * WARM_UP + [0, 1]:
        update([batch(sentences=sentences)])
    assert notes.replayed == [[IGNORE_INDEX] * 2, [7, 7]]


def test_a_replay_that_does_not_end_is_reported():
    """NCCL has no time limit inside a CUDA graph."""
    ended, reported = SimpleNamespace(query=lambda: True), threading.Event()
    stuck = SimpleNamespace(query=lambda: False)
    timer = ReplayTimer(timedelta(seconds=0.2), reported.set, interval=0.01)
    timer.watch(ended)
    assert not reported.wait(0.4)
    timer.watch(ended)
    timer.watch(stuck)
    assert reported.wait(10)
