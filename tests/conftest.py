"""Small trained models that many tests share. They translate number words into French, in reverse order."""

import dataclasses
import os
import random
import signal
from collections.abc import Generator
from pathlib import Path

import jaxtyping
import pytest
import torch

from regard.data import Tokenizer
from regard.data.text.special_tokens import EOS
from regard.models import ModelConfig, Seq2SeqConfig, TransformerConfig, make_model
from regard.pipelines import Translator, load, save

ENGLISH = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
FRENCH = ["un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf", "dix"]

Pairs = list[tuple[str, str]]

# A process in the background of a shell ignores Ctrl-C, and so would the processes of tests that send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:
    # One test per core runs at a time: more threads and workers, also in subprocesses, would only compete.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    if hasattr(os, "sched_setaffinity"):
        cores, number = sorted(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        os.sched_setaffinity(0, {cores[number % len(cores)]})

# Scripts that need Triton and atheris.
collect_ignore = ["kernels/compiled_kernels.py", "fuzz/fuzz.py"]

# Packages in whose tests the shapes in signatures are checked; elsewhere that is too slow.
SHAPE_CHECKED = ("attention", "kernels", "layers", "models")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    package = item.path.relative_to(item.config.rootpath).parts[1]  # of tests/PACKAGE/… or regard/PACKAGE/…
    jaxtyping.config.update("jaxtyping_disable", package not in SHAPE_CHECKED)
    try:
        return (yield)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def number_pairs(count: int, seed: int) -> Pairs:
    """Pairs such as "one two" and "deux un"."""
    draw = random.Random(seed)
    rows = [draw.sample(range(10), draw.randint(2, 6)) for _ in range(count)]
    return [(" ".join(ENGLISH[i] for i in row), " ".join(FRENCH[i] for i in reversed(row))) for row in rows]


def number_links(pairs: Pairs) -> list[list[tuple[int, int]]]:
    """Gold alignments: the last word corresponds to the first."""
    sizes = [len(source.split()) for source, _ in pairs]
    return [[(size - 1 - i, i) for i in range(size)] for size in sizes]


def train_numbers(config: ModelConfig, steps: int = 120, seed: int = 0) -> Translator:
    torch.manual_seed(seed)
    pairs = number_pairs(32 * steps, seed=1)
    tokenizer = Tokenizer.train([side for pair in pairs for side in pair], "word")
    size = tokenizer.vocab_size
    config = dataclasses.replace(config, source_vocab=size, target_vocab=size, shared_vocab=True, max_len=16, dropout=0)
    translator = Translator(make_model(config), tokenizer, tokenizer, {"step": steps, "validation": {"bleu": 12.5}})
    optimizer = torch.optim.Adam(translator.model.parameters())
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / steps)
        chosen = pairs[32 * step :][:32]
        batch = [(translator.encode_source(source), translator.encode_target(target)) for source, target in chosen]
        targets = torch.tensor([token for _, target in batch for token in [*target, EOS]])
        logits = translator.model(*translator.teacher_forced(batch))
        loss = torch.nn.functional.cross_entropy(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    translator.model.eval()
    return translator


@pytest.fixture(scope="session")
def seq2seq_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recurrent model, trained to convergence."""
    folder = tmp_path_factory.mktemp("models") / "seq2seq"
    save(folder, train_numbers(Seq2SeqConfig(width=32)))
    return folder


@pytest.fixture(scope="session")
def transformer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Transformer after a short training."""
    folder = tmp_path_factory.mktemp("models") / "transformer"
    config = TransformerConfig(width=32, heads=2, feedforward=64, encoder_layers=1, decoder_layers=2)
    save(folder, train_numbers(config, steps=60))
    return folder


@pytest.fixture(scope="session")
def learned_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Transformer with learned positions, limited to 16 tokens."""
    folder = tmp_path_factory.mktemp("models") / "learned"
    config = TransformerConfig(width=16, heads=2, feedforward=32, encoder_layers=1, decoder_layers=1)
    save(folder, train_numbers(dataclasses.replace(config, positions="learned"), steps=1))
    return folder


@pytest.fixture(scope="session")
def blind_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recurrent model without attention."""
    folder = tmp_path_factory.mktemp("models") / "blind"
    save(folder, train_numbers(Seq2SeqConfig(width=16, attention="none"), steps=1))
    return folder


@pytest.fixture(scope="session")
def seq2seq(seq2seq_folder: Path) -> Translator:
    return load(seq2seq_folder, "cpu")


@pytest.fixture(scope="session")
def transformer(transformer_folder: Path) -> Translator:
    return load(transformer_folder, "cpu")


@pytest.fixture(scope="session")
def learned(learned_folder: Path) -> Translator:
    return load(learned_folder, "cpu")


@pytest.fixture(scope="session")
def blind(blind_folder: Path) -> Translator:
    return load(blind_folder, "cpu")
