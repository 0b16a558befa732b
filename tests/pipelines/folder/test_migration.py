"""Model folders and checkpoints of version 0.1.0, which named the parameters of residual connections differently.

Each fixture is a model folder of version 0.1.0 with random parameters, and the output of that version for the inputs
below (expected.json).
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from regard.errors import RegardError
from regard.layers.packed import pack
from regard.pipelines import load, save
from regard.training.checkpoint import Checkpoint

FIXTURES = Path(__file__).parent / "fixtures"
FOLDERS = sorted(path.name for path in FIXTURES.iterdir())
SOURCE, TARGET = pack([[4, 5, 6, 3], [7, 3]]), pack([[2, 8, 9], [2, 5, 6, 7, 4]])
IMAGES = torch.arange(2 * 64.0).view(2, 1, 8, 8).sin().abs()
INPUTS = {"transformer": (SOURCE, TARGET), "seq2seq": (SOURCE, TARGET), "gpt": (TARGET,), "bert": (SOURCE,)}


def tensor_names(folder: Path) -> list[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return list(file.keys())


@torch.no_grad()
def model_output(folder: Path) -> torch.Tensor:
    family = json.loads((folder / "config.json").read_text())["family"]
    out = load(folder, "cpu").model(*INPUTS.get(family, (IMAGES,)))
    return (out[:, :, ::2, ::2] if out.dim() == 4 else out).flatten()


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_of_previous_version_gives_the_same_output(name, tmp_path):
    expected = torch.tensor(json.loads((FIXTURES / name / "expected.json").read_text()))
    torch.testing.assert_close(model_output(FIXTURES / name), expected, rtol=0, atol=1e-5)
    assert any(".residuals." in old for old in tensor_names(FIXTURES / name)) == (name != "seq2seq")
    save(tmp_path, load(FIXTURES / name, "cpu"))
    assert not any(".residuals." in new for new in tensor_names(tmp_path))
    torch.testing.assert_close(model_output(tmp_path), expected, rtol=0, atol=1e-5)


def test_fixtures_cover_every_family_and_norm_placement():
    configs = [json.loads((FIXTURES / name / "config.json").read_text()) for name in FOLDERS]
    assert {config["family"] for config in configs} == {"transformer", "seq2seq", "gpt", "bert", "vit"}
    assert {config["norm"] for config in configs if config["family"] == "transformer"} == {"pre", "post"}
    assert any(config.get("layer_scale") for config in configs)


@pytest.mark.parametrize("name", ["transformer_pre", "vit"])
def test_checkpoint_of_previous_version_has_the_current_names(name, tmp_path):
    with safe_open(FIXTURES / name / "model.safetensors", framework="pt") as file:
        weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    old = {f"{part}.{key}": tensor.clone() for part in ("model", "average") for key, tensor in weights.items()}
    path = tmp_path / "state.safetensors"
    path.write_bytes(Checkpoint(old | {"optimizer.0.step": torch.zeros(())}, {"step": 1}).to_bytes())
    loaded = Checkpoint.load(path).tensors
    current = dict(load(FIXTURES / name, "cpu").model.named_parameters())
    assert loaded.keys() == {f"{part}.{key}" for part in ("model", "average") for key in current} | {"optimizer.0.step"}
    for key, parameter in current.items():
        assert torch.equal(loaded[f"average.{key}"], parameter)


def test_unknown_parameter_names_raise(tmp_path):
    shutil.copytree(FIXTURES / "gpt", tmp_path / "gpt")
    weights = tmp_path / "gpt" / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"residuals.0.norm", b"residuals.7.norm"))
    with pytest.raises(RegardError, match=r"do not match the config: blocks\.0\.attention_norm\.weight"):
        load(tmp_path / "gpt", "cpu")
