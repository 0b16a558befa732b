"""SDPA with lengths: what is made of them is made once, and only what is needed; when cuDNN is asked by itself."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from regard.attention import attend, causal, masks, padding, use
from regard.attention.kernels import sdpa
from regard.attention.masks import Form, Keys
from regard.attention.reference import reference
from regard.attention.scores import ScaledDot
from tests.attention.helpers import OnGPU, random

CPU = torch.device("cpu")


@pytest.fixture
def made(monkeypatch) -> list[int]:
    """For how many keys something was made of lengths, each time that it was."""
    numbers: list[int] = []
    make = Keys._made
    monkeypatch.setattr(Keys, "_made", staticmethod(lambda *given: (numbers.append(given[1]), make(*given))[1]))
    return numbers


def attended(mask, S=5):
    q, k, v = (random(2, 1, S, 4, seed=i) for i in range(3))
    with use("sdpa"):
        out = attend(q, k, v, mask=mask)
    torch.testing.assert_close(out, reference(q, k, v, ScaledDot(), mask))
    return out


def test_calls_that_share_lengths_share_what_is_made_of_them(made):
    lengths = torch.tensor([5, 2])
    mask = padding(lengths)
    attended(mask)
    attended(mask)
    attended(causal() & mask)
    assert made == [5]
    attended(mask, S=7)
    assert made == [5, 7]
    assert Keys.of(lengths, 7, CPU, torch.float64) is Keys.of(lengths, 7, CPU, torch.float64)


def test_lengths_that_were_changed_are_noticed(made):
    lengths = torch.tensor([5, 2])
    mask = padding(lengths)
    before = attended(mask)
    lengths[1] = 3
    assert not torch.equal(attended(mask), before)
    lengths[0] = 0
    assert (attended(mask)[0] == 0).all()
    assert made == [5, 5, 5]


def test_nothing_holds_the_lengths():
    lengths = torch.tensor([5, 2])
    attended(padding(lengths))
    assert lengths in masks._kept
    there = weakref.ref(lengths)
    del lengths
    gc.collect()
    assert there() is None


def test_tensors_of_inference_mode_are_not_kept(made):
    with torch.inference_mode():
        lengths = torch.tensor([5, 2])
        attended(padding(lengths))
        lengths[1] = 3
        attended(padding(lengths))
    assert made == [5, 5]


def test_made_in_inference_mode_and_used_outside_of_it():
    lengths = torch.tensor([5, 0])
    with torch.inference_mode():
        attended(padding(lengths))
    q, k, v = (random(2, 1, 5, 4, seed=i).requires_grad_() for i in range(3))
    with use("sdpa"):
        attend(q, k, v, mask=padding(lengths)).sum().backward()
    assert (q.grad[1] == 0).all()


def test_nothing_is_kept_while_a_graph_is_captured(made, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    lengths, device = torch.tensor([5, 2]), torch.device("cuda")
    monkeypatch.setattr(Keys, "_made", staticmethod(lambda *given: made.append(given[1])))
    Keys.of(lengths, 5, device, torch.float32)
    Keys.of(lengths, 5, device, torch.float32)
    assert made == [5, 5]


@pytest.mark.parametrize(("lengths", "times"), [([5, 1], 0), ([5, 0], 1)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_output_is_multiplied_only_where_a_sequence_is_empty(lengths, times, is_causal):
    mask = padding(torch.tensor(lengths))
    q, k, v = (random(2, 1, 5, 4, seed=i) for i in range(3))
    with torch.profiler.profile() as profile, use("sdpa"):
        attend(q, k, v, mask=causal() & mask if is_causal else mask)
    # The mask as a width multiplies its one column.
    assert sum(event.name == "aten::mul" for event in profile.events()) == times + is_causal


def test_lengths_that_are_compiled_are_not_asked(made):
    def zeros_for_the_second(lengths):
        return Keys.of(lengths, 3, CPU, torch.float32).seeing

    compiled = torch.compile(zeros_for_the_second, backend="eager", fullgraph=True)
    assert compiled(torch.tensor([1, 2])).flatten().tolist() == [True, True]
    assert compiled(torch.tensor([1, 0])).flatten().tolist() == [True, False]


@pytest.mark.parametrize("shape", [(7, 7, 2, 6), (5, 7, 4, 6), (9, 7, 4, 3)], ids=str)
def test_what_cudnn_is_asked(shape, monkeypatch):
    """By a stand-in that does as it is told and takes what cuDNN takes: a square, and equal heads and widths."""
    T, S, G, Dv = shape
    asked = []

    def stand_in(q, k, v, bias, keep, *, is_causal, scale):
        assert q.shape == k.shape == v.shape
        assert is_causal
        assert keep == torch.is_grad_enabled()
        asked.append(bias.shape)
        ahead = torch.ones(S, S, dtype=torch.bool).triu(1)
        return ((scale * q @ k.mT + bias).masked_fill(ahead, float("-inf")).softmax(-1) @ v, None)

    def with_bias(*given):
        keys = make(*given)
        return replace(keys, bias=masks._bias(keys.allowed, torch.float64))

    make = Keys._made
    monkeypatch.setattr(Keys, "_made", staticmethod(with_bias))
    monkeypatch.setattr(sdpa, "cudnn_takes", lambda q, k, v: True)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", stand_in)
    tensors = random(3, 4, T, 6), random(3, G, S, 6, seed=1), random(3, G, S, Dv, seed=2)
    for mask in (causal() & padding(torch.tensor([7, 0, 3])), padding(torch.tensor([7, 0, 3]))):
        found, wanted = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
        with use("sdpa"):
            out = attend(*found, mask=mask)
        expected = reference(*wanted, ScaledDot(), mask)
        torch.testing.assert_close(out, expected)
        for one, other in zip(torch.autograd.grad(out.sum(), found), torch.autograd.grad(expected.sum(), wanted)):
            torch.testing.assert_close(one, other)
    assert asked == [(3, 1, 1, S)]  # without a causal mask SDPA takes the bias


def test_lengths_on_two_devices_meet_where_it_is_not_the_cpu():
    here, there = torch.tensor([5, 2]), torch.empty(2, dtype=torch.long, device="meta")
    for one, other in ((here, there), (there, here)):
        assert Form(lengths=one).both(Form(lengths=other)).lengths.device.type == "meta"


@pytest.mark.parametrize(
    ("changes", "taken"),
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
def test_when_cudnn_is_asked_by_itself(changes, taken, monkeypatch):
    given = {"dtype": torch.bfloat16, "width": 64, "keys": 8, "batch": 2, "capability": (9, 0)} | changes
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: given["capability"])
    monkeypatch.setattr(torch.version, "hip", given.get("hip"))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: given.get("deterministic", False))
    x = torch.zeros(1, dtype=given["dtype"]).expand(given["batch"], 2, given["keys"], given["width"])
    x = x.as_subclass(OnGPU) if given.get("cuda", True) else x
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(given.get("enabled", True))
    try:
        assert sdpa.cudnn_takes(x, x, x) == taken
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(37, 37, 4, 24), (33, 45, 2, 20), (45, 33, 4, 24), (2, 2, 4, 16), (256, 256, 4, 24)])
def test_cuda_causal_and_padding(shape, dtype, where):
    T, S, G, Dv = shape
    tensors = random(3, 4, T, 24), random(3, G, S, 24, seed=1), random(3, G, S, Dv, seed=2)
    for lengths in ([S, 0, S // 2], [S, 1, S // 2]):
        mask = causal() & padding(torch.tensor(lengths, device=where))
        found = [x.to("cuda", dtype).requires_grad_() for x in tensors]
        wanted = [x.detach().cpu().double().requires_grad_() for x in found]
        grad = random(3, 4, T, Dv, seed=3).to(dtype)
        with use("sdpa"):
            out = attend(*found, mask=mask)
        expected = reference(*wanted, ScaledDot(), causal() & padding(torch.tensor(lengths)))
        pairs = [(out, expected)]
        pairs += zip(torch.autograd.grad(out, found, grad.cuda()), torch.autograd.grad(expected, wanted, grad.double()))
        for one, other in pairs:
            other = other.detach()
            error = (one.detach().cpu().double() - other).norm()
            assert error < 0.03 * (other.norm() + 0.01 * other.numel() ** 0.5)
        assert (out[1] == 0).all() == (lengths[1] == 0)
