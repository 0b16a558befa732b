"""`look`: what every attention of a model regarded while it translated, or read, one text."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float

from regard.attention import Recorded, record
from regard.data import Tokenizer
from regard.errors import RegardError
from regard.files import write_whole
from regard.folder import LanguageModel, TextEncoder, Translator
from regard.layers.packed import pack
from regard.viewer.forcing import force, information

FORMATS = ("png", "svg")


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """What one attention regarded: a weight for each head, row and column. Every row sums to 1.

    In self-attention rows and columns are the tokens that are read (`<sos>` first on the decoder's side). In
    cross-attention a row belongs to the token that it predicts, so the target stands there with `<eos>` at its end.
    """

    name: str
    kind: str
    rows: list[str]
    columns: list[str]
    recorded: Recorded = field(repr=False)

    @cached_property
    def weights(self) -> Float[np.ndarray, "H T S"]:
        """The exact weights, computed when they are first asked for."""
        return self.recorded.weights()[0].float().cpu().numpy()

    def of(self, head: int | None = None) -> Float[np.ndarray, "T S"]:
        """One head's weights, or the mean of all."""
        if head is None:
            return self.weights.mean(0)
        if not 0 <= head < len(self.weights):
            raise RegardError(f"{self.name} has no head {head}.", f"There are {len(self.weights)}, counted from 0.")
        return self.weights[head]


@dataclass(frozen=True, eq=False)
class Look:
    """A sentence, its translation, and every attention between them; or a text that was read, and every attention
    inside it. Shows itself in a notebook.

    `maps` are the attentions by their modules' names: `look.maps["decoder.0.cross"].weights`.
    """

    source: str
    translation: str
    source_pieces: list[str]
    target_pieces: list[str]
    maps: dict[str, AttentionMap]

    @cached_property
    def alignment(self) -> AttentionMap:
        """The attention whose rows, averaged over heads, tell most about where they look (see `information`): of those
        between source and translation, where there are any.
        """
        cross = [one for one in self.maps.values() if one.kind == "cross"]
        return max(cross or self.maps.values(), key=lambda one: information(one.of()))

    def save(
        self, path: str | Path, attention: str | None = None, head: int | None = None, *, overview: bool = False
    ) -> None:
        """Writes a picture, .png or .svg: one attention, by default the alignment; its mean over heads, or one head.

        With `overview` (or attention "all") the picture is a small map for each head of each attention.
        """
        form = Path(path).suffix.lower().removeprefix(".")
        if form not in FORMATS:
            raise RegardError(f"{path}: pictures are .png or .svg.", "Change the name's ending.")
        write_whole(Path(path), self._picture(form, attention, head, overview))

    def _picture(
        self, form: str, attention: str | None = None, head: int | None = None, overview: bool = False
    ) -> bytes:
        from regard.viewer import pictures  # matplotlib is slow to import, and wanted here alone

        if overview or attention == "all":
            panels = [pictures.Panels(one.name, one.weights, one.rows, one.columns) for one in self.maps.values()]
            return pictures.overview("  →  ".join(filter(None, self._texts())), panels, form)
        if attention is not None and attention not in self.maps:
            raise RegardError(f"The model has no attention {attention!r}.", f"There are: {', '.join(self.maps)}.")
        shown = self.alignment if attention is None else self.maps[attention]
        heads = len(shown.weights)
        which = f"head {head}" if head is not None else f"mean of {heads} heads" if heads > 1 else "its one head"
        return pictures.heat_map(shown.of(head), shown.rows, shown.columns, f"{shown.name}, {which}", shown.kind, form)

    def _repr_png_(self) -> bytes:
        return self._picture("png")

    def __repr__(self) -> str:
        texts = " → ".join(repr(text) for text in self._texts() if text)
        return f"Look({texts}, {len(self.maps)} attentions: {', '.join(self.maps)})"

    def _texts(self) -> tuple[str, str]:
        return self.source.strip(), self.translation.strip()


def look(
    bundle: Translator | LanguageModel | TextEncoder, source: str, target: str | None = None, *, truncate: bool = False
) -> Look:
    """Translates a sentence (or takes the translation that is given) and shows what was regarded.

    A language model and an encoder of texts read the text, and show what was regarded in it.

    >>> seen = look(translator, "The cat chased the mouse.")  # doctest: +SKIP
    >>> seen.maps["decoder.1.cross"].weights.shape  # doctest: +SKIP
    (4, 8, 7)
    >>> seen.save("map.png")  # doctest: +SKIP
    """
    if not source.strip():
        raise RegardError("The text is empty: there is nothing to look at.", "Give a sentence.")
    if isinstance(bundle, Translator):
        return _look_at_translation(bundle, source, target, truncate)
    if target is not None:
        raise RegardError("Only a translator has a target to look at.", "Leave it out.")
    if isinstance(bundle, LanguageModel):
        ids = bundle.prompt_ids(source, name="the text", truncate=truncate)
    else:
        ids = bundle.text_ids(source, name="the text", truncate=truncate)
    bundle.model.eval()
    with torch.inference_mode(), record(bundle.model) as recording:
        bundle.model(pack([ids]).to(bundle.device))
    labels = _framed_labels(bundle, source, ids)
    maps = {}
    for name, one in recording.items():
        for number, call in enumerate(one.calls):  # several where layers share their weights
            called = name if len(one.calls) == 1 else f"{name}.{number}"
            maps[called] = AttentionMap(called, one.kind, labels, labels, replace(one, calls=[call]))
    return Look(source, "", labels, [], maps)


def _framed_labels(bundle: LanguageModel | TextEncoder, text: str, ids: list[int]) -> list[str]:
    """A label for each id: the text's pieces, and the names of what frames it."""
    head = 0 if bundle.special.begin is None else 1
    tail = 0 if bundle.special.end is None else 1
    inside = ids[head : len(ids) - tail]
    names = bundle.tokenizer.vocabulary
    return [
        *(names[i] for i in ids[:head]),
        *_labels(bundle.tokenizer, text, inside),
        *(names[i] for i in ids[len(ids) - tail :]),
    ]


def _look_at_translation(translator: Translator, source: str, target: str | None, truncate: bool) -> Look:
    source_ids = translator.source_ids(source, name="the source", truncate=truncate)
    if target is None:
        best = translator.translate([source], truncate=truncate)[0][0]
        target, target_ids = best.text, best.hypothesis.ids[len(translator.special.begun([])) - 1 :]
    else:
        target_ids = translator.target_ids(target, name="the target", truncate=truncate)
    recording = force(translator, [(source_ids, target_ids)])
    begin, end = (0 if one is None else 1 for one in (translator.special.begin, translator.special.end))
    sources = _labels(translator.source_tokenizer, source, source_ids[begin : len(source_ids) - end])
    targets = _labels(translator.target_tokenizer, target, target_ids)
    special, names = translator.special, translator.target_tokenizer.vocabulary
    source_names = translator.source_tokenizer.vocabulary
    read = [*(source_names[i] for i in source_ids[:begin]), *sources]
    read += [source_names[i] for i in source_ids[len(source_ids) - end :]]
    begun = [*(names[i] for i in special.begun([])), *targets]
    predicted = [*begun[1:], names[special.eos]]
    axes = {"self": (read, read), "masked": (begun, begun), "cross": (predicted, read)}
    maps = {name: AttentionMap(name, one.kind, *axes[one.kind], one) for name, one in recording.items()}
    return Look(source, target, sources, targets, maps)


def _labels(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> list[str]:
    """A label for each id: its piece of the text, unless these ids are not how the text is encoded.

    A model may spell a word by other pieces than its tokeniser would, and may say `<unk>`.
    """
    if tokenizer.encode(text)[: len(ids)] == list(ids):
        return [piece for piece, _ in tokenizer.pieces(text)[: len(ids)]]
    return [tokenizer.vocabulary[i] for i in ids]
