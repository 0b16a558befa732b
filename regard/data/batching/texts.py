"""Encoded texts and text pairs with special tokens and segment ids, in batches of similar length."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int
from torch import Tensor

from regard.data.batching.batch import WHOLE, BatchSampler, RankSlice
from regard.data.batching.sequences import Sequences
from regard.data.text.special_tokens import SpecialTokens
from regard.data.text.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.layers.packed import Packed, pack

# Arguments of an encoder: the packed texts and, for models with segment embeddings, the segment of each token.
EncoderInputs = tuple[Packed] | tuple[Packed, Tensor]


@dataclass(frozen=True, eq=False)
class EncodedTexts:
    """Encoded texts with special tokens and, for models with segment embeddings, the segment of each token: 0 in the
    first text, 1 in the second.

    A pair is encoded as begin, first, end, second, end. Models with `special.between` before the second text (RoBERTa)
    use one segment for both.

    >>> texts = EncodedTexts.from_ids([([5, 6], None), ([7], [8, 9])], SpecialTokens(begin=2, end=3), segments=True)
    >>> texts.ids[0].tolist(), texts.ids[1].tolist(), texts.segments[1].tolist()
    ([2, 5, 6, 3], [2, 7, 3, 8, 9, 3], [0, 0, 0, 1, 1, 1])
    """

    ids: Sequences
    segments: Sequences | None = None

    @staticmethod
    def from_ids(
        rows: Iterable[tuple[list[int], list[int] | None]], special: SpecialTokens, *, segments: bool
    ) -> "EncodedTexts":
        """From the ids of the first texts and, where there are any, of the second texts."""
        ids, segment_ids = [], []
        for first, second in rows:
            head = special.add_special_tokens(first)
            tail = [] if second is None else special.add_special_tokens_to_second(second)
            ids.append(head + tail)
            if segments:
                segment_ids.append([0] * len(head) + [int(special.between is None)] * len(tail))
        return EncodedTexts(Sequences.from_lists(ids), Sequences.from_lists(segment_ids) if segments else None)

    def __len__(self) -> int:
        return len(self.ids)


def max_text_tokens(special: SpecialTokens, texts: int, max_len: int) -> int:
    """Maximum number of tokens of `texts` texts together, without their special tokens.

    >>> max_text_tokens(SpecialTokens(begin=2, end=3), texts=2, max_len=10)
    7
    """
    left = max_len - len(special.add_special_tokens([])) - (texts - 1) * len(special.add_special_tokens_to_second([]))
    if left < texts:
        raise RegardError(
            f"A maximum length of {max_len} tokens leaves no room for text next to the special tokens.",
            hint="Raise model.max_len.",
        )
    return left


def encode_texts(
    texts: Sequence[tuple[str, ...]], tokenizer: Tokenizer, special: SpecialTokens, *, max_len: int, segments: bool
) -> tuple[EncodedTexts, int]:
    """Encode texts or text pairs with special tokens, truncated to `max_len` tokens. Also returns how many were
    truncated.

    Of a pair, the longer text is truncated first, down to the length of the other. With `segments`, each token has a
    segment id.

    >>> tokenizer = Tokenizer.train(["a b c d"], "word")
    >>> special = SpecialTokens(begin=2, end=3)
    >>> texts, truncated = encode_texts([("a b", "c"), ("d",)], tokenizer, special, max_len=5, segments=False)
    >>> texts.ids[0].tolist(), texts.ids[1].tolist(), truncated
    ([2, 4, 3, 6, 3], [2, 7, 3], 1)
    """
    encoded = iter(tokenizer.encode_batch([text for row in texts for text in row]))
    rows: list[tuple[list[int], list[int] | None]] = []
    truncated = 0
    for row in texts:
        first, second = next(encoded), next(encoded) if len(row) == 2 else None
        limit, length = max_text_tokens(special, len(row), max_len), len(first) + len(second or ())
        truncated += length > limit
        if second is None:
            rows.append((first[:limit], None))
        elif length <= limit:
            rows.append((first, second))
        else:
            first = first[: max(limit - len(second), limit - limit // 2)]
            rows.append((first, second[: limit - len(first)]))
    return EncodedTexts.from_ids(rows, special, segments=segments), truncated


class LengthGroupedBatches:
    """Texts in batches of similar length. Yields the indices of the texts of each batch and the model inputs.

    Epoch e depends on (seed, e) alone. `constant_shapes` is as in `PairBatches`; padding comes after the texts. `begin`
    and `end` are added to each text of a batch, unless they are None: the texts already have their special tokens.

    >>> texts = EncodedTexts(Sequences.from_lists([[2, 5, 6, 3], [2, 3], [2, 7, 3]]))
    >>> [(rows, inputs)] = LengthGroupedBatches(texts, budget=16, max_len=16, seed=0).epoch(0)
    >>> rows, inputs[0].offsets.lengths
    ([1, 2, 0], tensor([2, 3, 4], dtype=torch.int32))
    """

    def __init__(
        self,
        texts: EncodedTexts,
        *,
        budget: int,
        max_len: int,
        seed: int,
        constant_shapes: bool = False,
        begin: int | None = None,
        end: int | None = None,
    ) -> None:
        self.texts, self.seed, self.begin, self.end = texts, seed, begin, end
        lengths = self._lengths()
        if not len(lengths) or lengths.max() > max_len:
            raise ValueError(
                f"expected texts of at most max_len = {max_len} tokens, "
                f"got {len(lengths)} of up to {lengths.max(initial=0)}"
            )
        mean_length = max(1.0, float(lengths.mean()))
        self._sampler = BatchSampler(mean_length, budget=budget, max_len=max_len, constant_shapes=constant_shapes)

    def epoch(self, number: int, start: int = 0, part: RankSlice = WHOLE) -> Iterator[tuple[list[int], EncoderInputs]]:
        """The batches of an epoch from index `start` on, or a part of each. Skipped batches are not built.

        A text that only pads a part is in the inputs, but not among the indices.
        """
        segments, lengths = self.texts.segments, self._lengths()
        batches = self._sampler.sample(np.random.default_rng([self.seed, number]), lengths)
        for batch in batches[start:]:
            selected, count = part.select(lengths[batch].tolist())
            rows = [batch[i] for i in selected]
            texts = list(self.texts.ids.take(rows).add_special_tokens(self.begin, self.end))
            options = self.pack_options(lengths[batch], part)
            packed = pack(texts, **options)
            if segments is None:
                yield rows[:count], (packed,)
            else:
                yield rows[:count], (packed, pack([segments[row] for row in rows], **options).ids)

    def pack_options(self, lengths: Int[np.ndarray, "B"], part: RankSlice = WHOLE) -> dict[str, int]:
        """Keyword arguments of `pack` for a batch of texts with these lengths, or for a part of it."""
        return self._sampler.pack_options(lengths, part=part)

    def _lengths(self) -> Int[np.ndarray, "B"]:
        return self.texts.ids.lengths + ((self.begin is not None) + (self.end is not None))
