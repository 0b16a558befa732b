"""Dispatch: the choice of a backend, invalid inputs, empty inputs, and the state that context managers set."""

import copy
import os
import subprocess
import sys
import threading

import jaxtyping
import pytest
import torch

import regard.attention
from regard.attention import (
    Concat,
    Cosine,
    Dot,
    General,
    Location,
    Offsets,
    ScaledDot,
    SoftCap,
    attend,
    causal,
    dispatch,
    explain,
    local,
    padding,
    use,
    weights,
    window,
)
from regard.errors import RegardError
from regard.layers.blocks import BlockConfig
from tests.attention.helpers import Slope, Tanh, assert_all_close, random


def chosen_backend(T, S, B=4, H=2, **options):
    with explain() as choices:
        attend(random(B, H, T, 4), random(B, H, S, 4), random(B, H, S, 4), **options)
    (choice,) = choices
    assert choice.q == (B, H, T, 4)
    return choice.backend


def test_backend_choice():
    lengths = padding(torch.tensor([1, 2, 3, 0]))
    assert chosen_backend(16, 16) == "batched_matmul"
    assert chosen_backend(1, 16, B=1) == "sdpa"
    assert chosen_backend(100, 100, mask=causal()) == "sdpa"
    assert chosen_backend(100, 100, mask=causal() & lengths) == "sdpa"
    assert chosen_backend(70, 100, mask=causal()) == "sdpa"
    assert chosen_backend(10, 100, mask=causal()) == "chunked"
    assert chosen_backend(1, 100, mask=causal()) == "sdpa"
    assert chosen_backend(100, 100, mask=window(3)) == "chunked"
    assert chosen_backend(100, 100, mask=local(3)) == "chunked"
    assert chosen_backend(100, 100, mask=causal() | lengths) == "chunked"
    assert chosen_backend(100, 100, bias=Slope(2).double()) == "chunked"
    assert chosen_backend(16, 16, bias=Slope(2).double()) == "batched_matmul"
    with torch.no_grad():
        assert chosen_backend(100, 100, bias=Slope(2).double()) == "sdpa"
        assert chosen_backend(100, 100, bias=Slope(2).double(), mask=causal()) == "chunked"
        assert chosen_backend(4000, 4000, B=1, bias=Slope(2).double()) == "chunked"  # too large a matrix
    assert chosen_backend(16, 16, score=Concat(4, 4, 5).double()) == "concat_cpu"
    assert chosen_backend(16, 16, score=Concat(4, 4, 5).double(), bias=Slope(2).double()) == "chunked"
    assert chosen_backend(100, 100, score=General(4, 4).double()) == "sdpa"
    assert chosen_backend(0, 5) == "reference"


def test_use_forces_a_backend():
    with use("chunked"):
        assert chosen_backend(16, 16) == "chunked"
    assert chosen_backend(16, 16) == "batched_matmul"
    with pytest.raises(RegardError, match=r"Unknown backend 'fast'.*chunked, reference"), use("fast"):
        pass
    with pytest.raises(RegardError, match="varlen supports packed"), use("varlen"):
        chosen_backend(2, 2)


@pytest.mark.parametrize(
    ("backend", "options", "part"),
    [
        ("batched_matmul", {"score": Concat(4, 4, 4)}, "the score Concat"),
        ("batched_matmul", {"score": SoftCap(ScaledDot(), 2.0)}, "the score SoftCap"),
        ("sdpa", {"score": Tanh(4)}, "the score Tanh"),
        ("sdpa", {"mask": window(2)}, "this mask"),
        ("sdpa", {"mask": causal() | local(1)}, "this mask"),
        ("sdpa", {"mask": torch.ones(3, 3, dtype=torch.bool)}, "this mask"),
        ("concat_cpu", {"score": Dot()}, "the score Dot"),
        ("concat_cpu", {"score": Concat(4, 4, 4), "bias": Slope(1)}, "the bias"),
        ("concat", {"score": Concat(4, 4, 4), "mask": local(1)}, "this mask"),
        ("varlen_short", {"mask": padding(torch.tensor([1, 3]))}, "this mask"),
        ("disentangled", {}, "the score ScaledDot"),
        ("sdpa", {"bias": Slope(1), "mask": causal()}, "a bias with a causal mask"),
        ("varlen_short", {}, "tensors on a CPU"),
        ("concat", {"score": Concat(4, 4, 4)}, "tensors on a CPU"),
    ],
)
def test_a_forced_backend_computes_the_call_or_refuses_it(monkeypatch, backend, options, part):
    monkeypatch.setattr(dispatch, "is_interpreted", lambda: False)
    q, k, v = (random(2, 1, 3, 4, seed=i) for i in range(3))
    with pytest.raises(RegardError, match=f"The backend {backend} does not compute {part}"), use(backend):
        attend(q, k, v, **options)


# Dispatch state, which the context managers set


def test_nested_contexts_restore_the_outer_state():
    outputs = []
    with use("chunked"), explain() as outer:
        with use("reference"), explain() as inner, dispatch.observe(lambda call, out: outputs.append(out)):
            chosen_backend(16, 16)
        chosen_backend(16, 16)
    chosen_backend(16, 16)
    assert [choice.backend for choice in inner] == ["reference"]
    assert [choice.backend for choice in outer] == ["reference", "chunked"]
    assert len(outputs) == 1
    assert dispatch._thread.state == dispatch.DispatchState()


class Apply(torch.nn.Module):
    """A module whose parameters are those of a score, and whose output is that of a function."""

    def __init__(self, score, function):
        super().__init__()
        self.score, self.function = score, function

    def forward(self, x):
        return self.function(x)


class Halve:
    """An intervention that halves the queries before the backend and the output after it."""

    def before(self, call):
        return call._replace(q=call.q / 2)

    def after(self, call, out):
        return out / 2


def test_observers_receive_calls_after_interventions():
    q, k, v = random(1, 1, 3, 4), random(1, 1, 3, 4, seed=1), random(1, 1, 3, 4, seed=2)
    observed = []
    with dispatch.observe(lambda call, out: observed.append((call.q, out))), dispatch.intercept(Halve()):
        out = attend(q, k, v)
    torch.testing.assert_close(out, attend(q / 2, k, v) / 2)
    assert torch.equal(observed[0][0], q / 2)
    assert torch.equal(observed[0][1], out)


@pytest.mark.parametrize(
    "context",
    [lambda: use("chunked"), explain, lambda: dispatch.observe(print), lambda: dispatch.intercept(Halve())],
    ids=["use", "explain", "observe", "intercept"],
)
def test_exception_restores_the_state(context):
    with pytest.raises(RegardError, match="Incompatible shapes"), context():
        attend(*random(3, 1, 1, 2, 4).unbind(), k_offsets=None, mask=padding(torch.tensor([1, 2, 3])))
    assert dispatch._thread.state == dispatch.DispatchState()
    assert dispatch._traced_backend is None
    assert chosen_backend(16, 16) == "batched_matmul"


def test_each_thread_has_its_own_state():
    both_inside, results = threading.Barrier(2), {}

    def run(name):
        outputs = []
        with use(name), explain() as choices, dispatch.observe(lambda call, out: outputs.append(out)):
            both_inside.wait()
            for _ in range(20):
                attend(*torch.zeros(3, 1, 2, 16, 4))
            both_inside.wait()
        results[name] = {choice.backend for choice in choices}, len(choices), len(outputs)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("chunked", "reference")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {name: ({name}, 20, 20) for name in ("chunked", "reference")}
    assert dispatch._traced_backend is None


def test_compiled_code_uses_the_forced_backend(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shape checker cannot be compiled
    torch._dynamo.reset()
    graphs = []

    def record_graph(graph, inputs):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph.forward

    compiled = torch.compile(attend, fullgraph=True, backend=record_graph)
    tensors = torch.randn(3, 1, 2, 100, 4)
    expected, outputs = attend(*tensors), []
    torch.testing.assert_close(compiled(*tensors), expected)
    with explain():
        torch.testing.assert_close(compiled(*tensors), expected)
    with dispatch.observe(lambda call, out: outputs.append(out)):
        torch.testing.assert_close(compiled(*tensors), expected)
    torch.testing.assert_close(compiled(*tensors), expected)
    assert len(graphs) == 1
    assert len(outputs) == 1
    with use("reference"):
        torch.testing.assert_close(compiled(*tensors), expected)
    assert len(graphs) == 2
    assert not any("scaled_dot_product" in target for target in graphs[1])
    torch.testing.assert_close(compiled(*tensors), expected)
    assert len(graphs) == 2


SCORES = [Tanh(4), SoftCap(Dot(), 2.0), Concat(4, 4, 3), ScaledDot(), General(4, 4), Cosine(3.0), Location(4, 80)]


def score_name(score):
    return type(score).__name__


@pytest.mark.parametrize("score", SCORES, ids=score_name)
@pytest.mark.parametrize("differentiated", ["q", "parameters"])
def test_second_derivatives_are_exact_or_refused(score, differentiated):
    """Also of a scalar that is linear in the output, whose gradient torch's own decorator takes for constant."""
    score = copy.deepcopy(score).double()
    q, k, v = (random(1, 2, 70, 4, seed=i).requires_grad_() for i in range(3))
    x = q if differentiated == "q" or not list(score.parameters()) else next(score.parameters())

    def penalty(out):
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return torch.autograd.grad(out.sum() + grad.square().sum(), x)[0]

    with pytest.raises(RegardError, match=r"create_graph=True.*regard\.attention\.use\(\"reference\"\)"):
        penalty(attend(q, k, v, score=score))
    with use("reference"):
        actual = penalty(attend(q, k, v, score=score))
    torch.testing.assert_close(actual, penalty(score(q, k).softmax(-1) @ v))


@pytest.mark.parametrize("score", SCORES, ids=score_name)
@pytest.mark.parametrize("length", [5, 70])
def test_transforms_of_torch_func(score, length):
    score = copy.deepcopy(score).double()
    q, k, v = (random(2, 2, length, 4, seed=i) for i in range(3))
    mask, packed_mask = causal() & padding(torch.tensor([length, 3])), causal()
    starts = torch.tensor([0, length, 2 * length])

    def function(parameters, q):
        def run(x):
            rows = x.transpose(1, 2).flatten(0, 1)
            packed = attend(rows, rows, rows, score=score, mask=packed_mask, q_offsets=starts, k_offsets=starts)
            probability = weights(x, k, score=score, mask=mask)[..., 0].square().sum()
            return attend(x, k, v, score=score, mask=mask).square().sum() + packed.square().sum() + probability

        layer = Apply(score, run)
        return torch.func.functional_call(layer, {f"score.{name}": x for name, x in parameters.items()}, (q,))

    parameters = {name: x.detach() for name, x in score.named_parameters()}
    inputs = [x.clone().requires_grad_() for x in (q, *parameters.values())]
    loss = function(dict(zip(parameters, inputs[1:])), inputs[0])
    expected = torch.autograd.grad(loss, inputs)
    parameter_grads, q_grad = torch.func.grad(function, argnums=(0, 1))(parameters, q)
    assert_all_close([q_grad, *parameter_grads.values()], expected, 1e-9)
    # Of each example, and forward mode: the derivative in the direction of q.
    batched = torch.func.vmap(torch.func.grad(function, argnums=1), in_dims=(None, 0))(
        parameters, torch.stack((q, 2 * q))
    )
    torch.testing.assert_close(batched[0], expected[0])
    slope = torch.func.jvp(lambda q: function(parameters, q), (q,), (q,))[1]
    torch.testing.assert_close(slope, (expected[0] * q).sum())


@pytest.mark.parametrize("score", SCORES, ids=score_name)
@pytest.mark.parametrize("mask", [None, window(3), padding(torch.tensor([4, 2]))], ids=["none", "window", "padding"])
def test_meta_tensors(score, mask):
    score = copy.deepcopy(score).to("meta")
    q = torch.randn(2, 2, 70, 4, device="meta", requires_grad=True)
    out = attend(q, q, q, score=score, mask=mask)
    out.sum().backward()
    assert (out.shape, q.grad.shape) == (q.shape, q.shape)
    assert weights(q, q, score=score, mask=mask).shape == (2, 2, 70, 70)
    starts, rows = torch.tensor([0, 3, 9], device="meta"), q[0].transpose(0, 1)[:9]
    offsets = Offsets(starts, 9, 6)
    assert attend(rows, rows, rows, score=score, q_offsets=offsets, k_offsets=offsets).shape == rows.shape
    with pytest.raises(RegardError, match=r"meta device have no values.*Pass Offsets"):
        attend(rows, rows, rows, score=score, q_offsets=starts, k_offsets=starts)


@pytest.mark.parametrize("score", SCORES, ids=score_name)
@pytest.mark.parametrize("length", [5, 70])
def test_autocast_gives_all_scores_one_dtype(score, length):
    q, k, v = (random(1, 2, length, 4, seed=i, dtype=torch.float32) for i in range(3))
    expected = attend(q, k, v, score=score)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            out = attend(q, k, v, score=score)
            with use("reference"):
                assert attend(q, k, v, score=score).dtype == dtype
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)


def test_compiling_a_score_without_a_kernel_into_one_graph_is_an_error(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shape checker cannot be compiled
    torch._dynamo.reset()
    q, score = torch.randn(1, 1, 70, 4), Tanh(4)
    expected = attend(q, q, q, score=score)
    compiled = torch.compile(lambda q: attend(q, q, q, score=score), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"score Tanh runs block by block.*without fullgraph=True"):
        compiled(q)
    with use("reference"):
        torch.testing.assert_close(compiled(q), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(lambda q: attend(q, q, q, score=score), backend="eager")(q), expected)


def test_reference_exports_with_a_dynamic_length(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # shapes are symbolic during export
    block = BlockConfig(8, 2, 16).make_block("scaled_dot", causal()).eval()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            return self.block(x, None)

    length = torch.export.Dim("length", min=2, max=64)
    with use("reference"), torch.no_grad():
        exported = torch.export.export(Model(), (torch.randn(1, 5, 8),), dynamic_shapes=({1: length},), strict=False)
        x = torch.randn(1, 9, 8)
        torch.testing.assert_close(exported.module()(x), block(x, None))


def test_empty_queries_or_keys():
    assert attend(random(2, 1, 0, 4), random(2, 1, 3, 4), random(2, 1, 3, 4)).shape == (2, 1, 0, 4)
    empty = random(2, 1, 0, 4)
    assert torch.equal(attend(random(2, 1, 3, 4), empty, empty), torch.zeros(2, 1, 3, 4, dtype=torch.float64))
    assert weights(random(2, 1, 3, 4), empty).shape == (2, 1, 3, 0)


def test_3d_inputs_are_one_head():
    q, k, v = random(2, 3, 4), random(2, 5, 4, seed=1), random(2, 5, 6, seed=2)
    out = attend(q, k, v, mask=causal())
    torch.testing.assert_close(out, attend(q[:, None], k[:, None], v[:, None], mask=causal())[:, 0])


@pytest.mark.parametrize("mask", [None, causal(), padding(torch.tensor([5, 2]))], ids=["none", "causal", "padding"])
def test_weights_have_as_many_axes_as_the_inputs(mask):
    q, k, v = random(2, 3, 4), random(2, 5, 4, seed=1), random(2, 5, 6, seed=2)
    matrix = weights(q, k, mask=mask)
    assert matrix.shape == (2, 3, 5)
    assert torch.equal(matrix, weights(q[:, None], k[:, None], mask=mask)[:, 0])
    torch.testing.assert_close(matrix @ v, attend(q, k, v, mask=mask))


@pytest.mark.parametrize("name", ["batched_matmul", "sdpa", "chunked"])
def test_queries_without_keys_get_zero_outputs_and_gradients(name):
    q, k, v = (random(2, 1, 4, 4, seed=i).requires_grad_() for i in range(3))
    with use(name):
        out = attend(q, k, v, mask=padding(torch.tensor([0, 2])))
    out.sum().backward()
    assert (out[0] == 0).all()
    assert all((x.grad[0] == 0).all() for x in (q, k, v))
    assert (k.grad[1, :, 2:] == 0).all()
    assert (v.grad[1, :, 2:] == 0).all()
    assert (v.grad[1, :, :2] != 0).all()


def test_incompatible_shapes(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # test our message, not the shape checker's
    q, k = random(2, 4, 3, 4), random(2, 4, 5, 4)
    cases = [
        ((q, k[:1], k[:1]), {}, r"q \(2, 4, 3, 4\), k \(1, 4, 5, 4\)"),
        ((q, k, k[:, :, :4]), {}, r"v \(2, 4, 4, 4\).*differ only in their last axis"),
        ((q, k[:, :3], k[:, :3]), {}, "multiple of that of k"),
        ((q, k[0], k[0]), {}, r"Pass \(B, T, D\) or \(B, H, T, D\)"),
        ((q, k[..., :3], k), {}, "same width"),
        ((q, k[..., :3], k), {"score": Dot()}, "same width"),
        ((q, k, k), {"score": General(4, 4, heads=2)}, "parameters for 2 heads"),
        ((q, k, k), {"mask": padding(torch.tensor([1, 2, 3]))}, r"shape \(3,\): pass one per sequence"),
        ((q, k, k), {"score": Location(4, 3)}, "5 keys, but W_a has 3 rows"),
    ]
    for tensors, options, message in cases:
        with pytest.raises(RegardError, match=message):
            attend(*tensors, **options)


def test_weights_have_gradients():
    q, k = random(1, 2, 3, 4).requires_grad_(), random(1, 2, 3, 4, seed=1).requires_grad_()
    score = Concat(4, 4, 3, heads=2).double()
    weights(q, k, score=score, mask=causal())[..., 0].sum().backward()
    assert all(x.grad.abs().sum() > 0 for x in (q, k, *score.parameters()))


def test_public_names_exist_once():
    assert sorted(regard.attention.__all__, key=str.lower) == sorted(set(regard.attention.__all__), key=str.lower)
    assert all(hasattr(regard.attention, name) for name in regard.attention.__all__)


HALF_PRECISION = """
import copy, torch
from regard.attention import *
from regard.attention.reference import reference
torch.manual_seed(0)
for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
    for T, S in ((7, 7), (9, 12), (70, 70)):
        q, k, v = torch.randn(2, 2, T, 8), torch.randn(2, 2, S, 8), torch.randn(2, 2, S, 8)
        for mask in (None, causal(), padding(torch.tensor([0, 5])), causal() & padding(torch.tensor([0, 5]))):
            for score in (ScaledDot(), Cosine(10.0, learned=True), General(8, 8), Concat(8, 8, 8), Location(8, S)):
                tensors = [x.to(dtype).requires_grad_() for x in (q, k, v)]
                exact = [x.detach().double().requires_grad_() for x in tensors]
                expected = reference(*exact, copy.deepcopy(score).double(), mask)
                for backend in ("batched_matmul", "sdpa", "chunked") if not isinstance(score, Concat) else ("chunked",):
                    with use(backend):
                        actual = attend(*tensors, score=score.to(dtype), mask=mask)
                    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=2 * tolerance)
                    for grad, expected_grad in zip(
                        torch.autograd.grad(actual.sum(), tensors, allow_unused=True),
                        torch.autograd.grad(expected.sum(), exact, allow_unused=True, retain_graph=True),
                    ):
                        if expected_grad is not None:
                            # A gradient sums over all queries: compare norms, not elements.
                            error = (grad.double() - expected_grad).norm()
                            assert error <= tolerance * expected_grad.norm(), (backend, score, mask)
"""


def test_half_precision_equals_reference():
    """In a separate process, which sets the instruction set: some CPUs report bf16 instructions that they lack."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    result = subprocess.run([sys.executable, "-c", HALF_PRECISION], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
