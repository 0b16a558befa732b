"""Requests of many threads share batches, and have the results that they have alone."""

import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace

import pytest

from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.serve import scheduler as scheduler_module
from regard.serve.errors import DeadlineExceeded, Overloaded, ShuttingDown
from regard.serve.scheduler import Scheduler
from tests.conftest import number_pairs
from tests.pipelines.test_text_generator import make_generator

CONFIGS = [
    DecodeConfig(beam=5),
    DecodeConfig(beam=3, n_best=2),
    DecodeConfig(method="greedy"),
    DecodeConfig(method="sample", n_best=2, seed=7),
    DecodeConfig(method="sample", n_best=2, seed=8, top_k=5),
    DecodeConfig(method="greedy", engine="plain"),
]


@pytest.fixture
def scheduler():
    scheduler = Scheduler(latency_target=60)
    yield scheduler
    assert scheduler.close()


def sources(count: int) -> list[str]:
    return [source for source, _ in number_pairs(count, seed=5)]


@pytest.mark.parametrize("name", ["transformer", "seq2seq"])
def test_results_under_load_equal_results_alone(name, request, scheduler):
    translator = request.getfixturevalue(name)
    lines = sources(16)
    alone = [[translator.translate(line, config) for line in lines] for config in CONFIGS]

    def run(prepared):
        return prepared.finish(scheduler.submit(prepared).result())[0]

    jobs = [(config, line) for line in range(len(lines)) for config in range(len(CONFIGS))]
    # Prepared before: a busy machine prepares requests more slowly than the scheduler runs them.
    requests = [translator.prepare([lines[line]], CONFIGS[config]) for config, line in jobs]
    with ThreadPoolExecutor(16) as pool:
        for (config, line), results in zip(jobs, pool.map(run, requests)):
            expected = alone[config][line]
            assert [result.text for result in results] == [result.text for result in expected]
            assert [result.score for result in results] == pytest.approx([r.score for r in expected], abs=1e-4)
    assert scheduler.counts.rows > 1.5 * scheduler.counts.steps  # requests shared batches
    assert scheduler.outstanding == 0


def test_tokens_are_streamed(scheduler):
    generator = make_generator(max_len=64)
    config = DecodeConfig(method="greedy", min_len=5, max_len=20)
    prepared = generator.prepare(["Un", "Une"], config)
    streamed: dict[int, list[int]] = {0: [], 1: []}
    results = scheduler.submit(prepared, on_token=lambda i, token: streamed[i].append(token)).result()
    assert [streamed[i] for i in range(2)] == [n_best[0].ids for n_best in results]


def test_calls_of_one_kind_are_batched(scheduler):
    blocker, batches = threading.Event(), []

    def double(values: list[int]) -> list[int]:
        batches.append(len(values))
        return [2 * value for value in values]

    scheduler.call(("wait",), lambda values: [blocker.wait() for _ in values], [0])
    futures = [scheduler.call(("double",), double, [i, i + 1]) for i in range(5)]
    blocker.set()
    assert [future.result() for future in futures] == [[2 * i, 2 * i + 2] for i in range(5)]
    assert batches == [10]


def test_a_wrong_input_fails_alone(scheduler):
    blocker = threading.Event()

    def check(values: list[int]) -> list[int]:
        if 3 in values:
            raise RegardError("3 is invalid.", "Pass another.")
        return values

    scheduler.call(("wait",), lambda values: [blocker.wait() for _ in values], [0])
    futures = [scheduler.call(("check",), check, [i]) for i in range(5)]
    blocker.set()
    for i, future in enumerate(futures):
        if i == 3:
            with pytest.raises(RegardError, match="3 is invalid"):
                future.result()
        else:
            assert future.result() == [i]


def test_unexpected_errors_end_their_request_only(scheduler, transformer):
    with pytest.raises(ZeroDivisionError):
        scheduler.call(("bad",), lambda values: [1 // 0], [0]).result()
    prepared = transformer.prepare(["one two"])
    assert scheduler.submit(prepared).result()


def test_overload_is_refused_and_recovers(transformer, monkeypatch):
    scheduler = Scheduler(latency_target=0.05)
    try:
        prepared = transformer.prepare(sources(8))
        scheduler.submit(prepared).result()  # measures the throughput
        accepted, refused = [], []
        for _ in range(200):
            try:
                accepted.append(scheduler.submit(prepared))
            except Overloaded as error:
                refused.append(error)
        assert accepted
        assert refused
        assert all(error.retry_after >= 1 for error in refused)
        for future in accepted:
            future.result()
        scheduler.submit(prepared).result()
        assert scheduler.counts.refused == len(refused)
    finally:
        scheduler.close()


def test_cancelled_requests_leave_the_batch(scheduler, transformer):
    long = DecodeConfig(beam=4, min_len=3000, max_len=3000, max_extra=3000)
    prepared = transformer.prepare(["one two three"], long)
    future = scheduler.submit(prepared)
    wait_until(lambda: scheduler.counts.steps > 2)
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result()
    wait_until(lambda: scheduler.outstanding == 0)
    steps = scheduler.counts.steps
    time.sleep(0.05)
    assert scheduler.counts.steps <= steps + 1  # nothing is left to do
    assert scheduler.counts.cancelled == 1


def test_deadlines(scheduler, transformer):
    long = DecodeConfig(beam=4, min_len=3000, max_len=3000, max_extra=3000)
    future = scheduler.submit(transformer.prepare(["one two three"], long), timeout=0.2)
    with pytest.raises(DeadlineExceeded, match=r"0\.2 s"):
        future.result()
    assert scheduler.counts.steps < 3000
    assert scheduler.outstanding == 0


def test_the_earliest_deadline_is_first(scheduler):
    blocker, order = threading.Event(), []
    scheduler.call(("wait",), lambda values: [blocker.wait() for _ in values], [0])
    futures = [
        scheduler.call((name,), lambda values, name=name: [order.append(name) for _ in values], [0], timeout=timeout)
        for name, timeout in (("late", 600.0), ("early", 300.0))
    ]
    blocker.set()
    for future in futures:
        future.result()
    assert order == ["early", "late"]


def test_closing_finishes_what_was_accepted(transformer):
    scheduler = Scheduler(latency_target=60)
    prepared = transformer.prepare(sources(40))
    futures = [scheduler.submit(prepared) for _ in range(5)]
    assert scheduler.close()
    expected = [[h.ids for h in n_best] for n_best in prepared.decode()]
    for future in futures:
        assert [[h.ids for h in n_best] for n_best in future.result(timeout=0)] == expected
    with pytest.raises(ShuttingDown):
        scheduler.submit(prepared)


def test_configurations_beyond_the_number_of_batches_wait(transformer, scheduler, monkeypatch):
    monkeypatch.setattr(scheduler_module, "MAX_BATCHES", 2)
    configs = [replace(DecodeConfig(), beam=beam, length_penalty=penalty) for beam in (1, 2, 3) for penalty in (0, 1)]
    prepared = [transformer.prepare(["one two three"], config) for config in configs]
    futures = [scheduler.submit(request) for request in prepared]
    for request, future in zip(prepared, futures):
        assert [h.ids for h in future.result()[0]] == [h.ids for h in request.decode()[0]]


def wait_until(condition) -> None:
    while not condition():
        time.sleep(0.005)
