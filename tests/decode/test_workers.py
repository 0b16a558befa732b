"""Worker processes decode as this process does, whatever happens to them and to the process that uses them."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from regard.decode import Ensemble, Request, decode_all, engine, workers
from regard.errors import RegardError
from tests.decode.models import (
    CONFIGS,
    assert_equal_search,
    decode_both,
    gpt,
    make_sources,
    seq2seq,
    special_options,
    transformer,
)
from tests.decode.test_shortlist import SHORTLIST, with_shortlist

SOURCES = make_sources(40)


def wait_until_ready(count):
    """The workers of this process, when they have started."""
    with workers.acquire_workers(count) as running:
        while not all(worker.is_ready for worker in running):
            for worker in running:
                worker.connection.poll(1)
                worker.receive(lambda *_: None)
        return list(running)


@pytest.fixture
def two_workers(monkeypatch):
    """Calls divide their sentences among this process and two workers, which are ready."""
    monkeypatch.setattr(engine, "MIN_SENTENCES", 2)
    monkeypatch.setattr(engine, "WORKER_SENTENCES", 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield wait_until_ready(2)
    torch.set_num_threads(threads)


@pytest.fixture
def parts(monkeypatch):
    """The number of sentences that were handed to a worker, for each job."""
    counts, start = [], workers.Worker.start

    def spy(self, model, job, indices, budget):
        counts.append(len(indices))
        start(self, model, job, indices, budget)

    monkeypatch.setattr(workers.Worker, "start", spy)
    return counts


@pytest.fixture(scope="module", autouse=True)
def _end_of_the_workers():
    yield
    workers._pool.close()


@pytest.mark.parametrize("make", [transformer, gpt, seq2seq, lambda: Ensemble([transformer(1), seq2seq(2)]).eval()])
def test_workers_give_the_same_results(two_workers, parts, make):
    model = make()
    for config in (CONFIGS["beam"], CONFIGS["greedy"], CONFIGS["samples"]):
        assert_equal_search(*decode_both(model, SOURCES, config))
    assert sum(parts) > len(SOURCES)
    assert torch.get_num_threads() == 3
    with torch.no_grad():
        next(model.parameters()).mul_(-1)
    assert_equal_search(*decode_both(model, SOURCES, CONFIGS["beam"]))
    assert wait_until_ready(2) == two_workers


def test_shortlists_and_prefixes(two_workers, parts):
    prefixes = [source[1:-1][: i % 3] for i, source in enumerate(reversed(SOURCES))]
    for name in ("greedy", "beam"):
        options = {"shortlist": SHORTLIST, "prefixes": prefixes}
        assert_equal_search(*decode_both(transformer(), SOURCES, with_shortlist(name), **options))
    assert parts


def test_weights_are_sent_once(two_workers, monkeypatch):
    """Also if precisions alternate, and for ensembles, whose converted form is a new object in every call."""
    made = []
    monkeypatch.setattr(workers.SharedModel, "load", lambda *_: made.append(1))
    count = workers.SharedModel.count
    models = [(transformer(), "int8"), (Ensemble([transformer(1), transformer(2)]).eval(), "auto")]
    for model, precision in models:
        for other in (precision, "auto", precision, "auto"):
            config = CONFIGS["greedy"].__class__("greedy", max_len=3, precision=other)
            decode_all(model, Request(SOURCES, config, **special_options(model)))
    assert workers.SharedModel.count == count + 3


def test_changed_data_reaches_the_workers(two_workers, parts):
    model = transformer()
    decode_all(model, Request(SOURCES, CONFIGS["greedy"]))
    model.output.weight.data.mul_(-1)
    assert_equal_search(*decode_both(model, SOURCES, CONFIGS["greedy"]))
    assert parts


def test_killed_workers_are_replaced(two_workers):
    """An idle one between two calls, and one that decodes: no call fails."""
    model = transformer()
    expected = decode_all(model, Request(SOURCES, CONFIGS["greedy"]))
    for worker in two_workers:
        worker.process.kill()
        worker.process.wait()
    assert decode_all(model, Request(SOURCES, CONFIGS["greedy"])) == expected
    first, _ = wait_until_ready(2)
    killed = []

    def kill(done, total):
        if not killed:
            killed.append(first.process.kill())

    results = decode_all(model, Request(SOURCES, CONFIGS["beam"]), progress=kill)
    assert killed
    assert results == decode_all(model, Request(SOURCES, CONFIGS["beam"]))


def test_silent_worker_is_replaced(two_workers, monkeypatch):
    monkeypatch.setattr(workers, "MAX_SILENCE", 0.2)
    monkeypatch.setattr(workers, "HEARTBEAT", 0.1)
    model = transformer()
    expected = decode_all(model, Request(SOURCES, CONFIGS["greedy"]))
    stopped = wait_until_ready(2)[0].process
    os.kill(stopped.pid, signal.SIGSTOP)
    assert decode_all(model, Request(SOURCES, CONFIGS["greedy"])) == expected
    assert stopped.wait() == -signal.SIGKILL


def test_errors_of_a_worker_are_raised_here(two_workers):
    model = transformer()
    with torch.no_grad():
        model.output.weight[5] = torch.nan
    with pytest.raises(RegardError, match="NaN"):
        decode_all(model, Request(SOURCES, CONFIGS["greedy"]))


def test_a_model_that_workers_cannot_load_is_decoded_here(two_workers, parts, monkeypatch):
    monkeypatch.setattr(workers, "_CODE", workers._CODE.replace("{path}", "[p for p in {path} if p]"))
    model = transformer()
    model.note = type("Local", (), {"__module__": "__main__", "__qualname__": "Local"})  # is found in no worker
    monkeypatch.setattr(sys.modules["__main__"], "Local", model.note, raising=False)
    expected = [decode_all(model, Request([source], CONFIGS["greedy"]))[0] for source in SOURCES]
    for _ in range(2):
        assert decode_all(model, Request(SOURCES, CONFIGS["greedy"])) == expected
    assert len(parts) == 2
    model.note = lambda: None  # cannot be pickled
    assert decode_all(model, Request(SOURCES, CONFIGS["greedy"])) == expected


def test_second_thread_decodes_without_workers(two_workers, parts):
    model = transformer()
    expected = decode_all(model, Request(SOURCES, CONFIGS["greedy"]))
    count = len(parts)
    with workers._pool.lock:  # another thread uses the workers
        assert decode_all(model, Request(SOURCES, CONFIGS["greedy"])) == expected
    assert len(parts) == count


# Translations before the processes start, in each of them, and at the same time in the parent.
FORKED = """
import multiprocessing, os
import torch
from regard.decode import DecodeConfig, Request, decode_all, engine, workers
from tests.decode.models import make_sources, transformer
from tests.decode.test_workers import wait_until_ready

torch.set_num_threads(2)
engine.WORKER_SENTENCES = 0
model, config = transformer(), DecodeConfig("greedy", max_len=9)
def decode(seed):
    return [n_best[0].ids for n_best in decode_all(model, Request(make_sources(32, seed), config))]
def decode_all_seeds():
    return [decode(seed) for seed in range(4)]
wait_until_ready(1)
expected = decode_all_seeds()
# Daemonic processes of a pool, which may have no children of multiprocessing.
with multiprocessing.get_context("fork").Pool(2) as pool:
    pending = pool.map_async(decode, range(4))
    assert decode_all_seeds() == expected
    assert pending.get() == expected
ours = workers._pool.workers[:]
# A plain child that decodes, exits and runs its exit handlers.
child = os.fork()
if child == 0:
    assert decode_all_seeds() == expected
    raise SystemExit(0)
assert decode_all_seeds() == expected
assert os.waitpid(child, 0)[1] == 0
assert decode_all_seeds() == expected
assert workers._pool.workers == ours
print(workers._pool.workers[0].process.pid)
"""


def test_forked_processes():
    result = subprocess.run([sys.executable, "-c", FORKED], check=True, stdout=subprocess.PIPE, text=True)
    assert_ends(int(result.stdout))


def test_workers_do_not_share_signals(two_workers):
    """A worker that ends by a signal writes nothing to the wake-up descriptor of this process, which asyncio reads."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in (ours, theirs):
            end.setblocking(False)
        handler = signal.signal(signal.SIGTERM, lambda *_: None)
        descriptor = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            workers._pool.close()  # the next ones start with this descriptor
            for worker in wait_until_ready(2):
                worker.process.terminate()
                worker.process.wait()
            with pytest.raises(BlockingIOError):
                ours.recv(1)
        finally:
            signal.set_wakeup_fd(descriptor)
            signal.signal(signal.SIGTERM, handler)


def test_workers_end_with_their_process():
    """Also if it is killed."""
    code = """
import os, signal
from tests.decode.test_workers import wait_until_ready
print(wait_until_ready(1)[0].process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    result = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert_ends(int(result.stdout))


def assert_ends(pid):
    """Wait for the end of a process, which is not a child of this one. The time limit of the tests bounds it."""
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == "Z":  # it has ended
                return
        time.sleep(0.05)


def test_script_without_main_guard(tmp_path):
    """Workers do not run the main program again."""
    script = tmp_path / "script.py"
    script.write_text(FORKED.split("# Daemonic")[0] + "print('once')\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run([sys.executable, script], check=True, stdout=subprocess.PIPE, text=True, env=environment)
    assert result.stdout == "once\n"
