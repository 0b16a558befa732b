"""Compiled training: same outputs, one compilation for all layers, unchanged model."""

import functools

import jaxtyping
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from regard.attention import use
from regard.kernels.triton.support import is_interpreted
from regard.layers.packed import pack
from regard.models import GPTConfig, Seq2SeqConfig, TransformerConfig, ViTConfig, make_model
from regard.training import distributed
from regard.training.distributed import compiled_features

SIZES = dict(width=16, heads=2, feedforward=32, dropout=0.0)


@pytest.fixture
def counter(monkeypatch):
    """A compiler backend that counts compilations and skips code generation, which is slow."""
    counter = CompileCounter()
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shape checker cannot be compiled
    monkeypatch.setattr(distributed.torch, "compile", functools.partial(torch.compile, backend=counter))
    torch._dynamo.reset()
    yield counter
    torch._dynamo.reset()


def sentences(*lengths, max_len):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(4, 20, (n,), generator=generator).tolist() for n in lengths]
    return pack(rows, total=24, count=4, max_len=max_len)


def gpt():
    return make_model(GPTConfig(vocab=20, layers=2, **SIZES))


def test_all_layers_share_the_compiled_code(counter):
    sizes = dict(source_vocab=20, target_vocab=20, encoder_layers=2, decoder_layers=2)
    model = make_model(TransformerConfig(norm="post", **sizes, **SIZES))
    inputs = sentences(8, 3, max_len=8), sentences(2, 7, max_len=8)
    torch.testing.assert_close(compiled_features(model)(*inputs), model.features(*inputs))
    assert counter.frame_count == 3  # embedding, encoder block, decoder block


def test_changed_max_len_is_recompiled_once(counter):
    model = gpt()
    features = compiled_features(model)
    for max_len, compilations in ((8, 2), (16, 3), (24, 3)):
        tokens = sentences(8, 3, max_len=max_len)
        torch.testing.assert_close(features(tokens), model.features(tokens))
        assert counter.frame_count == compilations, max_len


@pytest.mark.skipif(not is_interpreted(), reason="needs Triton's interpreter")
def test_custom_kernels_are_part_of_the_graph(counter):
    model = gpt()
    features = compiled_features(model)
    for max_len, compilations in ((8, 2), (16, 3), (32, 3)):
        tokens = sentences(8, 3, max_len=max_len)
        expected = model.features(tokens)
        with use("varlen_short"):
            torch.testing.assert_close(features(tokens), expected)
        assert counter.frame_count == compilations, max_len


def test_layers_with_different_drop_path_share_the_compiled_code(counter):
    sizes = dict(image_height=8, image_width=8, patch=4, channels=1, layers=4, drop_path=0.5)
    model = make_model(ViTConfig(head="segment", labels=("a", "b"), **sizes, **SIZES)).train()
    compiled_features(model)(torch.rand(2, 1, 8, 8))
    assert counter.frame_count == 1


def test_model_without_blocks_is_compiled_in_one_piece(counter):
    model = make_model(Seq2SeqConfig(width=8, source_vocab=20, target_vocab=20, dropout=0.0))
    inputs = sentences(8, 3, max_len=8), sentences(2, 7, max_len=8)
    torch.testing.assert_close(compiled_features(model)(*inputs), model.features(*inputs))
    assert counter.frame_count > 0


def test_model_is_not_changed(counter):
    model = gpt()
    features = compiled_features(model)
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    features(sentences(8, 3, max_len=8))
    with pytest.raises(AttributeError):
        features("no batch")
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before
