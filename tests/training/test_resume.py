"""The output folder: no overwriting of other files, the lock, resuming and extending runs."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from regard.errors import Interrupted, RegardError
from regard.pipelines import load
from regard.training import DataConfig, loop, read_dataset, run_recipe
from regard.training.checkpoint import LOCK, METRICS, Checkpoint, CheckpointStore, TrainState, lock_folder
from regard.training.log import read_metrics
from tests.training.helpers import bit_equal, last_checkpoint, saved_tensors, small_dataset, small_recipe


def run(recipe, out, **options):
    return run_recipe(recipe, out, dataset=small_dataset(), quiet=True, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "out"
    run(small_recipe(), out)
    return out


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "metrics.jsonl", "training.json", "loss.png"])
def test_existing_files_are_not_overwritten(tmp_path, name):
    (tmp_path / name).write_text("precious", encoding="utf-8")
    with pytest.raises(RegardError, match=rf"(already contains .+ \(|would overwrite: ){name}"):
        run(small_recipe(), tmp_path)
    assert (tmp_path / name).read_text(encoding="utf-8") == "precious"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_dangling_link_is_not_overwritten(tmp_path):
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RegardError, match=r"already contains a model \(model.safetensors\)"):
        run(small_recipe(), tmp_path)


def test_unrelated_files_in_the_folder_are_allowed(tmp_path):
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    run(small_recipe(train={"steps": 1}), tmp_path)
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_empty_out_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RegardError, match="The output is the current folder"):
        run(small_recipe(), "")
    assert not list(tmp_path.iterdir())


def test_run_killed_before_its_first_checkpoint_starts_again(tmp_path, finished):
    """The lock file marks the folder of a run before there is a checkpoint."""
    (tmp_path / LOCK).parent.mkdir()
    (tmp_path / LOCK).touch()
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    run(small_recipe(), tmp_path)
    assert bit_equal(saved_tensors(tmp_path), saved_tensors(finished))


def test_run_killed_before_it_locked_the_folder_starts_again(tmp_path):
    (tmp_path / LOCK).parent.mkdir()
    run(small_recipe(train={"steps": 1}), tmp_path)
    assert last_checkpoint(tmp_path).exists()


def test_second_run_in_a_folder_is_an_error(tmp_path):
    code = (
        "import sys, pathlib\nfrom regard.training.checkpoint import lock_folder\n"
        "with lock_folder(pathlib.Path(sys.argv[1])):\n    print('ready', flush=True)\n    sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "ready\n"
    with pytest.raises(RegardError, match=rf"is in use by another run \(process {other.pid} on "):
        run(small_recipe(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state"]
    other.kill()
    other.communicate()
    run(small_recipe(train={"steps": 1}), tmp_path)  # the lock ended with the process


def test_file_system_without_locks_is_supported(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock_folder(tmp_path):
        assert (tmp_path / LOCK).exists()


def test_damaged_metrics_are_skipped(tmp_path, finished):
    shutil.copytree(finished, tmp_path / "out")
    (tmp_path / "out" / METRICS).write_bytes(b'[1]\n{"step": "x"}\n\xff\n{"step": 2, "kind": "train"}\n{"st')
    run(small_recipe(), tmp_path / "out")
    assert read_metrics(tmp_path / "out" / METRICS) == [{"step": 2, "kind": "train"}]


def test_same_data_under_another_path_resumes(tmp_path):
    lines = "".join(f"{source}\t{target}\n" for source, target in small_dataset().training)
    for name in ("one.tsv", "two.tsv"):
        (tmp_path / name).write_text(lines, encoding="utf-8")
        data = {"files": [str(tmp_path / name)]}
        dataset = read_dataset("translate", DataConfig(files=(str(tmp_path / name),)))
        run_recipe(small_recipe(data=data, train={"steps": 2}), tmp_path / "out", dataset=dataset, quiet=True)


def test_finished_run_is_extended(tmp_path, finished):
    shutil.copytree(finished, tmp_path / "out")
    run(small_recipe(train={"steps": 16}), tmp_path / "out")
    steps = [(line["step"], line["kind"]) for line in read_metrics(tmp_path / "out" / METRICS)]
    assert steps[:8] == [(s, k) for s, k in steps[:8] if s <= 12]  # earlier lines are kept
    assert steps[-1] == (16, "validation")
    assert (
        json.loads((tmp_path / "out" / "training.json").read_text(encoding="utf-8"))["recipe"]["train"]["steps"] == 16
    )
    before = saved_tensors(tmp_path / "out")
    run(small_recipe(train={"steps": 16}), tmp_path / "out")  # the extended run is finished
    assert bit_equal(saved_tensors(tmp_path / "out"), before)


def test_early_stopped_run_is_extended(tmp_path):
    stalls = {"lr": 1e-30, "validate_every": 2, "patience": 1, "schedule": "wsd", "log_every": 1}
    run(small_recipe(train=stalls | {"steps": 20}), tmp_path)
    # The second validation brings no improvement; the decay takes one step.
    assert read_metrics(tmp_path / METRICS)[-1]["step"] == 5
    run(small_recipe(train=stalls | {"steps": 20}), tmp_path)
    assert read_metrics(tmp_path / METRICS)[-1]["step"] == 5
    run(small_recipe(train=stalls | {"steps": 30}), tmp_path)
    assert read_metrics(tmp_path / METRICS)[-1]["step"] > 5


def test_state_of_another_version_is_an_error(tmp_path, finished):
    shutil.copytree(finished, tmp_path / "out")
    old = Checkpoint.load(last_checkpoint(tmp_path / "out"))
    other = Checkpoint(old.tensors, {"step": 12, "waiting": 0, "provenance": {}})
    CheckpointStore(tmp_path / "out").save(other, 12)
    with pytest.raises(RegardError, match="written by a different version of Regard"):
        run(small_recipe(), tmp_path / "out")


def test_resumed_run_prints_its_first_step(tmp_path, finished, capsys):
    shutil.copytree(finished, tmp_path / "out")
    run_recipe(small_recipe(train={"steps": 14}), tmp_path / "out", dataset=small_dataset())
    assert "Resuming from step 12 of 14." in capsys.readouterr().err


def test_run_without_a_finished_update_is_resumed(tmp_path, monkeypatch, capsys):
    """The checkpoint of step 0 is resumed like any other."""

    def fail(*_: object) -> None:
        raise ConnectionError

    with monkeypatch.context() as patch:
        patch.setattr(loop, "set_learning_rate", fail)
        with pytest.raises(ConnectionError):
            run_recipe(small_recipe(train={"steps": 2}), tmp_path, dataset=small_dataset())
    run_recipe(small_recipe(train={"steps": 2}), tmp_path, dataset=small_dataset())
    assert "Resuming from step 0 of 2." in capsys.readouterr().err


def test_loading_a_run_without_a_model_is_an_error(tmp_path):
    (tmp_path / LOCK).parent.mkdir()
    with pytest.raises(RegardError, match=r"stopped before its first validation\. Resume it"):
        load(tmp_path, "cpu")


def test_interrupted_run_saves_a_model(tmp_path, monkeypatch):
    original = loop.set_learning_rate
    monkeypatch.setattr(loop, "set_learning_rate", lambda *a: (original(*a), signal.raise_signal(signal.SIGINT)))
    with pytest.raises(Interrupted, match="everything up to step 1 is saved"):
        run(small_recipe(), tmp_path)
    assert load(tmp_path, "cpu").training["step"] == 1
    assert last_checkpoint(tmp_path).exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": "12"}, "step must be an integer"),
        ({"step": -1}, "step must be at least 0"),
        ({"precision": "int3"}, "precision must be one of float32, bfloat16"),
        ({"provenance": []}, "provenance is damaged"),
        ({"provenance": {"recipe": []}}, "provenance is damaged"),
        ({"provenance": {"recipe": {}, "data": {"training": 1}}}, "provenance is damaged"),
        ({"provenance": {}}, "provenance is damaged"),
        ({"best": [1]}, "best is damaged"),
        ({"best": ["a", "b"]}, "best is damaged"),
        ({"unlogged": [1]}, "unlogged is damaged"),
    ],
    ids=str,
)
def test_state_with_values_of_the_wrong_type_is_an_error(change, message):
    table = TrainState({"recipe": {}}).to_json()
    TrainState.from_json(table)
    with pytest.raises(RegardError, match=message):
        TrainState.from_json(table | change)
