"""Random changes of single config keys: a model is either refused, or computes what transformers computes."""

import copy
import json
import random
import warnings
from typing import Any

import pytest
import torch

from regard.errors import RegardError
from regard.interop import import_huggingface
from regard.layers.packed import pack
from tests.interop.huggingface import test_bert_models, test_gpt_models
from tests.interop.model_comparison import ROWS, random_model

# Changes per class in the tests; `benchmarks/formats.py` tries more.
CHANGES = 6
CHOICES: dict[str, list[Any]] = {
    "hidden_act": ["silu", "gelu", "gelu_pytorch_tanh", "relu", "quick_gelu"],
    "layer_types": [None, ["full_attention"] * 2, ["sliding_attention"] * 3, ["sliding_attention", "full_attention"]],
    "no_rope_layers": [None, [0, 0], [1, 1], [0, 1], [1]],
    "rope_parameters": [
        None,
        {"rope_type": "default", "rope_theta": 77.0},
        {"rope_type": "linear", "rope_theta": 77.0, "factor": 2.0},
        {"rope_type": "dynamic", "rope_theta": 77.0, "factor": 2.0},
        {"rope_type": "yarn", "rope_theta": 77.0, "factor": 2.0, "original_max_position_embeddings": 20},
        {"rope_type": "yarn", "rope_theta": 77.0, "factor": 2.0, "mscale": 0.5, "mscale_all_dim": 2.0},
        {"rope_type": "default", "rope_theta": 77.0, "partial_rotary_factor": 0.5},
    ],
}
CHOICES["hidden_activation"] = CHOICES["activation_function"] = CHOICES["activation"] = CHOICES["hidden_act"]
EXTRA = ["sliding_window", "use_sliding_window", "max_window_layers", "attn_logit_softcapping", "layer_types"]
EXTRA += ["final_logit_softcapping", "query_pre_attn_scalar", "rope_theta", "use_bidirectional_attention", "head_dim"]
# Not part of the computation on a text, or of the type of the model.
IGNORED = ("architectures", "model_type", "dtype", "transformers_version", "vocab_size", "id2label", "label2id")
REMOVED = object()


def random_value(key: str, value: Any, rng: random.Random) -> Any:
    if rng.random() < 0.15:
        return REMOVED
    if key in CHOICES:
        return rng.choice(CHOICES[key])
    if isinstance(value, bool) or key.startswith("use_"):
        return rng.choice([True, False])
    if isinstance(value, float):
        return rng.choice([value * 2, value / 3, 0.5, 0.0, None])
    return rng.choice([1, 2, 3, 4, 6, 12, 24, 0.5, None])


def change_config(table: dict[str, Any], rng: random.Random) -> tuple[str, Any, dict[str, Any]]:
    """A key, its new value (or REMOVED), and the changed table."""
    keys = [key for key in {**table, **dict.fromkeys(EXTRA)} if key not in IGNORED and "token_id" not in key]
    key = rng.choice(keys)
    value = random_value(key, table.get(key), rng)
    changed = copy.deepcopy(table) | {key: value}
    if value is REMOVED:
        del changed[key]
    return key, value, changed


@torch.no_grad()
def largest_error(transformers: Any, folder: Any, name: str) -> float | None:
    """The difference of the outputs for each text alone; None if Regard or transformers refuses the folder."""
    try:
        pipeline = import_huggingface(folder)
    except RegardError:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hf_model, report = getattr(transformers, name).from_pretrained(
                folder, attn_implementation="eager", output_loading_info=True
            )
        if any(report.values()):
            return None
        expected = [hf_model.eval()(input_ids=torch.tensor([row])) for row in ROWS]
    except Exception:  # transformers raises many kinds of errors for invalid configs
        return None
    worst = 0.0
    for row, output in zip(ROWS, expected):
        try:
            found = pipeline.model(pack([row]))
        except RegardError:  # more tokens than positions
            return None
        reference = output[0] if "logits" not in output else output.logits
        worst = max(worst, float((found - reference.reshape(found.shape)).abs().max()))
    return worst


def base_models() -> dict[str, tuple[str, dict[str, Any]]]:
    """A class, its config class and a small config, by the name of the class."""
    found = {name: (config, sizes) for name, config, sizes in reversed(test_gpt_models.CASES)}
    for family, (sizes, *_) in test_bert_models.CONFIGS.items():
        found[f"{family}ForTokenClassification"] = f"{family}Config", sizes
    return found


@pytest.mark.parametrize("name", base_models())
def test_changed_configs_are_refused_or_exact(transformers, tmp_path, name):
    config, sizes = base_models()[name]
    random_model(getattr(transformers, name), getattr(transformers, config)(**sizes), tmp_path)
    path = tmp_path / "config.json"
    table = json.loads(path.read_text())
    for seed in range(CHANGES):
        key, value, changed = change_config(table, random.Random(f"{name} {seed}"))
        path.write_text(json.dumps(changed))
        error = largest_error(transformers, tmp_path, name)
        assert error is None or error < 1e-4, (key, value, error)
