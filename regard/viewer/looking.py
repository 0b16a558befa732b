"""`look`: what every attention of a model regarded while it translated one sentence."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Float

from regard.attention import Recorded
from regard.data import SPECIALS, Tokenizer
from regard.data.special import EOS, SOS
from regard.errors import RegardError
from regard.files import write_whole
from regard.folder import Translator
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
    """A sentence, its translation, and every attention between them. Shows itself in a notebook.

    `maps` are the attentions by their modules' names: `look.maps["decoder.0.cross"].weights`.
    """

    source: str
    translation: str
    source_pieces: list[str]
    target_pieces: list[str]
    maps: dict[str, AttentionMap]

    @cached_property
    def alignment(self) -> AttentionMap:
        """The cross-attention whose rows, averaged over heads, tell most about where they look (see `information`)."""
        cross = [one for one in self.maps.values() if one.kind == "cross"]
        return max(cross, key=lambda one: information(one.of()))

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
            return pictures.overview(f"{self.source.strip()}  →  {self.translation.strip()}", panels, form)
        if attention is not None and attention not in self.maps:
            raise RegardError(f"The model has no attention {attention!r}.", f"There are: {', '.join(self.maps)}.")
        shown = self.alignment if attention is None else self.maps[attention]
        heads = len(shown.weights)
        which = f"head {head}" if head is not None else f"mean of {heads} heads" if heads > 1 else "its one head"
        return pictures.heat_map(shown.of(head), shown.rows, shown.columns, f"{shown.name}, {which}", shown.kind, form)

    def _repr_png_(self) -> bytes:
        return self._picture("png")

    def __repr__(self) -> str:
        return f"Look({self.source!r} → {self.translation!r}, {len(self.maps)} attentions: {', '.join(self.maps)})"


def look(translator: Translator, source: str, target: str | None = None, *, truncate: bool = False) -> Look:
    """Translates a sentence (or takes the translation that is given) and shows what was regarded.

    >>> seen = look(translator, "The cat chased the mouse.")  # doctest: +SKIP
    >>> seen.maps["decoder.1.cross"].weights.shape  # doctest: +SKIP
    (4, 8, 7)
    >>> seen.save("map.png")  # doctest: +SKIP
    """
    if not source.strip():
        raise RegardError("The text is empty: there is nothing to look at.", "Give a sentence.")
    source_ids = translator.source_ids(source, name="the source", truncate=truncate)
    if target is None:
        best = translator.translate([source], truncate=truncate)[0][0]
        target, target_ids = best.text, best.hypothesis.ids
    else:
        target_ids = translator.target_ids(target, name="the target", truncate=truncate)
    recording = force(translator, [(source_ids, target_ids)])
    sources = _labels(translator.source_tokenizer, source, source_ids[:-1])
    targets = _labels(translator.target_tokenizer, target, target_ids)
    read, begun, predicted = [*sources, SPECIALS[EOS]], [SPECIALS[SOS], *targets], [*targets, SPECIALS[EOS]]
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
