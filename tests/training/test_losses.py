"""The loss that is computed by chunks, against its formula in float64."""

import pytest
import torch
from torch import Tensor

from regard.data import Batches, Sequences
from regard.data.batches import IGNORED
from regard.kernels import cross_entropy_cuda
from regard.kernels.triton_support import is_interpreted
from regard.models import TransformerConfig, make_model
from regard.training import losses
from regard.training.losses import token_loss


def formula(
    features, weight, targets, smoothing=0.0, twin=None, divergence=0.0, bias=0.0
) -> tuple[Tensor, Tensor, int]:
    """The definition: whole logits, float64, autograd."""
    counted = targets != IGNORED
    both = [features] if twin is None else [features, twin]
    passes = [(x @ weight.T + bias).log_softmax(-1)[counted] for x in both]
    wanted = targets[counted]
    nlls = [-logp.gather(1, wanted[:, None])[:, 0] for logp in passes]
    loss = sum((1 - smoothing) * nll - smoothing * logp.mean(-1) for nll, logp in zip(nlls, passes)) / len(passes)
    if divergence:
        p, q = passes
        loss = loss + divergence * ((p.exp() * (p - q)).sum(-1) + (q.exp() * (q - p)).sum(-1)) / 2
    return loss.sum(), sum(nlls).sum() / len(passes), len(wanted)


def example(rows=11, vocab=17, width=5, seed=0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features, twin, weight = (torch.randn(n, width, generator=generator) for n in (rows, rows, vocab))
    targets = torch.randint(1, vocab, (rows,), generator=generator)
    targets[[2, rows - 1]] = IGNORED
    return features, weight, targets, twin


@pytest.fixture(params=["plain", "kernel"])
def at_once(request, monkeypatch):
    """Sets how many rows a chunk has, for the plain sweep and for the GPU's, whose kernels an interpreter runs."""
    if request.param == "kernel" and not is_interpreted():
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setattr(cross_entropy_cuda, "supports", lambda features: request.param == "kernel")
    monkeypatch.setattr(cross_entropy_cuda, "BLOCK", 8)

    def set_rows(rows):
        monkeypatch.setattr(losses, "chunk_rows", lambda vocab, device: rows)
        monkeypatch.setattr(cross_entropy_cuda, "rows_per_chunk", lambda count, vocab: rows)

    return set_rows


@pytest.mark.parametrize(("smoothing", "divergence"), [(0.0, 0.0), (0.1, 0.0), (0.1, 2.5)])
def test_an_output_layer_may_have_a_bias(at_once, smoothing, divergence):
    at_once(4)
    features, weight, targets, twin = example()
    single = [x.requires_grad_() for x in (features, weight, twin, torch.randn(len(weight)))]
    double = [x.detach().double().requires_grad_() for x in single]
    wanted = formula(double[0], double[1], targets, smoothing, double[2], divergence, double[3])
    grads = torch.autograd.grad(wanted[0], double)
    parts = token_loss(single[0], single[1], targets, smoothing, single[2], divergence, single[3])
    torch.testing.assert_close(parts.loss.double(), wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(parts.loss, single), grads, rtol=1e-5, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("rows_at_once", [1, 4, 64])
@pytest.mark.parametrize(
    ("smoothing", "with_twin", "divergence"),
    [(0.0, False, 0.0), (0.1, False, 0.0), (0.0, True, 0.0), (0.2, True, 0.0), (0.0, True, 3.0), (0.1, True, 2.5)],
)
def test_value_and_gradients_are_those_of_the_formula(at_once, rows_at_once, smoothing, with_twin, divergence):
    at_once(rows_at_once)
    features, weight, targets, twin = example()
    single = [x.clone().requires_grad_() for x in (features, weight, twin)]
    double = [x.double().requires_grad_() for x in (features, weight, twin)]
    parts = token_loss(single[0], single[1], targets, smoothing, single[2] if with_twin else None, divergence)
    loss, nll, tokens = formula(double[0], double[1], targets, smoothing, double[2] if with_twin else None, divergence)
    assert parts.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert parts.nll.item() == pytest.approx(nll.item(), rel=1e-6)
    assert parts.tokens.item() == tokens
    (3 * parts.loss).backward()  # the gradient that comes from behind is not always 1
    (3 * loss).backward()
    for mine, right in zip(single, double):
        if right.grad is None:
            assert mine.grad is None
        else:
            torch.testing.assert_close(mine.grad.double(), right.grad, rtol=1e-5, atol=2e-6)


def test_the_formula_itself_is_torchs_cross_entropy():
    features, weight, targets, _ = (x.double() if x.is_floating_point() else x for x in example())
    loss, _, _ = formula(features, weight, targets, 0.1)
    torch_loss = torch.nn.functional.cross_entropy(
        features @ weight.T, targets, ignore_index=IGNORED, label_smoothing=0.1, reduction="sum"
    )
    assert loss.item() == pytest.approx(torch_loss.item(), rel=1e-12)


def test_r_drop_of_equal_passes_is_the_plain_loss():
    features, weight, targets, _ = example()
    plain = token_loss(features, weight, targets, 0.1)
    twins = token_loss(features, weight, targets, 0.1, features.clone(), 5.0)
    assert twins.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)


def test_ignored_rows_have_no_gradient_whatever_is_in_them(at_once):
    at_once(4)
    features, weight, targets, _ = example()
    features[2] = 1e4
    features.requires_grad_()
    token_loss(features, weight, targets, 0.1).loss.backward()
    assert features.grad[2].eq(0).all()
    assert features.grad[0].ne(0).all()


def test_nothing_but_ignored_rows_is_zero(at_once):
    at_once(64)
    features, weight, _, _ = example()
    features.requires_grad_()
    parts = token_loss(features, weight, torch.full((len(features),), IGNORED), 0.1)
    parts.loss.backward()
    assert parts.loss.item() == parts.tokens.item() == 0
    assert features.grad.eq(0).all()


def test_no_gradient_is_computed_where_none_is_wanted(monkeypatch):
    asked = []
    rows_loss = losses._rows_loss
    monkeypatch.setattr(losses, "_rows_loss", lambda *arguments: asked.append(arguments[-1]) or rows_loss(*arguments))
    features, weight, targets, _ = example()
    weight = torch.nn.Parameter(weight)
    with torch.no_grad():
        token_loss(features, weight, targets)
    token_loss(features, weight, targets)
    assert asked == [False, True]


@pytest.mark.skipif(not is_interpreted(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("divergence", [0.0, 2.5])
def test_in_halves_it_is_as_exact_as_halves_are(monkeypatch, divergence):
    """Narrow features and logits, float32 weights: what autocast gives on a GPU, where halves are bf16."""
    monkeypatch.setattr(cross_entropy_cuda, "supports", lambda features: True)
    features, weight, targets, twin = example(rows=40, vocab=60, width=16)
    given = [x.half().requires_grad_() for x in (features, twin)]
    weight = weight.half().float().requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (given[0], given[1], weight)]
    wanted = formula(exact[0], exact[2], targets, 0.1, exact[1], divergence)
    with torch.autocast("cpu", dtype=torch.float16):
        parts = token_loss(given[0], weight, targets, 0.1, given[1], divergence)
    assert parts.loss.item() == pytest.approx(wanted[0].item(), rel=1e-3)
    found = torch.autograd.grad(parts.loss, [*given, weight])
    assert [x.dtype for x in found] == [torch.float16, torch.float16, torch.float32]
    for one, other in zip(found, torch.autograd.grad(wanted[0], exact)):
        assert (one.double() - other).norm() <= 2e-3 * other.norm()


def test_chunks_are_even_and_bounded():
    for count, vocab in ((25_600, 32_000), (1, 32_000), (100_000, 50_257), (300, 10)):
        rows = cross_entropy_cuda.rows_per_chunk(count, vocab)
        assert rows % 128 == 0
        assert (rows - 128) * vocab <= cross_entropy_cuda.CHUNK_ELEMENTS
        assert rows < count + 128


@pytest.mark.parametrize("constant_shapes", [False, True])
def test_a_packed_batch_has_the_loss_and_gradients_of_its_sentences_one_by_one(constant_shapes):
    torch.manual_seed(0)
    sizes = dict(
        width=16, heads=2, feedforward=32, encoder_layers=2, decoder_layers=2, source_vocab=30, target_vocab=30
    )
    model = make_model(TransformerConfig(dropout=0.0, max_len=16, **sizes)).double()
    generator = torch.Generator().manual_seed(1)
    sides = [
        [torch.randint(4, 30, (n,), generator=generator).tolist() for n in lengths]
        for lengths in ((3, 1, 9, 5), (2, 12, 7, 1))
    ]

    def gradients(rows: list[int], budget: int) -> Tensor:
        packed = [Sequences.of(side[i] for i in rows) for side in sides]
        batches = Batches(*packed, budget=budget, max_len=16, seed=0, constant_shapes=constant_shapes)
        [batch] = batches.epoch(0)
        model.zero_grad()
        features = model.features(*batch.inputs)
        parts = token_loss(features, model.output.weight, batch.targets, 0.1)
        parts.loss.backward()
        return torch.cat([parts.loss.detach()[None], *(p.grad.flatten() for p in model.parameters())])

    together = gradients([0, 1, 2, 3], 64)
    alone = [gradients([i], 16) for i in range(4)]
    torch.testing.assert_close(together, torch.stack(alone).sum(0), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("divergence", [0.0, 2.5])
@pytest.mark.parametrize("vocab", [2, 999, 5000])
def test_cuda_in_bf16(monkeypatch, vocab, divergence):
    monkeypatch.setattr(cross_entropy_cuda, "rows_per_chunk", lambda count, vocab: 128)
    features, weight, targets, twin = (x.cuda() for x in example(rows=300, vocab=vocab, width=64))
    given = [x.bfloat16().requires_grad_() for x in (features, twin)]
    weight = (0.1 * weight).bfloat16().float().requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (*given, weight)]
    wanted = formula(exact[0], exact[2], targets, 0.1, exact[1], divergence)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        parts = token_loss(given[0], weight, targets, 0.1, given[1], divergence)
    assert parts.loss.item() == pytest.approx(wanted[0].item(), rel=5e-3)
    found = torch.autograd.grad(parts.loss, [*given, weight])
    for one, other in zip(found, torch.autograd.grad(wanted[0], exact)):
        assert (one.double() - other).norm() <= 2e-2 * other.norm()
