"""Helpers for tests of scenes: a NumPy reference that computes attention weights from a scene."""

import itertools
import math

import numpy as np

from regard.viewer.page.text_scene import Scene


def numbers(seen: Scene, blob: dict) -> np.ndarray:
    """The array of a blob, dequantized."""
    raw, shape = seen.blobs[blob["at"]], blob["shape"]
    if blob["type"] == "float32":
        return np.frombuffer(raw, "<f4").reshape(shape).astype(float)
    assert blob["type"] == "uint16"
    channels = math.prod(shape[1:])
    low, step = np.frombuffer(raw, "<f4", 2 * channels).reshape(2, channels).astype(float)
    return (low + step * np.frombuffer(raw, "<u2", offset=8 * channels).reshape(-1, channels)).reshape(shape)


def is_allowed(mask: dict | None, p: int, s: int) -> bool:
    """Whether the mask allows the query at position p to attend to key s."""
    match mask:
        case None:
            return True
        case {"op": "causal"}:
            return s <= p
        case {"op": "window", "size": n}:
            return p - n < s <= p
        case {"op": "local", "size": n}:
            return abs(p - s) <= n
        case {"op": "lengths", "length": n}:
            return s < n
        case {"op": "and", "parts": parts}:
            return all(is_allowed(part, p, s) for part in parts)
        case {"op": "or", "parts": parts}:
            return any(is_allowed(part, p, s) for part in parts)
        case {"op": "not", "part": part}:
            return not is_allowed(part, p, s)
    raise AssertionError(mask)


def weights(seen: Scene, name: str) -> np.ndarray:
    """The weights (H, T, S) of an attention, computed from q and k of the scene."""
    (one,) = (one for one in seen.header["attentions"] if one["name"] == name)
    q, k = numbers(seen, one["q"]), numbers(seen, one["k"])
    (T, H, _), (S, G, _) = q.shape, k.shape
    assert one["heads"] == H
    assert [len(seen.header["sides"][one[axis]]["tokens"]) for axis in ("rows", "columns")] == [T, S]
    result = np.zeros((H, T, S))
    for h in range(H):
        keys = k[:, h * G // H]
        if one["score"]["form"] == "dot":
            relative = one["score"].get("relative")
            width = min(relative) if relative else q.shape[-1]
            logits = q[:, h, :width] @ keys[:, :width].T
            for t, s in itertools.product(range(T), range(S)) if relative else ():
                channel = relative[s - t + T - 1]
                logits[t, s] += q[t, h, channel] + keys[s, channel]
        else:
            logits = np.tanh(q[:, None, h] + keys) @ numbers(seen, one["w"])[h]
        logits = logits * one["score"]["scale"]
        if cap := one["score"].get("cap"):
            logits = cap * np.tanh(logits / cap)
        for t in range(T):
            if one["bias"] is not None:
                logits[t] += numbers(seen, one["bias"])[h, T - 1 - t :][:S]
            allowed = np.array([is_allowed(one["mask"], t + S - T, s) for s in range(S)])
            if allowed.any():
                e = np.exp(logits[t, allowed] - logits[t, allowed].max())
                result[h, t, allowed] = e / e.sum()
    return result
