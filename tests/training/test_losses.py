"""The chunked cross-entropy against its formula in float64."""

import pytest
import torch
from torch import Tensor

from regard.data import PairBatches
from regard.data.batching.batch import IGNORE_INDEX
from regard.data.batching.sequences import Sequences
from regard.errors import RegardError
from regard.kernels.triton import cross_entropy
from regard.kernels.triton.support import is_interpreted
from regard.models import TransformerConfig, make_model
from regard.training import losses
from regard.training.losses import token_loss


def formula(
    features, weight, targets, smoothing=0.0, second_pass=None, divergence=0.0, bias=0.0, logit_cap=0.0
) -> tuple[Tensor, Tensor, int]:
    """The definition: full logits, float64, autograd."""
    counted = targets != IGNORE_INDEX
    inputs = [features] if second_pass is None else [features, second_pass]
    logits = [x @ weight.T + bias for x in inputs]
    logits = [(x / logit_cap).tanh() * logit_cap for x in logits] if logit_cap else logits
    passes = [x.log_softmax(-1)[counted] for x in logits]
    targets = targets[counted]
    nlls = [-logp.gather(1, targets[:, None])[:, 0] for logp in passes]
    loss = sum((1 - smoothing) * nll - smoothing * logp.mean(-1) for nll, logp in zip(nlls, passes)) / len(passes)
    if divergence:
        p, q = passes
        loss = loss + divergence * ((p.exp() * (p - q)).sum(-1) + (q.exp() * (q - p)).sum(-1)) / 2
    return loss.sum(), sum(nlls).sum() / len(passes), len(targets)


def example(rows=11, vocab=17, width=5, seed=0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features, second_pass, weight = (torch.randn(n, width, generator=generator) for n in (rows, rows, vocab))
    targets = torch.randint(1, vocab, (rows,), generator=generator)
    targets[[2, rows - 1]] = IGNORE_INDEX
    return features, weight, targets, second_pass


@pytest.fixture(params=["plain", "kernel"])
def set_chunk_rows(request, monkeypatch):
    """A function that sets the rows per chunk, for the plain loss and for the Triton kernel in the interpreter."""
    if request.param == "kernel" and not is_interpreted():
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setattr(cross_entropy, "supports", lambda features: request.param == "kernel")
    monkeypatch.setattr(cross_entropy, "BLOCK", 8)

    def set_rows(rows):
        monkeypatch.setattr(losses, "chunk_rows", lambda vocab, device: rows)
        monkeypatch.setattr(cross_entropy, "rows_per_chunk", lambda count, vocab: rows)

    return set_rows


@pytest.mark.parametrize(("smoothing", "divergence"), [(0.0, 0.0), (0.1, 0.0), (0.1, 2.5)])
def test_bias_of_the_output_layer(set_chunk_rows, smoothing, divergence):
    set_chunk_rows(4)
    features, weight, targets, second_pass = example()
    single = [x.requires_grad_() for x in (features, weight, second_pass, torch.randn(len(weight)))]
    double = [x.detach().double().requires_grad_() for x in single]
    expected = formula(double[0], double[1], targets, smoothing, double[2], divergence, double[3])
    grads = torch.autograd.grad(expected[0], double)
    parts = token_loss(single[0], single[1], targets, smoothing, single[2], divergence, single[3])
    torch.testing.assert_close(parts.loss.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(parts.loss, single), grads, rtol=1e-5, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize(
    ("smoothing", "has_second_pass", "divergence"),
    [(0.0, False, 0.0), (0.1, False, 0.0), (0.0, True, 0.0), (0.2, True, 0.0), (0.0, True, 3.0), (0.1, True, 2.5)],
)
def test_loss_and_gradients_match_the_formula(set_chunk_rows, rows, smoothing, has_second_pass, divergence):
    set_chunk_rows(rows)
    features, weight, targets, second_pass = example()
    single = [x.clone().requires_grad_() for x in (features, weight, second_pass)]
    double = [x.double().requires_grad_() for x in (features, weight, second_pass)]
    parts = token_loss(single[0], single[1], targets, smoothing, single[2] if has_second_pass else None, divergence)
    loss, nll, tokens = formula(
        double[0], double[1], targets, smoothing, double[2] if has_second_pass else None, divergence
    )
    assert parts.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert parts.nll.item() == pytest.approx(nll.item(), rel=1e-6)
    assert parts.tokens.item() == tokens
    (3 * parts.loss).backward()  # with an incoming gradient other than 1
    (3 * loss).backward()
    for actual, expected in zip(single, double):
        if expected.grad is None:
            assert actual.grad is None
        else:
            torch.testing.assert_close(actual.grad.double(), expected.grad, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("smoothing", "divergence"), [(0.0, 0.0), (0.1, 2.5)])
def test_soft_capped_logits(monkeypatch, smoothing, divergence):
    monkeypatch.setattr(losses, "chunk_rows", lambda vocab, device: 4)
    features, weight, targets, second_pass = example()
    single = [x.requires_grad_() for x in (features, weight, second_pass, torch.randn(len(weight)))]
    double = [x.detach().double().requires_grad_() for x in single]
    results = []
    for compute, (x, w, other, bias) in ((token_loss, single), (formula, double)):
        second = other if divergence else None
        loss, nll, _ = compute(x, w, targets, smoothing, second, divergence, bias, 1.5)
        loss.backward()
        results.append([loss, nll, *(tensor.grad for tensor in (x, w, bias)), *([other.grad] if divergence else [])])
    for found, expected in zip(*results):
        torch.testing.assert_close(found.double(), expected.double(), atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        assert token_loss(features, weight, targets, logit_cap=1.5).nll > 0


def test_formula_matches_torch_cross_entropy():
    features, weight, targets, _ = (x.double() if x.is_floating_point() else x for x in example())
    loss, _, _ = formula(features, weight, targets, 0.1)
    torch_loss = torch.nn.functional.cross_entropy(
        features @ weight.T, targets, ignore_index=IGNORE_INDEX, label_smoothing=0.1, reduction="sum"
    )
    assert loss.item() == pytest.approx(torch_loss.item(), rel=1e-12)


def test_r_drop_of_equal_passes_is_the_plain_loss():
    features, weight, targets, _ = example()
    plain = token_loss(features, weight, targets, 0.1)
    r_drop = token_loss(features, weight, targets, 0.1, features.clone(), 5.0)
    assert r_drop.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)


def test_ignored_rows_have_no_gradient(set_chunk_rows):
    set_chunk_rows(4)
    features, weight, targets, _ = example()
    features[2] = 1e4
    features.requires_grad_()
    token_loss(features, weight, targets, 0.1).loss.backward()
    assert features.grad[2].eq(0).all()
    assert features.grad[0].ne(0).all()


def test_loss_of_ignored_rows_only_is_zero(set_chunk_rows):
    set_chunk_rows(64)
    features, weight, _, _ = example()
    features.requires_grad_()
    parts = token_loss(features, weight, torch.full((len(features),), IGNORE_INDEX), 0.1)
    parts.loss.backward()
    assert parts.loss.item() == parts.tokens.item() == 0
    assert features.grad.eq(0).all()


def test_second_derivatives_are_refused():
    features, weight, targets, _ = example()
    features.requires_grad_()
    with pytest.raises(RegardError, match="create_graph=True"):
        torch.autograd.grad(token_loss(features, weight, targets).loss, features, create_graph=True)


def test_gradients_are_only_computed_when_needed(monkeypatch):
    needs_grad = []
    rows_loss = losses._rows_loss
    monkeypatch.setattr(
        losses, "_rows_loss", lambda *arguments: needs_grad.append(arguments[-1]) or rows_loss(*arguments)
    )
    features, weight, targets, _ = example()
    weight = torch.nn.Parameter(weight)
    with torch.no_grad():
        token_loss(features, weight, targets)
    token_loss(features, weight, targets)
    assert needs_grad == [False, True]


@pytest.mark.skipif(not is_interpreted(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("divergence", [0.0, 2.5])
def test_float16_loss_and_gradients_are_close_to_the_formula(monkeypatch, divergence):
    """float16 features and logits with float32 weights, like autocast on a GPU (there with bfloat16)."""
    monkeypatch.setattr(cross_entropy, "supports", lambda features: True)
    features, weight, targets, second_pass = example(rows=40, vocab=60, width=16)
    inputs = [x.half().requires_grad_() for x in (features, second_pass)]
    weight = weight.half().float().requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (inputs[0], inputs[1], weight)]
    expected = formula(exact[0], exact[2], targets, 0.1, exact[1], divergence)
    with torch.autocast("cpu", dtype=torch.float16):
        parts = token_loss(inputs[0], weight, targets, 0.1, inputs[1], divergence)
    assert parts.loss.item() == pytest.approx(expected[0].item(), rel=1e-3)
    grads = torch.autograd.grad(parts.loss, [*inputs, weight])
    assert [x.dtype for x in grads] == [torch.float16, torch.float16, torch.float32]
    for actual, reference in zip(grads, torch.autograd.grad(expected[0], exact)):
        assert (actual.double() - reference).norm() <= 2e-3 * reference.norm()


def test_chunk_sizes_are_even_and_bounded():
    for count, vocab in ((25_600, 32_000), (1, 32_000), (100_000, 50_257), (300, 10)):
        rows = cross_entropy.rows_per_chunk(count, vocab)
        assert rows % 128 == 0
        assert (rows - 128) * vocab <= cross_entropy.CHUNK_ELEMENTS
        assert rows < count + 128


@pytest.mark.parametrize("constant_shapes", [False, True])
def test_packed_batch_has_the_loss_and_gradients_of_its_sentences(constant_shapes):
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
        packed = [Sequences.from_lists(side[i] for i in rows) for side in sides]
        batches = PairBatches(*packed, budget=budget, max_len=16, seed=0, constant_shapes=constant_shapes)
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
def test_cuda_bfloat16_loss_and_gradients_are_close_to_the_formula(monkeypatch, vocab, divergence):
    monkeypatch.setattr(cross_entropy, "rows_per_chunk", lambda count, vocab: 128)
    features, weight, targets, second_pass = (x.cuda() for x in example(rows=300, vocab=vocab, width=64))
    inputs = [x.bfloat16().requires_grad_() for x in (features, second_pass)]
    weight = (0.1 * weight).bfloat16().float().requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (*inputs, weight)]
    expected = formula(exact[0], exact[2], targets, 0.1, exact[1], divergence)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        parts = token_loss(inputs[0], weight, targets, 0.1, inputs[1], divergence)
    assert parts.loss.item() == pytest.approx(expected[0].item(), rel=5e-3)
    grads = torch.autograd.grad(parts.loss, [*inputs, weight])
    for actual, reference in zip(grads, torch.autograd.grad(expected[0], exact)):
        assert (actual.double() - reference).norm() <= 2e-2 * reference.norm()
