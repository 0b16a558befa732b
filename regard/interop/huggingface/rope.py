"""Rotary positions and sliding windows in configs of transformers, in both directions."""

from collections.abc import Mapping, Sequence
from typing import Any

from regard.interop.foreign_config import ForeignConfig
from regard.layers.positions import HIGH_FREQ_FACTOR, LOW_FREQ_FACTOR, YARN_ROTATIONS
from regard.models.bert import BertConfig
from regard.models.gpt import GPTConfig

_SUPPORTED_TYPES = ("default", "linear", "llama3", "yarn", "dynamic")
# Options of YaRN and the values that change nothing; the attention factor follows from the factor.
_YARN_OPTIONS = {
    "beta_slow": YARN_ROTATIONS[0],
    "beta_fast": YARN_ROTATIONS[1],
    "attention_factor": None,
    "mscale": None,
    "mscale_all_dim": None,
    "truncate": True,
}

# -- rotary positions -------------------------------------------------------------------------------------------------


def read_rope(settings: ForeignConfig, default_base: float = 10000.0, partial: float | None = None) -> dict[str, Any]:
    """Fields of rotary positions. transformers 5 keeps them in one table, earlier versions in several keys.

    `partial` is the default share of rotated channels; None: the class rotates all.

    >>> read_rope(ForeignConfig({"rope_theta": 500.0}, "config.json"))
    {'rotary_base': 500.0}
    """
    key = "rope_scaling" if settings.table.get("rope_scaling") else "rope_parameters"
    rope = _rope_table(settings, key, settings.table.get(key))
    return _read_rope_table(settings, key, rope, settings.get_float("rope_theta", default_base), partial)


def _rope_table(settings: ForeignConfig, key: str, table: Any) -> ForeignConfig:
    if not isinstance(table or {}, dict):
        raise settings.unsupported(key, "expected a table")
    return ForeignConfig(table or {}, settings.origin)


def _read_rope_table(
    settings: ForeignConfig, key: str, rope: ForeignConfig, base: float, partial: float | None = None
) -> dict[str, Any]:
    rope_type = rope.table.get("rope_type", rope.table.get("type", "default"))
    if rope_type not in _SUPPORTED_TYPES:
        raise settings.unsupported(key, f"expected a rope_type among {', '.join(_SUPPORTED_TYPES)}")
    fields: dict[str, Any] = {"rotary_base": rope.get_float("rope_theta", base)}
    if partial is None:
        for config in (settings, rope):
            config.require("partial_rotary_factor", 1.0)
    else:
        default = settings.get_float("partial_rotary_factor", partial)
        fields["rotary_share"] = rope.get_float("partial_rotary_factor", default)
    if rope_type == "default":
        return fields
    fields["rotary_factor"] = rope.get_float("factor", 0.0)
    if fields["rotary_factor"] < 1:
        raise settings.unsupported(key, "its factor must be at least 1")
    if rope_type == "llama3":
        rope.require("low_freq_factor", LOW_FREQ_FACTOR)
        rope.require("high_freq_factor", HIGH_FREQ_FACTOR)
    if rope_type in ("llama3", "yarn"):
        fields["rotary_context"] = rope.get_count("original_max_position_embeddings")
        # transformers prefers the key outside of the table.
        settings.require("original_max_position_embeddings", fields["rotary_context"])
    if rope_type == "yarn":
        for option, value in _YARN_OPTIONS.items():
            rope.require(option, value)
        if fields["rotary_base"] <= 1:
            raise settings.unsupported(key, "its rope_theta must be above 1")
        fields["rotary_scaling"] = "yarn"
    if rope_type == "dynamic":
        fields |= {"rotary_scaling": "dynamic", "rotary_context": settings.get_count("max_position_embeddings")}
    return fields


def write_rope(config: GPTConfig) -> dict[str, Any]:
    """The keys of transformers 5, and those of earlier versions and other programs.

    >>> write_rope(GPTConfig(rotary_base=500.0))
    {'rope_parameters': {'rope_type': 'default', 'rope_theta': 500.0}, 'rope_theta': 500.0}
    """
    base: dict[str, Any] = {"rope_theta": config.rotary_base}
    if config.rotary_share != 1.0:
        base["partial_rotary_factor"] = config.rotary_share
    scaling = _write_scaling(config)
    if not scaling:
        return {"rope_parameters": {"rope_type": "default", **base}, **base}
    return {"rope_parameters": {**scaling, **base}, **base, "rope_scaling": scaling}


def _write_scaling(config: GPTConfig) -> dict[str, Any]:
    if config.rotary_factor == 1.0:
        return {}
    kind = {"yarn": "yarn", "dynamic": "dynamic"}.get(config.rotary_scaling)
    scaling = {"rope_type": kind or ("llama3" if config.rotary_context else "linear"), "factor": config.rotary_factor}
    if scaling["rope_type"] == "llama3":
        scaling |= {"low_freq_factor": LOW_FREQ_FACTOR, "high_freq_factor": HIGH_FREQ_FACTOR}
    if scaling["rope_type"] in ("llama3", "yarn"):
        scaling |= {"original_max_position_embeddings": config.rotary_context}
    return scaling


# A key of earlier versions and its default: the rotary base of layers with full attention, and with a sliding window.
RopeKey = tuple[str, float]
_GEMMA_BASE, _GEMMA_WINDOW_BASE = ("rope_theta", 1e6), ("rope_local_base_freq", 10000.0)


def read_rope_by_layer_type(
    settings: ForeignConfig, base: RopeKey = _GEMMA_BASE, window_base: RopeKey = _GEMMA_WINDOW_BASE
) -> dict[str, Any]:
    """Fields of rotary positions with a table per type of layer (Gemma 3, ModernBERT)."""
    tables = settings.table.get("rope_parameters") or {}
    if not isinstance(tables, dict):
        raise settings.unsupported("rope_parameters", "expected a table")
    rope = _rope_table(settings, "rope_parameters", tables.get("full_attention"))
    local = _rope_table(settings, "rope_parameters", tables.get("sliding_attention"))
    if settings.table.get("rope_scaling"):
        scaling = _rope_table(settings, "rope_scaling", settings.table["rope_scaling"])
        rope = rope.replace(scaling.table)
    fields = _read_rope_table(settings, "rope_parameters", rope, settings.get_float(*base))
    if fields.get("rotary_scaling") == "dynamic":
        raise settings.unsupported("rope_parameters", "expected a rope_type other than dynamic")
    local_fields = _read_rope_table(settings, "rope_parameters", local, settings.get_float(*window_base))
    if len(local_fields) > 1:
        raise settings.unsupported("rope_parameters", "expected rope_type default in layers with sliding_attention")
    return fields | {"window_rotary_base": local_fields["rotary_base"]}


def write_rope_by_layer_type(
    config: GPTConfig | BertConfig, base: RopeKey = _GEMMA_BASE, window_base: RopeKey = _GEMMA_WINDOW_BASE
) -> dict[str, Any]:
    """The opposite of `read_rope_by_layer_type`."""
    scaling = _write_scaling(config) if isinstance(config, GPTConfig) else {}
    local_base = config.window_rotary_base or config.rotary_base
    full = {"rope_type": "default", **scaling, "rope_theta": config.rotary_base}
    local = {"rope_type": "default", "rope_theta": local_base}
    old_keys: dict[str, Any] = {base[0]: config.rotary_base, window_base[0]: local_base}
    return {
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        **old_keys,
        **({"rope_scaling": scaling} if scaling else {}),
    }


# -- sliding windows --------------------------------------------------------------------------------------------------


def read_layer_types(settings: ForeignConfig, layers: int, window: int | None, default: Sequence[bool]) -> Any:
    """The field `sliding_windows` from the key layer_types; `default` are the layers with a window if it is missing.

    >>> read_layer_types(ForeignConfig({}, "config.json"), 4, 8, [True, False, True, False])
    (8, 0)
    """
    types = settings.table.get("layer_types")
    if types is None:
        has_window = list(default)
    else:
        if not isinstance(types, list) or len(types) != layers:
            raise settings.unsupported("layer_types", f"expected a list of {layers} types")
        if not set(types) <= {"full_attention", "sliding_attention"}:
            raise settings.unsupported("layer_types", "expected full_attention or sliding_attention in each layer")
        has_window = [layer_type == "sliding_attention" for layer_type in types]
    if not any(has_window):
        return ()
    if not window:
        raise settings.unsupported("sliding_window", "layers with sliding_attention need a window")
    windows = tuple(window if is_windowed else 0 for is_windowed in has_window)
    # The shortest pattern that gives the same windows.
    return next(windows[:n] for n in range(1, layers + 1) if (windows[:n] * layers)[:layers] == windows)


def layer_windows(config: GPTConfig | BertConfig) -> tuple[int, ...]:
    """The sliding window of each layer; () if there is none.

    >>> layer_windows(GPTConfig(layers=3, sliding_windows=(8, 0)))
    (8, 0, 8)
    """
    windows = tuple(config.sliding_window(i) for i in range(config.layers))
    return windows if any(windows) else ()


def write_layer_types(config: GPTConfig) -> dict[str, Any]:
    """The keys layer_types and sliding_window."""
    windows = layer_windows(config) or (0,) * config.layers
    types = ["sliding_attention" if window else "full_attention" for window in windows]
    return {"layer_types": types, "sliding_window": max(windows) or None}


def rotary_fields(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields of a config that matter for rotary positions only."""
    names = ("rotary_base", "rotary_factor", "rotary_context", "rotary_scaling", "rotary_share")
    return tuple(name for name in (*names, "unrotated_layers", "window_rotary_base") if name in config)
