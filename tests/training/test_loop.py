"""The training loop: reproducibility, resuming after interruptions, output files and error messages."""

import contextlib
import gc
import json
import shutil
import signal
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from regard.errors import RegardError
from regard.evaluation.text_metrics import margin_key
from regard.pipelines import Translator, load
from regard.training import checkpoint, list_step_folders, loop, run_recipe
from regard.training.checkpoint import METRICS
from regard.training.log import read_metrics
from tests.training.helpers import STOCHASTIC, bit_equal, last_checkpoint, saved_tensors, small_dataset, small_recipe


def run(recipe, out, **options):
    return run_recipe(recipe, out, dataset=small_dataset(), quiet=True, **options)


@contextlib.contextmanager
def at_step(monkeypatch, step, act):
    """Call `act` in the middle of the update after `step` updates."""
    original, calls = loop.set_learning_rate, []

    def set_learning_rate(*arguments):
        calls.append(None)
        if len(calls) == step + 1:
            act()
        original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "set_learning_rate", set_learning_rate)
        yield


class CrashError(Exception):
    pass


def crash():
    raise CrashError


def press_ctrl_c():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A finished run with the small recipe. Tests read or copy it, but do not change it."""
    out = tmp_path_factory.mktemp("plain") / "out"
    run(small_recipe(), out)
    return out


@pytest.fixture(scope="module")
def stochastic(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("stochastic") / "out"
    run(small_recipe(**STOCHASTIC), out)
    return out


def metric_steps(out: Path) -> list[tuple[int, str]]:
    return [(line["step"], line["kind"]) for line in read_metrics(out / METRICS)]


def test_runs_in_several_threads_wait_for_each_other(plain, tmp_path, capsys):
    """Random numbers, threads and process groups belong to the process."""
    with ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(run, small_recipe(), tmp_path / name) for name in ("a", "b")]
        assert [type(future.result()) for future in runs] == [Translator] * 2
    for name in ("a", "b"):
        assert bit_equal(saved_tensors(tmp_path / name), saved_tensors(plain))
    assert "regard: waiting for the end of another training in this process." in capsys.readouterr().err


def test_settings_of_the_caller_neither_change_the_run_nor_are_changed(plain, tmp_path):
    def settings():
        return torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(), torch.is_grad_enabled()

    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        with torch.inference_mode(), torch.no_grad(), torch.autocast("cpu"):
            before, random_state = settings(), torch.get_rng_state()
            run(small_recipe(), tmp_path)
            assert settings() == before
            assert torch.is_inference_mode_enabled()
            assert torch.equal(torch.get_rng_state(), random_state)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert bit_equal(saved_tensors(tmp_path), saved_tensors(plain))


def test_step_folders_are_saved_without_changing_the_run(stochastic, tmp_path, monkeypatch):
    """Also across a resume: step folders hold the EMA weights, and the run ends with identical weights."""
    recipe = small_recipe(**STOCHASTIC | {"train": STOCHASTIC["train"] | {"keep_every": 6}})
    with at_step(monkeypatch, 5, crash), pytest.raises(CrashError):
        run(recipe, tmp_path)
    assert [path.name for path in list_step_folders(tmp_path).values()] == ["000000"]
    run(recipe, tmp_path)
    assert bit_equal(saved_tensors(tmp_path), saved_tensors(stochastic))
    steps = list_step_folders(tmp_path)
    assert list(steps) == [0, 6, 12]
    assert json.loads((steps[6] / "training.json").read_text(encoding="utf-8"))["step"] == 6
    first, last, best = (load_file(folder / "model.safetensors") for folder in (steps[0], steps[12], tmp_path))
    assert load(tmp_path, "cpu").training["step"] == 12
    assert bit_equal(last, best)
    assert not bit_equal(first, best)
    assert load(steps[0], "cpu")("The cat sleeps.") is not None
    with pytest.raises(RegardError, match="no models of single steps were saved"):
        list_step_folders(stochastic)


def test_another_seed_gives_other_weights(plain, tmp_path):
    run(small_recipe(train={"seed": 2}), tmp_path / "other")
    assert not bit_equal(saved_tensors(tmp_path / "other"), saved_tensors(plain))


def test_output_files_of_a_run(plain):
    names = sorted(str(path.relative_to(plain)) for path in plain.rglob("*") if path.is_file())
    assert names == [
        "config.json",
        "loss.png",
        "metrics.jsonl",
        "model.safetensors",
        "state/lock",
        "state/step-00000008/checksums.json",
        "state/step-00000008/state.safetensors",
        "state/step-00000012/checksums.json",
        "state/step-00000012/state.safetensors",
        "tokenizer.json",
        "training.json",
    ]
    assert (plain / "loss.png").read_bytes().startswith(b"\x89PNG")
    training = json.loads((plain / "training.json").read_text(encoding="utf-8"))
    assert training["recipe"]["train"]["seed"] == 1
    assert training["data"]["training"]["pairs"] == 200
    assert len(training["data"]["validation"]["sha256"]) == 64
    assert training["versions"]["torch"] == torch.__version__
    metrics = {"bleu", "chrf", "exact_match"}
    assert set(training["validation"]) == {"nll", "perplexity", *metrics, *map(margin_key, metrics)}


def test_metrics_are_logged_at_the_expected_steps(plain):
    train_lines = [(step, "train") for step in range(2, 13, 2)]
    assert metric_steps(plain) == sorted([*train_lines, (6, "validation"), (12, "validation")])
    lines = read_metrics(plain / METRICS)
    assert lines[-1]["nll"] < lines[3]["nll"]
    assert lines[0]["lr"] == pytest.approx(2e-3 * 2 / 3)


@pytest.mark.parametrize("step", [1, 5, 6, 11])
def test_resumed_run_has_the_same_weights(stochastic, tmp_path, monkeypatch, step):
    recipe = small_recipe(**STOCHASTIC)
    with at_step(monkeypatch, step, crash), pytest.raises(CrashError):
        run(recipe, tmp_path)
    run(recipe, tmp_path)
    assert bit_equal(saved_tensors(tmp_path), saved_tensors(stochastic))
    assert metric_steps(tmp_path) == metric_steps(stochastic)
    for name in ("config.json", "tokenizer.json", "training.json"):
        assert (tmp_path / name).read_bytes() == (stochastic / name).read_bytes()


def test_crash_between_saving_the_model_and_the_checkpoint_is_resumed(plain, tmp_path, monkeypatch):
    """The folder holds a model of this run that is newer than the checkpoint."""
    with monkeypatch.context() as patch:
        write_model = checkpoint.write_model
        patch.setattr(checkpoint, "write_model", lambda *arguments: (write_model(*arguments), crash()))
        with pytest.raises(CrashError):
            run(small_recipe(train={"save_every": 100}), tmp_path)
    assert (tmp_path / "config.json").exists()
    run(small_recipe(), tmp_path)
    assert bit_equal(saved_tensors(tmp_path), saved_tensors(plain))


def test_ctrl_c_saves_and_the_run_resumes_exactly(stochastic, tmp_path, monkeypatch):
    recipe = small_recipe(**STOCHASTIC)
    handler = signal.getsignal(signal.SIGINT)
    with (
        at_step(monkeypatch, 4, press_ctrl_c),
        pytest.raises(KeyboardInterrupt, match=r"everything up to step 5 is saved in .* to resume") as caught,
    ):
        run(recipe, tmp_path)
    assert not isinstance(caught.value, Exception)  # in a loop over runs, `except Exception` does not catch it
    assert signal.getsignal(signal.SIGINT) is handler
    assert metric_steps(tmp_path) == [(2, "train"), (4, "train")]
    run(recipe, tmp_path)
    assert bit_equal(saved_tensors(tmp_path), saved_tensors(stochastic))
    assert metric_steps(tmp_path) == metric_steps(stochastic)


def test_ctrl_c_in_the_last_step_finishes_the_run(plain, tmp_path, monkeypatch):
    with at_step(monkeypatch, 11, press_ctrl_c):
        run(small_recipe(), tmp_path)
    assert bit_equal(saved_tensors(tmp_path), saved_tensors(plain))


def test_second_ctrl_c_ends_the_run_immediately(plain, tmp_path, monkeypatch):
    with at_step(monkeypatch, 5, lambda: (press_ctrl_c(), press_ctrl_c())), pytest.raises(KeyboardInterrupt):
        run(small_recipe(), tmp_path)
    run(small_recipe(), tmp_path)  # resumes from step 4, the last checkpoint
    assert bit_equal(saved_tensors(tmp_path), saved_tensors(plain))


def test_finished_run_is_not_repeated(plain, tmp_path, monkeypatch, capsys):
    shutil.copytree(plain, tmp_path / "out")
    before = {
        path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.suffix in (".json", ".safetensors")
    }
    monkeypatch.setattr(loop.Trainer, "run", lambda *_: pytest.fail("trained again"))
    translator = run_recipe(small_recipe(), tmp_path / "out", dataset=small_dataset())
    assert translator("The cat sleeps.") is not None
    assert "the run is already finished (12 steps)" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before


def test_logging_settings_may_change_on_resume(plain, tmp_path, monkeypatch):
    with at_step(monkeypatch, 5, crash), pytest.raises(CrashError):
        run(small_recipe(), tmp_path)
    run(small_recipe(train={"save_every": 5, "log_every": 3, "keep_every": 8}), tmp_path)
    assert list(list_step_folders(tmp_path)) == [8]
    assert bit_equal(saved_tensors(tmp_path), saved_tensors(plain))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": {"lr": 0.5}}, "holds a run with train.lr = 0.002, not 0.5."),
        ({"train": {"steps": 11}}, "holds a run of 12 steps, which exceeds train.steps (11)."),
        ({"model": {"width": 32}}, "holds a run with model.width = 16, not 32."),
        ({"model": {"family": "seq2seq"}}, "holds a run with model.family = 'transformer', not 'seq2seq'."),
        ({"tokenizer": {"kind": "char"}}, "holds a run with tokenizer.kind = 'bpe', not 'char'."),
    ],
)
def test_resuming_with_another_recipe_is_an_error(plain, change, message):
    before = saved_tensors(plain)
    with pytest.raises(RegardError) as caught:
        run(small_recipe(**change), plain)
    assert str(caught.value).startswith(f"{plain} {message}")
    assert bit_equal(saved_tensors(plain), before)


def test_resuming_with_other_data_is_an_error(plain):
    dataset = small_dataset()
    other = type(dataset)([*dataset.training[1:], ("new", "nouveau")], dataset.validation)
    with pytest.raises(RegardError, match="holds a run with different data"):
        run_recipe(small_recipe(), plain, dataset=other, quiet=True)


def test_model_folder_without_run_state_is_not_overwritten(plain, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(plain, out)
    shutil.rmtree(out / "state")
    with pytest.raises(RegardError, match="already contains a model"):
        run(small_recipe(), out)


def test_existing_output_files_are_an_error_before_data_are_read(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text("", encoding="utf-8")
    monkeypatch.setattr("regard.training.run.read_dataset", lambda *_, **__: pytest.fail("read the data"))
    with pytest.raises(RegardError, match=r"holds files that this run would overwrite: metrics\.jsonl\."):
        run_recipe(small_recipe(), tmp_path, quiet=True)


def test_out_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "out").write_text("something", encoding="utf-8")
    with pytest.raises(RegardError, match="out: a file of that name exists"):
        run(small_recipe(), tmp_path / "out")


def test_damaged_checkpoints_are_an_error_and_nothing_is_lost(plain, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(plain, out)
    files = sorted((out / "state").glob("*/state.safetensors"))
    for file in files:
        file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(RegardError, match=r"step-00000012: damaged.* train again with another --out\."):
        run(small_recipe(), out)
    assert [file.stat().st_size for file in files] == [1000, 1000]
    assert (out / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()


def test_early_stopping_ends_the_run(tmp_path):
    recipe = small_recipe(train={"lr": 1e-30, "validate_every": 2, "patience": 2, "steps": 100})
    run(recipe, tmp_path)
    validated = [step for step, kind in metric_steps(tmp_path) if kind == "validation"]
    assert validated == [2, 4, 6]  # the first is the best; two more without improvement
    run(recipe, tmp_path)  # the run is finished
    assert metric_steps(tmp_path)[-1] == (6, "validation")


def test_best_model_is_saved_not_the_last(tmp_path, monkeypatch):
    nlls = iter([3.0, 2.0, 4.0])
    monkeypatch.setattr(loop, "evaluate_loss", lambda *_: {"nll": next(nlls)})
    translator = run(small_recipe(train={"validate_every": 4}), tmp_path)
    assert translator.training["step"] == 8
    last = load_file(last_checkpoint(tmp_path))
    best = load_file(tmp_path / "model.safetensors")
    assert not torch.equal(best["encoder_norm.weight"], last["model.encoder_norm.weight"])


def test_ema_weights_are_saved(stochastic):
    state, saved = load_file(last_checkpoint(stochastic)), load_file(stochastic / "model.safetensors")
    assert json.loads((stochastic / "training.json").read_text(encoding="utf-8"))["step"] == 12
    for name, tensor in saved.items():
        assert torch.equal(tensor, state[f"average.{name}"])
    assert any(not torch.equal(tensor, state[f"model.{name}"]) for name, tensor in saved.items())


def test_fine_tuning_keeps_sizes_tokenizer_and_weights(plain, tmp_path):
    dataset = small_dataset()
    other = type(dataset)(dataset.training[:50], dataset.validation)
    # sizes and tokenizer come from the first model, not from the recipe
    recipe = small_recipe(
        model={"width": 32}, tokenizer={"kind": "char"}, train={"lr": 1e-30, "steps": 2, "validate_every": 2}
    )
    translator = run_recipe(recipe, tmp_path / "out", start_from=plain, dataset=other, quiet=True)
    assert translator.model.config.width == 16
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (plain / "tokenizer.json").read_bytes()
    assert bit_equal(load_file(tmp_path / "out" / "model.safetensors"), load_file(plain / "model.safetensors"))
    assert translator.training["start_from"] == str(plain)
    assert translator.training["recipe"]["model"]["width"] == 16
    with pytest.raises(RegardError, match="the input and the output are the same folder"):
        run_recipe(recipe, tmp_path / "out", start_from=tmp_path / "out", dataset=other, quiet=True)
    shutil.copytree(plain, tmp_path / "copy")
    with pytest.raises(RegardError, match="holds a run with start_from = "):
        run_recipe(recipe, tmp_path / "out", start_from=tmp_path / "copy", dataset=other, quiet=True)


def test_fine_tuning_starts_from_a_lower_loss(plain, tmp_path):
    recipe = small_recipe(train={"steps": 4, "validate_every": 2, "lr": 1e-2})
    run(recipe, tmp_path / "out", start_from=plain)
    first = read_metrics(tmp_path / "out" / METRICS)[0]
    assert first["nll"] < read_metrics(plain / METRICS)[0]["nll"]
    assert not bit_equal(load_file(tmp_path / "out" / "model.safetensors"), load_file(plain / "model.safetensors"))


def test_fine_tuning_from_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(RegardError, match="model folder not found"):
        run(small_recipe(), tmp_path / "out", start_from=tmp_path / "none")
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
def test_loss_decreases_with_other_settings(tmp_path, change):
    short = {"train": {"steps": 6, "validate_every": 3, "log_every": 1, **change.get("train", {})}}
    run(small_recipe(**(change | short)), tmp_path)
    validated = [line["nll"] for line in read_metrics(tmp_path / METRICS) if line["kind"] == "validation"]
    assert validated[1] < validated[0]


def test_non_finite_loss_is_an_error_and_nothing_is_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(loop.Schedule, "rate", lambda *_: 1e38)
    with pytest.raises(
        RegardError, match=r"Step \d+: the loss or its gradient is not finite, again .* smaller train\.lr"
    ):
        run(
            small_recipe(train={"optimizer": "sgd", "clip": 0.0}),
            tmp_path,
        )
    assert all(tensor.isfinite().all() for tensor in load_file(last_checkpoint(tmp_path)).values())


def test_run_frees_its_model(tmp_path, monkeypatch):
    """By reference counting alone, since on a GPU the saved model is loaded right after the run."""
    runs = []
    original = loop.Trainer.run

    def record(self):
        runs.append((weakref.ref(self), weakref.ref(self.model)))
        original(self)

    monkeypatch.setattr(loop.Trainer, "run", record)
    gc.disable()
    try:
        run(small_recipe(train={"steps": 1, "ema": 0.9}), tmp_path)
        assert [reference() for reference in runs[0]] == [None, None]
    finally:
        gc.enable()


def test_number_of_threads_is_restored(plain, tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    run(small_recipe(train={"steps": 1}), tmp_path)
    assert torch.get_num_threads() == before + 1
    torch.set_num_threads(before)


def test_max_len_larger_than_a_batch_is_an_error(tmp_path):
    with pytest.raises(RegardError, match="The maximum length is 300 tokens, but a batch has only 256"):
        run(small_recipe(model={"max_len": 300}), tmp_path)
