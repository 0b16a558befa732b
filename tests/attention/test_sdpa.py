"""SDPA with padding: masks are cached and computed only as needed; conditions for calling cuDNN directly."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from regard.attention import attend, causal, explain, masks, padding, use
from regard.attention.backends import sdpa
from regard.attention.masks import KeyPadding, MaskParts
from regard.attention.reference import reference
from regard.attention.scores import ScaledDot
from tests.attention.helpers import FakeCudaTensor, Slope, random

CPU = torch.device("cpu")


@pytest.fixture
def computed(monkeypatch) -> list[int]:
    """The numbers of keys for which a padding mask was computed, in order."""
    key_counts: list[int] = []
    compute = KeyPadding._compute

    def record_and_compute(*arguments):
        key_counts.append(arguments[1])
        return compute(*arguments)

    monkeypatch.setattr(KeyPadding, "_compute", staticmethod(record_and_compute))
    return key_counts


def attend_with_sdpa(mask, S=5):
    q, k, v = (random(2, 1, S, 4, seed=i) for i in range(3))
    with use("sdpa"):
        out = attend(q, k, v, mask=mask)
    torch.testing.assert_close(out, reference(q, k, v, ScaledDot(), mask))
    return out


def test_calls_with_the_same_lengths_share_a_mask(computed):
    lengths = torch.tensor([5, 2])
    mask = padding(lengths)
    attend_with_sdpa(mask)
    attend_with_sdpa(mask)
    attend_with_sdpa(causal() & mask)
    assert computed == [5]
    attend_with_sdpa(mask, S=7)
    assert computed == [5, 7]
    assert KeyPadding.from_lengths(lengths, 7, CPU, torch.float64) is KeyPadding.from_lengths(
        lengths, 7, CPU, torch.float64
    )


@pytest.mark.parametrize("mask", [None, padding(torch.tensor([70, 33, 0]))])
def test_bias_without_gradients_equals_the_reference(mask):
    q, k, v = (random(3, heads, length, 4, seed=i) for i, (heads, length) in enumerate(((4, 65), (2, 70), (2, 70))))
    bias = Slope(4).double()
    with torch.no_grad(), explain() as choices:
        out = attend(q, k, v, mask=mask, bias=bias)
    assert choices[0].backend == "sdpa"
    torch.testing.assert_close(out, reference(q, k, v, ScaledDot(), mask, bias))


def test_modified_lengths_invalidate_the_cache(computed):
    lengths = torch.tensor([5, 2])
    mask = padding(lengths)
    before = attend_with_sdpa(mask)
    lengths[1] = 3
    assert not torch.equal(attend_with_sdpa(mask), before)
    lengths[0] = 0
    assert (attend_with_sdpa(mask)[0] == 0).all()
    assert computed == [5, 5, 5]


def test_cache_does_not_keep_lengths_alive():
    lengths = torch.tensor([5, 2])
    attend_with_sdpa(padding(lengths))
    assert lengths in masks._cache
    reference_to_lengths = weakref.ref(lengths)
    del lengths
    gc.collect()
    assert reference_to_lengths() is None


def test_masks_of_inference_tensors_are_not_cached(computed):
    with torch.inference_mode():
        lengths = torch.tensor([5, 2])
        attend_with_sdpa(padding(lengths))
        lengths[1] = 3
        attend_with_sdpa(padding(lengths))
    assert computed == [5, 5]


def test_mask_computed_in_inference_mode_works_with_autograd():
    lengths = torch.tensor([5, 0])
    with torch.inference_mode():
        attend_with_sdpa(padding(lengths))
    q, k, v = (random(2, 1, 5, 4, seed=i).requires_grad_() for i in range(3))
    with use("sdpa"):
        attend(q, k, v, mask=padding(lengths)).sum().backward()
    assert (q.grad[1] == 0).all()


def test_masks_are_not_cached_during_graph_capture(computed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    lengths, device = torch.tensor([5, 2]), torch.device("cuda")
    monkeypatch.setattr(KeyPadding, "_compute", staticmethod(lambda *arguments: computed.append(arguments[1])))
    KeyPadding.from_lengths(lengths, 5, device, torch.float32)
    KeyPadding.from_lengths(lengths, 5, device, torch.float32)
    assert computed == [5, 5]


@pytest.mark.parametrize(("lengths", "times"), [([5, 1], 0), ([5, 0], 1)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_output_is_multiplied_only_if_a_sequence_is_empty(lengths, times, is_causal):
    mask = padding(torch.tensor(lengths))
    q, k, v = (random(2, 1, 5, 4, seed=i) for i in range(3))
    with torch.profiler.profile() as profile, use("sdpa"):
        attend(q, k, v, mask=causal() & mask if is_causal else mask)
    # The mask column of the causal case is one more multiplication.
    assert sum(event.name == "aten::mul" for event in profile.events()) == times + is_causal


def test_compiled_code_does_not_read_lengths(computed):
    def has_keys(lengths):
        return KeyPadding.from_lengths(lengths, 3, CPU, torch.float32).has_keys

    compiled = torch.compile(has_keys, backend="eager", fullgraph=True)
    assert compiled(torch.tensor([1, 2])).flatten().tolist() == [True, True]
    assert compiled(torch.tensor([1, 0])).flatten().tolist() == [True, False]


@pytest.mark.parametrize("shape", [(7, 7, 2, 6), (5, 7, 4, 6), (9, 7, 4, 3)], ids=str)
def test_cudnn_arguments(shape, monkeypatch):
    """With a fake that checks what cuDNN requires: as many queries as keys, and equal heads and widths."""
    T, S, G, Dv = shape
    bias_shapes = []

    def fake_cudnn(q, k, v, bias, compute_lse, *, is_causal, scale):
        assert q.shape == k.shape == v.shape
        assert is_causal
        assert compute_lse == torch.is_grad_enabled()
        bias_shapes.append(bias.shape)
        is_future = torch.ones(S, S, dtype=torch.bool).triu(1)
        return ((scale * q @ k.mT + bias).masked_fill(is_future, float("-inf")).softmax(-1) @ v, None)

    def compute_with_bias(*arguments):
        keys = compute(*arguments)
        return replace(keys, bias=masks._as_bias(keys.allowed, torch.float64))

    compute = KeyPadding._compute
    monkeypatch.setattr(KeyPadding, "_compute", staticmethod(compute_with_bias))
    monkeypatch.setattr(sdpa, "cudnn_supports", lambda q, k, v: True)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", fake_cudnn)
    tensors = random(3, 4, T, 6), random(3, G, S, 6, seed=1), random(3, G, S, Dv, seed=2)
    for mask in (causal() & padding(torch.tensor([7, 0, 3])), padding(torch.tensor([7, 0, 3]))):
        inputs, exact_inputs = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
        with use("sdpa"):
            out = attend(*inputs, mask=mask)
        expected = reference(*exact_inputs, ScaledDot(), mask)
        torch.testing.assert_close(out, expected)
        expected_grads = torch.autograd.grad(expected.sum(), exact_inputs)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), inputs), expected_grads)
    assert bias_shapes == [(3, 1, 1, S)]  # without a causal mask SDPA supports the bias


def test_lengths_on_two_devices_are_moved_off_the_cpu():
    cpu, meta = torch.tensor([5, 2]), torch.empty(2, dtype=torch.long, device="meta")
    for a, b in ((cpu, meta), (meta, cpu)):
        assert MaskParts(lengths=a).intersect(MaskParts(lengths=b)).lengths.device.type == "meta"


@pytest.mark.parametrize(
    ("changes", "supported"),
    [
        ({}, True),
        ({"dtype": torch.float16, "width": 128}, True),
        ({"dtype": torch.float32}, False),
        ({"width": 136}, False),
        ({"keys": 1}, False),
        ({"keys": 2}, True),
        ({"batch": 65536}, False),
        ({"capability": (8, 9)}, False),
        ({"capability": (10, 0)}, True),
        ({"enabled": False}, False),
        ({"deterministic": True}, False),
        ({"cuda": False}, False),
        ({"hip": "7.0"}, False),
    ],
    ids=str,
)
def test_cudnn_supports(changes, supported, monkeypatch):
    case = {"dtype": torch.bfloat16, "width": 64, "keys": 8, "batch": 2, "capability": (9, 0)} | changes
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: case["capability"])
    monkeypatch.setattr(torch.version, "hip", case.get("hip"))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: case.get("deterministic", False))
    x = torch.zeros(1, dtype=case["dtype"]).expand(case["batch"], 2, case["keys"], case["width"])
    x = x.as_subclass(FakeCudaTensor) if case.get("cuda", True) else x
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(case.get("enabled", True))
    try:
        assert sdpa.cudnn_supports(x, x, x) == supported
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("lengths_device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(37, 37, 4, 24), (33, 45, 2, 20), (45, 33, 4, 24), (2, 2, 4, 16), (256, 256, 4, 24)])
def test_cuda_causal_and_padding_equals_reference(shape, dtype, lengths_device):
    T, S, G, Dv = shape
    tensors = random(3, 4, T, 24), random(3, G, S, 24, seed=1), random(3, G, S, Dv, seed=2)
    for lengths in ([S, 0, S // 2], [S, 1, S // 2]):
        mask = causal() & padding(torch.tensor(lengths, device=lengths_device))
        inputs = [x.to("cuda", dtype).requires_grad_() for x in tensors]
        exact_inputs = [x.detach().cpu().double().requires_grad_() for x in inputs]
        grad = random(3, 4, T, Dv, seed=3).to(dtype)
        with use("sdpa"):
            out = attend(*inputs, mask=mask)
        expected = reference(*exact_inputs, ScaledDot(), causal() & padding(torch.tensor(lengths)))
        pairs = [(out, expected)]
        grads = torch.autograd.grad(out, inputs, grad.cuda())
        pairs += zip(grads, torch.autograd.grad(expected, exact_inputs, grad.double()))
        for actual, exact in pairs:
            exact = exact.detach()
            error = (actual.detach().cpu().double() - exact).norm()
            assert error < 0.03 * (exact.norm() + 0.01 * exact.numel() ** 0.5)
        assert (out[1] == 0).all() == (lengths[1] == 0)
