"""Compiled attention kernels against torch."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from regard.kernels.cpu import decode_attention as kernels
from regard.layers.positions import Rotary

B, K, G, H, D, S = 3, 2, 2, 4, 6, 11
EMPTY, EMPTY_TABLE = np.empty(0, np.float32), np.empty((0, 0), np.float32)


def linear(rows, columns):
    """A float32 matrix product without scales, and its bias."""
    y, bias = torch.randn(rows, columns), torch.randn(columns)
    return (y.numpy(), np.ones(rows, np.float32), np.ones(columns, np.float32), bias.numpy()), y + bias


def expected_head(q, keys, values, factor, bias=0.0):
    return ((keys @ q) * factor + bias).softmax(0) @ values


@pytest.mark.parametrize("has_rotary", [True, False])
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_self_attention(has_rotary, has_norm, has_bias):
    torch.manual_seed(0)
    y, value = linear(B * K, (H + 2 * G) * D)
    cache = torch.randn(2, B, G, S, K, D)
    keys, values = cache.numpy().copy()
    ancestors = torch.randint(K, (B, K, S), dtype=torch.int32)
    positions = torch.tensor([4, -1, S - 1])
    for b, p in enumerate(positions.tolist()):
        ancestors[b, :, p] = torch.arange(K, dtype=torch.int32)
    q, k, v = value.view(B, K, -1, D).split([H, G, G], dim=2)
    gains = torch.rand(2, D)
    if has_norm:
        q, k = (torch.nn.functional.rms_norm(x, (D,), gain, 1e-6) for x, gain in zip((q, k), gains))
    rotary = EMPTY_TABLE
    if has_rotary:
        rotation = Rotary(D)
        angle = torch.arange(S)[:, None] * rotation.rates
        rotary = torch.cat((angle.cos(), angle.sin()), dim=1).numpy()
        q, k = (rotation(x, positions.clamp(min=0)[:, None].expand(B, K)) for x in (q, k))
    bias = torch.randn(H, S)
    out, scale = np.zeros((B * K, H * D), np.float32), np.ones(B * K, np.float32)
    q_gain, k_gain = (gain.numpy() if has_norm else EMPTY for gain in gains)
    kernels.self_attention(
        *(*y, keys, values, ancestors.numpy(), positions.numpy(), np.float32(0.4)),
        *(bias.numpy() if has_bias else EMPTY_TABLE, q_gain, k_gain, np.float32(1e-6), rotary, out, scale),
    )
    for b in (0, 2):
        p = int(positions[b])
        cache[0, b, :, p], cache[1, b, :, p] = k[b].transpose(0, 1), v[b].transpose(0, 1)
        assert_close(torch.from_numpy(keys[b, :, p]), cache[0, b, :, p])
        for j in range(K):
            columns = ancestors[b, j, : p + 1].long()
            for h in range(H):
                kv = cache[:, b, h // 2, torch.arange(p + 1), columns]
                added = bias[h, : p + 1].flip(0) if has_bias else 0.0
                result = torch.from_numpy(out[b * K + j, h * D : (h + 1) * D])
                assert_close(result, expected_head(q[b, j, h], *kv, 0.4, added))
    assert not out[K : 2 * K].any()


# 32, 64 and 128 have their own code.
@pytest.mark.parametrize("D", [6, 32, 64, 128])
@pytest.mark.parametrize("S", [11, 32, 37])
def test_cross_attention(D, S):
    torch.manual_seed(0)
    y, value = linear(B * K, H * D)
    keys, values = torch.randn(2, B, G, S, D)
    lengths = np.array([3, S, 1])
    for b, n in enumerate(lengths):  # what is beyond the end of a source has no effect
        keys[b, :, n:] = values[b, :, n:] = torch.nan
    out, scale = np.zeros((B * K, H * D), np.float32), np.ones(B * K, np.float32)
    kernels.cross_attention(
        *(*y, keys.numpy(), values.numpy(), lengths, np.zeros(B, np.int64), np.float32(1), EMPTY, np.float32(0)),
        *(out, scale),
    )
    for r in range(B * K):
        n = lengths[r // K]
        for h in range(H):
            kv = keys[r // K, h // 2, :n], values[r // K, h // 2, :n]
            result = torch.from_numpy(out[r, h * D : (h + 1) * D])
            assert_close(result, expected_head(value[r, h * D : (h + 1) * D], *kv, 1.0))


def test_encoder_attention():
    starts = np.array([0, 3, 4, 9])
    y, value = linear(9, (H + 2 * G) * D)
    out, scale = np.zeros((9, H * D), np.float32), np.ones(9, np.float32)
    kernels.encoder_attention(*y, starts, H, G, np.float32(0.5), out, scale)
    q, k, v = value.view(9, -1, D).split([H, G, G], dim=1)
    for first, last in pairwise(starts):
        for r in range(first, last):
            for h in range(H):
                expected = expected_head(q[r, h], k[first:last, h // 2], v[first:last, h // 2], 0.5)
                assert_close(torch.from_numpy(out[r, h * D : (h + 1) * D]), expected)


def test_store_keys_values():
    starts, slots = np.array([0, 3, 5]), np.array([2, 0])
    y, value = linear(5, 2 * G * D)
    keys, values = np.zeros((2, B, G, S, D), np.float32)
    kernels.store_keys_values(*y, starts, slots, EMPTY, np.float32(0), keys, values)
    k, v = value.view(5, 2, G, D).unbind(1)
    assert_close(torch.from_numpy(keys[2, :, :3]), k[:3].transpose(0, 1))
    assert_close(torch.from_numpy(values[0, :, :2]), v[3:].transpose(0, 1))
    assert not keys[1].any()
