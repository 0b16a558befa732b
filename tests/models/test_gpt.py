"""Decoder-only models: masking, incremental decoding, limits of length."""

from contextlib import nullcontext

import pytest
import torch

from regard.attention import SCORES, record, use
from regard.attention.exact_weights import compute_weights
from regard.decode import DecodeConfig, Ensemble
from regard.errors import RegardError
from regard.layers.packed import pack
from regard.models.gpt import GPT, GPTConfig, gpt2, gpt_small
from tests.decode.helpers import beam, greedy, sample
from tests.models.gpt_variants import VARIANTS

PROMPTS = [[2, 4, 5, 6, 7], [2, 6], [8]]


def small(**changes) -> GPT:
    torch.manual_seed(0)
    sizes = dict(width=16, heads=4, layers=2, feedforward=32, dropout=0.0, vocab=11, max_len=32)
    return GPT(GPTConfig(**(sizes | changes))).eval()


def decode_without_cache(model: GPT, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding that recomputes the full text for each token."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        logits = model(pack([ids]))[-1]
        logits[[0, 2]] = -torch.inf  # <pad> and <sos> are never generated
        ids.append(int(logits.argmax()))
        if ids[-1] == 3:
            return ids[len(prompt) : -1]
    return ids[len(prompt) :]


@pytest.mark.parametrize("positions", ["rotary", "learned", "sinusoidal", "none"])
@pytest.mark.parametrize("score", SCORES)
def test_cached_decoding_matches_full_forward(positions, score):
    """Prompts of several lengths in one batch."""
    model = small(positions=positions, score=score, kv_heads=2)
    found = greedy(model, PROMPTS, DecodeConfig(method="greedy", max_len=12))
    assert [n_best[0].ids for n_best in found] == [decode_without_cache(model, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_decode_as_without_cache_and_pack_as_alone(name):
    model = small(**VARIANTS[name])
    found = greedy(model, PROMPTS, DecodeConfig(method="greedy", max_len=12))
    assert [n_best[0].ids for n_best in found] == [decode_without_cache(model, prompt, 12) for prompt in PROMPTS]
    alone = torch.cat([model(pack([prompt])) for prompt in PROMPTS])
    torch.testing.assert_close(model(pack(PROMPTS)), alone)


@pytest.mark.parametrize("name", VARIANTS)
def test_backends_agree_on_variants(name):
    """No backend ignores a window or soft-capping, forward and backward."""
    model, results = small(**VARIANTS[name]).train(), []
    for backend in (nullcontext(), use("reference"), use("chunked")):
        model.zero_grad()
        with backend:
            logits = model(pack(PROMPTS))
            logits.square().sum().backward()
        results.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
    for others in zip(*results):
        torch.testing.assert_close(others[1], others[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(others[2], others[0], atol=1e-4, rtol=1e-4)


def test_each_option_changes_the_output():
    plain = small()(pack(PROMPTS))
    options: dict = dict(norm="sandwich", parallel=True, rotary_share=0.5, unrotated_layers=(0,), score_width=2.0)
    options |= dict(sliding_windows=(2,), score_cap=0.1, logit_cap=0.01, embedding_scale=True, qk_norm_joint=True)
    for name, value in options.items():
        changed = small(**{name: value})
        with torch.no_grad():  # other parameters stay the same
            changed.load_state_dict(small().state_dict(), strict=False) if name != "qk_norm_joint" else None
        assert not torch.allclose(changed(pack(PROMPTS)), plain, atol=1e-6), name


def test_parallel_blocks_have_norms_of_inputs_only():
    with pytest.raises(RegardError, match=r'model.norm = "output"'):
        small(parallel=True, norm="output")


def test_window_limits_the_attention_maps():
    model = small(sliding_windows=(2, 0), score_cap=1.0)
    with record(model) as recording, torch.no_grad():
        model(pack(PROMPTS))
    windowed, full = (compute_weights(one.calls[0])[0, :, :5, :5] for one in recording.values())
    rows = torch.arange(5)
    is_allowed = (rows <= rows[:, None]) & (rows > rows[:, None] - 2)
    assert torch.equal(windowed > 0, is_allowed.expand_as(windowed))
    assert torch.equal(full > 0, (rows <= rows[:, None]).expand_as(full))
    # Soft-capped scores are between -1 and 1, so that weights differ by a factor of at most e².
    assert (full.amax(-1) / full.masked_fill(full == 0, 1).amin(-1) <= torch.e**2 + 1e-3).all()


def test_dynamic_scaling_applies_beyond_the_context():
    options = dict(rotary_factor=2.0, rotary_context=4)
    model, plain = small(**options, rotary_scaling="dynamic"), small()
    torch.testing.assert_close(model(pack([[2, 4, 5, 6]])), plain(pack([[2, 4, 5, 6]])))
    assert not torch.allclose(model(pack([[2, 4, 5, 6, 7]])), plain(pack([[2, 4, 5, 6, 7]])))
    alone = torch.cat([model(pack([prompt])) for prompt in PROMPTS])
    torch.testing.assert_close(model(pack(PROMPTS)), alone)
    with pytest.raises(RegardError, match="rotary_context"):
        small(rotary_factor=2.0, rotary_scaling="dynamic")


@torch.no_grad()
def test_beam_logprobs_match_full_forward():
    model = small()
    for prompt, n_best in zip(PROMPTS, beam(model, PROMPTS, DecodeConfig(beam=3, n_best=3, max_len=6))):
        for found in n_best:
            ids = [*prompt, *found.ids, 3][: len(prompt) + len(found.token_logprobs)]
            rows = model(pack([ids[:-1]])).log_softmax(-1)[len(prompt) - 1 :]
            targets = torch.tensor(ids[len(prompt) :])
            assert found.logprob == pytest.approx(float(rows.gather(1, targets[:, None]).sum()))


def test_tokens_do_not_depend_on_later_tokens_or_other_texts():
    model = small()
    rows = model(pack(PROMPTS))
    changed = model(pack([[2, 4, 5, 9, 10], [7, 7, 7], [8]]))
    torch.testing.assert_close(rows[:3], changed[:3])
    torch.testing.assert_close(rows[-1], changed[-1])
    assert not torch.allclose(rows[3], changed[3])


def test_packed_and_single_texts_agree():
    model = small(bias="all", norm_kind="layer", activation="swiglu", qk_norm=False)
    alone = torch.cat([model(pack([prompt])) for prompt in PROMPTS])
    torch.testing.assert_close(model(pack(PROMPTS)), alone)


@pytest.mark.parametrize("placement", ["all", "attention", "qkv", "feedforward", "none"])
def test_bias_placement(placement):
    names = {name.removeprefix("blocks.0.") for name, _ in small(bias=placement).blocks[0].named_parameters()}
    found = {name.removesuffix(".bias") for name in names if name.endswith(".bias")}
    qkv, out = {"attention.query", "attention.key_value"}, {"attention.out"}
    network = {"feedforward.fc1", "feedforward.fc2"}
    expected = {"all": qkv | out | network, "attention": qkv | out, "qkv": qkv, "feedforward": network, "none": set()}
    assert found == expected[placement]


def test_head_width_is_independent_of_width():
    model = small(head_width=6, kv_heads=1)
    assert model.blocks[0].attention.query.weight.shape == (24, 16)
    assert model.blocks[0].attention.key_value.weight.shape == (12, 16)
    assert greedy(model, PROMPTS, DecodeConfig(method="greedy", max_len=3))


def test_room_limits_prompt_and_output_together():
    model = small(positions="learned", max_len=8)
    config = DecodeConfig(method="greedy", max_len=99, min_len=99)
    assert [len(n_best[0].ids) for n_best in greedy(model, PROMPTS, config, max_total_len=8)] == [3, 6, 7]
    with pytest.raises(RegardError, match="longer than the 8 learned positions"):
        greedy(model, PROMPTS, config)


@pytest.mark.parametrize("score", ["scaled_dot", "location"])  # location: its keys are limited to max_len too
@pytest.mark.parametrize("method", ["greedy", "sample", "beam"])
def test_prompt_at_the_length_limit_does_not_stop_the_others(method, score):
    """One long and four short prompts: finished rows must not advance past the last learned position."""
    model = small(positions="learned", max_len=16, score=score)
    prompts = [[2, *[4, 5, 6, 7] * 3][:12], *([2, 4 + i] for i in range(4))]
    config = DecodeConfig(method=method, beam=3, n_best=1, max_len=99, min_len=9)
    decode = {"greedy": greedy, "sample": sample, "beam": beam}[method]
    together = decode(model, prompts, config, max_total_len=16)
    assert len(together[0][0].ids) == 4
    assert min(len(n_best[0].ids) for n_best in together[1:]) >= 9
    for index, (prompt, n_best) in enumerate(zip(prompts, together)):
        options = {"sample_indices": [index]} if method == "sample" else {}
        alone = decode(model, [prompt], config, max_total_len=16, **options)[0]
        assert [hypothesis.ids for hypothesis in n_best] == [hypothesis.ids for hypothesis in alone]
        assert n_best[0].logprob == pytest.approx(alone[0].logprob, abs=1e-4)


def test_ensemble_with_a_prompt_at_the_length_limit():
    model = small(positions="learned", max_len=16)
    prompts = [[4] * 15, [5], [6], [7], [8]]
    config = DecodeConfig(method="greedy", max_len=99, min_len=14)
    alone = greedy(model, prompts, config, max_total_len=16)
    together = greedy(Ensemble([model, model]), prompts, config, max_total_len=16)
    assert [n_best[0].ids for n_best in together] == [n_best[0].ids for n_best in alone]


def test_recorded_attention_is_causal():
    model = small(kv_heads=2)
    with record(model) as recording:
        model(pack(PROMPTS))
    weights = recording["blocks.1.attention"].weights()
    assert weights.shape == (3, 4, 5, 5)
    assert weights[0].triu(1).eq(0).all()


def test_untied_embeddings_and_named_sizes():
    assert small(tied=False).output.weight is not small(tied=False).embedding.tokens.weight
    with torch.device("meta"):
        assert 124e6 < sum(p.numel() for p in GPT(gpt2(vocab=50257)).parameters()) < 125e6
    assert gpt_small(layers=2).layers == 2
