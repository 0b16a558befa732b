"""Checks of model sizes and memory before anything is written."""

import pytest
import torch

from regard.cli import main
from regard.errors import RegardError
from regard.models import FAMILIES, BertConfig, GPTConfig, ViTConfig, make_model
from regard.models.parameters import count_parameters
from regard.training.runtime.memory import check_memory

LABELS = ("a", "b")
CONFIGS = [
    *(family.config(width=16) for name, family in FAMILIES.items() if name not in ("vit", "seq2seq")),
    FAMILIES["seq2seq"].config(width=16, layers=4),
    BertConfig(width=16, layers=6, groups=3, vocab=9),
    ViTConfig(width=16, heads=2, layers=3, labels=LABELS),
    ViTConfig(width=16, heads=2, layers=1, head="segment", segmenter="queries", segmenter_layers=4, labels=LABELS),
    ViTConfig(width=16, heads=2, layers=2, head="pixels", decoder_layers=5),
]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_parameters_are_counted_without_allocating_them(config):
    parameters = list(make_model(config).parameters())
    assert count_parameters(config) == (len(parameters), sum(p.numel() for p in parameters))


def test_model_larger_than_memory_is_an_error():
    with pytest.raises(
        RegardError, match=r"A model of [\d,]{20,} parameters needs [\d,]{12,} GB to train .* has \d+ GB"
    ):
        check_memory(GPTConfig(width=10**9, vocab=9), torch.device("cpu"))


def test_tensor_size_beyond_64_bits_is_an_error():
    with pytest.raises(RegardError, match="too large to be built"):
        check_memory(GPTConfig(width=10**9, heads=10**6, head_width=10**6, vocab=9), torch.device("cpu"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.width", "1000000000"], "GB to train"),
        (["--model.width", "102"], "it must be a multiple of model.heads"),
        (["--model.heads", "128"], "rotary positions need an even number"),
        (["--model.kv-heads", "3"], "it must divide model.heads"),
        (["--train.lr", "nan"], "train.lr must be above 0 and at most 100 (got nan)."),
        (["--train.steps", "0"], "train.steps must be at least 1 (got 0)."),
        (["--train.workers", "-1"], "train.workers must be between 0 and 256 (got -1)."),
    ],
    ids=str,
)
def test_invalid_sizes_are_errors_before_anything_is_written(tmp_path, capsys, options, message):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"word {i}\tmot {i}\n" for i in range(50)), encoding="utf-8")
    assert main(["train", "--data", str(pairs), "--out", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.tsv"]
