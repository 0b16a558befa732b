"""Sizes that do not fit the machine or each other are refused before anything is written."""

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
def test_parameters_are_counted_without_being_made(config):
    parameters = list(make_model(config).parameters())
    assert count_parameters(config) == (len(parameters), sum(one.numel() for one in parameters))


def test_a_model_that_no_machine_holds():
    with pytest.raises(
        RegardError, match=r"A model of [\d,]{20,} parameters takes [\d,]{12,} GB to train .* has \d+ GB"
    ):
        check_memory(GPTConfig(width=10**9, vocab=9), torch.device("cpu"))


def test_a_tensor_beyond_64_bits():
    with pytest.raises(RegardError, match="too large to be built"):
        check_memory(GPTConfig(width=10**9, heads=10**6, head_width=10**6, vocab=9), torch.device("cpu"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model.width", "1000000000"], "GB to train"),
        (["--model.width", "102"], "it must be a multiple of model.heads"),
        (["--model.heads", "128"], "rotary positions need an even number"),
        (["--model.kv-heads", "3"], "it must divide model.heads"),
        (["--train.lr", "nan"], "train.lr must be above 0 (got nan)."),
        (["--train.steps", "0"], "train.steps must be at least 1 (got 0)."),
        (["--train.workers", "-1"], "train.workers must be between 0 and 256 (got -1)."),
    ],
    ids=str,
)
def test_nothing_is_written(tmp_path, capsys, options, says):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"word {i}\tmot {i}\n" for i in range(50)), encoding="utf-8")
    assert main(["train", "--data", str(pairs), "--out", str(tmp_path / "out"), *options]) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.tsv"]
