"""From one batch to any number of sentences."""

from collections.abc import Callable, Sequence
from typing import Any

from regard.decode.beam_search import beam
from regard.decode.decode_config import DecodeConfig
from regard.decode.hypotheses import NBest
from regard.decode.protocol import SPECIAL, Decodable, Source, Special
from regard.decode.sampling import OnToken, greedy, sample


def decode_batch(
    model: Decodable,
    source: Source,
    config: DecodeConfig,
    *,
    special: Special = SPECIAL,
    prefixes: Sequence[Sequence[int]] | None = None,
    history: bool = False,
    numbers: Sequence[int] | None = None,
    room: int | None = None,
    on_token: OnToken | None = None,
) -> list[NBest]:
    """Decode one batch by the config's method. `numbers` is heard by sample: see there.

    `history` keeps what each step considered, took and left (`NBest.history`); the outputs stay the same, bit for bit.
    `room` bounds source and output together, for models whose output goes on with the source. `on_token(sentence,
    token)` is told each token as it is chosen, except by beam, which does not know until the end.
    """
    common: dict[str, Any] = {"special": special, "prefixes": prefixes, "history": history, "room": room}
    if config.method == "greedy":
        return greedy(model, source, config, **common, on_token=on_token)
    if config.method == "sample":
        return sample(model, source, config, **common, numbers=numbers, on_token=on_token)
    return beam(model, source, config, **common)


def decode_all(
    model: Decodable,
    sources: Sequence[Sequence[int]],
    pack: Callable[[list[list[int]]], Source],
    config: DecodeConfig,
    *,
    special: Special = SPECIAL,
    prefixes: Sequence[Sequence[int]] | None = None,
    history: bool = False,
    numbers: Sequence[int] | None = None,
    room: int | None = None,
    on_token: OnToken | None = None,
    budget: int = 8192,
    progress: Callable[[int, int], None] | None = None,
) -> list[NBest]:
    """Decode any number of sentences, in batches of similar lengths; the results come in the order of `sources`.

    `room` and `on_token`: see `decode_batch`. `numbers` are those of the sources for sampling, which draws the same for
    the same seed and number; by default from 0. `budget` bounds sentences * hypotheses * longest source of a batch.
    `progress(done, total)` is called after each.

    >>> from regard.layers.packed import pack
    >>> from regard.models.transformer import Transformer, TransformerConfig
    >>> sizes = TransformerConfig(width=16, heads=2, feedforward=32, source_vocab=9, target_vocab=9)
    >>> model = Transformer(sizes).eval()
    >>> len(decode_all(model, [[4, 5, 3], [6, 3], [7, 3]], pack, DecodeConfig(beam=2)))
    3
    """
    hypotheses = {"greedy": 1, "beam": config.beam, "sample": config.n_best}[config.method]
    results: list[NBest] = [NBest() for _ in sources]
    done = 0
    for batch in _by_length([len(source) for source in sources], budget // hypotheses):
        answers = decode_batch(
            model,
            pack([list(sources[i]) for i in batch]),
            config,
            special=special,
            prefixes=None if prefixes is None else [prefixes[i] for i in batch],
            history=history,
            numbers=batch if numbers is None else [numbers[i] for i in batch],
            room=room,
            on_token=None if on_token is None else lambda row, token, batch=batch: on_token(batch[row], token),
        )
        for i, answer in zip(batch, answers):
            results[i] = answer
        done += len(batch)
        if progress is not None:
            progress(done, len(sources))
    return results


def _by_length(lengths: list[int], budget: int) -> list[list[int]]:
    """Indices in batches, longest first (so that what does not fit in memory fails at once), each within the budget."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # The first of a batch is its longest.
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches
