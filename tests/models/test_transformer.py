"""The Transformer: packed and alone, forced and step by step, in every form that its config allows."""

import pytest
import torch

from regard.attention import SCORES, record
from regard.errors import RegardError
from regard.layers.packed import pack
from regard.models import Transformer, TransformerConfig
from regard.models.transformer import transformer_base, transformer_small, transformer_tiny

SOURCES = [[5, 6, 7, 8, 3], [9, 3], [4, 4, 10, 3]]
TARGETS = [[2, 6, 5], [2, 7, 8, 9, 4, 5], [2]]
FORMS = [
    {},
    {"norm": "post"},
    {"positions": "learned"},
    {"positions": "rotary", "qk_norm": True},
    {"positions": "none"},
    {"norm_kind": "rms", "activation": "swiglu", "bias": False},
    {"activation": "gelu"},
    {"activation": "relu2", "tied": False},
    {"kv_heads": 1},
    {"shared_vocab": True},
]


def make(**changes) -> Transformer:
    torch.manual_seed(0)
    sizes = dict(width=16, heads=2, feedforward=32, encoder_layers=2, decoder_layers=2, dropout=0.2, max_len=32)
    return Transformer(TransformerConfig(**(sizes | {"source_vocab": 12, "target_vocab": 12} | changes))).eval()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_packed_batch_equals_each_sentence_alone(form):
    model = make(**form)
    together = model(pack(SOURCES), pack(TARGETS))
    alone = torch.cat([model(pack([source]), pack([target])) for source, target in zip(SOURCES, TARGETS)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "form", [*FORMS, *({f"{a}_score": s} for a in ("encoder", "decoder", "cross") for s in SCORES)], ids=str
)
def test_step_by_step_equals_the_whole_sequence(form):
    model = make(**form)
    target = [2, 6, 5, 9]
    forced = model(pack(SOURCES), pack([target] * 3)).view(3, 4, -1)
    state = model.start(pack(SOURCES))
    for t, token in enumerate(target):
        logits, state = model.step(state, torch.full((3, 1), token))
        torch.testing.assert_close(logits[:, 0], forced[:, t], atol=1e-5, rtol=1e-5)


def test_beams_are_reordered_and_finished_sentences_leave():
    model = make()
    state = model.start(pack(SOURCES))
    _, state = model.step(state, torch.full((3, 1), 2))
    state = model.reorder(state, torch.tensor([[0, 0], [2, 2]]))  # sentences 0 and 2, two beams each
    _, state = model.step(state, torch.tensor([[6, 7], [6, 7]]))
    state = model.reorder(state, torch.tensor([[1, 1], [3, 2]]))
    logits, _ = model.step(state, torch.tensor([[5, 4], [5, 4]]))
    expected = [(0, [2, 7, 5]), (0, [2, 7, 4]), (2, [2, 7, 5]), (2, [2, 6, 4])]
    for row, (sentence, target) in zip(logits.flatten(0, 1), expected):
        torch.testing.assert_close(row, model(pack([SOURCES[sentence]]), pack([target]))[-1], atol=1e-5, rtol=1e-5)


def test_the_decoder_does_not_see_what_comes_and_sees_the_source():
    model = make()
    source, target = pack([SOURCES[0]]), pack([[2, 6, 5, 9]])
    logits = model(source, target)
    torch.testing.assert_close(model(source, pack([[2, 6, 5, 11]]))[:3], logits[:3])
    assert not torch.allclose(model(pack([[6, 5, 7, 8, 3]]), target), logits)


def test_attentions_are_found_by_name_and_kind_and_every_row_sums_to_one():
    model = make()
    with record(model) as recording:
        model(pack(SOURCES), pack(TARGETS))
    kinds = {name: recording[name].kind for name in recording}
    assert kinds["encoder.1.attention"] == "self"
    assert kinds["decoder.0.attention"] == "masked"
    assert kinds["decoder.1.cross"] == "cross"
    for name in recording:
        rows = recording[name].weights()[0].sum(-1)  # sentence 0
        real = 5 if name.startswith("encoder") else 3
        torch.testing.assert_close(rows[:, :real], torch.ones(2, real))


def test_every_parameter_learns_and_tied_weights_are_one():
    model = make(shared_vocab=True).train()
    assert model.output.weight is model.target_embedding.tokens.weight is model.source_embedding.tokens.weight
    model(pack(SOURCES), pack(TARGETS)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters() if p.dim() > 1)
    apart = make(tied=False)
    assert apart.output.weight is not apart.target_embedding.tokens.weight


def test_named_sizes_are_what_their_papers_say():
    base, tiny = transformer_base(), transformer_tiny()
    assert (base.width, base.heads, base.feedforward, base.encoder_layers, base.norm) == (512, 8, 2048, 6, "post")
    assert (tiny.width, tiny.feedforward, tiny.decoder_layers, tiny.dropout) == (128, 256, 4, 0.3)
    assert transformer_small(width=320).width == 320


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        ({"heads": 3}, "must be a multiple of model.heads"),
        ({"heads": 4, "kv_heads": 3}, "must divide model.heads"),
        ({"heads": 16, "positions": "rotary"}, "need an even number"),
        ({"positions": "relative", "relative_buckets": 32, "relative_distance": 16}, "above half"),
        ({"shared_vocab": True, "target_vocab": 13}, "one size"),
    ],
)
def test_sizes_that_cannot_be_are_refused(form, sentence):
    with pytest.raises(RegardError, match=sentence):
        make(**form)


def test_learned_positions_end_and_sinusoidal_ones_do_not():
    long = pack([[5] * 40])
    with pytest.raises(RegardError, match="longer than the 32 learned positions"):
        make(positions="learned")(long, long)
    assert make()(long, long).isfinite().all()
