"""Every backend on a GPU, in bf16 and float32, packed and padded, forward and backward, eager and compiled.

On a machine with a GPU: pytest tests/attention -k cuda
"""

import copy

import jaxtyping
import pytest
import torch

from regard.attention import Concat, Offsets, ScaledDot, attend, causal, explain, local, padding, record, use, window
from regard.attention.masks import Local, Window
from regard.attention.reference import reference, reference_packed
from tests.attention.helpers import MASK_NAMES, SCORE_NAMES, Slope, masks, random, scores

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DTYPES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def to_cuda(tensors, dtype):
    return [x.to("cuda", dtype).requires_grad_() for x in tensors]


def gradients(function, tensors, parameters, grad):
    out = function(*tensors)
    grads = torch.autograd.grad(out, [*tensors, *parameters], grad, allow_unused=True)
    return [out.detach(), *grads]


def assert_norms_close(actual, expected, tolerance, case, plain=None):
    """Compare the norms of errors with those of the tensors: half precision rounds each element, not each sum.

    Where large terms cancel, the error of the reference in the same dtype (`plain`) exceeds the tolerance; backends may
    have twice that error.
    """
    for i, (x, y) in enumerate(zip(actual, expected, strict=True)):
        if x is None or y is None:
            assert all(z is None or not z.any() for z in (x, y)), case
            continue
        assert torch.isfinite(x).all(), case
        y = y.double().cpu()
        error, norm = (x.double().cpu() - y).norm(), y.norm()
        plain_error = (plain[i].double().cpu() - y).norm() if plain is not None else 0.0
        # Gradients of parameters are sums over all queries and keys, and torch's kernels multiply float32 as sums of
        # TF32 products: their rounding errors do not cancel where the terms do.
        factor = 3 if i > 3 else 1
        allowed = max(factor * tolerance * (norm + 1e-2 * y.numel() ** 0.5), 2 * plain_error)
        assert error <= allowed, (case, float(error), float(norm), float(plain_error))


@pytest.fixture(autouse=True)
def disable_tf32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask_name", MASK_NAMES)
@pytest.mark.parametrize("shape", [(3, 4, 2, 37, 37, 16, 16), (2, 2, 2, 1, 70, 64, 64), (2, 4, 4, 66, 90, 24, 20)])
def test_cuda_padded_equals_reference(shape, mask_name, dtype):
    B, H, G, T, S, D, Dv = shape
    tensors = random(B, H, T, D), random(B, G, S, D, seed=1), random(B, G, S, Dv, seed=2)
    grad = random(B, H, T, Dv, seed=3)
    lengths = torch.tensor([S, 0, S // 2][:B])
    torch.manual_seed(0)
    for name, score in scores(D, D, S, H).items():
        for bias in (None, Slope(H)):
            inputs = to_cuda(tensors, dtype)
            cuda_score, cuda_bias = copy.deepcopy(score).to("cuda", dtype), copy.deepcopy(bias)
            if cuda_bias is not None:
                cuda_bias.to("cuda", dtype)
            exact = [x.detach().cpu().double().requires_grad_() for x in inputs]
            exact_score = copy.deepcopy(cuda_score).cpu().double()
            exact_bias = None if bias is None else copy.deepcopy(cuda_bias).cpu().double()
            expected = gradients(
                lambda q, k, v, s=exact_score, b=exact_bias: reference(q, k, v, s, masks(lengths)[mask_name], b),
                exact,
                [*exact_score.parameters(), *(exact_bias.parameters() if exact_bias else ())],
                grad.to(dtype).double(),
            )
            mask = masks(lengths.cuda())[mask_name]
            parameters = [*cuda_score.parameters(), *(cuda_bias.parameters() if cuda_bias else ())]
            actual = gradients(
                lambda q, k, v, s=cuda_score, m=mask, b=cuda_bias: attend(q, k, v, score=s, mask=m, bias=b),
                inputs,
                parameters,
                grad.to("cuda", dtype),
            )
            plain = gradients(
                lambda q, k, v, s=cuda_score, m=mask, b=cuda_bias: reference(q, k, v, s, m, b),
                inputs,
                parameters,
                grad.to("cuda", dtype),
            )
            compared = (
                None if dtype == torch.float32 else 4
            )  # gradients of parameters, sums over all pairs, are mostly rounding errors in bf16
            assert_norms_close(actual[:compared], expected[:compared], DTYPES[dtype], (name, mask_name, bias), plain)


LENGTHS = {
    "self": ([5, 0, 33, 64, 1, 0], None),
    "cross": ([5, 0, 33, 64, 1, 0], [7, 4, 0, 20, 90, 0]),
    "rectangular": ([130, 130], None),
}


def packed_offsets(lengths):
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return Offsets(starts, total=sum(lengths), max_len=max(96, *lengths))


def offsets_to_cuda(offsets):
    return Offsets(offsets.starts.cuda(), offsets.total, offsets.max_len)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LENGTHS)
def test_cuda_packed_equals_reference(case, dtype, compiled, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", compiled)  # the shape checker cannot be compiled
    q_lengths, k_lengths = LENGTHS[case]
    q_offsets = packed_offsets(q_lengths)
    k_offsets = q_offsets if k_lengths is None else packed_offsets(k_lengths)
    cuda_q_offsets = offsets_to_cuda(q_offsets)
    cuda_k_offsets = cuda_q_offsets if k_lengths is None else offsets_to_cuda(k_offsets)
    H, D, Dv = 4, 20, 12
    tensors = (
        random(q_offsets.total, H, D),
        random(k_offsets.total, 2, D, seed=1),
        random(k_offsets.total, 2, Dv, seed=2),
    )
    grad = random(q_offsets.total, H, Dv, seed=3)
    names = ["scaled_dot", "cosine-heads", "general", "location"] if compiled else SCORE_NAMES
    for name in names:
        torch.manual_seed(0)
        score = scores(D, D, k_offsets.max_len, H)[name].to("cuda", dtype)
        exact_score = copy.deepcopy(score).cpu().double()
        for mask in (None, causal(), window(3), local(2)) if k_lengths is None else (None,):

            def function(q, k, v, score=score, mask=mask):
                return attend(q, k, v, score=score, mask=mask, q_offsets=cuda_q_offsets, k_offsets=cuda_k_offsets)

            if compiled:
                torch._dynamo.reset()
                function = torch.compile(function)
            inputs = to_cuda(tensors, dtype)
            with explain() as choices:
                actual = gradients(function, inputs, list(score.parameters()), grad.to("cuda", dtype))
            if not compiled:
                if dtype == torch.bfloat16 and "concat" not in name:
                    expected_backend = "sdpa" if case == "rectangular" else "varlen_short"
                    assert choices[0].backend == ("varlen" if isinstance(mask, Window | Local) else expected_backend)
                else:
                    assert choices[0].backend not in ("varlen", "varlen_short")
            expected = gradients(
                lambda q, k, v, s=exact_score, m=mask: reference_packed(q, k, v, s, m, None, q_offsets, k_offsets),
                [x.detach().cpu().double().requires_grad_() for x in inputs],
                list(exact_score.parameters()),
                grad.to(dtype).double(),
            )
            compared = None if dtype == torch.float32 else 4
            assert_norms_close(actual[:compared], expected[:compared], DTYPES[dtype], (name, mask))


def test_cuda_packed_in_a_cuda_graph():
    """Captured once, and replayed with other tensors and offsets."""
    starts = torch.tensor([0, 5, 5, 30, 64], dtype=torch.int32, device="cuda")
    offsets = Offsets(starts, total=64, max_len=64)
    q, k, v = (random(64, 2, 16, seed=i).to("cuda", torch.bfloat16) for i in range(3))

    def function():
        return attend(q, k, v, mask=causal(), q_offsets=offsets, k_offsets=offsets)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    starts.copy_(torch.tensor([0, 1, 40, 64, 64], dtype=torch.int32))
    q.copy_(random(64, 2, 16, seed=9))
    graph.replay()
    new_offsets = Offsets(starts.cpu(), total=64, max_len=64)
    expected = reference_packed(
        *(x.cpu().double() for x in (q, k, v)), ScaledDot(), causal(), None, new_offsets, new_offsets
    )
    assert_norms_close([out], [expected], 3e-2, "graph")


def test_cuda_recording_under_autocast():
    """float32 parameters, bf16 activations: every score runs, and its weights can be computed afterwards."""

    class Attention(torch.nn.Module):
        kind = "self"

        def __init__(self, score):
            super().__init__()
            self.project = torch.nn.Linear(16, 16)
            self.score = score

        def forward(self, x, offsets):
            q = self.project(x).unflatten(-1, (2, 8))
            return attend(q, q, q, score=self.score, q_offsets=offsets, k_offsets=offsets)

    offsets = offsets_to_cuda(packed_offsets([5, 0, 9]))
    x = random(14, 16).float().cuda()
    for name, score in scores(8, 8, 96, 2).items():
        torch.manual_seed(0)
        model = Attention(score).cuda()
        with record(model) as recording, torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(x, offsets)
            out.float().sum().backward()
        assert out.dtype == torch.bfloat16
        matrices = recording[""].weights()
        torch.testing.assert_close(
            matrices.sum(-1), offsets.valid[:, None].expand(-1, 2, -1).float(), atol=1e-3, rtol=0
        )
        assert all(torch.isfinite(p.grad).all() for p in model.parameters()), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_memory_is_linear(dtype):
    """At T = S = 8192 one T×S matrix in bf16 would be 128 MiB."""
    T = 8192
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 1, T, 64, device="cuda", dtype=dtype))
    lengths = padding(torch.tensor([T - 9], device="cuda"))
    for mask in (None, causal(), lengths, causal() & lengths):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attend(q, k, v, mask=mask).sum().backward()
        assert torch.cuda.max_memory_allocated() - before < 64 << 20, mask


def test_cuda_chunked_causal_concat_needs_less_than_4_gib():
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 1, 4096, 64, device="cuda"))
    score = Concat(64, 64, hidden=64).cuda()
    with use("chunked"):
        attend(q, k, v, score=score, mask=causal()).sum().backward()
    assert torch.cuda.max_memory_allocated() < 4 << 30


@pytest.mark.parametrize("mask", [None, causal()], ids=["no mask", "causal"])
def test_cuda_attend_launches_the_same_kernels_as_sdpa(mask):
    q, k, v = (torch.randn(2, 4, 1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def launched_kernels(function):
        grad = torch.ones_like(v)
        torch.autograd.grad(function(), (q, k, v), grad)  # warm-up
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            torch.autograd.grad(function(), (q, k, v), grad)
            torch.cuda.synchronize()
        return sorted(event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA)

    def sdpa():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=mask is not None)

    expected = launched_kernels(sdpa)
    assert expected
    assert launched_kernels(lambda: attend(q, k, v, mask=mask)) == expected


@pytest.mark.parametrize("backend", [None, "batched_matmul", "sdpa", "chunked", "reference"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_cuda_float16_scores_beyond_its_maximum(backend, has_bias):
    """65504: unfused backends compute in float32, fused ones accumulate in it."""
    if has_bias and backend == "sdpa":
        return  # supports no bias
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randint(-16, 17, (2, 2, 33, 16), generator=generator) * 64.0 for _ in range(2))
    q, k, v = (x.to("cuda", torch.float16) for x in (q, k, torch.randn(2, 2, 33, 16, generator=generator)))
    assert (q @ k.mT).isinf().any()
    bias = Slope(2).cuda() if has_bias else None
    if backend is None:
        out = attend(q, k, v, bias=bias)
    else:
        with use(backend):
            out = attend(q, k, v, bias=bias)
    exact_bias = copy.deepcopy(bias).double() if has_bias else None
    expected = reference(q.double(), k.double(), v.double(), ScaledDot(), None, exact_bias)
    torch.testing.assert_close(out.double(), expected, atol=4e-3, rtol=2e-3)
