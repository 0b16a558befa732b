"""In which width matrix products run, and that nobody dies of it."""

import os

import pytest
import torch

from regard.errors import RegardError
from regard.models import Seq2SeqConfig, TransformerConfig
from regard.training import Recipe, TrainConfig, precision, train
from regard.training.checkpoint import Checkpoint
from regard.training.precision import is_bfloat16_safe, make_autocast, settle_precision
from regard.training.report import read_metrics
from regard.training.trainer import METRICS, STATE
from tests.training.helpers import small, small_dataset

WIDE = TransformerConfig(width=256)


def recipe(model=WIDE, **given):
    return Recipe(model=model, train=TrainConfig(device="cpu", **given))


@pytest.fixture
def survivals(monkeypatch):
    """Whether the copies of the process survive, one after another; what oneDNN was told each time."""
    answers, told = [], []
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)

    def copy_survives():
        told.append(os.environ.get("ONEDNN_MAX_CPU_ISA"))
        return answers.pop(0)

    monkeypatch.setattr(precision, "_bfloat16_works_in_child", copy_survives)
    monkeypatch.setattr(precision, "has_bfloat16_instructions", lambda: True)
    yield answers, told
    os.environ.pop("ONEDNN_MAX_CPU_ISA", None)


def test_wide_models_on_a_cpu_that_multiplies_bfloat16(survivals):
    survivals[0].append(True)
    assert settle_precision(recipe()).train.precision == "bfloat16"


@pytest.mark.parametrize("model", [TransformerConfig(width=128), Seq2SeqConfig(width=512)])
def test_narrow_and_recurrent_models_stay_as_they_are(survivals, model):
    assert settle_precision(recipe(model)).train.precision == "float32"
    assert survivals[1] == []  # nothing had to be tried


def test_a_run_goes_on_in_the_precision_that_it_began_in(survivals):
    """Also where another process would begin otherwise, such as one in which oneDNN did something before."""
    assert settle_precision(recipe(), "float32").train.precision == "float32"
    assert survivals[1] == []
    survivals[0].append(True)
    assert settle_precision(recipe(TransformerConfig(width=128)), "bfloat16").train.precision == "bfloat16"
    survivals[0][:] = [False, False]
    assert settle_precision(recipe(), "bfloat16").train.precision == "float32"  # moved to a machine that cannot


def test_what_a_run_began_in_is_kept(tmp_path, survivals):
    train(small(train={"steps": 2}), tmp_path / "run", dataset=small_dataset(), quiet=True)
    assert Checkpoint.load(tmp_path / "run" / STATE).facts["precision"] == "float32"


def test_a_cpu_without_instructions_for_it(survivals, monkeypatch):
    monkeypatch.setattr(precision, "has_bfloat16_instructions", lambda: False)
    assert settle_precision(recipe()).train.precision == "float32"


def test_a_cpu_that_is_taken_for_a_greater_one(survivals):
    survivals[0][:] = [False, True]
    assert is_bfloat16_safe()
    assert survivals[1] == [None, "AVX512_CORE_BF16"]
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"  # for this process and its workers


def test_a_cpu_that_dies_of_it(survivals):
    survivals[0][:] = [False, False] * 2
    assert settle_precision(recipe()).train.precision == "float32"
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ
    with pytest.raises(RegardError, match=r"illegal instruction.*train\.precision float32"):
        settle_precision(recipe(precision="bfloat16"))


def test_what_the_user_told_onednn_is_left_alone(survivals, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    survivals[0][:] = [False]
    assert not is_bfloat16_safe()
    assert survivals[1] == ["AVX2"]


def test_float32_needs_no_trial(survivals):
    assert settle_precision(recipe(precision="float32")).train.precision == "float32"
    assert survivals[1] == []


def test_a_copy_that_dies_or_hangs_harms_nobody(monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *_: os.abort())
    assert not precision._bfloat16_works_in_child()
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *_: precision.time.sleep(60))
    assert not precision._bfloat16_works_in_child(patience=0.05)
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *_: None)
    assert precision._bfloat16_works_in_child()


def test_the_context():
    cpu = torch.device("cpu")
    with make_autocast(small(train={"precision": "bfloat16"}).train, cpu)():
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    with make_autocast(small(train={"precision": "float32"}).train, cpu)():
        assert not torch.is_autocast_enabled("cpu")


def test_it_learns_as_in_float32(tmp_path):
    if not is_bfloat16_safe():
        pytest.skip("this CPU cannot multiply bfloat16")
    losses = {}
    for width in ("float32", "bfloat16"):
        train(small(train={"precision": width, "steps": 6}), tmp_path / width, dataset=small_dataset(), quiet=True)
        losses[width] = [line["loss"] for line in read_metrics(tmp_path / width / METRICS) if line["kind"] == "train"]
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)
