"""Encoder-decoder Transformer: batches, teacher forcing and single steps, in many configurations."""

import pytest
import torch

from regard.attention import SCORES, record
from regard.errors import RegardError
from regard.layers.packed import pack
from regard.models import Transformer, TransformerConfig
from regard.models.transformer import transformer_base, transformer_small, transformer_tiny

SOURCES = [[5, 6, 7, 8, 3], [9, 3], [4, 4, 10, 3]]
TARGETS = [[2, 6, 5], [2, 7, 8, 9, 4, 5], [2]]
CONFIGS = [
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


@pytest.mark.parametrize("changes", CONFIGS, ids=str)
def test_packed_and_single_sentences_agree(changes):
    model = make(**changes)
    together = model(pack(SOURCES), pack(TARGETS))
    alone = torch.cat([model(pack([source]), pack([target])) for source, target in zip(SOURCES, TARGETS)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "changes", [*CONFIGS, *({f"{a}_score": s} for a in ("encoder", "decoder", "cross") for s in SCORES)], ids=str
)
def test_single_steps_match_teacher_forcing(changes):
    model = make(**changes)
    target = [2, 6, 5, 9]
    forced = model(pack(SOURCES), pack([target] * 3)).view(3, 4, -1)
    state = model.start(pack(SOURCES))
    for t, token in enumerate(target):
        logits, state = model.step(state, torch.full((3, 1), token))
        torch.testing.assert_close(logits[:, 0], forced[:, t], atol=1e-5, rtol=1e-5)


def test_reorder_selects_beams_and_removes_finished_sentences():
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


def test_decoder_depends_on_the_source_and_not_on_later_tokens():
    model = make()
    source, target = pack([SOURCES[0]]), pack([[2, 6, 5, 9]])
    logits = model(source, target)
    torch.testing.assert_close(model(source, pack([[2, 6, 5, 11]]))[:3], logits[:3])
    assert not torch.allclose(model(pack([[6, 5, 7, 8, 3]]), target), logits)


def test_recorded_attentions_have_kinds_and_rows_sum_to_one():
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


def test_every_parameter_gets_a_gradient_and_tied_weights_are_shared():
    model = make(shared_vocab=True).train()
    assert model.output.weight is model.target_embedding.tokens.weight is model.source_embedding.tokens.weight
    model(pack(SOURCES), pack(TARGETS)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters() if p.dim() > 1)
    untied = make(tied=False)
    assert untied.output.weight is not untied.target_embedding.tokens.weight


def test_named_sizes_match_their_papers():
    base, tiny = transformer_base(), transformer_tiny()
    assert (base.width, base.heads, base.feedforward, base.encoder_layers, base.norm) == (512, 8, 2048, 6, "post")
    assert (tiny.width, tiny.feedforward, tiny.decoder_layers, tiny.dropout) == (128, 256, 4, 0.3)
    assert transformer_small(width=320).width == 320


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "must be a multiple of model.heads"),
        ({"heads": 4, "kv_heads": 3}, "must divide model.heads"),
        ({"heads": 16, "positions": "rotary"}, "need an even number"),
        ({"positions": "relative", "relative_buckets": 32, "relative_distance": 16}, "above half"),
        ({"shared_vocab": True, "target_vocab": 13}, "one size"),
    ],
)
def test_inconsistent_sizes_raise(changes, message):
    with pytest.raises(RegardError, match=message):
        make(**changes)


def test_only_learned_positions_limit_the_length():
    long = pack([[5] * 40])
    with pytest.raises(RegardError, match="longer than the 32 learned positions"):
        make(positions="learned")(long, long)
    assert make()(long, long).isfinite().all()
