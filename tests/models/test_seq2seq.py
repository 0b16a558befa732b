"""The recurrent encoder-decoder: batches, steps, gradients, learning."""

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
    """Every cell with every place of attention, every score in one of them, and one direction."""
    cells = ["gru", "lstm", "rnn"]
    places = [{"cell": c, "attention": a} for c in cells for a in ["luong", "bahdanau", "none"]]
    places += [{"cell": c, "attention": "luong", "bidirectional": False} for c in cells]
    return places + [
        {"cell": cells[i % 2], "attention": a, "score": s} for i, s in enumerate(SCORES) for a in ["luong", "bahdanau"]
    ]


def name(kind: dict) -> str:
    return "-".join(map(str, kind.values()))


@pytest.mark.parametrize("kind", kinds(), ids=name)
def test_a_batch_is_its_sentences_one_by_one(kind):
    model = make(**kind)
    together = model.features(pack(SOURCES), pack(TARGETS))
    alone = torch.cat([model.features(pack([s]), pack([t])) for s, t in zip(SOURCES, TARGETS)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", kinds(), ids=name)
def test_decoding_step_by_step_is_teacher_forcing(kind):
    model = make(**kind)
    targets = [[2, 5, 6, 7], [2, 9, 8, 8], [2, 4, 4, 4]]
    forced = model(pack(SOURCES), pack(targets)).view(3, 4, -1)
    state, logits = model.start(pack(SOURCES)), []
    for t in range(4):
        step, state = model.step(state, torch.tensor(targets)[:, t : t + 1])
        logits.append(step)
    torch.testing.assert_close(torch.cat(logits, dim=1), forced, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", [k for k in kinds() if "score" not in k], ids=name)
def test_reordered_hypotheses_go_on_as_their_own(kind):
    model = make(**kind)
    _, state = model.step(model.start(pack(SOURCES)), torch.tensor([[2], [2], [2]]))
    state = model.reorder(state, torch.tensor([[0, 0], [1, 1], [2, 2]]))
    assert state.memory is None or state.memory.k.shape[0] == 3, "the memory exists once per sentence"
    _, state = model.step(state, torch.tensor([[4, 5], [6, 7], [8, 9]]))
    # Sentence 1 is finished; the beams of sentence 2 change places, sentence 0 goes on with its second one alone.
    state = model.reorder(state, torch.tensor([[5, 4], [1, 1]]))
    logits, state = model.step(state, torch.tensor([[6, 6], [4, 5]]))
    assert logits.shape == (2, 2, 10)
    pairs = [(2, [2, 9, 6]), (2, [2, 8, 6]), (0, [2, 5, 4]), (0, [2, 5, 5])]
    for row, (source, target) in zip(logits.flatten(0, 1), pairs):
        forced = model(pack([SOURCES[source]]), pack([target]))[-1]
        torch.testing.assert_close(row, forced, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", kinds(), ids=name)
def test_empty_and_filler_sequences_change_nothing_and_stay_finite(kind):
    model = make(**kind).train()
    # Sequence 3 has no source, 4 no target, 5 neither; the tails of the two sides are of unequal number.
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


def test_every_parameter_learns():
    for kind in kinds():
        model = make(**kind).train()
        model(pack(SOURCES), pack(TARGETS)).logsumexp(-1).sum().backward()
        idle = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
        assert not idle, kind


def toy_reversal(count: int, generator: torch.Generator) -> tuple[list[list[int]], list[list[int]]]:
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
        sources, targets = toy_reversal(32, generator)
        logits = model(pack(sources), pack([t[:-1] for t in targets]))
        loss = nn.functional.cross_entropy(logits, torch.tensor([i for t in targets for i in t[1:]]))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert losses[-1] < 0.75 * losses[0], losses


@pytest.mark.parametrize("kind", [k for k in kinds() if k["attention"] != "none"], ids=name)
def test_what_was_regarded_is_on_record(kind):
    model = make(**kind)
    with torch.no_grad(), record(model) as forced:
        model(pack(SOURCES), pack(TARGETS))
    with torch.no_grad(), record(model) as stepwise:
        state = model.start(pack(SOURCES))
        for t in range(5):
            _, state = model.step(state, torch.tensor([[row[t] if t < len(row) else 0] for row in TARGETS]))
    forced, stepwise = (found["decoder.attention"].weights() for found in (forced, stepwise))
    assert forced.shape == stepwise.shape == (3, 1, 5, 5)
    for b, (source, target) in enumerate(zip(SOURCES, TARGETS)):
        rows = forced[b, 0, : len(target)]
        assert not rows[:, len(source) :].any()
        torch.testing.assert_close(rows.sum(-1), torch.ones(len(target)))
        torch.testing.assert_close(rows, stepwise[b, 0, : len(target)], atol=1e-5, rtol=0)


def test_without_attention_nothing_is_on_record():
    with pytest.raises(RegardError, match="no attention"), record(make(attention="none")):
        pass


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", kinds(), ids=name)
def test_a_captured_update_replays_with_other_batches(kind):
    """Forward and backward wait for nothing on the host, under autocast, and are right for batches not yet seen."""
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
    still, graph = batch(0), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = update(*still)
    captured = {n: p.grad for n, p in model.named_parameters()}
    for first in (0, 1, 2):
        for mine, other in zip(still, batch(first)):
            mine.ids.copy_(other.ids)
            mine.offsets.starts.copy_(other.offsets.starts)
        graph.replay()
        found = loss.item(), {n: g.clone() for n, g in captured.items()}
        torch.testing.assert_close(found[0], update(*batch(first)).item(), atol=1e-3, rtol=0)
        for parameter_name, parameter in model.named_parameters():
            torch.testing.assert_close(found[1][parameter_name], parameter.grad, atol=1e-3, rtol=1e-2)


def test_output_is_the_target_embedding_when_tied():
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


def test_a_shared_vocabulary_has_one_size():
    with pytest.raises(RegardError, match="one size"):
        make(shared_vocab=True, target_vocab=11)


@pytest.mark.parametrize("field", ["cell", "attention", "score"])
def test_an_unknown_name_is_refused(field):
    with pytest.raises(RegardError, match=rf"model.{field} must be one of .* \(got 'loung'\)"):
        replace(TOY, **{field: "loung"})


@pytest.mark.parametrize("place", ["luong", "bahdanau"])
def test_a_longest_length_rounded_up_is_no_length(place):
    model = make(attention=place, score="location", max_len=20)
    rounded = model(pack(SOURCES, max_len=32), pack(TARGETS, max_len=32))
    torch.testing.assert_close(rounded, model(pack(SOURCES), pack(TARGETS)), atol=1e-5, rtol=0)


def test_dropout_is_active_in_training_alone():
    model = make(dropout=0.5)
    source, target = pack(SOURCES), pack(TARGETS)
    torch.testing.assert_close(model(source, target), model(source, target))
    model.train()
    assert not torch.equal(model(source, target), model(source, target))


def test_named_sizes():
    assert (seq2seq_tiny().width, seq2seq_small().width, seq2seq_base().width) == (128, 256, 512)
    assert seq2seq_base(layers=1, cell="lstm") == replace(seq2seq_base(), layers=1, cell="lstm")
