"""A Ray cluster of two local nodes: the output of one process, also if a worker and a node are killed on the way."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard.cli import main
from regard.data import Tokenizer
from regard.errors import RegardError
from regard.models import Bert
from regard.models.bert import BertConfig
from regard.pipelines import TextEncoder, files
from regard.pipelines.files import FileProgress
from tests.conftest import number_pairs

LINES = [source for source, _ in number_pairs(400, seed=12)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head node and a second node, with one CPU each."""
    ray = pytest.importorskip("ray")
    from ray._private import services
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Busy is not dead: processes that start or answer slowly are waited for.
    os.environ |= {"RAY_worker_register_timeout_seconds": "280", "RAY_health_check_timeout_ms": "280000"}
    node = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_log_monitor": False, "wait": False}
    get_node = services.get_node

    def wait_for_node(*arguments: Any) -> Any:  # Ray itself waits 30 seconds
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:  # the node is not registered yet
                time.sleep(0.1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "get_node", wait_for_node)
        nodes = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False, "no_monitor": True})
        nodes.second = nodes.add_node(**node)
        nodes.wait_for_nodes(timeout=280)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(files, "BLOCK_ITEMS", 16)


def worker_pids() -> list[int]:
    """The processes of Ray actors of Regard in this cluster: children of the children of this process."""
    found, parents = [], {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, status = (folder / "cmdline").read_bytes(), (folder / "stat").read_text()
        except OSError:
            continue
        parents[int(folder.name)] = int(status.rpartition(")")[2].split()[1])
        if name.startswith(b"ray::_Actor"):
            found.append(int(folder.name))
    return [pid for pid in found if parents.get(parents[pid]) == os.getpid()]


# The tests run in this order: the second one removes a node.


def test_embed_a_folder(cluster, tmp_path, capsys):
    torch.manual_seed(0)
    tokenizer = Tokenizer.train(LINES, "word", mask=True)
    config = BertConfig(width=16, heads=2, layers=1, feedforward=16, vocab=tokenizer.vocab_size, max_len=12)
    encoder = TextEncoder(Bert(config).eval(), tokenizer)
    encoder.save(tmp_path / "encoder")
    for i in range(3):
        (tmp_path / f"part-{i}.txt").write_text("".join(f"{line}\n" for line in LINES[40 * i : 40 * i + 40]))
    command = ["embed", tmp_path / "encoder", "--input", tmp_path / "part-*.txt", "--output", tmp_path / "vectors"]
    assert main([*map(str, command), "--cluster", "ray"]) == 0, capsys.readouterr().err
    vectors = np.concatenate([np.load(tmp_path / "vectors" / f"part-{i}.npy") for i in range(3)])
    np.testing.assert_allclose(vectors, encoder.embed(LINES[:120]), atol=1e-6)


def test_every_line_once_although_a_worker_and_a_node_die(cluster, learned, tmp_path):
    corpus = tmp_path / "corpus.en"
    corpus.write_text("".join(f"{line}\n" for line in [*LINES, " ".join(["one"] * 30)]))
    learned.translate_file(corpus, tmp_path / "local.fr", truncate=True)
    events = []

    def break_things(progress: FileProgress) -> None:
        if progress.items >= 32 and not events:
            os.kill(worker_pids()[0], signal.SIGKILL)
            events.append("worker")
        if progress.items >= 160 and len(events) == 1:
            cluster.remove_node(cluster.second)
            events.append("node")

    summary = learned.translate_file(corpus, tmp_path / "ray.fr", truncate=True, cluster="ray", progress=break_things)
    assert events == ["worker", "node"]
    assert summary.items == 401
    assert (tmp_path / "ray.fr").read_text() == (tmp_path / "local.fr").read_text()


def test_errors_of_workers_name_the_line(cluster, learned, tmp_path):
    corpus = tmp_path / "corpus.en"
    corpus.write_text("".join(f"{line}\n" for line in [*LINES[:20], " ".join(["one"] * 30)]))
    with pytest.raises(RegardError, match=r"corpus.en, line 21 has 30 tokens.*The 20 lines before it are kept"):
        learned.translate_file(corpus, tmp_path / "out.fr", cluster="ray")


def test_missing_package(learned, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "corpus.en").write_text("one\n")
    with pytest.raises(RegardError, match=r'ray is not installed. Install it with: \S+ -m pip install "ray\[serve\]>='):
        learned.translate_file(tmp_path / "corpus.en", tmp_path / "out.fr", cluster="ray")
