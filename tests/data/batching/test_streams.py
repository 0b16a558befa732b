import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data.batching.batch import IGNORE_INDEX
from regard.data.batching.streams import TokenStreamBatches, sliding_window_batches
from regard.errors import RegardError
from tests.data.helpers import check_epochs, rows


def stream(length):
    """Ids that identify their position in the stream."""
    return np.arange(10, 10 + length, dtype=np.int32)


@settings(deadline=None)
@given(st.integers(2, 80), st.integers(1, 12), st.integers(0, 30), st.booleans(), st.integers(0, 5))
def test_epoch_is_windows_of_the_stream(length, context, more, constant_shapes, number):
    if length <= context:
        return
    budget = context + more
    batches = list(
        TokenStreamBatches(stream(length), context, budget=budget, seed=1, constant_shapes=constant_shapes).epoch(
            number
        )
    )
    begins = []
    for batch in batches:
        real = batch.sentences * context
        [packed] = batch.inputs
        assert batch.tokens == real <= budget
        assert batch.targets[:real].tolist() == (packed.ids[:real] + 1).tolist()
        assert (batch.targets[real:] == IGNORE_INDEX).all()
        assert len(batch.targets) == len(packed.ids) == (budget // context * context if constant_shapes else real)
        # a rectangle without padding
        assert len(packed.ids) == len(packed) * packed.max_len
        assert packed.max_len == context
        for row in rows(packed)[: batch.sentences]:
            assert row == list(range(row[0], row[0] + context))
            begins.append(row[0] - 10)
    assert [batch.sentences for batch in batches[:-1]] == [budget // context] * (len(batches) - 1)
    begins.sort()
    assert begins == list(range(begins[0], length - context, context))  # all windows that fit after the first
    assert begins[0] < context


def test_window_boundaries_change_and_windows_are_shuffled():
    batches = TokenStreamBatches(stream(1000), 16, budget=64, seed=0)
    epochs = [[row[0] for batch in batches.epoch(number) for row in rows(batch.inputs[0])] for number in range(40)]
    assert all(begins != sorted(begins) for begins in epochs)
    assert len({begins[0] % 16 for begins in epochs}) > 8


@pytest.mark.parametrize("constant_shapes", [False, True])
def test_epoch_depends_on_seed_and_number_alone(constant_shapes):
    check_epochs(lambda seed: TokenStreamBatches(stream(300), 8, budget=40, seed=seed, constant_shapes=constant_shapes))


@settings(deadline=None)
@given(st.integers(2, 60), st.integers(1, 12), st.data(), st.integers(0, 30), st.booleans())
def test_every_token_is_predicted_exactly_once(length, context, data, more, constant_shapes):
    overlap = data.draw(st.integers(0, context - 1))
    budget = context + more
    ids = stream(length)
    seen, shapes = [], set()
    for batch in sliding_window_batches(ids, context, budget=budget, overlap=overlap, constant_shapes=constant_shapes):
        [packed] = batch.inputs
        counted = batch.targets != IGNORE_INDEX
        assert batch.tokens == counted.sum() > 0
        assert batch.sentences <= budget // context
        assert packed.max_len <= context
        assert torch.equal(packed.ids[counted] + 1, batch.targets[counted])
        for id, position in zip(batch.targets[counted].tolist(), packed.positions[counted].tolist()):
            assert position >= min(overlap, id - 11)  # at least `overlap` tokens of context, or all there are
            seen.append(id)
        shapes.add((len(packed.ids), len(packed), packed.max_len))
    assert seen == ids[1:].tolist()
    assert not constant_shapes or len(shapes) == 1


def test_invalid_arguments_are_errors():
    with pytest.raises(RegardError, match="The text has 8 tokens; a window of 8 and its next token need 9"):
        TokenStreamBatches(stream(8), 8, budget=64, seed=0)
    with pytest.raises(RegardError, match="A window has 16 tokens, but a batch has only 8"):
        TokenStreamBatches(stream(80), 16, budget=8, seed=0)
    with pytest.raises(RegardError, match="A window has 16 tokens, but a batch has only 8"):
        next(sliding_window_batches(stream(80), 16, budget=8))
    with pytest.raises(RegardError, match="single token: there is nothing to predict"):
        next(sliding_window_batches(stream(1), 16, budget=16))
    with pytest.raises(
        RegardError,
        match=r"The overlap \(16\) must be smaller than the window \(16 tokens\)\. Choose an overlap from 0 to 15",
    ):
        next(sliding_window_batches(stream(80), 16, budget=16, overlap=16))
