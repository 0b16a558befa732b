"""Folders of sentence-transformers: pooling, the layers after it and the length limit, in both directions.

modules.json                          the modules in their order, each with its class and its folder
sentence_bert_config.json             Transformer: max_seq_length, do_lower_case
1_Pooling/config.json                 Pooling
2_Dense/config.json, model.safetensors    Dense: a linear layer with an activation
3_Normalize                           Normalize (without files)
config_sentence_transformers.json     prompts, truncate_dim
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from safetensors.torch import save as weights_to_bytes
from tokenizers import normalizers
from torch import Tensor

from regard.config_reader import json_bytes, parse_json
from regard.errors import RegardError
from regard.files import read_file, write_atomically
from regard.interop.foreign_config import ForeignConfig, foreign_value
from regard.interop.tensor_files import SAFETENSORS_FILE, read_json, read_tensors
from regard.pipelines.sentence_embedding import Pooling, SentenceConfig, SentenceEmbedding, check_linear_layers

logger = logging.getLogger("regard")

MODULES_FILE = "modules.json"
_PROMPTS_FILE = "config_sentence_transformers.json"
# Files with the settings of the Transformer, from versions of sentence-transformers; the first is written.
_FAMILIES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_TRANSFORMER_FILES = [f"sentence_{family}_config.json" for family in _FAMILIES]
_CLASSES = ("Transformer", "Pooling", "Dense", "Normalize", "Dropout")
# Keys of earlier versions, in the order in which several pooled vectors are concatenated.
_POOLING_KEYS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS = {
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.linear.Identity": "linear",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}


def transformer_folder(folder: Path) -> Path:
    """The folder of the Transformer: early versions of sentence-transformers kept it in a folder of its own.

    >>> transformer_folder(Path("no-such-folder"))
    PosixPath('no-such-folder')
    """
    if (folder / "config.json").exists() or not (folder / MODULES_FILE).exists():
        return folder
    paths = [path for name, path in _read_modules(folder) if name == "Transformer"]
    return paths[0] if paths else folder


def read_sentence_modules(folder: Path, width: int, max_len: int) -> SentenceEmbedding | None:
    """The sentence embedding of a folder, for a model of this width and maximum length; None without a Pooling module.

    A module that Regard does not support is an error.
    """
    if not (folder / MODULES_FILE).exists():
        return None
    modules = _read_modules(folder)
    names = [name for name, _ in modules]
    if "Pooling" not in names:  # the modules of a cross-encoder
        return None
    if names[:2] != ["Transformer", "Pooling"] or names.count("Pooling") > 1:
        raise RegardError(
            f"{folder / MODULES_FILE}: unsupported order of modules: {', '.join(names)}.",
            "Expected Transformer and Pooling, then Dense or Normalize.",
        )
    pooling = _read_pooling(modules[1][1] / "config.json", width)
    layers: list[Any] = []
    weights: list[tuple[Tensor | None, Tensor | None]] = []
    for name, path in modules[2:]:
        if name == "Normalize":
            _require_defaults(ForeignConfig(read_json(path / "config.json"), str(path / "config.json")))
            layers.append("normalize")
        elif name == "Dense":
            layers.append(_read_activation(path / "config.json"))
            tensors = read_tensors(path)
            weights.append((tensors.get("linear.weight"), tensors.get("linear.bias")))
    transformer = ForeignConfig(_read_transformer_settings(modules[0][1]), str(modules[0][1]))
    limit = transformer.get_count("max_seq_length", _tokenizer_limit(modules[0][1], max_len))
    prompt, dimensions = _read_prompt(folder / _PROMPTS_FILE)
    config = SentenceConfig(pooling, tuple(layers), min(limit, max_len), prompt, dimensions)
    return SentenceEmbedding(config, check_linear_layers(weights, width * len(pooling), folder / MODULES_FILE))


def lowercase_normalizer(folder: Path) -> normalizers.Normalizer | None:
    """The normalizer that the Transformer module adds in front of the tokenizer's, with `do_lower_case`."""
    path = str(folder / _TRANSFORMER_FILES[0])
    if ForeignConfig(_read_transformer_settings(folder), path).get_bool("do_lower_case", False):
        return normalizers.Lowercase()
    return None


def write_sentence_modules(folder: Path, sentence: SentenceEmbedding, width: int, max_len: int) -> None:
    """Write the modules of a sentence embedding beside an exported model."""
    config = sentence.config
    pooling: dict[str, Any] = {"word_embedding_dimension": width, "include_prompt": True}
    pooling |= {key: mode in config.pooling for key, mode in _POOLING_KEYS.items()}
    if [mode for mode in _POOLING_KEYS.values() if mode in config.pooling] != list(config.pooling):
        pooling = {"embedding_dimension": width, "pooling_mode": list(config.pooling), "include_prompt": True}
    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    write_atomically(folder / "1_Pooling" / "config.json", json_bytes(pooling))
    for i, layer in enumerate(config.layers):
        name = "Normalize" if layer == "normalize" else "Dense"
        path = f"{i + 2}_{name}"
        modules.append((name, path))
        if name == "Dense":
            linear: Any = sentence.linear[str(i)]
            tensors = {f"linear.{key}": x.detach().cpu().contiguous() for key, x in linear.named_parameters()}
            table = {
                "in_features": linear.in_features,
                "out_features": linear.out_features,
                "bias": linear.bias is not None,
                "activation_function": foreign_value(_ACTIVATIONS, layer),
            }
            write_atomically(folder / path / SAFETENSORS_FILE, weights_to_bytes(tensors, metadata={"format": "pt"}))
            write_atomically(folder / path / "config.json", json_bytes(table))
        else:
            (folder / path).mkdir(parents=True, exist_ok=True)
    rows = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(modules)
    ]
    settings = {"max_seq_length": config.max_len or max_len, "do_lower_case": False}
    prompts: dict[str, Any] = {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    if config.prompt:
        prompts |= {"prompts": {"default": config.prompt}, "default_prompt_name": "default"}
    if config.dimensions:
        prompts["truncate_dim"] = config.dimensions
    files: dict[str, Any] = {_TRANSFORMER_FILES[0]: settings, _PROMPTS_FILE: prompts, MODULES_FILE: rows}
    for file, content in files.items():
        write_atomically(folder / file, json_bytes(content))


def _read_modules(folder: Path) -> list[tuple[str, Path]]:
    """The class and the folder of each module, without those that do nothing after training."""
    path = folder / MODULES_FILE
    try:
        rows = parse_json(read_file(path).decode())
        entries = [(row["type"], row["path"]) for row in rows]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RegardError(f"{path}: not a list of modules.", "Restore the file from a good copy.") from None
    modules = []
    for kind, part in entries:
        name = kind.rpartition(".")[2] if isinstance(kind, str) else ""
        if name not in _CLASSES or not kind.startswith("sentence_transformers."):
            raise RegardError(f"{path}: unsupported module {kind!r}.", f"Supported are {', '.join(_CLASSES)}.")
        if not isinstance(part, str) or Path(part).is_absolute() or ".." in Path(part).parts:
            raise RegardError(f"{path}: invalid path {part!r}.", "Expected a folder beside the file.")
        if name != "Dropout":
            modules.append((name, folder / part))
    return modules


def _read_transformer_settings(folder: Path) -> dict[str, Any]:
    return next((table for file in _TRANSFORMER_FILES if (table := read_json(folder / file))), {})


def _read_pooling(path: Path, width: int) -> tuple[Pooling, ...]:
    settings = ForeignConfig(read_json(path), str(path))
    for key in ("word_embedding_dimension", "embedding_dimension"):
        settings.require(key, width)
    settings.require("include_prompt", True)
    modes = settings.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in _POOLING_KEYS.items() if settings.get_bool(key, False)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not modes or any(mode not in get_args(Pooling) for mode in modes):
        raise settings.unsupported("pooling_mode", f"expected one or several of {', '.join(get_args(Pooling))}")
    return tuple(modes)


def _read_activation(path: Path) -> str:
    settings = ForeignConfig(read_json(path), str(path))
    _require_defaults(settings)
    settings.require("use_residual", False)
    return settings.get_choice("activation_function", _ACTIVATIONS, next(iter(_ACTIVATIONS)))


def _require_defaults(settings: ForeignConfig) -> None:
    """Raise an error for a module that reads or writes something other than the embedding of a text."""
    for key in ("module_input_name", "module_output_name"):
        settings.require(key, "sentence_embedding")


def _tokenizer_limit(folder: Path, max_len: int) -> int:
    """The maximum length in tokenizer_config.json, which is a huge number if there is none."""
    limit = read_json(folder / "tokenizer_config.json").get("model_max_length")
    return max(1, min(int(limit), max_len)) if isinstance(limit, int | float) else max_len


def _read_prompt(path: Path) -> tuple[str, int]:
    """The default prompt and the number of dimensions that are kept."""
    settings = ForeignConfig(read_json(path), str(path))
    prompts, name = settings.get("prompts", {}), settings.get("default_prompt_name")
    if not isinstance(prompts, Mapping) or (name is not None and not isinstance(prompts.get(name), str)):
        raise settings.unsupported("default_prompt_name", "expected the name of a prompt")
    others = {key: text for key, text in prompts.items() if text and key != name}
    if others:
        texts = ", ".join(f"{key} = {text!r}" for key, text in others.items())
        logger.warning("%s: prompts are not used; write them in front of your texts: %s", path, texts)
    return prompts[name] if name is not None else "", settings.get_natural("truncate_dim", 0)
