"""Pairs of sentences as packed batches of a constant number of tokens."""

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from regard.data.batching.batch_sampler import Planner
from regard.data.batching.sequences import Sequences
from regard.data.text.bpe_dropout import BpeDropout
from regard.data.text.special_tokens import TRANSLATING, Special
from regard.data.text.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.layers.packed import Packed, pack

# One side of the corpus; an epoch draws its encoding, always the same or, with dropout, always another.
Side = Sequences | BpeDropout


def encode_pairs(
    pairs: Sequence[tuple[str, str]],
    source: Tokenizer,
    target: Tokenizer,
    *,
    max_len: int,
    dropout: float = 0.0,
    seed: int = 0,
) -> tuple[Side, Side, int]:
    """Both sides of the pairs as ids, without those longer than `max_len` on either side (`<eos>` counts), and how
    many pairs are too long.

    BPE-dropout makes texts longer, anew in each epoch. The count then includes the pairs that are too long in one
    drawing, an estimate for every epoch; these pairs are kept, since another epoch may shorten them.

    >>> tokenizer = Tokenizer.train(["a b c d"], "word")
    >>> sources, targets, too_long = encode_pairs([("a b", "c"), ("a b c", "d")], tokenizer, tokenizer, max_len=3)
    >>> len(sources), len(targets), too_long
    (1, 1, 1)
    """
    sources = source.encode_batch([one for one, _ in pairs])
    targets = target.encode_batch([other for _, other in pairs])
    kept = [i for i in range(len(pairs)) if max(len(sources[i]), len(targets[i])) < max_len]
    if not kept:
        raise RegardError(
            f"Every one of {len(pairs)} pairs is longer than {max_len} tokens.", hint="Raise the longest length."
        )
    too_long = len(pairs) - len(kept)
    if dropout:
        first, second = (
            BpeDropout(tokenizer, [pairs[i][side] for i in kept], dropout, seed)
            for side, tokenizer in enumerate((source, target))
        )
        fits = np.maximum(*_usual_lengths(first, second, seed)) < max_len
        if not fits.any():
            raise RegardError(
                f"With BPE-dropout {dropout} every one of {len(pairs)} pairs is longer than {max_len} tokens.",
                hint="Lower tokenizer.dropout, or raise model.max_len.",
            )
        return first, second, too_long + int((~fits).sum())
    return Sequences.of(sources[i] for i in kept), Sequences.of(targets[i] for i in kept), too_long


def _usual_lengths(source: Side, target: Side, seed: int) -> tuple[Int[np.ndarray, "B"], Int[np.ndarray, "B"]]:
    """The lengths of both sides in one drawing, which belongs to no epoch."""
    generator = np.random.default_rng(seed)
    return source.draw(generator).lengths, target.draw(generator).lengths


# A target that is none: the loss does not count it.
IGNORED = -1


@dataclass(frozen=True, eq=False)
class Batch:
    """What one step learns from: `inputs` are what the model takes, `targets` what should come out, row by row.

    Where nothing should come out a target is IGNORED. Sentences and tokens are counted without what fills a batch up.
    """

    inputs: tuple[Packed | Tensor, ...]
    targets: Int[Tensor, "rows *more"]
    sentences: int
    tokens: int
    # The same numbers are computed with for every batch whose inputs have the same shapes.
    repeats: ClassVar[bool] = True

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        inputs = tuple(one.to(device, non_blocking=non_blocking) for one in self.inputs)
        return replace(self, inputs=inputs, targets=self.targets.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        inputs = tuple(one.pin_memory() for one in self.inputs)
        return replace(self, inputs=inputs, targets=self.targets.pin_memory())


class Batches:
    """Batches of at most `budget` tokens a side; epoch e is a function of (seed, e) alone.

    Sentences are shuffled, sorted by length within pools, cut into batches where either side is full, and the batches
    shuffled. With `constant_shapes` each side is filled to `budget` tokens and a constant number of sequences, and both
    sides' max_len is one of 16, 32, 64, … up to the largest, so that compiled code is reused; without, batches are as
    they come.

    Where BPE-dropout makes a pair longer than `max_len`, the pair is not in that epoch.

    >>> sides = Sequences.of([[5], [6, 7], [8]]), Sequences.of([[9], [9, 9], [9]])
    >>> [batch] = Batches(*sides, budget=16, max_len=16, seed=0).epoch(0)
    >>> batch.inputs[0].padded()
    (tensor([[8, 3, 0],
            [5, 3, 0],
            [6, 7, 3]]), tensor([2, 2, 3]))
    """

    def __init__(
        self,
        source: Side,
        target: Side,
        *,
        budget: int,
        max_len: int,
        seed: int,
        constant_shapes: bool = False,
        special: tuple[Special, Special] = (TRANSLATING, TRANSLATING),
    ) -> None:
        if not 0 < len(source) == len(target):
            raise ValueError(f"{len(source)} sources and {len(target)} targets: there must be as many, and some")
        self.source, self.target = source, target
        self.source_special, self.target_special = special
        self.seed = seed
        usual = float(1 + np.maximum(*_usual_lengths(source, target, seed)).mean())
        self._planner = Planner(usual, budget=budget, max_len=max_len, constant_shapes=constant_shapes)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from number `start` on: those before it cost nothing but the plan."""
        generator = np.random.default_rng([self.seed, number])
        source, target = self.source.draw(generator), self.target.draw(generator)
        source = source.framed(self.source_special.begin, self.source_special.end)
        special = self.target_special
        target = target.framed(special.forced).framed(special.sos, special.eos)
        # Each of the two copies of the target lacks one end.
        plan = self._planner.plan(generator, source.lengths, target.lengths - 1)
        for rows in plan[start:]:
            yield self._batch(source, target, rows)

    def _batch(self, source: Sequences, target: Sequences, rows: list[int]) -> Batch:
        """The source ends with `<eos>`; the target has both ends, of which each of its two copies lacks one."""
        sources, targets = [source[row] for row in rows], [target[row] for row in rows]
        shape = self._planner.shape(max(max(map(len, sources)), max(map(len, targets)) - 1))
        return Batch(
            inputs=(pack(sources, **shape), pack([one[:-1] for one in targets], **shape)),
            targets=pack([one[1:] for one in targets], **shape, fill=IGNORED).ids,
            sentences=len(rows),
            tokens=sum(map(len, targets)) - len(rows),
        )


Item = TypeVar("Item")


def prefetch(items: Iterable[Item], depth: int = 4) -> Iterator[Item]:
    """The same items in the same order, made by a thread that is up to `depth` of them ahead.

    What the thread raises is raised here; when the caller stops early, so does the thread. An item that takes longer
    than a second then is not waited for: Ctrl-C must end the program.

    >>> list(prefetch(range(3)))
    [0, 1, 2]
    """
    ready: queue.Queue[tuple[bool, object]] = queue.Queue(depth)  # (is an item, the item | what ended the work)
    stopped = threading.Event()

    def offer(entry: tuple[bool, object]) -> bool:
        while not stopped.is_set():
            try:
                ready.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not offer((True, item)):
                    return
            offer((False, None))
        except BaseException as error:
            offer((False, error))

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            is_item, value = ready.get()
            if is_item:
                yield value  # type: ignore[misc]
            elif value is None:
                return
            else:
                raise value  # type: ignore[misc]
    finally:
        stopped.set()
        thread.join(timeout=1.0)
