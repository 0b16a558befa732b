"""Random changes of single options in configs of every supported class: refused, or as in transformers."""

import copy
import json
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch

from regard.errors import RegardError
from regard.interop import import_huggingface
from regard.interop.foreign_config import ForeignConfig
from tests.interop.huggingface.architecture_comparison import (
    largest_difference,
    make_inputs,
    make_model,
    run_hf_model,
    run_model,
)
from tests.interop.huggingface.architectures import ARCHITECTURES, configurations

Outcome = Literal["refused by transformers", "refused", "equal", "wrong"]
TOLERANCE = 1e-4

_ACTIVATION_NAMES = ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2", "quick_gelu", "tanh"]
_ROPE_TABLES: list[Any] = [
    None,
    {"rope_type": "default", "rope_theta": 77.0},
    {"rope_type": "linear", "rope_theta": 77.0, "factor": 2.0},
    {"rope_type": "linear", "factor": 2.0},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "rope_theta": 77.0, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 77.0, "factor": 2.0, "original_max_position_embeddings": 20},
    {"rope_type": "yarn", "rope_theta": 77.0, "factor": 2.0, "mscale": 0.5, "mscale_all_dim": 2.0},
    {"rope_type": "default", "rope_theta": 77.0, "partial_rotary_factor": 0.5},
]
_CHOICES: dict[str, list[Any]] = {
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function", "activation"), _ACTIVATION_NAMES),
    "layer_types": [None, ["full_attention"] * 2, ["sliding_attention"] * 3, ["sliding_attention", "full_attention"]],
    "no_rope_layers": [None, [0, 0], [1, 1], [0, 1], [1]],
    "rope_parameters": _ROPE_TABLES,
    "rope_scaling": _ROPE_TABLES,
    "dense_act_fn": _ACTIVATION_NAMES,
    "feed_forward_proj": [*_ACTIVATION_NAMES[:6], "gated-gelu", "gated-silu", "gated-relu"],
    "problem_type": [None, "regression", "single_label_classification", "multi_label_classification"],
    "position_embedding_type": ["absolute", "relative_key", "relative_key_query", None],
    "pooler_act": ["tanh", "relu", "gelu"],
    "pruned_heads": [{}, {"0": [0]}],
    "image_size": [8, 12, [8, 8], [12, 8], 16, 13],
    "patch_size": [2, 4, [2, 2], [4, 2], 3],
    "num_labels": [1, 2, 3],
    "sentence_transformers": [None, {"activation_fn": "torch.nn.modules.linear.Identity"}],
    **{key: [77.0, 500, 10000.0] for key in ("rope_theta", "rotary_emb_base", "rope_local_base_freq")},
    **{key: [0.25, 0.5, 1.0] for key in ("partial_rotary_factor", "rotary_pct")},
}
# Not part of the computation, or part of the type of the model or of its tokenizer.
_IGNORED = ("architectures", "model_type", "dtype", "transformers_version", "vocab_size", "id2label", "label2id")
_IGNORED += ("_name_or_path", "quantization_config", "auto_map", "sbert_ce_default_activation_function")
_IGNORED_PARTS = ("token_id", "initializer", "init_std", "dropout", "_drop", "pdrop", "use_cache", "output_")
REMOVED = object()
# How much more often than other keys options of the class are changed, and keys that Regard reads.
_OPTION_WEIGHT, _READ_WEIGHT = 6, 2
# The share of changes that set all keys of an option to one of its alternatives.
_OPTION_SHARE = 0.2
# The share of changes for which the weights stay as they were; else they are made for the changed config.
_KEPT_WEIGHTS = 0.2


class _RecordingTable(dict[str, Any]):
    """A dictionary that records the keys that are looked up."""

    def __init__(self, table: Any, keys: dict[str, None]) -> None:
        super().__init__(table)
        self.keys_read = keys

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read[key] = None
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.keys_read[key] = None
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.keys_read[str(key)] = None
        return super().__contains__(key)


@contextmanager
def record_keys() -> Iterator[dict[str, None]]:
    """The keys of config.json that the import of a model looks up, in order."""
    keys: dict[str, None] = {}

    def wrap(self: ForeignConfig, table: Any, origin: str) -> None:
        is_config = "model_type" in dict(table)
        self.table, self.origin = _RecordingTable(table, keys) if is_config else table, origin

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForeignConfig, "__init__", wrap)
        yield keys


class _Base(NamedTuple):
    """A model folder before the change."""

    table: dict[str, Any]
    """config.json"""
    weights: bytes
    read_keys: list[str]
    """the keys of config.json that Regard looks up"""
    keys: list[str]
    """the keys that can change, some more often than others"""


class ChangeSearch:
    """Changes of the configurations of a class; each is a function of its number."""

    def __init__(self, transformers: Any, name: str, folder: Path) -> None:
        self.transformers, self.name, self.folder = transformers, name, folder
        architecture = ARCHITECTURES[name]
        self.config_class = getattr(transformers, architecture.config)
        self.defaults = self.config_class().to_dict()
        self.configurations = configurations(name)
        self.options = [alternatives for alternatives in architecture.options if len(alternatives) > 1]
        self.bases: dict[int, _Base] = {}
        self.known_values: dict[str, list[Any]] = {}
        for alternatives in architecture.options:
            for key in {key for one in alternatives for key in one}:
                self.known_values.setdefault(key, []).extend(one[key] for one in alternatives if key in one)

    def base(self, seed: int) -> _Base:
        """The model that a change starts from: another configuration of the class for each number."""
        index = seed % len(self.configurations)
        if index not in self.bases:
            make_model(self.transformers, self.name, self.config_class(**self.configurations[index]), self.folder)
            table = json.loads((self.folder / "config.json").read_text())
            with record_keys() as read:
                import_huggingface(self.folder)
            keys = [
                key
                for key in dict.fromkeys((*table, *read))
                for _ in range(_OPTION_WEIGHT if key in self.known_values else _READ_WEIGHT if key in read else 1)
                if not _is_ignored(key)
            ]
            weights = (self.folder / "model.safetensors").read_bytes()
            self.bases[index] = _Base(table, weights, [*read], keys)
        return self.bases[index]

    def change(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The changed values (or REMOVED) by key, and the changed table."""
        rng, base = random.Random(f"{self.name} {seed}"), self.base(seed)
        while True:
            if rng.random() < _OPTION_SHARE:
                values = rng.choice(rng.choice(self.options))
            else:
                key = rng.choice(base.keys)
                values = {key: self._random_value(key, base.table.get(key), rng)}
            changed = copy.deepcopy(base.table) | values
            changed = {key: value for key, value in changed.items() if value is not REMOVED}
            if changed != base.table and not any(self._is_large(key, changed) for key in values):
                return values, changed

    def _random_value(self, key: str, value: Any, rng: random.Random) -> Any:
        if rng.random() < 0.1:
            return REMOVED
        if key in self.known_values and rng.random() < 0.5:
            return rng.choice(self.known_values[key])
        if key in _CHOICES:
            return rng.choice(_CHOICES[key])
        if isinstance(value, bool) or key.startswith(("use_", "is_", "tie_", "add_")):
            return rng.choice([True, False])
        if isinstance(value, float):
            return rng.choice([value * 2, value / 3, 0.5, 0.0, None])
        return rng.choice([1, 2, 3, 4, 6, 8, 12, 24, 0.5, None])

    def _is_large(self, key: str, changed: dict[str, Any]) -> bool:
        """Whether a removed key has a default that makes a large model."""
        default = self.defaults.get(key)
        return changed.get(key) is None and type(default) is int and default > 100 and "position" not in key

    @torch.no_grad()
    def outcome(self, seed: int) -> tuple[Outcome, str]:
        """What happens to a change, and its description."""
        values, changed = self.change(seed)
        keeps_weights = random.Random(f"{self.name} weights {seed}").random() < _KEPT_WEIGHTS
        texts = (f"{key} {'removed' if value is REMOVED else f'= {value!r}'}" for key, value in values.items())
        description = f"{self.name}: {', '.join(texts)}"
        path = self.folder / "config.json"
        path.write_text(json.dumps(changed))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                hf_model = self._old_weights(seed) if keeps_weights else self._new_weights()
            except Exception:  # transformers raises many kinds of errors for invalid configs
                return "refused by transformers", description
            path.write_text(json.dumps(changed))
            try:
                pipeline = import_huggingface(self.folder)
            except RegardError as error:
                return "refused", f"{description}: {error}"
            worst = 0.0
            for inputs in make_inputs(self.name, pipeline):
                try:
                    expected = run_hf_model(hf_model, self.name, inputs, needs_maps=False)
                except Exception:
                    return "refused by transformers", description
                try:
                    found = run_model(pipeline.model, self.name, inputs, needs_maps=False)
                except RegardError as error:  # more tokens than positions
                    return "refused", f"{description}: {error}"
                worst = max(worst, largest_difference(found.tensors, expected.tensors))
        kept = " (weights kept)" if keeps_weights else ""
        return "equal" if worst < TOLERANCE else "wrong", f"{description}{kept}: error {worst:.2g}"

    def _new_weights(self) -> Any:
        config = self.config_class.from_pretrained(self.folder)
        return make_model(self.transformers, self.name, config, self.folder)

    def _old_weights(self, seed: int) -> Any:
        (self.folder / "model.safetensors").write_bytes(self.base(seed).weights)
        hf_model, report = getattr(self.transformers, self.name).from_pretrained(
            self.folder, attn_implementation="eager", output_loading_info=True
        )
        if any(report.values()):
            raise ValueError(report)
        return hf_model.eval()


def _is_ignored(key: str) -> bool:
    return key in _IGNORED or any(part in key for part in _IGNORED_PARTS)
