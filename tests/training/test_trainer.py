"""The trainer: equal bits for equal seeds, also after interruptions; and its error messages."""

import contextlib
import errno
import gc
import json
import os
import shutil
import signal
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from regard.errors import RegardError
from regard.folder import load
from regard.training import kept_steps, train, trainer
from regard.training.report import read_metrics
from regard.training.tasks import translate
from regard.training.trainer import METRICS, STATE
from tests.training.helpers import LIVELY, same_bits, small, small_dataset, weights_of


def run(recipe, out, **options):
    return train(recipe, out, dataset=small_dataset(), quiet=True, **options)


@contextlib.contextmanager
def at_step(monkeypatch, step, act):
    """Calls `act` in the middle of the update after so many steps."""
    original, calls = trainer.set_rate, []

    def set_rate(*arguments):
        calls.append(None)
        if len(calls) == step + 1:
            act()
        original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "set_rate", set_rate)
        yield


class PowerCutError(Exception):
    pass


def cut_power():
    raise PowerCutError


def press_ctrl_c():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A run without dropout of merges, averages and the like. Tests read it, or copy it."""
    out = tmp_path_factory.mktemp("plain") / "out"
    run(small(), out)
    return out


@pytest.fixture(scope="module")
def lively(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("lively") / "out"
    run(small(**LIVELY), out)
    return out


def metric_steps(out: Path) -> list[tuple[int, str]]:
    return [(line["step"], line["kind"]) for line in read_metrics(out / METRICS)]


def test_the_same_seed_gives_the_same_bits(lively, tmp_path):
    run(small(**LIVELY), tmp_path / "again")
    assert same_bits(weights_of(tmp_path / "again"), weights_of(lively))
    for name in ("config.json", "tokenizer.json", "training.json"):
        assert (tmp_path / "again" / name).read_bytes() == (lively / name).read_bytes()


def test_models_of_some_steps_are_kept_and_change_nothing(lively, tmp_path, monkeypatch):
    """Cut off and gone on: what is kept are the averaged weights, and the run ends with the same bits."""
    kept = small(**LIVELY | {"train": LIVELY["train"] | {"keep_every": 6}})
    with at_step(monkeypatch, 5, cut_power), pytest.raises(PowerCutError):
        run(kept, tmp_path)
    assert [path.name for path in kept_steps(tmp_path).values()] == ["000000"]
    run(kept, tmp_path)
    assert same_bits(weights_of(tmp_path), weights_of(lively))
    steps = kept_steps(tmp_path)
    assert list(steps) == [0, 6, 12]
    assert json.loads((steps[6] / "training.json").read_text(encoding="utf-8"))["step"] == 6
    first, last, best = (load_file(folder / "model.safetensors") for folder in (steps[0], steps[12], tmp_path))
    assert load(tmp_path, "cpu").training["step"] == 12
    assert same_bits(last, best)
    assert not same_bits(first, best)
    assert load(steps[0], "cpu")("The cat sleeps.") is not None
    with pytest.raises(RegardError, match="no steps were kept here"):
        kept_steps(lively)


def test_another_seed_gives_others(plain, tmp_path):
    run(small(train={"seed": 2}), tmp_path / "other")
    assert not same_bits(weights_of(tmp_path / "other"), weights_of(plain))


def test_what_a_run_leaves_behind(plain):
    names = sorted(str(path.relative_to(plain)) for path in plain.rglob("*") if path.is_file())
    assert names == [
        "config.json",
        "loss.png",
        "metrics.jsonl",
        "model.safetensors",
        "state/last.safetensors",
        "state/lock",
        "tokenizer.json",
        "training.json",
    ]
    assert (plain / "loss.png").read_bytes().startswith(b"\x89PNG")
    training = json.loads((plain / "training.json").read_text(encoding="utf-8"))
    assert training["recipe"]["train"]["seed"] == 1
    assert training["data"]["training"]["pairs"] == 200
    assert len(training["data"]["validation"]["sha256"]) == 64
    assert training["versions"]["torch"] == torch.__version__
    assert set(training["validation"]) == {"nll", "perplexity", "bleu", "chrf", "exact_match"}


def test_metrics(plain):
    trained = [(step, "train") for step in range(2, 13, 2)]
    assert metric_steps(plain) == sorted([*trained, (6, "validation"), (12, "validation")])
    lines = read_metrics(plain / METRICS)
    assert lines[-1]["nll"] < lines[3]["nll"]  # it learns
    assert lines[0]["lr"] == pytest.approx(2e-3 * 2 / 3)


@pytest.mark.parametrize("step", [1, 5, 6, 11])
def test_a_run_that_was_cut_off_goes_on_exactly(lively, tmp_path, monkeypatch, step):
    recipe = small(**LIVELY)
    with at_step(monkeypatch, step, cut_power), pytest.raises(PowerCutError):
        run(recipe, tmp_path)
    run(recipe, tmp_path)
    assert same_bits(weights_of(tmp_path), weights_of(lively))
    assert metric_steps(tmp_path) == metric_steps(lively)


def test_cut_off_between_the_first_model_and_the_next_state(plain, tmp_path, monkeypatch):
    """A model is in the folder, written by this run, and no state of that step: the run goes on all the same."""
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "save", lambda *arguments: (loop_save(*arguments), cut_power()))
        loop_save = sys.modules["regard.folder"].save
        with pytest.raises(PowerCutError):
            run(small(train={"save_every": 100}), tmp_path)
    assert (tmp_path / "config.json").exists()
    run(small(), tmp_path)
    assert same_bits(weights_of(tmp_path), weights_of(plain))


def test_ctrl_c_saves_says_so_and_goes_on_exactly(lively, tmp_path, monkeypatch):
    recipe = small(**LIVELY)
    handler = signal.getsignal(signal.SIGINT)
    with (
        at_step(monkeypatch, 4, press_ctrl_c),
        pytest.raises(RegardError, match=r"Interrupted; everything up to step 5 is saved in .* resumes the run"),
    ):
        run(recipe, tmp_path)
    assert signal.getsignal(signal.SIGINT) is handler
    assert metric_steps(tmp_path) == [(2, "train"), (4, "train")]
    run(recipe, tmp_path)
    assert same_bits(weights_of(tmp_path), weights_of(lively))
    assert metric_steps(tmp_path) == metric_steps(lively)


def test_ctrl_c_in_the_last_step_is_too_late(plain, tmp_path, monkeypatch):
    with at_step(monkeypatch, 11, press_ctrl_c):
        run(small(), tmp_path)
    assert same_bits(weights_of(tmp_path), weights_of(plain))


def test_ctrl_c_twice_ends_at_once(plain, tmp_path, monkeypatch):
    with at_step(monkeypatch, 5, lambda: (press_ctrl_c(), press_ctrl_c())), pytest.raises(KeyboardInterrupt):
        run(small(), tmp_path)
    run(small(), tmp_path)  # from step 4, the last that was saved
    assert same_bits(weights_of(tmp_path), weights_of(plain))


def test_a_finished_run_is_not_run_again(plain, tmp_path, monkeypatch, capsys):
    shutil.copytree(plain, tmp_path / "out")
    before = {
        path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.suffix in (".json", STATE.suffix)
    }
    monkeypatch.setattr(trainer.Trainer, "run", lambda *_: pytest.fail("it trains again"))
    translator = train(small(), tmp_path / "out", dataset=small_dataset())
    assert translator("The cat sleeps.") is not None
    assert "holds the finished run: 12 steps" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before


def test_what_does_not_change_the_outcome_may_change(plain, tmp_path, monkeypatch):
    with at_step(monkeypatch, 5, cut_power), pytest.raises(PowerCutError):
        run(small(), tmp_path)
    run(small(train={"save_every": 5, "log_every": 3, "keep_every": 8}), tmp_path)
    assert list(kept_steps(tmp_path)) == [8]
    assert same_bits(weights_of(tmp_path), weights_of(plain))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"train": {"lr": 0.5}}, "holds a run with train.lr = 0.002, not 0.5."),
        ({"train": {"steps": 11}}, "holds a run of 12 steps, more than train.steps (11)."),
        ({"model": {"width": 32}}, "holds a run with model.width = 16, not 32."),
        ({"model": {"family": "seq2seq"}}, "holds a run with model.family = 'transformer', not 'seq2seq'."),
        ({"tokenizer": {"kind": "char"}}, "holds a run with tokenizer.kind = 'bpe', not 'char'."),
    ],
)
def test_a_run_of_another_recipe_is_refused(plain, change, says):
    before = weights_of(plain)
    with pytest.raises(RegardError) as caught:
        run(small(**change), plain)
    assert str(caught.value).startswith(f"{plain} {says}")
    assert same_bits(weights_of(plain), before)


def test_a_run_on_other_data_is_refused(plain):
    dataset = small_dataset()
    changed = type(dataset)([*dataset.training[1:], ("new", "nouveau")], dataset.validation)
    with pytest.raises(RegardError, match="holds a run with other data"):
        train(small(), plain, dataset=changed, quiet=True)


def test_a_model_without_its_run_is_not_overwritten(plain, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(plain, out)
    shutil.rmtree(out / "state")
    with pytest.raises(RegardError, match="holds a model already"):
        run(small(), out)


def test_other_files_are_refused_before_data_are_read(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text("", encoding="utf-8")
    monkeypatch.setattr(trainer, "read_dataset", lambda *_, **__: pytest.fail("data are read"))
    with pytest.raises(RegardError, match=r"holds metrics\.jsonl, which this run would overwrite"):
        train(small(), tmp_path, quiet=True)


def test_out_that_is_a_file(tmp_path):
    (tmp_path / "out").write_text("something", encoding="utf-8")
    with pytest.raises(RegardError, match="out: cannot be made"):
        run(small(), tmp_path / "out")


def test_a_truncated_state_is_an_error_that_loses_nothing(plain, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(plain, out)
    (out / STATE).write_bytes((plain / STATE).read_bytes()[:1000])
    with pytest.raises(RegardError, match=r"last\.safetensors: damaged.* train again with another --out\."):
        run(small(), out)
    assert (out / STATE).stat().st_size == 1000
    assert (out / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    run(small(), tmp_path / "another")  # the advice
    assert same_bits(weights_of(tmp_path / "another"), weights_of(plain))


def test_a_full_disk_ends_the_run_and_loses_nothing(plain, tmp_path, monkeypatch):
    def fsync(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("last.safetensors.part") and (tmp_path / STATE).exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(
            RegardError, match=r"last\.safetensors: no space left on the device .* run the same command"
        ):
            run(small(), tmp_path)
    run(small(), tmp_path)
    assert same_bits(weights_of(tmp_path), weights_of(plain))


def test_early_stopping(tmp_path):
    recipe = small(train={"lr": 1e-30, "validate_every": 2, "patience": 2, "steps": 100})
    run(recipe, tmp_path)
    validated = [step for step, kind in metric_steps(tmp_path) if kind == "validation"]
    assert validated == [2, 4, 6]  # the first is the best, and two more are no better
    run(recipe, tmp_path)  # and that was the end of it
    assert metric_steps(tmp_path)[-1] == (6, "validation")


def test_the_best_model_is_kept_not_the_last(tmp_path, monkeypatch):
    nlls = iter([3.0, 2.0, 4.0])
    monkeypatch.setattr(trainer, "evaluate_loss", lambda *_: {"nll": next(nlls)})
    translator = run(small(train={"validate_every": 4}), tmp_path)
    assert translator.training["step"] == 8
    last = load_file(tmp_path / STATE)
    best = load_file(tmp_path / "model.safetensors")
    assert not torch.equal(best["encoder_norm.weight"], last["model.encoder_norm.weight"])


def test_the_average_is_what_is_saved(lively):
    state, saved = load_file(lively / STATE), load_file(lively / "model.safetensors")
    assert json.loads((lively / "training.json").read_text(encoding="utf-8"))["step"] == 12
    for name, tensor in saved.items():
        assert torch.equal(tensor, state[f"average.{name}"])
    assert any(not torch.equal(tensor, state[f"model.{name}"]) for name, tensor in saved.items())


def test_going_on_from_a_trained_model(plain, tmp_path):
    dataset = small_dataset()
    other = type(dataset)(dataset.training[:50], dataset.validation)
    # sizes and tokeniser are the first model's, whatever the recipe says
    recipe = small(
        model={"width": 32}, tokenizer={"kind": "char"}, train={"lr": 1e-30, "steps": 2, "validate_every": 2}
    )
    translator = train(recipe, tmp_path / "out", start_from=plain, dataset=other, quiet=True)
    assert translator.model.config.width == 16
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (plain / "tokenizer.json").read_bytes()
    assert same_bits(load_file(tmp_path / "out" / "model.safetensors"), load_file(plain / "model.safetensors"))
    assert translator.training["start_from"] == str(plain)
    assert translator.training["recipe"]["model"]["width"] == 16
    with pytest.raises(RegardError, match="holds a run with start_from = "):
        train(recipe, tmp_path / "out", start_from=tmp_path / "out", dataset=other, quiet=True)


def test_going_on_learns(plain, tmp_path):
    recipe = small(train={"steps": 4, "validate_every": 2, "lr": 1e-2})
    run(recipe, tmp_path / "out", start_from=plain)
    first = read_metrics(tmp_path / "out" / METRICS)[0]
    assert first["nll"] < read_metrics(plain / METRICS)[0]["nll"]
    assert not same_bits(load_file(tmp_path / "out" / "model.safetensors"), load_file(plain / "model.safetensors"))


def test_going_on_from_nothing(tmp_path):
    with pytest.raises(RegardError, match="model folder not found"):
        run(small(), tmp_path / "out", start_from=tmp_path / "none")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"train": {"optimizer": "sgd", "lr": 0.1, "schedule": "inverse_root"}},
        {"train": {"optimizer": "adamw", "weight_decay": 0.1, "schedule": "linear"}},
        {"train": {"r_drop": 2.0, "label_smoothing": 0.0, "clip": 0.0}},
        {"train": {"validate_by": "bleu", "schedule": "constant", "warmup": 0}},
        {"model": {"family": "seq2seq", "width": 16, "max_len": 40}},
        {"tokenizer": {"kind": "word", "shared": False}},
    ],
    ids=lambda change: " ".join(str(value) for section in change.values() for value in section.values()),
)
def test_other_settings_learn_too(tmp_path, change):
    changed = {"train": {"steps": 6, "validate_every": 3, "log_every": 1, **change.get("train", {})}}
    run(small(**(change | changed)), tmp_path)
    validated = [line["nll"] for line in read_metrics(tmp_path / METRICS) if line["kind"] == "validation"]
    assert validated[1] < validated[0]


def test_validation_by_bleu_keeps_the_best_by_bleu(tmp_path, monkeypatch):
    bleus = iter([5.0, 3.0])
    scores = translate.text_scores([""], ["a"])
    monkeypatch.setattr(translate, "text_scores", lambda *_: type(scores)(**(vars(scores) | {"bleu": next(bleus)})))
    assert run(small(train={"validate_by": "bleu"}), tmp_path).training["step"] == 6


def test_a_loss_that_is_not_a_number_saves_nothing_and_says_so(tmp_path):
    with pytest.raises(RegardError, match=r"The loss is not a number at step \d+; .* smaller train\.lr"):
        run(small(train={"lr": 1e38, "warmup": 0, "schedule": "constant", "optimizer": "sgd", "clip": 0.0}), tmp_path)
    assert all(tensor.isfinite().all() for tensor in load_file(tmp_path / STATE).values())


def test_training_outside_the_main_thread(plain, tmp_path):
    """Where no signal can be caught, as in a notebook's or a server's thread, it trains all the same."""
    thread = threading.Thread(target=run, args=(small(), tmp_path))
    thread.start()
    thread.join()
    assert same_bits(weights_of(tmp_path), weights_of(plain))


def test_a_run_frees_its_model(tmp_path, monkeypatch):
    """Without waiting for the garbage collector: on a GPU the trained model is loaded after it."""
    runs = []
    original = trainer.Trainer.run

    def record(self):
        runs.append((weakref.ref(self), weakref.ref(self.model)))
        original(self)

    monkeypatch.setattr(trainer.Trainer, "run", record)
    gc.disable()
    try:
        run(small(train={"steps": 1, "ema": 0.9}), tmp_path)
        assert [reference() for reference in runs[0]] == [None, None]
    finally:
        gc.enable()


def test_threads_are_as_before(plain, tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    run(small(train={"steps": 1}), tmp_path)
    assert torch.get_num_threads() == before + 1
    torch.set_num_threads(before)


def test_the_model_of_a_run_translates(plain):
    assert isinstance(load(plain, "cpu")("The cat sleeps."), str)


def test_too_long_a_limit_for_the_batch(tmp_path):
    with pytest.raises(RegardError, match="A sentence may have 300 tokens, but a batch only 256"):
        run(small(model={"max_len": 300}), tmp_path)
