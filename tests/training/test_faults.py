"""Faults during a run: skipped updates, repeated saves, rollback, and error messages."""

import contextlib
import errno
import itertools
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from regard.data.batching.pairs import PairBatches
from regard.data.batching.sequences import Sequences
from regard.errors import Interrupted, Preempted, RegardError
from regard.pipelines import load
from regard.training import guards, list_step_folders, log, loop, run_recipe
from regard.training.checkpoint import METRICS, TENSORS, CheckpointStore, TrainState, read_metadata
from regard.training.guards import agree_on_micro_batches
from regard.training.log import read_metrics
from regard.training.tasks.task import features_loss
from regard.training.tasks.translate import TranslateTask
from tests.training.helpers import bit_equal, saved_tensors, small_dataset, small_recipe

# Without dropout and smoothing of gradients, so that split batches have the same gradients to rounding.
RECIPE = {"model": {"dropout": 0.0}}


def run(out, **train):
    return run_recipe(small_recipe(**RECIPE, train=train), out, dataset=small_dataset(), quiet=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    out = tmp_path_factory.mktemp("plain") / "out"
    run(out)
    return out


@contextlib.contextmanager
def changed_loss(monkeypatch, change):
    """Replace the training loss by change(batch, number of the batch, loss parts). Yields the list of batches."""
    batches = []

    def loss(_task, model, features, batch, config):
        parts = features_loss(model, features, batch, config)
        if not torch.is_grad_enabled():
            return parts
        batches.append(batch)
        return change(batch, len(batches), parts)

    with monkeypatch.context() as patch:
        patch.setattr(TranslateTask, "loss", loss)
        yield batches


def scaled(factor, *numbers):
    """A change that multiplies the loss of the batches with these numbers."""
    return lambda _, number, parts: parts._replace(loss=parts.loss * factor) if number in numbers else parts


def state_of(out):
    return read_metadata(CheckpointStore(out).find_intact())


def metric_steps(out):
    return [(line["step"], line["kind"]) for line in read_metrics(out / METRICS)]


# Out of memory


def limited_memory(monkeypatch, tokens, sizes):
    """A device on which batches of more than `tokens` target tokens do not fit; `sizes` gets all sizes."""

    def change(batch, _number, parts):
        sizes.append(len(batch.targets))
        if sizes[-1] > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return parts

    return changed_loss(monkeypatch, change)


def test_batches_that_do_not_fit_are_split(plain, tmp_path, monkeypatch, capsys):
    """The result is the same to rounding, and a resumed run splits them from the start."""
    sizes: list[int] = []
    with limited_memory(monkeypatch, 100, sizes):
        run(tmp_path / "split")
        assert sizes[0] > 100
        errors = capsys.readouterr().err
        assert "Step 1: out of memory. From now on every batch is processed in 2 parts" in errors
        assert "every batch is processed in 4 parts" in errors
        assert "lower train.batch_tokens" in errors
        assert errors.count("out of memory") == 2

        run(tmp_path / "resumed", steps=6, schedule="constant")
        sizes.clear()
        run(tmp_path / "resumed", schedule="constant")
        assert max(sizes) <= 100
        assert "out of memory" in capsys.readouterr().err  # of the first six steps only
        run(tmp_path / "whole", schedule="constant")
    assert bit_equal(saved_tensors(tmp_path / "resumed"), saved_tensors(tmp_path / "whole"))
    losses, expected = ([line["nll"] for line in read_metrics(out / METRICS)] for out in (tmp_path / "split", plain))
    assert losses == pytest.approx(expected, rel=1e-4)


def test_gradients_of_parts_add_up(plain):
    """Also with R-Drop and label smoothing, which are sums over tokens."""
    model = load(plain, "cpu").model
    recipe = small_recipe(train={"r_drop": 1.0, "label_smoothing": 0.2})
    sides = [Sequences.from_lists([[5] * n, [6, 7], [8] * 5]) for n in (3, 9)]
    batch = next(PairBatches(*sides, budget=64, max_len=16, seed=0).epoch(0))
    totals = []
    for parts in (1, 2, 3):
        model.zero_grad()
        for piece in batch.split(parts):
            features_loss(model, model.features, piece, recipe.train).loss.backward()
        totals.append([p.grad.clone() for p in model.parameters()])
    for other in totals[1:]:
        for one, two in zip(totals[0], other):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_sequence_that_does_not_fit_is_an_error(tmp_path, monkeypatch):
    with limited_memory(monkeypatch, 1, []), pytest.raises(RegardError, match=r"Out of memory at step 1, although"):
        run(tmp_path)
    assert state_of(tmp_path)["step"] == 0


def test_ranks_agree_on_the_number_of_parts():
    """The largest number of all ranks is used."""

    def add_other_rank(tensors):
        tensors[0][2] += 1

    warnings = []
    rank = SimpleNamespace(
        workers=SimpleNamespace(size=2, sum=add_other_rank),
        state=TrainState(step=6),
        run_log=SimpleNamespace(warn=warnings.append),
    )
    agree_on_micro_batches(rank)
    assert rank.state.micro_batches == 4
    assert warnings[0].startswith("Step 7: out of memory. From now on every batch is processed in 4 parts")


# Losses that are not finite, and spikes


@pytest.mark.parametrize("factor", [torch.nan, -torch.inf])
def test_non_finite_update_is_skipped(tmp_path, monkeypatch, capsys, factor):
    with changed_loss(monkeypatch, scaled(factor, 6)):
        run(tmp_path, keep_every=1)
    folders = list_step_folders(tmp_path)
    weights = [load_file(folders[step] / "model.safetensors") for step in (4, 5, 6, 7)]
    assert [bit_equal(one, other) for one, other in itertools.pairwise(weights)] == [False, True, False]
    errors = capsys.readouterr().err
    assert "Step 6: the loss or its gradient is not finite; 1 update skipped, the weights are unchanged." in errors
    assert state_of(tmp_path)["skipped"] == 1
    assert all(torch.isfinite(torch.tensor(line["nll"])) for line in read_metrics(tmp_path / METRICS))


def test_run_with_a_skipped_update_resumes_exactly(tmp_path, monkeypatch):
    """No checkpoint is written while the last update was skipped."""
    with changed_loss(monkeypatch, scaled(torch.nan, 4)):
        run(tmp_path / "whole", save_every=4, keep_checkpoints=9)
    assert [path.name for path in CheckpointStore(tmp_path / "whole").paths()][-2:] == [
        "step-00000005",
        "step-00000000",
    ]
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    for path in CheckpointStore(tmp_path / "resumed").paths()[:-2]:
        shutil.rmtree(path)
    run(tmp_path / "resumed", save_every=4, keep_checkpoints=9)
    assert bit_equal(saved_tensors(tmp_path / "resumed"), saved_tensors(tmp_path / "whole"))


def test_run_is_rolled_back_after_three_skipped_updates(tmp_path, monkeypatch, capsys):
    with changed_loss(monkeypatch, scaled(torch.nan, 6, 7, 8)) as batches:
        run(tmp_path)
    assert "returns to the checkpoint of step 4 and continues with the batches after them" in capsys.readouterr().err
    state = state_of(tmp_path)
    assert (state["step"], state["skipped"], state["failed_step"], state["done"]) == (12, 3, 6, True)
    assert len(batches) == 8 + 8  # of the eight steps after the checkpoint, all use batches that were not used before
    assert len({batch.targets.numpy().tobytes() for batch in batches}) == 16
    assert metric_steps(tmp_path) == sorted(
        [*((s, "train") for s in range(2, 13, 2)), (6, "validation"), (12, "validation")]
    )


def test_second_failure_ends_the_run_with_a_report_of_the_batch(tmp_path, monkeypatch):
    message = (
        r"Step 5: the loss .* not finite, again after the run returned to the checkpoint of step 4; .*bad_batch\.json"
    )
    with (
        changed_loss(monkeypatch, scaled(torch.nan, *range(6, 99))) as batches,
        pytest.raises(RegardError, match=message),
    ):
        run(tmp_path)
    report = json.loads((tmp_path / "state" / "bad_batch.json").read_text(encoding="utf-8"))
    assert (report["step"], report["batch"], report["loss"]) == (5, 8, "nan")
    [batch] = report["batches"]
    assert batch["inputs"][1]["lengths"] == batches[8].inputs[1].offsets.lengths.tolist()
    assert batch["inputs"][0]["texts"][0] in {source for source, _ in small_dataset().training}
    assert state_of(tmp_path)["step"] == 4
    assert all(
        tensor.isfinite().all() for tensor in load_file(CheckpointStore(tmp_path).find_intact() / TENSORS).values()
    )


def test_later_failure_is_rolled_back_too(tmp_path, monkeypatch):
    """More than save_every updates after the first failure."""
    with changed_loss(monkeypatch, scaled(torch.nan, 3, 4, 5, 13, 14, 15)):
        run(tmp_path, save_every=2)
    assert state_of(tmp_path)["step"] == 12
    assert state_of(tmp_path)["skipped"] == 6


@pytest.mark.parametrize("skips", [True, False])
def test_loss_spike_is_skipped(tmp_path, monkeypatch, capsys, skips):
    monkeypatch.setattr(guards, "MIN_UPDATES", 4)
    with changed_loss(monkeypatch, scaled(50.0, 10)):
        run(tmp_path, skip_spikes=skips)
    assert state_of(tmp_path)["skipped"] == int(skips)
    assert ("Step 10: the loss is 2" in capsys.readouterr().err) == skips


# Disks


@contextlib.contextmanager
def failing_flush(monkeypatch, *names, number=errno.ENOSPC, times=99):
    """Flushing a file whose path contains one of the names fails, at most `times` times."""
    fsync, failures = os.fsync, []

    def fail(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if any(name in path for name in names) and len(failures) < times:
            failures.append(path)
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        yield


@contextlib.contextmanager
def crash_at(monkeypatch, step):
    """The run crashes after a step."""
    original, calls = loop.set_learning_rate, []

    def crash(*arguments):
        calls.append(None)
        if len(calls) > step:
            raise ConnectionError
        original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "set_learning_rate", crash)
        with pytest.raises(ConnectionError):
            yield


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_failed_checkpoint_is_a_warning_and_the_next_one_succeeds(plain, tmp_path, monkeypatch, capsys, number):
    with failing_flush(monkeypatch, "step-00000004", number=number):
        run(tmp_path)
    errors = capsys.readouterr().err
    assert "the checkpoint of step 4 could not be saved: " in errors
    assert "Training continues, the next save tries again (failure 1 of 3). The last checkpoint is step 0." in errors
    assert bit_equal(saved_tensors(tmp_path), saved_tensors(plain))


def test_third_failed_checkpoint_ends_the_run(plain, tmp_path, monkeypatch):
    saves = {"save_every": 2}
    message = r"no space left on the device \(0 MiB needed\); everything up to step 2 is saved\. Free some space"
    with failing_flush(monkeypatch, "step-00000004", "step-00000006"):
        run(tmp_path / "two", **saves)  # two failures are tolerated
    with (
        failing_flush(monkeypatch, "step-00000004", "step-00000006", "step-00000008"),
        pytest.raises(RegardError, match=message),
    ):
        run(tmp_path / "three", **saves)
    run(tmp_path / "three", **saves)
    for name in ("two", "three"):
        assert bit_equal(saved_tensors(tmp_path / name), saved_tensors(plain))


def test_failed_last_checkpoint_is_an_error(plain, tmp_path, monkeypatch):
    with (
        failing_flush(monkeypatch, "step-00000012"),
        pytest.raises(RegardError, match="everything up to step 8 is saved"),
    ):
        run(tmp_path)
    run(tmp_path)
    assert bit_equal(saved_tensors(tmp_path), saved_tensors(plain))


def test_failed_first_checkpoint_is_an_error(tmp_path, monkeypatch):
    with failing_flush(monkeypatch, "step-00000000"), pytest.raises(RegardError, match="no space left on the device"):
        run(tmp_path)


def test_failed_model_is_written_before_the_next_checkpoint(plain, tmp_path, monkeypatch, capsys):
    with failing_flush(monkeypatch, "model.safetensors.part", number=errno.EIO, times=1), crash_at(monkeypatch, 9):
        run(tmp_path)  # the model is selected at step 6, and the next checkpoint is that of step 8
    assert "the model could not be saved: " in capsys.readouterr().err
    assert load(tmp_path, "cpu").training["step"] == 6
    run(tmp_path)
    assert bit_equal(saved_tensors(tmp_path), saved_tensors(plain))
    assert (tmp_path / "training.json").read_bytes() == (plain / "training.json").read_bytes()


def test_file_that_cannot_be_removed_is_a_warning(plain, tmp_path, monkeypatch, capsys):
    """A model folder may hold the shortlist of an earlier model."""
    unlink, failures = Path.unlink, []

    def fail(path, **options):
        if path.name == "shortlist.safetensors" and not failures:
            failures.append(path)
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        unlink(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail)
        run(tmp_path)
    assert f"the model could not be saved: {tmp_path}: cannot be written: Read-only" in capsys.readouterr().err
    assert bit_equal(saved_tensors(tmp_path), saved_tensors(plain))


def test_run_killed_after_a_failed_model_repeats_the_validation(plain, tmp_path, monkeypatch):
    """Validation at step 6 selects a model that cannot be written; the run ends before the next checkpoint."""
    with failing_flush(monkeypatch, "model.safetensors.part"), crash_at(monkeypatch, 7):
        run(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    run(tmp_path)
    assert bit_equal(saved_tensors(tmp_path), saved_tensors(plain))


def test_metrics_that_cannot_be_written_are_written_later(plain, tmp_path, monkeypatch, capsys):
    calls = []

    def fail(path, *arguments, **options):
        if str(path).endswith(METRICS) and arguments[0] == "ab":
            calls.append(path)
            if len(calls) in (2, 3):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return open(path, *arguments, **options)

    monkeypatch.setattr(log, "open", fail, raising=False)
    run(tmp_path)
    assert capsys.readouterr().err.count("metrics.jsonl: cannot be written: No space left on device.") == 1
    assert metric_steps(tmp_path) == metric_steps(plain)


def test_failing_plot_is_a_warning(tmp_path, monkeypatch, capsys):
    with failing_flush(monkeypatch, "loss.png"):
        run(tmp_path, steps=1)
    assert "loss.png: no space left on the device" in capsys.readouterr().err


# Damaged checkpoints and signals


def test_damaged_checkpoint_resumes_from_the_one_before(plain, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(plain, out)
    path = CheckpointStore(out).path(12) / TENSORS
    path.write_bytes(path.read_bytes()[:-1])
    run(out)
    assert (
        f"regard: {path.parent}: damaged (the checksum of state.safetensors does not match); resuming from step 8."
        in capsys.readouterr().err
    )
    assert bit_equal(saved_tensors(out), saved_tensors(plain))


@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGUSR1, signal.SIGTERM)])
def test_signal_of_a_cluster_saves_and_asks_for_a_restart(plain, tmp_path, monkeypatch, numbers):
    original, calls = loop.set_learning_rate, []

    def raise_signals(*arguments):
        calls.append(None)
        if len(calls) == 6:
            for number in numbers:
                signal.raise_signal(number)
        original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "set_learning_rate", raise_signals)
        with pytest.raises(Preempted, match="everything up to step 6 is saved") as caught:
            run(tmp_path)
    assert caught.value.exit_code == 75
    run(tmp_path)
    assert bit_equal(saved_tensors(tmp_path), saved_tensors(plain))


def test_interrupted_run_without_space_names_the_last_checkpoint(plain, tmp_path, monkeypatch):
    original, calls = loop.set_learning_rate, []

    def press_ctrl_c(*arguments):
        calls.append(None)
        if len(calls) == 6:
            signal.raise_signal(signal.SIGINT)
        original(*arguments)

    with failing_flush(monkeypatch, "step-00000006"), monkeypatch.context() as patch:
        patch.setattr(loop, "set_learning_rate", press_ctrl_c)
        with pytest.raises(Interrupted, match="Interrupted; everything up to step 4 is saved"):
            run(tmp_path)
    run(tmp_path)
    assert bit_equal(saved_tensors(tmp_path), saved_tensors(plain))
