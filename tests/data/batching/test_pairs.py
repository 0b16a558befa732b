import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data import PairBatches, Tokenizer, encode_pairs
from regard.data.batching.batch import IGNORE_INDEX, prefetch
from regard.data.batching.pairs import BpeDropout
from regard.data.batching.sequences import Sequences
from regard.data.text.special_tokens import EOS, SOS
from regard.errors import RegardError


def corpus(sizes):
    """Source and target whose ids identify the pair: pair i has ids 10 + 2i and 11 + 2i."""
    source = [[10 + 2 * i] * a for i, (a, _) in enumerate(sizes)]
    target = [[11 + 2 * i] * b for i, (_, b) in enumerate(sizes)]
    return Sequences.from_lists(source), Sequences.from_lists(target)


def rows(packed):
    """The sequences of a batch, without empty ones."""
    return [row[:length].tolist() for row, length in zip(*packed.padded()) if length]


def random_corpus(count=500, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, count)
    return corpus([(int(a), int(max(1, a + rng.integers(-3, 4)))) for a in lengths])


lengths = st.lists(st.tuples(st.integers(0, 31), st.integers(0, 31)), min_size=1, max_size=60)


@settings(deadline=None)
@given(lengths, st.integers(32, 200), st.booleans(), st.integers(0, 3))
def test_every_pair_comes_once_within_the_budget(sizes, budget, constant_shapes, seed):
    batches = PairBatches(*corpus(sizes), budget=budget, max_len=32, seed=seed, constant_shapes=constant_shapes)
    seen = []
    shapes = set()
    for batch in batches.epoch(0):
        sources, targets = rows(batch.inputs[0])[: batch.sentences], rows(batch.inputs[1])[: batch.sentences]
        real = batch.tokens
        outs = torch.split(batch.targets[:real], [len(one) for one in targets])
        for source, target, out in zip(sources, targets, outs):
            assert source[-1] == EOS
            assert target[0] == SOS
            assert out.tolist() == [*target[1:], EOS]
            seen.append((source[:-1], target[1:]))
        read = sum(map(len, sources))
        assert read <= budget
        assert batch.tokens == sum(map(len, targets)) <= budget
        assert torch.equal(batch.inputs[0].ids[read:], torch.zeros_like(batch.inputs[0].ids[read:]))
        assert (batch.targets[real:] == IGNORE_INDEX).all()
        assert (batch.targets != IGNORE_INDEX).sum() == real
        assert len(batch.targets) == len(batch.inputs[1].ids)
        if constant_shapes:
            shapes.add((len(batch.inputs[0].ids), len(batch.inputs[1].ids), len(batch.inputs[0]), len(batch.inputs[1])))
            assert batch.inputs[0].max_len == batch.inputs[1].max_len in (16, 32)
            assert len(batch.inputs[0].ids) == budget
        else:
            assert (len(batch.inputs[0]), len(batch.inputs[0].ids)) == (batch.sentences, read)
            assert batch.inputs[0].max_len == max(map(len, sources))
    source, target = corpus(sizes)
    assert sorted(seen) == sorted((source[i].tolist(), target[i].tolist()) for i in range(len(sizes)))
    assert len(shapes) <= 1


def same(one, other):
    return (
        torch.equal(one.inputs[0].ids, other.inputs[0].ids)
        and torch.equal(one.inputs[0].offsets.starts, other.inputs[0].offsets.starts)
        and torch.equal(one.inputs[1].ids, other.inputs[1].ids)
        and torch.equal(one.targets, other.targets)
    )


def with_dropout():
    texts = [f"{a}{b} {b}{a}{a}" for a in ("abc", "bca", "cab", "aaa") for b in ("cb", "aac", "ba")] * 5
    tokenizer = Tokenizer.train(texts, "bpe", vocab_size=60)
    source, target, _ = encode_pairs(
        list(zip(texts, texts[::-1])), tokenizer, tokenizer, max_len=64, dropout=0.3, seed=1
    )
    assert isinstance(source, BpeDropout)
    return source, target


@pytest.mark.parametrize("sides", [random_corpus, with_dropout])
@pytest.mark.parametrize("constant_shapes", [False, True])
def test_epoch_depends_on_seed_and_number_alone(sides, constant_shapes):
    def make_batches(seed):
        return PairBatches(*sides(), budget=128, max_len=64, seed=seed, constant_shapes=constant_shapes)

    used, fresh = make_batches(7), make_batches(7)
    for epoch in range(2):
        for _ in used.epoch(epoch):
            pass
    first, again = list(used.epoch(2)), list(fresh.epoch(2))
    assert len(first) == len(again) > 3
    assert all(map(same, first, again))
    assert not all(map(same, first, used.epoch(3)))
    assert not all(map(same, first, make_batches(8).epoch(2)))
    resumed = list(make_batches(7).epoch(2, start=3))
    assert len(resumed) == len(first) - 3
    assert all(map(same, first[3:], resumed))


def test_batches_are_full_and_have_similar_lengths():
    source, target = random_corpus(4000)
    batches = list(PairBatches(source, target, budget=1024, max_len=64, seed=0).epoch(0))
    real = sum(one.offsets.total for batch in batches for one in batch.inputs)
    cells = sum(len(one) * one.max_len for batch in batches for one in batch.inputs)
    assert real / cells > 0.85
    assert real / (2 * 1024 * len(batches)) > 0.85
    order = [batch.inputs[0].max_len for batch in batches]
    assert order != sorted(order)


def test_batch_of_many_short_pairs_leaves_room_for_padding():
    """Mostly long pairs, so that the sequence count is small, and then many of a single token."""
    sides = corpus([(60, 60)] * 300 + [(0, 0)] * 700)
    batches = list(PairBatches(*sides, budget=512, max_len=64, seed=0, constant_shapes=True).epoch(0))
    assert sum(batch.sentences for batch in batches) == 1000
    assert len({len(batch.inputs[0]) for batch in batches}) == 1


def test_pairs_made_too_long_by_dropout_are_left_out_of_the_epoch():
    tokenizer = Tokenizer.train(["abab"] * 5, "bpe", vocab_size=60)
    source, target, too_long = encode_pairs([("abab", "abab")] * 200, tokenizer, tokenizer, max_len=3, dropout=0.5)
    epochs = [
        sum(batch.sentences for batch in PairBatches(source, target, budget=8, max_len=3, seed=0).epoch(epoch))
        for epoch in range(5)
    ]
    assert all(0 < sentences < 200 for sentences in epochs)
    assert len(set(epochs)) > 1
    assert abs(200 - too_long - sum(epochs) / 5) < 30  # about as many are too long in every epoch


def test_encode_pairs_counts_long_pairs():
    tokenizer = Tokenizer.train(["a b c"], "word")
    pairs = [("a", "b"), ("a b c", "b"), ("a", "a b c"), ("a b", "b c")]
    source, target, too_long = encode_pairs(pairs, tokenizer, tokenizer, max_len=3)
    assert (len(source), len(target), too_long) == (2, 2, 2)
    with pytest.raises(RegardError, match="All 4 pairs are longer than 1 tokens"):
        encode_pairs(pairs, tokenizer, tokenizer, max_len=1)


def test_invalid_arguments_are_errors():
    source, target = corpus([(1, 1), (2, 2)])
    with pytest.raises(RegardError, match="maximum length is 64 tokens, but a batch has only 32"):
        PairBatches(source, target, budget=32, max_len=64, seed=0)
    with pytest.raises(ValueError, match="as many sources as targets, at least 1, got 2 and 1"):
        PairBatches(source, Sequences.from_lists([[1]]), budget=64, max_len=64, seed=0)


def test_batch_moves_all_tensors():
    [batch] = PairBatches(*corpus([(1, 1), (2, 2)]), budget=64, max_len=64, seed=0).epoch(0)
    assert same(batch.to("cpu", non_blocking=True), batch)
    on_meta = batch.to("meta")
    assert {one.device.type for one in (on_meta.inputs[0].ids, on_meta.inputs[1].ids, on_meta.targets)} == {"meta"}
    assert (on_meta.sentences, on_meta.tokens) == (2, 5)


def test_pairs_made_too_long_by_dropout_are_counted():
    """Short pairs stay short; long ones have 4 tokens, or 12 without any merge."""
    pairs = [("ab", "ab")] * 3 + [("abc abc abc", "ab")] * 4 + [("abc " * 9, "ab")] * 2
    tokenizer = Tokenizer.train([side for pair in pairs for side in pair], "bpe", vocab_size=40)
    assert len(tokenizer.encode("abc abc abc")) == 3
    assert encode_pairs(pairs, tokenizer, tokenizer, max_len=6)[2] == 2
    source, target, too_long = encode_pairs(pairs, tokenizer, tokenizer, max_len=6, dropout=1.0)
    assert too_long == 2 + 4
    assert len(source) == len(target) == 7  # with less dropout another epoch might shorten them
    epoch = PairBatches(source, target, budget=64, max_len=6, seed=0).epoch(0)
    assert sum(batch.sentences for batch in epoch) == 3


def test_all_pairs_made_too_long_by_dropout_is_an_error():
    pairs = [("abc abc abc", "ab")] * 4
    tokenizer = Tokenizer.train([side for pair in pairs for side in pair], "bpe", vocab_size=40)
    with pytest.raises(RegardError, match=r"With BPE-dropout 1.0, all 4 pairs are longer than 6 tokens.*Lower"):
        encode_pairs(pairs, tokenizer, tokenizer, max_len=6, dropout=1.0)
    sides = [BpeDropout(tokenizer, list(texts), 1.0, seed=0) for texts in zip(*pairs)]
    batches = prefetch(PairBatches(*sides, budget=64, max_len=6, seed=0).epoch(0))
    with pytest.raises(RegardError, match="All 4 sequences are longer than max_len"):
        next(batches)


def test_prefetch_does_not_wait_for_a_blocked_item():
    """Ctrl-C must end a program whose reader is blocked, for instance by a slow file system."""
    never = threading.Event()

    def stuck():
        yield 1
        never.wait()

    items = prefetch(stuck())
    assert next(items) == 1
    items.close()
    never.set()


def test_prefetch_keeps_order_and_raises_errors():
    assert list(prefetch(range(100), depth=3)) == list(range(100))

    def failing():
        yield 1
        raise RegardError("no more")

    items = prefetch(failing())
    assert next(items) == 1
    with pytest.raises(RegardError, match="no more"):
        next(items)


def test_prefetch_runs_ahead_by_its_depth():
    made = []
    items = prefetch((made.append(i) or i for i in range(100)), depth=3)
    next(items)
    while len(made) < 5:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(made) == 5  # one taken, three in the queue, one held by the thread
    items.close()


def test_prefetch_thread_stops_with_its_consumer():
    before = threading.active_count()
    items = prefetch(iter(int, 1), depth=2)
    assert next(items) == 0
    assert threading.active_count() == before + 1
    items.close()
    assert threading.active_count() == before


def test_skipped_batches_cost_little():
    batches = PairBatches(*random_corpus(20_000), budget=4096, max_len=64, seed=0)
    start = time.process_time()
    next(batches.epoch(0, start=50))
    assert time.process_time() - start < 1  # about 0.03 s
