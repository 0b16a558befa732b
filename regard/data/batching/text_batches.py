"""Texts that a model reads whole: framed, one by one or in twos, and in batches of similar length."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from regard.data.batching.batch_sampler import Planner
from regard.data.batching.sequences import Sequences
from regard.data.text.special_tokens import Special
from regard.data.text.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.layers.packed import Packed, pack

# What a model that reads takes: the texts and, if it asks for them, the tokens' segments.
Inputs = tuple[Packed] | tuple[Packed, Tensor]


@dataclass(frozen=True, eq=False)
class Texts:
    """Framed texts and, for models that ask for it, each token's segment: 0 in a first text, 1 in a second.

    Two texts share their middle: begin, first, end, second, end. Where the model has `between` before the second, that
    tells the two apart, and all is one segment, as in RoBERTa.

    >>> texts = Texts.of([([5, 6], None), ([7], [8, 9])], Special(begin=2, end=3), segments=True)
    >>> texts.ids[0].tolist(), texts.ids[1].tolist(), texts.segments[1].tolist()
    ([2, 5, 6, 3], [2, 7, 3, 8, 9, 3], [0, 0, 0, 1, 1, 1])
    """

    ids: Sequences
    segments: Sequences | None = None

    @staticmethod
    def of(rows: Iterable[tuple[list[int], list[int] | None]], special: Special, *, segments: bool) -> "Texts":
        """From the ids of first and, where there are any, second texts."""
        ids, kinds = [], []
        for first, second in rows:
            head = special.framed(first)
            tail = [] if second is None else special.second(second)
            ids.append(head + tail)
            if segments:
                kinds.append([0] * len(head) + [int(special.between is None)] * len(tail))
        return Texts(Sequences.of(ids), Sequences.of(kinds) if segments else None)

    def __len__(self) -> int:
        return len(self.ids)


def room(special: Special, texts: int, max_len: int) -> int:
    """How many tokens `texts` texts may have together beside what frames them.

    >>> room(Special(begin=2, end=3), texts=2, max_len=10)
    7
    """
    left = max_len - len(special.framed([])) - (texts - 1) * len(special.second([]))
    if left < texts:
        raise RegardError(f"{max_len} tokens leave no room for a text.", hint="Raise the longest length.")
    return left


def encode_texts(
    texts: Sequence[tuple[str, ...]], tokenizer: Tokenizer, special: Special, *, max_len: int, segments: bool
) -> tuple[Texts, int]:
    """Texts, or twos of them, framed as the model reads them, and how many were cut to fit into `max_len` tokens.

    Of two texts the longer is cut first, down to the other's length. With `segments` the tokens of the second are told
    from those of the first.

    >>> tokenizer = Tokenizer.train(["a b c d"], "word")
    >>> texts, cut = encode_texts([("a b", "c"), ("d",)], tokenizer, Special(begin=2, end=3), max_len=5, segments=False)
    >>> texts.ids[0].tolist(), texts.ids[1].tolist(), cut
    ([2, 4, 3, 6, 3], [2, 7, 3], 1)
    """
    encoded = iter(tokenizer.encode_batch([text for row in texts for text in row]))
    rows: list[tuple[list[int], list[int] | None]] = []
    cut = 0
    for row in texts:
        first, second = next(encoded), next(encoded) if len(row) == 2 else None
        left, length = room(special, len(row), max_len), len(first) + len(second or ())
        cut += length > left
        if second is None:
            rows.append((first[:left], None))
        elif length <= left:
            rows.append((first, second))
        else:
            first = first[: max(left - len(second), left - left // 2)]
            rows.append((first, second[: left - len(first)]))
    return Texts.of(rows, special, segments=segments), cut


class ByLength:
    """Texts in batches of similar length: which texts make up each batch, and what the model takes.

    Epoch e is a function of (seed, e) alone. `constant_shapes` is as in `Batches`: filling texts come after the real.

    >>> texts = Texts(Sequences.of([[2, 5, 6, 3], [2, 3], [2, 7, 3]]))
    >>> [(rows, inputs)] = ByLength(texts, budget=16, max_len=16, seed=0).epoch(0)
    >>> rows, inputs[0].offsets.lengths
    ([1, 2, 0], tensor([2, 3, 4], dtype=torch.int32))
    """

    def __init__(self, texts: Texts, *, budget: int, max_len: int, seed: int, constant_shapes: bool = False) -> None:
        lengths = texts.ids.lengths
        if not len(lengths) or max(lengths) > max_len:
            raise ValueError(f"{len(lengths)} texts of up to {max(lengths, default=0)} tokens, for max_len = {max_len}")
        self.texts, self.seed = texts, seed
        usual = max(1.0, float(lengths.mean()))
        self._planner = Planner(usual, budget=budget, max_len=max_len, constant_shapes=constant_shapes)

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[list[int], Inputs]]:
        """From batch number `start` on: those before it cost nothing but the plan."""
        ids, segments = self.texts.ids, self.texts.segments
        plan = self._planner.plan(np.random.default_rng([self.seed, number]), ids.lengths)
        for rows in plan[start:]:
            texts = [ids[row] for row in rows]
            shape = self._planner.shape(max(map(len, texts)))
            packed = pack(texts, **shape)
            if segments is None:
                yield rows, (packed,)
            else:
                yield rows, (packed, pack([segments[row] for row in rows], **shape).ids)
