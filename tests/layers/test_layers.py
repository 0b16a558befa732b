"""Positional encodings, dropout, norms, blocks and caches, each against its formula."""

import math
import warnings

import pytest
import torch
from torch import nn

from regard.attention import Offsets, ScaledDot, causal
from regard.attention.reference import reference
from regard.errors import RegardError
from regard.layers.attention import CrossAttention
from regard.layers.blocks import BlockConfig
from regard.layers.dropout import Dropout
from regard.layers.embeddings import Embedding
from regard.layers.kv_cache import KVCache
from regard.layers.norms import make_norm
from regard.layers.positions import Rotary, Sinusoidal


def test_sinusoidal_positions_match_the_paper_at_any_length():
    positions = Sinusoidal(6, length=4)
    positions.reserve(1000)
    for position in (0, 3, 999):
        for i in range(3):
            angle = position / 10000 ** (2 * i / 6)
            row = positions(torch.tensor([position]))[0]
            assert row[2 * i] == pytest.approx(math.sin(angle), abs=1e-5)
            assert row[2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-5)


def test_growing_the_sinusoidal_table_keeps_its_rows():
    positions = Sinusoidal(8, length=4)
    before = positions(torch.arange(4))
    positions.reserve(100)
    assert torch.equal(positions(torch.arange(4)), before)


def test_rotary_dot_products_depend_only_on_the_distance():
    rotary, q, k = Rotary(8), torch.randn(1, 1, 8), torch.randn(1, 1, 8)

    def product(p: int, s: int) -> torch.Tensor:
        return (rotary(q, torch.tensor([p])) * rotary(k, torch.tensor([s]))).sum()

    torch.testing.assert_close(product(7, 3), product(104, 100))
    assert not torch.isclose(product(7, 3), product(7, 4))


def test_rotary_scaling_matches_llama3():
    rates = Rotary(16, base=500.0).rates
    torch.testing.assert_close(Rotary(16, 500.0, factor=4.0).rates, rates / 4)
    assert torch.equal(Rotary(16, 500.0, context=99).rates, rates)
    scaled = Rotary(16, 500.0, factor=4.0, context=100).rates
    rotations = 100 * rates / (2 * math.pi)
    assert (rotations > 4).any()
    assert (rotations < 1).any()
    for rate, new, count in zip(rates.tolist(), scaled.tolist(), rotations.tolist()):
        unscaled = min(1.0, max(0.0, (count - 1) / 3))
        assert new == pytest.approx(unscaled * rate + (1 - unscaled) * rate / 4, rel=1e-5)
    with pytest.raises(RegardError, match=r"rotary_factor must be at least 1 \(got 0\.5\)"):
        Rotary(16, factor=0.5)


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_dropout_keeps_the_mean_and_drops_a_fraction_p(p):
    torch.manual_seed(0)
    x = torch.ones(400, 500, requires_grad=True)
    y = Dropout(p)(x)
    assert (y == 0).float().mean().item() == pytest.approx(p, abs=0.005)
    assert y.mean().item() == pytest.approx(1.0, abs=0.005)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())  # the same mask, the same scale
    # Neighboring bytes of one draw are independent.
    dropped = (y == 0).float().view(-1, 2)
    assert (dropped[:, 0] * dropped[:, 1]).mean().item() == pytest.approx(p * p, abs=0.01)


def test_dropout_is_reproducible_and_off_in_eval_mode():
    layer = Dropout(0.5)
    torch.manual_seed(3)
    first = layer(torch.ones(99))
    torch.manual_seed(3)
    assert torch.equal(layer(torch.ones(99)), first)
    assert torch.equal(layer.eval()(torch.ones(99)), torch.ones(99))


def test_dropout_under_transforms_of_torch_func():
    layer, x = Dropout(0.5), torch.ones(3, 400)
    gradient = torch.func.vmap(torch.func.grad(lambda row: layer(row).sum()), randomness="different")(x)
    assert gradient.unique().tolist() == [0.0, 2.0]
    assert not torch.equal(gradient[0], gradient[1])


def test_layer_norm_gives_each_token_mean_0_and_variance_1():
    y = make_norm("layer", 64)(3 + 5 * torch.randn(7, 64))
    torch.testing.assert_close(y.mean(-1), torch.zeros(7), atol=1e-5, rtol=0)
    torch.testing.assert_close(y.var(-1, unbiased=False), torch.ones(7), atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_blocks_match_the_formulas_of_the_paper(norm, kind):
    torch.manual_seed(0)
    config = BlockConfig(8, 2, 16, dropout=0.0, norm=norm, norm_kind=kind, norm_eps=0.1)
    encoder, decoder = config.make_block("scaled_dot"), config.make_block("scaled_dot", causal(), "scaled_dot")
    for parameter in (*encoder.parameters(), *decoder.parameters()):
        nn.init.normal_(parameter)
    offsets, memory_offsets = Offsets.from_starts(torch.tensor([0, 2, 5])), Offsets.from_starts(torch.tensor([0, 3, 4]))
    x, memory = torch.randn(5, 8), torch.randn(4, 8)

    def residual(x, sublayer, norm_layer):
        return x + sublayer(norm_layer(x)) if norm == "pre" else norm_layer(x + sublayer(x))

    expected = residual(x, lambda y: encoder.attention(y, offsets), encoder.attention_norm)
    expected = residual(expected, encoder.feedforward, encoder.feedforward_norm)
    torch.testing.assert_close(encoder(x, offsets), expected)
    expected = residual(x, lambda y: decoder.attention(y, offsets), decoder.attention_norm)
    source = dict(memory=memory, memory_offsets=memory_offsets)
    expected = residual(expected, lambda y: decoder.cross(y, offsets, **source), decoder.cross_norm)
    expected = residual(expected, decoder.feedforward, decoder.feedforward_norm)
    torch.testing.assert_close(decoder(x, offsets, memory=memory, memory_offsets=memory_offsets), expected)


def test_parameter_names_of_blocks():
    config = BlockConfig(8, 2, 16, layer_scale=0.1)
    for block, sublayers in (
        (config.make_block("dot"), {"attention", "feedforward"}),
        (config.make_block("dot", causal(), "dot"), {"attention", "cross", "feedforward"}),
    ):
        expected = sublayers | {f"{name}_norm" for name in sublayers} | {f"{name}_residual" for name in sublayers}
        assert {name.split(".")[0] for name, _ in block.named_parameters()} == expected
        assert {name for name, _ in block.named_parameters() if name.endswith("_scale")} == {
            f"{name}_residual.layer_scale" for name in sublayers
        }


def test_multi_head_attention_matches_its_formula():
    torch.manual_seed(0)
    attention = CrossAttention(12, heads=3)
    x, memory = torch.randn(4, 12), torch.randn(6, 12)
    output = attention(
        x,
        Offsets.from_starts(torch.tensor([0, 4])),
        memory=memory,
        memory_offsets=Offsets.from_starts(torch.tensor([0, 6])),
    )
    q = attention.query(x).view(4, 3, 4).transpose(0, 1)[None]
    k, v = (y.view(6, 3, 4).transpose(0, 1)[None] for y in attention.key_value(memory).chunk(2, dim=-1))
    heads = reference(q, k, v, ScaledDot())[0].transpose(0, 1).reshape(4, 12)
    torch.testing.assert_close(output, attention.out(heads))


def test_growing_cache_keeps_its_keys_and_values():
    cache, rows = KVCache(), [torch.randn(2, 1, 3, 4) for _ in range(40)]
    for row in rows:
        keys, values, mask = cache.update(row, -row)
    assert mask is None
    assert torch.equal(keys, torch.cat(rows, dim=1))
    assert torch.equal(values, -keys)
    assert torch.equal(cache.reorder(torch.tensor([1])).update(rows[0][:1], rows[0][:1]).k[:, :40], keys[1:])


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("low_precision", [False, True])
def test_residual_stream_keeps_the_dtype_of_the_embedding(norm, low_precision):
    torch.manual_seed(0)
    embedding = Embedding(10, 8, low_precision=low_precision)
    block = BlockConfig(8, 2, 16, dropout=0.0, norm=norm).make_block("scaled_dot")
    ids, offsets = torch.tensor([4, 5, 6]), Offsets.from_starts(torch.tensor([0, 3]))
    exact = block(embedding(ids, ids), offsets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = block(embedding(ids, ids), offsets)
    assert output.dtype == (torch.bfloat16 if low_precision else torch.float32)
    torch.testing.assert_close(output.float(), exact, atol=0.05, rtol=0.02)
    assert embedding(ids, ids).dtype == torch.float32  # no change without autocast


def test_rms_norm_of_bfloat16_computes_in_float32_without_warnings():
    norm, x = make_norm("rms", 64), torch.randn(50, 64).bfloat16()
    torch.nn.init.normal_(norm.weight)
    with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error")
        output = norm(x)
    assert torch.equal(output, norm(x.float()).bfloat16())
