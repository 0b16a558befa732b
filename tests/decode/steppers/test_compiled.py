"""Compiled CPU kernels give the same outputs as the plain search."""

import copy
import os
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from regard.decode import DecodeConfig, Ensemble, Request, Shortlist, decode_all, engine, explain, precision
from regard.decode.precision import convert_model
from regard.errors import RegardError
from tests.decode.models import (
    CONFIGS,
    OPTIONS,
    VOCAB,
    assert_equal_histories,
    assert_equal_search,
    decode_both,
    gpt,
    make_sources,
    special_options,
    transformer,
    with_option,
)
from tests.decode.test_engine import GPT2_OPTIONS, T5_OPTIONS
from tests.decode.test_shortlist import SHORTLIST

pytest.importorskip("numba")
from regard.decode.steppers import compiled, packed_weights
from regard.kernels.cpu import packed_product

SUPPORTED = {
    "transformer": (transformer, {}),
    "post-norm, learned positions": (transformer, {"norm": "post", "positions": "learned", "position_offset": 2}),
    "T5": (transformer, {**T5_OPTIONS, "output_scale": True}),
    "rotary, grouped heads": (transformer, {"positions": "rotary", "heads": 4, "kv_heads": 2, "qk_norm": True}),
    "output bias, swiglu": (transformer, {"output_bias": True, "tied": False, "activation": "swiglu"}),
    "GPT": (gpt, {}),
    "GPT-2": (gpt, GPT2_OPTIONS),
    "silu": (gpt, {"activation": "silu"}),
    "relu2, dot": (gpt, {"activation": "relu2", "score": "dot"}),
}
SEARCHES = [config for config in CONFIGS if "sample" not in config and "wider" not in config]


@pytest.fixture
def steps(monkeypatch):
    """The number of steps with compiled kernels, in a list; they are used from the first sentence on."""
    counts = [0]
    advance = compiled.CpuDecoder.advance

    def spy(self, *arguments):
        counts[0] += 1
        advance(self, *arguments)

    monkeypatch.setattr(compiled.CpuDecoder, "advance", spy)
    monkeypatch.setattr(engine, "COMPILED_SENTENCES", 0)
    return counts


@pytest.mark.parametrize("config", SEARCHES)
@pytest.mark.parametrize("name", SUPPORTED)
def test_equals_plain_search(steps, name, config):
    make, options = SUPPORTED[name]
    assert_equal_search(*decode_both(make(**options), make_sources(), CONFIGS[config]))
    assert steps[0]


@pytest.mark.parametrize("name", SUPPORTED)
def test_single_sentences_equal_plain_search(steps, name):
    """All layers run in one call."""
    make, options = SUPPORTED[name]
    for source in make_sources(3):
        for config in (CONFIGS["greedy"], DecodeConfig(beam=2, max_len=9)):
            assert_equal_search(*decode_both(make(**options), [source], config))
    assert steps[0]


def test_slots_are_refilled_and_dropped(steps, monkeypatch):
    monkeypatch.setattr(engine, "CPU_ROWS", 12)
    for make in (transformer, gpt):
        for config in (CONFIGS["greedy"], CONFIGS["beam"]):
            assert_equal_search(*decode_both(make(), make_sources(40, longest=20), config))
    assert steps[0]


@pytest.mark.parametrize("option", [option for option in OPTIONS if option != "coverage"])
@pytest.mark.parametrize("name", ["transformer", "rotary, grouped heads", "GPT"])
def test_every_option_equals_plain_search(monkeypatch, name, option):
    """With rules the search gets the logits of the kernels, in slots that are refilled and dropped."""
    monkeypatch.setattr(engine, "COMPILED_SENTENCES", 0)
    monkeypatch.setattr(engine, "CPU_ROWS", 12)
    make, options = SUPPORTED[name]
    model, sources = make(**options), make_sources(9)
    config, request = with_option(option, model, 9)
    with explain() as choices:
        ours, plain = decode_both(model, sources, config, **request)
    assert [choice.stepper for choice in choices] == ["compiled", "model"]
    assert_equal_search(ours, plain)
    assert_equal_histories(ours, plain)


@pytest.mark.parametrize("has_panels", [True, False])
@pytest.mark.parametrize("config", SEARCHES)
def test_logits_of_int8_weights_are_those_that_kernels_choose_from(monkeypatch, config, has_panels):
    if not has_panels:
        monkeypatch.setattr(packed_weights, "packing_available", lambda is_int8: False)
    monkeypatch.setattr(engine, "COMPILED_SENTENCES", 0)
    model, sources = transformer(width=32), make_sources()
    search = replace(CONFIGS[config], precision="int8")
    recorded = decode_all(model, Request(sources, search, history=True))
    assert_equal_search(decode_all(model, Request(sources, search)), recorded)


@pytest.mark.parametrize("has_panels", [True, False])
@pytest.mark.parametrize("config", [config for config in CONFIGS if "sample" not in config])
@pytest.mark.parametrize("name", ["transformer", "output bias, swiglu", "GPT"])
def test_shortlists_equal_plain_search(steps, monkeypatch, name, config, has_panels):
    """Slots are refilled and dropped, so the columns of the logits change while a sentence is decoded."""
    if not has_panels:
        monkeypatch.setattr(packed_weights, "packing_available", lambda is_int8: False)
    make, options = SUPPORTED[name]
    model, search = make(**options), replace(CONFIGS[config], shortlist=True)
    if model.output.bias is not None:
        torch.nn.init.normal_(model.output.bias)
    sources = make_sources(3 if search.beam > 100 else 14, longest=14)
    prefixes = [source[1:-1][: i % 3] for i, source in enumerate(reversed(sources))]
    monkeypatch.setattr(engine, "CPU_ROWS", 5 * search.beam if search.method == "beam" else 5)
    assert_equal_search(*decode_both(model, sources, search, shortlist=SHORTLIST, prefixes=prefixes))
    assert_equal_search(*decode_both(model, sources[:1], search, shortlist=SHORTLIST))
    assert steps[0]


@pytest.mark.parametrize("has_panels", [True, False])
def test_int8_with_shortlist(steps, monkeypatch, has_panels):
    """Results do not depend on the batch, nor on the columns of other tokens."""
    if not has_panels:
        monkeypatch.setattr(packed_weights, "packing_available", lambda is_int8: False)
    monkeypatch.setattr(engine, "CPU_ROWS", 12)
    model, sources = transformer(width=32), make_sources(20)
    config = DecodeConfig(beam=3, max_len=8, precision="int8", shortlist=True)
    options = {"shortlist": SHORTLIST, **special_options(model)}
    together = decode_all(model, Request(sources, config, **options))
    alone = [decode_all(model, Request([source], config, **options))[0] for source in sources]
    assert_equal_search(together, alone)
    everything = replace(SHORTLIST, frequent=np.arange(VOCAB, dtype=np.int32))
    all_tokens = decode_all(model, Request(sources, config, **options | {"shortlist": everything}))
    without = decode_all(model, Request(sources, replace(config, shortlist=False), **special_options(model)))
    assert all_tokens == without
    assert steps[0]


def test_lists_of_special_tokens(steps):
    """Fewer tokens than candidates of a beam."""
    empty = Shortlist(np.full((VOCAB, 1), -1, np.int32), np.zeros(0, np.int32), VOCAB)
    for name in ("greedy", "beam"):
        search = replace(CONFIGS[name], shortlist=True)
        assert_equal_search(*decode_both(transformer(), make_sources(3), search, shortlist=empty))
    assert steps[0]


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_weights_without_panels(steps, monkeypatch, precision):
    """Processors without instructions for packed products, and large float32 models, use the products of torch."""
    if not packed_product.packing_available(precision == "int8"):
        pytest.skip("this processor has no instructions for packed products")
    config = DecodeConfig(beam=3, max_len=8, precision=precision)
    packed, unpacked = [], []
    for results, is_available in ((packed, True), (unpacked, False)):
        monkeypatch.setattr(packed_weights, "packing_available", lambda is_int8, found=is_available: found)
        for make in (transformer, gpt):
            model = make(width=32)
            results += decode_all(model, Request(make_sources(20), config, **special_options(model)))
            results += decode_all(model, Request(make_sources(1), config, **special_options(model)))
    assert steps[0]
    difference = [abs(a[0].score - b[0].score) for a, b in zip(packed, unpacked)]
    assert max(difference) < 1e-5


def test_memory_of_caches_is_used_again(steps):
    """Also while another decoder of the same model is at work."""
    model, sources = transformer(), make_sources(12)
    config, options = CONFIGS["beam"], special_options(model)
    expected = decode_all(model, Request(sources, config, **options))
    nested = []
    for _ in range(2):
        for progress in (None, lambda *_: nested.append(decode_all(model, Request(sources, config, **options)))):
            results = decode_all(model, Request(sources, config, **options), progress=progress)
            assert results == expected
    assert nested
    assert all(results == expected for results in nested)


def test_forced_prefixes(steps):
    sources = make_sources()
    prefixes = [[token for token in source[: i % 4] if token != 3] for i, source in enumerate(make_sources(seed=1))]
    for config in (CONFIGS["greedy"], CONFIGS["beam"]):
        assert_equal_search(*decode_both(transformer(), sources, config, prefixes=prefixes))
    assert steps[0]


def test_int8_does_not_depend_on_the_batch(steps):
    model, sources = transformer(width=32), make_sources(20)
    config = DecodeConfig(beam=3, max_len=8, precision="int8")
    together = decode_all(model, Request(sources, config, **special_options(model)))
    alone = [decode_all(model, Request([source], config, **special_options(model)))[0] for source in sources]
    assert [(h.ids, h.score) for n_best in together for h in n_best] == [
        (h.ids, h.score) for n_best in alone for h in n_best
    ]


def test_int8_is_close_to_the_reference(steps, monkeypatch):
    model, sources = transformer(width=32), make_sources(20)
    config = DecodeConfig("greedy", max_len=1, precision="int8")
    compiled = decode_all(model, Request(sources, config, **special_options(model)))
    assert steps[0]
    monkeypatch.setattr(engine, "COMPILED_SENTENCES", 10**9)
    monkeypatch.setattr(engine, "_decoded", 0)
    plain = decode_all(model, Request(sources, config, **special_options(model)))
    difference = [abs(a[0].logprob - b[0].logprob) for a, b in zip(compiled, plain)]
    assert sorted(difference)[len(difference) // 2] < 1e-3


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (lambda: transformer(decoder_score="cosine"), CONFIGS["greedy"]),
        (lambda: transformer(embedding_norm=True), CONFIGS["greedy"]),
        (lambda: Ensemble([transformer(1), transformer(2)]).eval(), CONFIGS["greedy"]),
        (transformer, CONFIGS["samples"]),
    ],
)
def test_unsupported_calls_keep_the_plain_kernels(steps, model, config):
    assert_equal_search(*decode_both(model(), make_sources(), config))
    assert not steps[0]


def test_changed_weights_are_packed_again(steps):
    model, sources = transformer(), make_sources()
    decode_both(model, sources, CONFIGS["greedy"])
    with torch.no_grad():
        model.decoder[0].attention.query.weight.mul_(-1)
    assert_equal_search(*decode_both(model, sources, CONFIGS["greedy"]))


@pytest.mark.parametrize("precision", ["auto", "int8"])
def test_changes_that_pytorch_does_not_count(steps, precision):
    """Changes through `data` and NumPy views are found at once where they concern a head, a row or a tensor."""
    model, sources = transformer(width=32), make_sources()
    config = replace(CONFIGS["greedy"], precision=precision)
    weight, bias = model.decoder[0].attention.query.weight, model.decoder[0].feedforward.fc1.bias
    changes = [
        lambda: weight.data.mul_(-1),
        lambda: weight.data[16:].zero_(),
        lambda: weight.data.copy_(weight.data[torch.arange(32).roll(5)].clone()),
        lambda: np.multiply(bias.detach().numpy(), 0, out=bias.detach().numpy()),
        lambda: model.output.weight.data[7].fill_(3.0),
    ]
    torch.nn.init.normal_(bias)
    options = special_options(model)
    for change in changes:
        decode_all(model, Request(sources, config, **options))
        change()
        changed = decode_all(model, Request(sources, config, **options))
        fresh = copy.deepcopy(model)
        assert_equal_search(changed, decode_all(fresh, Request(sources, config, **options)))
    assert steps[0]


def test_changes_of_single_values_are_found_by_the_next_full_check(steps, monkeypatch):
    monkeypatch.setattr(precision, "CHECK_SHARE", 1e9)  # every call
    model = transformer()
    before = precision.weight_versions(model)
    assert precision.weight_versions(model) == before
    model.encoder[0].attention.out.weight.data[3, 5] += 1
    assert precision.weight_versions(model) != before


# Lengths around the sizes of tables, tiles, lanes, blocks and capacities.
SIZES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 400)


def test_sources_and_outputs_longer_than_the_table_of_positions(steps):
    """Also in the first call, and after calls with short sentences."""
    config = DecodeConfig("greedy", max_len=300, min_len=300, max_extra=300)
    for first in (make_sources(2), [[5] * 299 + [3]]):
        model = transformer(max_len=512)
        for sources in (first, make_sources(1), [[7] * 700 + [3], [4] * 255 + [3]]):
            assert_equal_search(*decode_both(model, sources, config), tolerance=1e-4)
    assert steps[0]


@pytest.mark.parametrize("seed", range(10))
def test_lengths_around_every_capacity(steps, monkeypatch, seed):
    """Sources, outputs, prefixes, vocabularies and batches of random sizes, with heads of 8, 32 and 64 channels."""
    draw = random.Random(seed)
    vocab, heads, width = draw.choice((40, 127, 128, 129, 1024, 1025)), draw.choice((1, 2)), draw.choice((8, 32, 64))
    sizes = {"source_vocab": vocab, "target_vocab": vocab, "max_len": 1024, "heads": heads, "width": heads * width}
    model = transformer(seed, **sizes, encoder_layers=1, decoder_layers=1, norm=draw.choice(("pre", "post")))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(width**-0.5)  # wide layers amplify rounding
    monkeypatch.setattr(engine, "CPU_ROWS", draw.choice((1, 5, 128, 160)))
    for method in ("greedy", "beam"):
        count, limit = draw.choice((1, 3, 9)), draw.choice(SIZES[:-4])
        config = DecodeConfig(method, beam=draw.choice((1, 2, 5)), max_len=limit, max_extra=limit, max_ratio=0.0)
        sources = [[draw.randrange(4, vocab) for _ in range(draw.choice(SIZES) - 1)] + [3] for _ in range(count)]
        prefixes = [[draw.randrange(4, vocab) for _ in range(draw.choice((0, 1, limit // 2, limit)))] for _ in sources]
        assert_equal_search(*decode_both(model, sources, config, prefixes=prefixes), tolerance=1e-3)
    assert steps[0]


def test_128_rows_of_int8(steps):
    """As many rows as the last tile of a product has bytes."""
    model, sources = transformer(width=40, heads=2), make_sources(128)
    config = DecodeConfig("greedy", max_len=4, precision="int8")
    together = decode_all(model, Request(sources, config, **special_options(model)))
    alone = [decode_all(model, Request([source], config, **special_options(model)))[0] for source in sources[:20]]
    assert together[:20] == alone


def test_ids_outside_of_the_vocabulary_are_not_read(steps):
    with pytest.raises(ValueError, match="sizes"):
        decode_all(transformer(), Request([[VOCAB, 3]], CONFIGS["greedy"]))


UNCHECKED = """
import numba
assert not numba.config.BOUNDSCHECK
from tests.decode import models as helpers
for make in (helpers.transformer, helpers.gpt):
    for config in ("greedy", "beam"):
        helpers.assert_equal_search(*helpers.decode_both(make(), helpers.make_sources(20), helpers.CONFIGS[config]))
"""


def test_kernels_without_bounds_checks():
    """As users run them: the other tests check every index."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    subprocess.run([sys.executable, "-c", UNCHECKED], env=environment, check=True)


@pytest.mark.parametrize("config", ["greedy", "beam"])
def test_nan_is_an_error(steps, config):
    model = transformer()
    with torch.no_grad():
        model.output.weight[5] = torch.nan
    with pytest.raises(RegardError, match="NaN"):
        decode_all(model, Request(make_sources(3), CONFIGS[config], **special_options(model)))


def test_kernels_are_used_after_some_sentences(monkeypatch):
    monkeypatch.setattr(engine, "_decoded", 0)
    monkeypatch.setattr(engine, "COMPILED_SENTENCES", 3)
    assert [engine.uses_compiled_kernels(1) for _ in range(4)] == [False, False, True, True]


def test_nothing_is_used_without_numba(monkeypatch):
    monkeypatch.setattr(engine, "COMPILED_SENTENCES", 0)
    monkeypatch.setattr(engine, "numba_available", lambda: False)
    assert not engine.uses_compiled_kernels(100)


def test_supported_precisions():
    assert compiled.supports(convert_model(transformer(), "int8"))
    assert not compiled.supports(convert_model(transformer(), "bfloat16"))
