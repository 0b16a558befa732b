"""LoRA adapters of PEFT, merged into the weights of their model: W + scale · B A (Hu et al. 2022)."""

from pathlib import Path
from typing import Any

from torch import Tensor

from regard.errors import RegardError
from regard.interop.foreign_config import ForeignConfig
from regard.interop.tensor_files import has_tensors, read_json, read_tensor_file, read_tensors

_CONFIG, _FILES = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
# Settings of other methods, with the values that change nothing.
_PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    **{key: {} for key in ("rank_pattern", "alpha_pattern")},
    **dict.fromkeys(("modules_to_save", "layer_replication", "alora_invocation_tokens", "use_bdlora"), None),
    **dict.fromkeys(("use_dora", "use_qalora", "lora_bias"), False),
}
# Initial values of A and B that leave the weights of the model unchanged.
_INITIAL_VALUES = (True, False, "gaussian", "orthogonal", "eva")
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def check_adapter(folder: Path) -> None:
    """Raise an error if the folder has an adapter without its model, or one that cannot be merged."""
    if not _has_adapter(folder):
        return
    settings = _read_settings(folder)
    if not has_tensors(folder):
        raise RegardError(
            f"{folder}: the folder contains only an adapter, not the weights of its model "
            f"({settings.get('base_model_name_or_path', 'not named')}).",
            f"Copy {_CONFIG} and the adapter's weights into the folder of that model, and import it.",
        )
    for key, plain in _PLAIN.items():
        if settings.get(key, plain) not in (plain, []):
            raise settings.unsupported(key, f"expected {plain!r}; merge the adapter with PEFT first")
    if settings.get("init_lora_weights", True) not in _INITIAL_VALUES:
        raise settings.unsupported("init_lora_weights", "it changes other weights; merge the adapter with PEFT first")


def _has_adapter(folder: Path) -> bool:
    return any((folder / name).exists() for name in (_CONFIG, *_FILES))


def _read_settings(folder: Path) -> ForeignConfig:
    return ForeignConfig(read_json(folder / _CONFIG), str(folder / _CONFIG))


def read_merged_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder by name, with its LoRA adapter merged if it has one."""
    tensors = read_tensors(folder)
    if not _has_adapter(folder):
        return tensors
    settings = _read_settings(folder)
    rank, alpha = settings.get_count("r"), settings.get_float("lora_alpha", 8.0)
    scale = alpha / (rank**0.5 if settings.get_bool("use_rslora", False) else rank)
    path = next((folder / name for name in _FILES if (folder / name).exists()), folder / _FILES[0])
    adapter = read_tensor_file(path)
    modules = {name.removeprefix(_PREFIX).removesuffix(_A) for name in adapter if name.endswith(_A)}
    expected = {f"{_PREFIX}{module}{end}" for module in modules for end in (_A, _B)}
    unknown = sorted(expected ^ adapter.keys()) or sorted(
        f"{module}.weight" for module in modules if f"{module}.weight" not in tensors
    )
    if unknown or not modules:
        raise RegardError(
            f"{path}: expected two tensors per linear layer of the model; the first other one: "
            f"{unknown[0] if unknown else 'none at all'}.",
            "Merge the adapter with PEFT first.",
        )
    for module in modules:
        change = scale * (adapter[f"{_PREFIX}{module}{_B}"].float() @ adapter[f"{_PREFIX}{module}{_A}"].float())
        weight = tensors[f"{module}.weight"]
        change = change.T if settings.get_bool("fan_in_fan_out", False) else change
        if change.shape != weight.shape:
            raise RegardError(
                f"{path}: {module} has the shape {tuple(change.shape)}; the model's is {tuple(weight.shape)}.",
                "Check that the adapter belongs to the model.",
            )
        tensors[f"{module}.weight"] = weight.float() + change
    return tensors
