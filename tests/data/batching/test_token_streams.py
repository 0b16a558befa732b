import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data import IGNORED, TextBatches, whole_text
from regard.errors import RegardError
from tests.data.helpers import check_epochs, rows


def stream(length):
    """Ids that say where they stand."""
    return np.arange(10, 10 + length, dtype=np.int32)


@settings(deadline=None)
@given(st.integers(2, 80), st.integers(1, 12), st.integers(0, 30), st.booleans(), st.integers(0, 5))
def test_an_epoch_is_pieces_of_the_stream(length, context, more, constant_shapes, number):
    if length <= context:
        return
    budget = context + more
    batches = list(
        TextBatches(stream(length), context, budget=budget, seed=1, constant_shapes=constant_shapes).epoch(number)
    )
    begins = []
    for batch in batches:
        real = batch.sentences * context
        [packed] = batch.inputs
        assert batch.tokens == real <= budget
        assert batch.targets[:real].tolist() == (packed.ids[:real] + 1).tolist()
        assert (batch.targets[real:] == IGNORED).all()
        assert len(batch.targets) == len(packed.ids) == (budget // context * context if constant_shapes else real)
        # a rectangle, and nothing else
        assert len(packed.ids) == len(packed) * packed.max_len
        assert packed.max_len == context
        for row in rows(packed)[: batch.sentences]:
            assert row == list(range(row[0], row[0] + context))
            begins.append(row[0] - 10)
    assert [batch.sentences for batch in batches[:-1]] == [budget // context] * (len(batches) - 1)
    begins.sort()
    assert begins == list(range(begins[0], length - context, context))  # all that fit after the first
    assert begins[0] < context


def test_borders_move_and_pieces_are_shuffled():
    batches = TextBatches(stream(1000), 16, budget=64, seed=0)
    epochs = [[row[0] for batch in batches.epoch(number) for row in rows(batch.inputs[0])] for number in range(40)]
    assert all(begins != sorted(begins) for begins in epochs)
    assert len({begins[0] % 16 for begins in epochs}) > 8


@pytest.mark.parametrize("constant_shapes", [False, True])
def test_an_epoch_is_a_function_of_seed_and_number(constant_shapes):
    check_epochs(lambda seed: TextBatches(stream(300), 8, budget=40, seed=seed, constant_shapes=constant_shapes))


@settings(deadline=None)
@given(st.integers(2, 60), st.integers(1, 12), st.data(), st.integers(0, 30), st.booleans())
def test_the_whole_text_is_predicted_exactly_once(length, context, data, more, constant_shapes):
    overlap = data.draw(st.integers(0, context - 1))
    budget = context + more
    ids = stream(length)
    seen, shapes = [], set()
    for batch in whole_text(ids, context, budget=budget, overlap=overlap, constant_shapes=constant_shapes):
        [packed] = batch.inputs
        counted = batch.targets != IGNORED
        assert batch.tokens == counted.sum() > 0
        assert batch.sentences <= budget // context
        assert packed.max_len <= context
        assert torch.equal(packed.ids[counted] + 1, batch.targets[counted])
        for id, place in zip(batch.targets[counted].tolist(), packed.positions[counted].tolist()):
            assert place >= min(overlap, id - 11)  # what comes before, or all there is
            seen.append(id)
        shapes.add((len(packed.ids), len(packed), packed.max_len))
    assert seen == ids[1:].tolist()
    assert not constant_shapes or len(shapes) == 1


def test_refusals():
    with pytest.raises(RegardError, match="The text has 8 tokens, too few for a piece of 8 and the token after it"):
        TextBatches(stream(8), 8, budget=64, seed=0)
    with pytest.raises(RegardError, match="A piece of text has 16 tokens, but a batch only 8"):
        TextBatches(stream(80), 16, budget=8, seed=0)
    with pytest.raises(RegardError, match="A piece of text has 16 tokens, but a batch only 8"):
        next(whole_text(stream(80), 16, budget=8))
    with pytest.raises(RegardError, match="a single token leaves nothing to predict"):
        next(whole_text(stream(1), 16, budget=16))
    with pytest.raises(RegardError, match=r"Pieces of 16 tokens cannot share 16\. Give an overlap from 0 to 15"):
        next(whole_text(stream(80), 16, budget=16, overlap=16))
