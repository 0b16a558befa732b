"""Scenes for tests of the page: small and large, with random numbers similar to those of a trained model."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.viewer.page.text_scene import Scene, add_blob, text_direction
from regard.viewer.token_axis import TokenAxis

AXIS_LABELS = {"source": "Source", "target": "Target", "predicted": "Translation", "text": "Text"}
SOURCE = ["The", "cat", "chased", "the", "mouse", "through", "the", "garden", "."]
TARGET = ["Le", "chat", "a", "pour", "chas", "sé", "la", "souris", "à", "travers", "le", "jardin", "."]


def side(name: str, tokens: Sequence[str], words: Sequence[int] | None = None) -> TokenAxis:
    return TokenAxis(name, list(tokens), list(range(len(tokens)) if words is None else words))


def attention(
    name: str,
    kind: str,
    layer: int | None,
    q: np.ndarray,
    k: np.ndarray,
    sides: tuple[str, str],
    mask: dict[str, Any] | None = None,
    bias: np.ndarray | None = None,
    w: np.ndarray | None = None,
) -> dict[str, Any]:
    """The header of an attention that still contains its arrays (see `scene`). q is (T, H, D), k (S, G, D)."""
    return {
        "name": name,
        "kind": kind,
        "layer": layer,
        "heads": q.shape[1],
        "rows": sides[0],
        "columns": sides[1],
        "score": {
            "name": "scaled_dot" if w is None else "concat",
            "form": "dot" if w is None else "concat",
            "scale": q.shape[-1] ** -0.5 if w is None else 1.0,
        },
        "mask": mask,
        "q": q,
        "k": k,
        "bias": bias,
        "w": w,
    }


def scene(
    sides: Sequence[TokenAxis],
    attentions: Sequence[dict[str, Any]],
    texts: tuple[str, str],
    *,
    exact: bool = True,
    links: list[list[int]] | None = None,
    initial: dict[str, Any] | None = None,
) -> Scene:
    blobs: list[bytes] = []
    headers = [
        one
        | {part: add_blob(blobs, one[part], exact) for part in ("q", "k")}
        | {part: add_blob(blobs, one[part]) for part in ("w", "bias")}
        for one in attentions
    ]
    header = {
        "format": 1,
        "title": texts[0][:99],
        "model": {"family": "transformer", "name": "invented", "regard": "0"},
        "texts": {"source": texts[0], "target": texts[1]},
        "initial": initial,
        "sides": {
            one.name: {
                "title": AXIS_LABELS[one.name],
                "tokens": one.tokens,
                "words": one.words,
                "direction": text_direction(one),
            }
            for one in sides
        },
        "attentions": headers,
        "links": links,
    }
    return Scene(header, blobs)


def positional_qk(
    rng: np.random.Generator, centers: np.ndarray, length: int, heads: int, width: int, sharp: np.ndarray
) -> tuple:
    """q and k whose head h attends around `centers` with sharpness sharp[h], plus noise."""
    waves = np.exp(np.linspace(np.log(0.01), np.log(0.9), width // 4))
    here, there = centers[:, None] * waves, np.arange(length)[:, None] * waves
    q = rng.normal(0, 1.0, (len(centers), heads, width))
    k = rng.normal(0, 1.0, (length, heads, width))
    half = width // 2
    q[..., :half] = np.concatenate([np.cos(here), np.sin(here)], -1)[:, None] * sharp[None, :, None]
    k[..., :half] = np.concatenate([np.cos(there), np.sin(there)], -1)[:, None]
    return q.astype(np.float32), k.astype(np.float32)


def translation(
    source: Sequence[str],
    target: Sequence[str],
    layers: int = 2,
    heads: int = 4,
    width: int = 32,
    source_words: Sequence[int] | None = None,
    target_words: Sequence[int] | None = None,
    **other: Any,
) -> Scene:
    """The scene of a translator with `layers` layers of encoder, decoder and cross-attention."""
    rng = np.random.default_rng(7)
    S, T = len(source) + 1, len(target) + 1
    sw = [*(range(len(source)) if source_words is None else source_words), -1]
    tw = list(range(len(target)) if target_words is None else target_words)
    sides = [
        side("source", [*source, "<eos>"], sw),
        side("target", ["<sos>", *target], [-1, *tw]),
        side("predicted", [*target, "<eos>"], [*tw, -1]),
    ]
    attentions = []
    for kind, name, rows, columns in (
        ("self", "encoder.{}.attention", "source", "source"),
        ("masked", "decoder.{}.attention", "target", "target"),
        ("cross", "decoder.{}.cross", "predicted", "source"),
    ):
        n, m = (S if rows == "source" else T), (S if columns == "source" else T)
        for layer in range(layers):
            sharp = width**0.5 * rng.choice([0.4, 1.0, 2.2, 4.0], heads) * (0.6 + 0.5 * layer / layers)
            shift = rng.integers(-2, 3) if kind != "cross" else 0
            centers = np.arange(n) * (m / n) + shift
            q, k = positional_qk(rng, centers, m, heads, width, sharp)
            mask = {"op": "causal"} if kind == "masked" else None
            attentions.append(attention(name.format(layer), kind, layer, q, k, (rows, columns), mask))
    return scene(sides, attentions, (" ".join(source), " ".join(target)), **other)


def small(**other: Any) -> Scene:
    """A sentence and its translation, with two words split into pieces."""
    words = [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9, 10, 11]
    return translation(SOURCE, TARGET, target_words=words, **other)


def long(length: int, heads: int = 1, width: int = 64) -> Scene:
    """A long text with attention to nearby earlier tokens and to every 997th token."""
    rng = np.random.default_rng(3)
    tokens = [f"w{i}" for i in range(length)]
    sharp = width**0.5 * rng.choice([1.0, 2.5, 4.0], heads)
    q, k = positional_qk(rng, np.arange(length) - 3.0, length, heads, width, sharp)
    k[::997, :, -1] += 14
    q[..., -1] += 1.5
    one = attention("blocks.0.attention", "masked", 0, q, k, ("text", "text"), {"op": "causal"})
    return scene([side("text", tokens)], [one], (" ".join(tokens), ""), exact=False)
