"""The choice of precision, and detection of CPUs on which bfloat16 crashes."""

import os

import pytest
import torch

from regard.cli import main
from regard.errors import RegardError
from regard.models import FAMILIES, BertConfig, GPTConfig, Seq2SeqConfig, TransformerConfig, ViTConfig, make_model
from regard.models.parameters import count_parameters
from regard.training import Recipe, TrainConfig, machine, run_recipe
from regard.training.checkpoint import METRICS, Checkpoint
from regard.training.log import read_metrics
from regard.training.machine import check_memory, is_bfloat16_safe, make_autocast, resolve_precision
from tests.training.helpers import last_checkpoint, small_dataset, small_recipe

WIDE = TransformerConfig(width=256)


def recipe(model=WIDE, **options):
    return Recipe(model=model, train=TrainConfig(device="cpu", **options))


@pytest.fixture
def child(monkeypatch):
    """Fake child processes: the results to return, and the setting of oneDNN at each call."""
    results, settings = [], []
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)

    def works_in_child():
        settings.append(os.environ.get("ONEDNN_MAX_CPU_ISA"))
        return results.pop(0)

    monkeypatch.setattr(machine, "_bfloat16_works_in_child", works_in_child)
    monkeypatch.setattr(machine, "has_bfloat16_instructions", lambda: True)
    yield results, settings
    os.environ.pop("ONEDNN_MAX_CPU_ISA", None)


def test_wide_models_use_bfloat16_on_a_cpu_that_supports_it(child):
    child[0].append(True)
    assert resolve_precision(recipe()).train.precision == "bfloat16"


@pytest.mark.parametrize("model", [TransformerConfig(width=128), Seq2SeqConfig(width=512)])
def test_small_and_recurrent_models_use_float32(child, model):
    assert resolve_precision(recipe(model)).train.precision == "float32"
    assert child[1] == []  # no child process was started


def test_resumed_run_keeps_its_precision(child):
    """Even if a new run would choose another precision."""
    assert resolve_precision(recipe(), "float32").train.precision == "float32"
    assert child[1] == []
    child[0].append(True)
    assert resolve_precision(recipe(TransformerConfig(width=128)), "bfloat16").train.precision == "bfloat16"
    child[0][:] = [False, False]
    assert resolve_precision(recipe(), "bfloat16").train.precision == "float32"  # on a machine that does not support it


def test_precision_is_stored_in_the_checkpoint(tmp_path, child):
    run_recipe(small_recipe(train={"steps": 2}), tmp_path / "run", dataset=small_dataset(), quiet=True)
    assert Checkpoint.load(last_checkpoint(tmp_path / "run")).metadata["precision"] == "float32"


def test_cpu_without_bfloat16_instructions_uses_float32(child, monkeypatch):
    monkeypatch.setattr(machine, "has_bfloat16_instructions", lambda: False)
    assert resolve_precision(recipe()).train.precision == "float32"


def test_wrong_cpu_detection_limits_onednn(child):
    child[0][:] = [False, True]
    assert is_bfloat16_safe()
    assert child[1] == [None, "AVX512_CORE_BF16"]
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"  # for this process and its workers


def test_cpu_on_which_bfloat16_crashes_uses_float32(child):
    child[0][:] = [False, False] * 2
    assert resolve_precision(recipe()).train.precision == "float32"
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ
    with pytest.raises(RegardError, match=r"illegal instruction.*train\.precision to float32"):
        resolve_precision(recipe(precision="bfloat16"))


def test_onednn_setting_of_the_user_is_kept(child, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    child[0][:] = [False]
    assert not is_bfloat16_safe()
    assert child[1] == ["AVX2"]


def test_float32_needs_no_child_process(child):
    assert resolve_precision(recipe(precision="float32")).train.precision == "float32"
    assert child[1] == []


def test_crashing_or_hanging_child_is_detected(monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *_: os.abort())
    assert not machine._bfloat16_works_in_child()
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *_: machine.time.sleep(600))
    assert not machine._bfloat16_works_in_child(timeout=0.05)
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *_: None)
    assert machine._bfloat16_works_in_child()


def test_autocast_context_has_the_precision():
    cpu = torch.device("cpu")
    with make_autocast(small_recipe(train={"precision": "bfloat16"}).train, cpu)():
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    with make_autocast(small_recipe(train={"precision": "float32"}).train, cpu)():
        assert not torch.is_autocast_enabled("cpu")


def test_bfloat16_losses_are_close_to_float32(tmp_path):
    if not is_bfloat16_safe():
        pytest.skip("this CPU does not support bfloat16")
    losses = {}
    for name in ("float32", "bfloat16"):
        run_recipe(
            small_recipe(train={"precision": name, "steps": 6}), tmp_path / name, dataset=small_dataset(), quiet=True
        )
        losses[name] = [line["loss"] for line in read_metrics(tmp_path / name / METRICS) if line["kind"] == "train"]
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)


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
