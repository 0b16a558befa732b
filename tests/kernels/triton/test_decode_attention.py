"""Attention of one new token per hypothesis against its twins and a loop: on a GPU, or in Triton's interpreter."""

import pytest
import torch

from regard.kernels.triton import decode_attention as kernels
from regard.kernels.triton.decode_attention import (
    decode_attention,
    decode_cross_attention,
    reference_decode_attention,
    reference_decode_cross_attention,
)
from regard.kernels.triton.support import is_interpreted, triton_available
from tests.attention.helpers import FakeCudaTensor
from tests.kernels.triton.helpers import combine

pytestmark = pytest.mark.skipif(not triton_available(), reason="needs Triton")

DEVICE = "cpu" if is_interpreted() else "cuda"
# The interpreter cannot multiply bf16; float16 takes the same path through the kernel.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3} | ({} if is_interpreted() else {torch.bfloat16: 1e-2})

# Positions per slot (negative: empty slot), hypotheses, heads of queries, of keys, width, capacity, bias, rotary.
CASES = {
    "first token": ([0, 0], 1, 2, 2, 16, 5, False, False),
    "greedy": ([3, -1, 40, 0], 1, 2, 2, 64, 41, False, False),
    "greedy with bias and rotary": ([17, -1, 3], 1, 2, 2, 32, 19, True, True),
    "grouped heads": ([5, 33], 1, 6, 2, 32, 35, True, False),
    "beam of 2": ([4, -1], 2, 2, 2, 16, 9, False, True),
    "beam of 4": ([15, 0, -1, 7], 4, 2, 2, 64, 17, False, False),
    "beam of 5, grouped heads": ([9, 30, -1], 5, 3, 1, 32, 31, True, True),
    "wide": ([20], 4, 1, 1, 128, 30, True, False),
    "odd width": ([6, 2], 2, 2, 1, 24, 8, False, True),
}


def make_inputs(case, dtype):
    positions, K, H, G, D, S, has_bias, has_rotary = CASES[case]
    torch.manual_seed(0)
    B = len(positions)
    caches = torch.randn(2, B, G, S, K, D)
    for b, position in enumerate(positions):  # what was never stored must not matter
        caches[:, b, :, max(0, position) :] = torch.nan
    angles = torch.rand(S, D // 2) * 6
    rotary = torch.cat((angles.cos(), angles.sin()), -1) if has_rotary else None
    tensors = {
        "qkv": torch.randn(B * K, (H + 2 * G) * D).to(dtype),
        "k_cache": caches[0].to(dtype),
        "v_cache": caches[1].to(dtype),
        "ancestors": torch.randint(K, (B, K, S), dtype=torch.int32) if K > 1 else None,
        "positions": torch.tensor(positions, dtype=torch.int32),
        "bias": torch.randn(H, S) if has_bias else None,
        "rotary": rotary,
    }
    tensors = {name: tensor if tensor is None else tensor.to(DEVICE) for name, tensor in tensors.items()}
    return tensors | {"heads": H, "scale": D**-0.5}


def to_double(inputs):
    return {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in inputs.items()
    }


def expected_output(inputs):
    """Attention of each hypothesis and head in a loop, in float64; stores nothing."""
    x = to_double(inputs)
    B, G, _, K, D = x["k_cache"].shape
    H = x["heads"]
    out = torch.zeros(B * K, H * D, dtype=torch.float64)
    for b, position in enumerate(x["positions"].tolist()):
        for k in range(K if position >= 0 else 0):
            qkv = x["qkv"][b * K + k].view(-1, D)
            if x["rotary"] is not None:
                cos, sin = x["rotary"][position].chunk(2)
                first, second = qkv[: H + G].chunk(2, -1)
                rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
                qkv = torch.cat((rotated, qkv[H + G :]))
            for h in range(H):
                g = h // (H // G)
                columns = [0 if K == 1 else x["ancestors"][b, k, s].item() for s in range(position)]
                keys = [x["k_cache"][b, g, s, column] for s, column in enumerate(columns)] + [qkv[H + g]]
                values = [x["v_cache"][b, g, s, column] for s, column in enumerate(columns)] + [qkv[H + G + g]]
                scores = torch.stack(keys) @ qkv[h] * x["scale"]
                if x["bias"] is not None:
                    scores += x["bias"][h, : position + 1].flip(0)
                out[b * K + k, h * D : (h + 1) * D] = scores.softmax(0) @ torch.stack(values)
    return out


def assert_norms_close(actual, expected, tolerance):
    assert torch.isfinite(actual).all()
    assert (actual.double().cpu() - expected.cpu()).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize(("case", "dtype", "splits"), combine(2, list(CASES), list(TOLERANCE), [1, 4]), ids=str)
def test_kernel_equals_loop(case, dtype, splits, monkeypatch):
    monkeypatch.setattr(kernels, "_splits", lambda programs, positions: splits)
    inputs = make_inputs(case, dtype)
    expected = expected_output({name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()})
    plain_inputs = inputs | {name: inputs[name].clone() for name in ("k_cache", "v_cache")}
    plain = reference_decode_attention(**plain_inputs)
    out = decode_attention(**inputs)
    assert out.dtype == dtype
    assert_norms_close(out, expected, TOLERANCE[dtype])
    assert_norms_close(plain, expected, TOLERANCE[dtype])
    for name in ("k_cache", "v_cache"):  # the new keys and values, and no others, were stored
        torch.testing.assert_close(inputs[name], plain_inputs[name], equal_nan=True, rtol=1e-2, atol=1e-2)
    assert (out.view(len(inputs["positions"]), -1)[inputs["positions"] < 0] == 0).all()


def test_steps_equal_attention_over_the_whole_sequence():
    """Greedy decoding step by step; empty caches at the start."""
    torch.manual_seed(0)
    B, H, D, S = 2, 2, 16, 6
    qkv = torch.randn(S, B, 3 * H * D, device=DEVICE)
    k_cache, v_cache = torch.full((2, B, H, S, 1, D), torch.nan, device=DEVICE)
    outputs = []
    for s in range(S):
        positions = torch.full((B,), s, dtype=torch.int32, device=DEVICE)
        outputs.append(decode_attention(qkv[s], k_cache, v_cache, None, positions, heads=H, scale=0.25))
    q, k, v = qkv.view(S, B, 3, H, D).permute(2, 1, 3, 0, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(torch.stack(outputs).view(S, B, H, D), expected.permute(2, 0, 1, 3))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("lengths", "K", "H", "G", "D", "M"),
    [
        ([1], 1, 1, 1, 16, 1),
        ([30, 0, 7], 1, 2, 2, 64, 33),
        ([30, 0, 7, 100], 4, 2, 2, 32, 100),
        ([5, 66], 5, 3, 1, 128, 70),
        ([3, 2], 1, 6, 2, 24, 5),
    ],
)
def test_cross_attention_equals_torch(lengths, K, H, G, D, M, dtype):
    torch.manual_seed(0)
    B = len(lengths)
    q = torch.randn(B * K, H * D, device=DEVICE).to(dtype)
    k, v = torch.randn(B, 2, G, M, D, device=DEVICE).to(dtype).unbind(1)
    for b, length in enumerate(lengths):
        k[b, :, length:] = v[b, :, length:] = torch.nan
    arguments = torch.tensor(lengths, dtype=torch.int32, device=DEVICE), {"heads": H, "scale": D**-0.5}
    expected = torch.zeros(B, K, H, D, dtype=torch.float64)
    for b, length in enumerate(lengths):
        for h in range(H if length else 0):
            keys, values = (x[b, h // (H // G), :length].double().cpu() for x in (k, v))
            scores = q.view(B, K, H, D)[b, :, h].double().cpu() @ keys.T * D**-0.5
            expected[b, :, h] = scores.softmax(-1) @ values
    for function in (decode_cross_attention, reference_decode_cross_attention):
        out = function(q, k, v, arguments[0], **arguments[1])
        assert out.dtype == dtype
        assert_norms_close(out, expected.view(B * K, H * D), TOLERANCE[dtype])


def test_splits_depend_on_shapes():
    assert kernels._splits(programs=12, positions=1024) == 8
    assert kernels._splits(programs=96, positions=1024) == 4
    assert kernels._splits(programs=768, positions=1024) == 1
    assert kernels._splits(programs=8, positions=128) == 1


def test_supported_inputs():
    q = torch.zeros(4, 48, dtype=torch.bfloat16).as_subclass(FakeCudaTensor)
    k = torch.zeros(2, 1, 5, 2, 16, dtype=torch.bfloat16)
    assert kernels.supports(q, k, 2, 1)
    assert not kernels.supports(q.as_subclass(torch.Tensor), k, 2, 1)
    assert not kernels.supports(q.double(), k, 2, 1)
    assert not kernels.supports(q, k.transpose(2, 3), 2, 1)
    assert not kernels.supports(q, k, 2, 64)
    assert not kernels.supports(q, k.new_zeros(2, 1, 5, 2, 512), 2, 1)
