"""Recurrent encoder-decoder: batches, steps, gradients, training."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from regard.attention import record
from regard.errors import RegardError
from regard.layers.packed import Packed, pack
from regard.models.seq2seq import Seq2Seq, Seq2SeqConfig, seq2seq_base, seq2seq_small, seq2seq_tiny

SCORES = ["dot", "scaled_dot", "cosine", "general", "concat", "location"]
SOURCES = [[4, 5, 6, 7, 3], [8, 3], [9, 4, 4, 3]]
TARGETS = [[2, 5, 6], [2, 9, 8, 7, 6], [2]]
TOY = Seq2SeqConfig(width=12, layers=2, dropout=0.0, max_len=16, source_vocab=10, target_vocab=10)


def make(**changes) -> Seq2Seq:
    torch.manual_seed(0)
    return Seq2Seq(replace(TOY, **changes)).eval()


def kinds() -> list[dict]:
    """Every cell with every attention variant, every score with both variants, and unidirectional encoders."""
    cells = ["gru", "lstm", "rnn"]
    variants = [{"cell": c, "attention": a} for c in cells for a in ["luong", "bahdanau", "none"]]
    variants += [{"cell": c, "attention": "luong", "bidirectional": False} for c in cells]
    variants += [{"memory_projection": False, "attention": a} for a in ["luong", "bahdanau"]]
    return variants + [
        {"cell": cells[i % 2], "attention": a, "score": s} for i, s in enumerate(SCORES) for a in ["luong", "bahdanau"]
    ]


def name(kind: dict) -> str:
    return "-".join(map(str, kind.values()))


@pytest.mark.parametrize("kind", kinds(), ids=name)
def test_packed_and_single_sentences_agree(kind):
    model = make(**kind)
    together = model.features(pack(SOURCES), pack(TARGETS))
    alone = torch.cat([model.features(pack([s]), pack([t])) for s, t in zip(SOURCES, TARGETS)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", kinds(), ids=name)
def test_single_steps_match_teacher_forcing(kind):
    model = make(**kind)
    targets = [[2, 5, 6, 7], [2, 9, 8, 8], [2, 4, 4, 4]]
    forced = model(pack(SOURCES), pack(targets)).view(3, 4, -1)
    state, logits = model.start(pack(SOURCES)), []
    for t in range(4):
        step, state = model.step(state, torch.tensor(targets)[:, t : t + 1])
        logits.append(step)
    torch.testing.assert_close(torch.cat(logits, dim=1), forced, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", [k for k in kinds() if "score" not in k], ids=name)
def test_reordered_hypotheses_match_teacher_forcing(kind):
    model = make(**kind)
    _, state = model.step(model.start(pack(SOURCES)), torch.tensor([[2], [2], [2]]))
    state = model.reorder(state, torch.tensor([[0, 0], [1, 1], [2, 2]]))
    assert state.memory is None or state.memory.k.shape[0] == 3, "the memory must be stored once per sentence"
    _, state = model.step(state, torch.tensor([[4, 5], [6, 7], [8, 9]]))
    # Sentence 1 is finished; the beams of sentence 2 are swapped; sentence 0 continues with two copies of its second.
    state = model.reorder(state, torch.tensor([[5, 4], [1, 1]]))
    logits, state = model.step(state, torch.tensor([[6, 6], [4, 5]]))
    assert logits.shape == (2, 2, 10)
    pairs = [(2, [2, 9, 6]), (2, [2, 8, 6]), (0, [2, 5, 4]), (0, [2, 5, 5])]
    for row, (source, target) in zip(logits.flatten(0, 1), pairs):
        forced = model(pack([SOURCES[source]]), pack([target]))[-1]
        torch.testing.assert_close(row, forced, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", kinds(), ids=name)
def test_empty_and_padding_sequences_change_nothing_and_stay_finite(kind):
    model = make(**kind).train()
    # Sequence 3 has no source, 4 no target, 5 neither; source and target have different numbers of padding sequences.
    sources, targets = [*SOURCES, [], [4, 4], []], [*TARGETS, [2, 2], [], []]
    source = pack(sources, total=29, count=12, max_len=8)
    target = pack(targets, total=14, count=12, max_len=8)
    features = model.features(source, target)
    real = sum(map(len, TARGETS))
    torch.testing.assert_close(features[:real], model.features(pack(SOURCES), pack(TARGETS)), atol=1e-5, rtol=0)
    assert features.shape == (14, 12)
    assert features.isfinite().all()
    features.square().sum().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None or parameter_name == "output.weight", parameter_name
        assert parameter.grad is None or parameter.grad.isfinite().all(), parameter_name


def test_every_parameter_gets_a_gradient():
    for kind in kinds():
        model = make(**kind).train()
        model(pack(SOURCES), pack(TARGETS)).logsumexp(-1).sum().backward()
        without_gradient = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
        assert not without_gradient, kind


def make_reversal_pairs(count: int, generator: torch.Generator) -> tuple[list[list[int]], list[list[int]]]:
    lengths = torch.randint(2, 7, (count,), generator=generator).tolist()
    words = [torch.randint(4, 10, (n,), generator=generator).tolist() for n in lengths]
    return [[*w, 3] for w in words], [[2, *reversed(w), 3] for w in words]


@pytest.mark.parametrize(
    "kind",
    [{"attention": a, "score": s} for s in SCORES for a in ["luong", "bahdanau"]] + [{"attention": "none"}],
    ids=name,
)
def test_learns_to_reverse(kind):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Seq2Seq(replace(TOY, width=32, layers=1, **kind))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(40):
        sources, targets = make_reversal_pairs(32, generator)
        logits = model(pack(sources), pack([t[:-1] for t in targets]))
        loss = nn.functional.cross_entropy(logits, torch.tensor([i for t in targets for i in t[1:]]))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert losses[-1] < 0.75 * losses[0], losses


@pytest.mark.parametrize("kind", [k for k in kinds() if k["attention"] != "none"], ids=name)
def test_recorded_attention_is_the_same_for_steps_and_teacher_forcing(kind):
    model = make(**kind)
    with torch.no_grad(), record(model) as forced:
        model(pack(SOURCES), pack(TARGETS))
    with torch.no_grad(), record(model) as stepwise:
        state = model.start(pack(SOURCES))
        for t in range(5):
            _, state = model.step(state, torch.tensor([[row[t] if t < len(row) else 0] for row in TARGETS]))
    forced, stepwise = (recording["decoder.attention"].weights() for recording in (forced, stepwise))
    assert forced.shape == stepwise.shape == (3, 1, 5, 5)
    for b, (source, target) in enumerate(zip(SOURCES, TARGETS)):
        rows = forced[b, 0, : len(target)]
        assert not rows[:, len(source) :].any()
        torch.testing.assert_close(rows.sum(-1), torch.ones(len(target)))
        torch.testing.assert_close(rows, stepwise[b, 0, : len(target)], atol=1e-5, rtol=0)


def test_recording_a_model_without_attention_raises():
    with pytest.raises(RegardError, match="no attention"), record(make(attention="none")):
        pass


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", kinds(), ids=name)
def test_captured_update_replays_with_other_batches(kind):
    """Under autocast, forward and backward have no host synchronization and are correct for new batches."""
    model = make(**kind, width=64).cuda().train()

    def batch(first: int) -> tuple[Packed, Packed]:
        return tuple(
            pack(rows[first:] + rows[:first], total=24, count=12, max_len=16).to("cuda") for rows in (SOURCES, TARGETS)
        )

    def update(source: Packed, target: Packed) -> torch.Tensor:
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            loss = model(source, target).float().logsumexp(-1).mean()
        loss.backward()
        return loss

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            update(*batch(0))
    torch.cuda.synchronize()
    static, graph = batch(0), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = update(*static)
    captured = {n: p.grad for n, p in model.named_parameters()}
    for first in (0, 1, 2):
        for buffer, new in zip(static, batch(first)):
            buffer.ids.copy_(new.ids)
            buffer.offsets.starts.copy_(new.offsets.starts)
        graph.replay()
        replayed = loss.item(), {n: g.clone() for n, g in captured.items()}
        torch.testing.assert_close(replayed[0], update(*batch(first)).item(), atol=1e-3, rtol=0)
        for parameter_name, parameter in model.named_parameters():
            torch.testing.assert_close(replayed[1][parameter_name], parameter.grad, atol=1e-3, rtol=1e-2)


def test_tied_output_shares_the_target_embedding():
    model = make()
    assert model.output.weight is model.target_embedding.tokens.weight
    assert model.output.weight is not model.source_embedding.tokens.weight
    shared = make(shared_vocab=True)
    assert shared.output.weight is shared.source_embedding.tokens.weight
    untied = make(shared_vocab=True, tied=False)
    assert (
        len({id(e.weight) for e in (untied.output, untied.source_embedding.tokens, untied.target_embedding.tokens)})
        == 3
    )


def test_shared_vocabulary_of_two_sizes_raises():
    with pytest.raises(RegardError, match="one size"):
        make(shared_vocab=True, target_vocab=11)


@pytest.mark.parametrize("field", ["cell", "attention", "score"])
def test_unknown_name_raises(field):
    with pytest.raises(RegardError, match=rf"model.{field} must be one of .* \(got 'loung'\)"):
        replace(TOY, **{field: "loung"})


@pytest.mark.parametrize("attention", ["luong", "bahdanau"])
def test_max_len_of_a_batch_does_not_change_the_output(attention):
    model = make(attention=attention, score="location", max_len=20)
    rounded = model(pack(SOURCES, max_len=32), pack(TARGETS, max_len=32))
    torch.testing.assert_close(rounded, model(pack(SOURCES), pack(TARGETS)), atol=1e-5, rtol=0)


def test_dropout_is_active_only_in_training():
    model = make(dropout=0.5)
    source, target = pack(SOURCES), pack(TARGETS)
    torch.testing.assert_close(model(source, target), model(source, target))
    model.train()
    assert not torch.equal(model(source, target), model(source, target))


def test_named_sizes():
    assert (seq2seq_tiny().width, seq2seq_small().width, seq2seq_base().width) == (128, 256, 512)
    assert seq2seq_base(layers=1, cell="lstm") == replace(seq2seq_base(), layers=1, cell="lstm")


@pytest.mark.parametrize("bidirectional", [True, False])
def test_keys_and_values_are_the_encoder_states(bidirectional):
    """The equations as they are taught: e_t = [s_tᵀ h_i], a_t = softmax(e_t), c_t = Σ a_i h_i."""
    model = make(score="dot", memory_projection=False, bidirectional=bidirectional)
    calls = []
    model.decoder.attention.register_forward_hook(lambda _, inputs, output: calls.append((inputs, output)))
    source = pack(SOURCES[:1])
    model.features(source, pack(TARGETS[:1]))
    (states, encoded, *_), context = calls[0]
    assert torch.equal(encoded, model.encode(source)[0])
    torch.testing.assert_close(context, (states @ encoded.T).softmax(-1) @ encoded)
    assert not list(model.decoder.memory.parameters())


def test_half_of_an_odd_width_is_an_error():
    with pytest.raises(RegardError, match="half of the width, which is 13"):
        make(width=13, memory_projection=False)
