"""The decoding engine gives the same outputs as the plain search, for every family, score and option."""

from dataclasses import replace

import pytest
import torch

from regard.attention import use
from regard.decode import DecodeConfig, Ensemble, Request, decode_all, engine, explain, slots
from regard.decode.engine import model_reason
from regard.decode.precision import convert_model, convert_to_float8
from regard.decode.steppers import static
from regard.errors import RegardError
from regard.layers.packed import pack
from regard.layers.quantized import Float8Linear
from regard.models.gpt import GPT
from tests.decode.models import (
    CONFIGS,
    assert_equal_search,
    decode_both,
    gpt,
    make_sources,
    seq2seq,
    special_options,
    transformer,
)
from tests.models.gpt_variants import VARIANTS

SCORES = ("dot", "scaled_dot", "cosine", "general", "concat", "location")
SCORE_OPTIONS = ("encoder_score", "decoder_score", "cross_score")
T5_OPTIONS = {"positions": "relative", "decoder_score": "dot", "norm_kind": "rms", "activation": "geglu", "bias": False}
GPT2_OPTIONS = {"positions": "learned", "norm_kind": "layer", "bias": "all", "activation": "gelu", "qk_norm": False}
MODELS = {
    **{f"transformer, {score}": (transformer, dict.fromkeys(SCORE_OPTIONS, score)) for score in SCORES},
    **{f"gpt, {score}": (gpt, {"score": score}) for score in SCORES},
    **{f"luong, {score}": (seq2seq, {"score": score}) for score in SCORES},
    "bahdanau, lstm": (seq2seq, {"attention": "bahdanau", "cell": "lstm", "layers": 2}),
    "no attention": (seq2seq, {"attention": "none", "cell": "rnn"}),
    "post-norm, learned positions": (transformer, {"norm": "post", "positions": "learned", "position_offset": 2}),
    "T5": (transformer, {**T5_OPTIONS, "output_scale": True}),
    "relative positions, cosine": (transformer, {"positions": "relative", "decoder_score": "cosine", "kv_heads": 1}),
    "rotary, grouped heads": (transformer, {"positions": "rotary", "heads": 4, "kv_heads": 2, "qk_norm": True}),
    "embedding norm, output bias": (transformer, {"embedding_norm": True, "output_bias": True, "tied": False}),
    "GPT-2": (gpt, GPT2_OPTIONS),
    "dynamic rotary scaling": (gpt, {"rotary_factor": 3.0, "rotary_scaling": "dynamic", "rotary_context": 4}),
    **{f"gpt, {name}": (gpt, {"heads": 4} | options) for name, options in VARIANTS.items()},
}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_equals_plain_search(name):
    make, options = MODELS[name]
    model = make(**options)
    for config in (CONFIGS["greedy"], CONFIGS["beam"]):
        assert model_reason(model, config) == ""
        assert_equal_search(*decode_both(model, make_sources(), config))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("make", [transformer, gpt, seq2seq])
def test_every_option_equals_plain_search(make, config):
    sources = make_sources(2 if CONFIGS[config].beam > 100 else 9)
    assert_equal_search(*decode_both(make(), sources, CONFIGS[config]))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("make", [transformer, gpt, seq2seq])
def test_forced_prefixes(make, seed):
    model, sources = make(seed), make_sources(seed=seed)
    prefixes = [source[: i % 4] for i, source in enumerate(make_sources(seed=seed + 1))]
    prefixes = [[token for token in prefix if token != 3] for prefix in prefixes]
    for config in (CONFIGS["greedy"], CONFIGS["beam"], CONFIGS["samples"]):
        fast, plain = decode_both(model, sources, config, prefixes=prefixes)
        assert_equal_search(fast, plain)
        assert all(h.ids[: len(p)] == p for n_best, p in zip(fast, prefixes) for h in n_best)


def test_sentences_take_the_slots_of_finished_ones(monkeypatch):
    """More sentences than slots, of different lengths: slots are refilled and finally dropped."""
    monkeypatch.setattr(engine, "CPU_ROWS", 12)
    sources = make_sources(40, longest=20)
    for make in (transformer, gpt, seq2seq):
        for config in (CONFIGS["greedy"], CONFIGS["beam"], CONFIGS["samples"]):
            assert_equal_search(*decode_both(make(), sources, config))


def test_finished_sentences_at_the_last_learned_position(monkeypatch):
    """They stay in the batch until others finish, without a position of their own."""
    monkeypatch.setattr(engine, "CPU_ROWS", 40)
    model = transformer(positions="learned", max_len=16)
    config = DecodeConfig(beam=5, max_len=15, max_ratio=1.0, max_extra=3)
    assert_equal_search(*decode_both(model, make_sources(20, longest=14), config))


def test_slots_are_refilled_before_the_batch_is_finished(monkeypatch):
    in_use = []
    load = slots.SlotDecoder.load

    def spy(self, slots, taken):
        in_use.append(sum(sentence is not None for sentence in self.sentences))
        load(self, slots, taken)

    monkeypatch.setattr(engine, "CPU_ROWS", 4)
    monkeypatch.setattr(slots.SlotDecoder, "load", spy)
    config = DecodeConfig("greedy", max_len=30, max_ratio=1.0, max_extra=0)  # outputs as long as their sources
    decode_all(transformer(), Request(make_sources(20, longest=20), config))
    assert any(in_use)


def test_long_prompts_are_processed_in_chunks(monkeypatch):
    monkeypatch.setattr(static, "PREFILL_CHUNK", 4)
    sources = [*make_sources(6, longest=14), [5], make_sources(1, seed=3)[0] * 2]
    for score in ("scaled_dot", "concat"):
        assert_equal_search(*decode_both(gpt(score=score), sources, CONFIGS["beam"]))


def test_ensemble_equals_plain_search():
    ensemble = Ensemble([transformer(1), transformer(2, positions="rotary"), seq2seq(3)]).eval()
    for config in (CONFIGS["greedy"], CONFIGS["beam"]):
        assert_equal_search(*decode_both(ensemble, make_sources(), config))


@pytest.mark.parametrize(
    ("make", "precision"), [(transformer, "float8"), (gpt, "float8"), (seq2seq, "float8"), (seq2seq, "int8")]
)
def test_quantized_models_equal_their_plain_search(monkeypatch, make, precision):
    monkeypatch.setattr(engine, "uses_compiled_kernels", lambda sentences: False)  # float8 is for GPUs
    model, sources = make(), make_sources(4)
    quantized = convert_model(model, "int8") if precision == "int8" else convert_to_float8(model, torch.float32)
    for config in (CONFIGS["greedy"], CONFIGS["beam"]):
        fast, plain = decode_both(quantized, sources, config)
        assert_equal_search(fast, plain, tolerance=1e-4)
        assert fast != decode_both(model, sources, config)[0]


def test_float8_layers_of_a_model():
    model = transformer()
    quantized = convert_to_float8(model, torch.bfloat16)
    names = {name for name, module in quantized.named_modules() if isinstance(module, Float8Linear)}
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert names == {name for name in linears if not name.startswith("encoder.")}
    assert "output" in names
    assert {parameter.dtype for parameter in quantized.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_float8_needs_a_gpu():
    with pytest.raises(RegardError, match=r"float8 is for CUDA GPUs \(the model is on cpu\)") as caught:
        decode_all(transformer(), Request(make_sources(1), DecodeConfig(precision="float8")))
    assert "Use int8." in str(caught.value) + str(caught.value.hint)


def test_progress_counts_every_sentence():
    calls = []
    progress = lambda done, total: calls.append((done, total))  # noqa: E731
    decode_all(transformer(), Request(make_sources(20), CONFIGS["beam"]), progress=progress)
    assert calls == [(i, 20) for i in range(1, 21)]


@pytest.mark.parametrize("make", [transformer, gpt])
def test_tokens_are_reported_as_they_are_generated(make):
    tokens = {i: [] for i in range(9)}
    model = make()
    request = Request(make_sources(), CONFIGS["greedy"], **special_options(model))
    results = decode_all(model, request, on_token=lambda i, token: tokens[i].append(token))
    assert [n_best[0].ids for n_best in results] == list(tokens.values())


def test_nan_in_the_weights_is_an_error():
    model = transformer()
    with torch.no_grad():
        model.output.weight[5] = torch.nan
    for config in (CONFIGS["greedy"], CONFIGS["beam"]):
        with pytest.raises(RegardError, match="NaN"):
            decode_all(model, Request(make_sources(), config))


COVERED = {
    "transformer": transformer,
    "concat": lambda: transformer(cross_score="concat"),
    "luong": seq2seq,
    "ensemble": lambda: Ensemble([transformer(1), transformer(2, decoder_layers=1), seq2seq(3)]).eval(),
}


@pytest.mark.parametrize("name", COVERED)
def test_coverage_equals_plain_search(monkeypatch, name):
    monkeypatch.setattr(engine, "CPU_ROWS", 9)
    config = DecodeConfig(beam=3, n_best=2, max_len=9, coverage_penalty=0.4)
    with explain() as choices:
        ours, plain = decode_both(COVERED[name](), make_sources(7), config)
    assert [choice.stepper for choice in choices] == ["static", "model"]
    assert_equal_search(ours, plain)


class NamedGPT(GPT):
    """A subclass that computes what its base does."""

    title = "extended"


class DoubledGPT(GPT):
    def features(self, tokens):
        return 2 * super().features(tokens)


def test_static_decoders_support_subclasses_that_compute_the_same():
    config = DecodeConfig(method="greedy", max_len=5)
    assert model_reason(NamedGPT(gpt().config).eval(), config) == ""
    assert model_reason(DoubledGPT(gpt().config).eval(), config) == "the model was replaced"


@pytest.mark.parametrize("change", ["module", "forward"])
def test_the_model_itself_decodes_models_with_other_layers(change):
    """The engine computes the layers from their parameters."""
    model, config = transformer(), DecodeConfig(method="greedy", max_len=5)
    sources = make_sources(2)
    before = decode_all(model, Request(sources, config))
    feedforward = model.decoder[0].feedforward
    if change == "module":
        model.decoder[0].feedforward = torch.nn.Identity()
    else:
        feedforward.forward = lambda x: -3 * x
    assert model_reason(model, config) == "decoder.0.feedforward was replaced"
    after = decode_all(model, Request(sources, config))
    assert all(one[0].logprob != other[0].logprob for one, other in zip(after, before))


def test_the_model_itself_runs_inside_attention_contexts():
    model = transformer()
    with use("reference"):
        assert model_reason(model, DecodeConfig()) == "attention is recorded, changed or forced to a backend"
    handle = model.encoder[0].register_forward_hook(lambda *args: None)
    assert model_reason(model, DecodeConfig()) == "the model has forward hooks"
    handle.remove()
    assert model_reason(model.train(), DecodeConfig()) == "the model is in training mode"
    with torch.autocast("cpu", torch.bfloat16):
        assert model_reason(model.eval(), DecodeConfig()) == "autocast is enabled"
    assert model_reason(model, DecodeConfig()) == ""


@pytest.mark.parametrize("config", ["greedy", "beam", "samples"])
@pytest.mark.parametrize("make", [transformer, gpt])
def test_outputs_without_eos_have_the_maximum_length(make, config):
    """A suppressed <eos> is never generated before, with other rules and without."""
    model, sources = make(), make_sources(5)
    free = replace(CONFIGS[config], max_len=20, max_extra=20)
    often = decode_both(model, sources, free)[0][0][0].ids[3]  # as <eos>, it ends outputs before the maximum length
    special = replace(special_options(model)["special"], eos=often)
    suppressed = replace(free, suppress_sequences=((often,),))
    fast, plain = decode_both(model, sources, suppressed, special=special)
    assert_equal_search(fast, plain)
    with_rule = decode_both(model, sources, replace(suppressed, no_repeat_ngram_size=30), special=special)[1]
    for results in (fast, plain, with_rule):
        assert {len(one.ids) for n_best in results for one in n_best} == {20}
    shorter = decode_both(model, sources, free, special=special)[0]
    assert min(len(one.ids) for n_best in shorter for one in n_best) < 20


@pytest.mark.parametrize("method", ["greedy", "beam", "sample"])
def test_language_models_end_at_the_limit_without_eos(method):
    """Scores and log-probabilities are those of the text; with a larger limit, <eos> ends it and is counted."""
    model, sources = gpt(), make_sources(5)
    config = DecodeConfig(method, beam=3, n_best=1 if method == "greedy" else 2, max_len=4, min_len=4, max_extra=100)
    for results in decode_both(model, sources, config):
        for source, n_best in zip(sources, results):
            for one in n_best:
                logits = model(pack([[*source, *one.ids[:-1]]]))[len(source) - 1 :]
                expected = logits.log_softmax(-1).gather(1, torch.tensor(one.ids)[:, None])[:, 0].tolist()
                assert one.token_logprobs == pytest.approx(expected, abs=1e-4)
                assert one.logprob == pytest.approx(sum(expected), abs=1e-3)
                assert one.score == pytest.approx(one.logprob / 4, abs=1e-3)
