"""Sharded checkpoints: saved on 4 ranks, loaded on 2 and on 1 with bit-equal weights and optimizer state."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh

from regard.errors import RegardError
from regard.models import GPTConfig, make_model
from regard.training.checkpoint import (
    CHECKSUMS,
    METADATA,
    AsyncSaver,
    Checkpoint,
    CheckpointStore,
    gather_state,
    load_like,
    read_metadata,
    restore_state,
    unique_parameters,
)
from regard.training.distributed import join_torchrun, shard
from regard.training.optimizers import make_optimizer
from tests.training.ranks import run_ranks

CONFIG = GPTConfig(width=18, heads=1, layers=2, feedforward=37, vocab=11, positions="learned", bias="all", max_len=8)


def model_and_optimizer(seed: int, group=None):
    torch.manual_seed(seed)
    model = make_model(CONFIG)
    if group is not None:
        shard(model, DeviceMesh.from_group(group, "cpu"))
    return model, make_optimizer("adamw", model, 1e-3, 0.98, 0.1)


def full_state(model, optimizer) -> dict[str, torch.Tensor]:
    state = gather_state(model, optimizer, None)
    return {name: (x.full_tensor() if hasattr(x, "full_tensor") else x).clone() for name, x in state.items()}


def update(model, optimizer) -> None:
    for index, parameter in enumerate(unique_parameters(model).values()):
        parameter.grad = parameter.detach() * (index + 1)
    optimizer.step()


def save_on_this_rank(folder: Path) -> None:
    """Save in the background, and change the weights meanwhile; rank 0 also writes the full tensors as they were."""
    with join_torchrun() as workers:
        model, optimizer = model_and_optimizer(1, workers.update_group)
        update(model, optimizer)
        expected, saver = full_state(model, optimizer), AsyncSaver(workers, CheckpointStore(folder))
        assert not saver.wait()
        for step in (3, 5, 7):
            saver.save(Checkpoint(gather_state(model, optimizer, None), {"step": step}), step)
            if step == 7:
                update(model, optimizer)
            assert saver.wait()
        if workers.rank == 0:
            save_file(expected, folder / "expected.safetensors")


def restored_state(folder: Path, group=None) -> dict[str, torch.Tensor]:
    model, optimizer = model_and_optimizer(2, group)
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    checkpoint = load_like(CheckpointStore(folder).find_intact(), unique_parameters(model), parameters)
    assert checkpoint.metadata == {"step": 7}
    restore_state(checkpoint.tensors, model, optimizer, None, RegardError)
    return full_state(model, optimizer)


def load_on_this_rank(folder: Path) -> None:
    with join_torchrun() as workers:
        found = restored_state(folder, workers.update_group)
        if dist.get_rank() == 0:
            save_file(found, folder / f"found-{workers.size}.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    assert run_ranks(4, save_on_this_rank, folder) == [0] * 4
    return folder


def bit_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_loads_on_two_ranks_and_on_one_with_bit_equal_tensors(folder):
    expected = load_file(folder / "expected.safetensors")
    assert run_ranks(2, load_on_this_rank, folder) == [0, 0]
    assert bit_equal(load_file(folder / "found-2.safetensors"), expected)
    assert bit_equal(restored_state(folder), expected)


def test_loads_a_checkpoint_that_is_not_sharded(folder, tmp_path):
    """With the same tensors: a run may be sharded from now on."""
    expected = load_file(folder / "expected.safetensors")
    CheckpointStore(tmp_path).save(Checkpoint(expected, {"step": 7}), 7)
    assert run_ranks(2, load_on_this_rank, tmp_path) == [0, 0]
    assert bit_equal(load_file(tmp_path / "found-2.safetensors"), expected)


def test_the_last_saves_are_kept(folder):
    assert [path.name for path in CheckpointStore(folder).paths()] == ["step-00000007", "step-00000005"]
    assert sorted(path.name for path in (folder / "state" / "step-00000007").iterdir()) == [
        CHECKSUMS,
        METADATA,
        *(f"shard-{rank:05}-model-00001-of-00001.safetensors" for rank in range(1, 5)),
    ]


@pytest.mark.parametrize("name", [METADATA, "shard-00003-model-00001-of-00001.safetensors"])
def test_a_damaged_checkpoint_is_passed_over(folder, tmp_path, name):
    shutil.copytree(folder / "state", tmp_path / "state")
    store, reports = CheckpointStore(tmp_path), []
    damaged = store.path(7) / name
    damaged.write_bytes(damaged.read_bytes()[:-1])
    path = store.find_intact(reports.append)
    assert read_metadata(path) == {"step": 5}
    assert f"the checksum of {name} does not match" in reports[0]


def test_invalid_content_is_an_error(folder, tmp_path):
    """Without the checksums, which find it first."""
    shutil.copytree(folder / "state" / "step-00000007", tmp_path / "7")
    for file in (tmp_path / "7").glob("*.safetensors"):
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
    model, _ = model_and_optimizer(2)
    with pytest.raises(RegardError, match="7: damaged, or not a checkpoint"):
        load_like(tmp_path / "7", unique_parameters(model), [])
    name = "optimizer.0.exp_avg"
    for offset in (1 << 40, -1, None):
        shutil.copytree(folder / "state" / "step-00000007", tmp_path / "7", dirs_exist_ok=True)
        file = tmp_path / "7" / "shard-00001-model-00001-of-00001.safetensors"
        with safe_open(file, "pt") as content:
            info = json.loads(content.metadata()["DCP_SHARDING_INFO"])
        info[name]["saved_offsets"] = None if offset is None else [offset] * len(info[name]["saved_offsets"])
        save_file(load_file(file), file, metadata={"DCP_SHARDING_INFO": json.dumps(info)})
        with pytest.raises(RegardError, match="7: damaged, or not a checkpoint"):
            load_like(tmp_path / "7", unique_parameters(model), [])
    for content in ("[1]", "{", "[" * 9**5):
        (tmp_path / "7" / METADATA).write_text(content, encoding="utf-8")
        with pytest.raises(RegardError, match="7: damaged, or not a checkpoint"):
            read_metadata(tmp_path / "7")
