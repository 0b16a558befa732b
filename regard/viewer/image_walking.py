"""The walk of a picture: every number between its pixels and what the model makes of them."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.attention.reference import softmax
from regard.errors import RegardError
from regard.layers.embeddings import ImageEmbedding
from regard.layers.patches import Patches, cut, grid_of, put_before, take_away, whereabouts
from regard.layers.positions import LearnedGrid, SinusoidalGrid, cubic
from regard.layers.readouts import ClassQueries, QueryPool
from regard.models import ViT
from regard.viewer import walking
from regard.viewer.image_words import PICTURE_WORDS
from regard.viewer.looking import Side
from regard.viewer.measures import entropy
from regard.viewer.overlays import BLOCKS, ImageLook
from regard.viewer.tape import Param, Value
from regard.viewer.walk_parts import Parts, numbers
from regard.viewer.walk_recurrent import ONE
from regard.viewer.walking import Walk, Walker

# Tokens up to which a page has a walk without being asked.
FEW = 256
# Bytes up to which pixels, and what becomes of them before the first block, are carried for all patches.
STAGE = 4 << 20
COLOURS = {1: ("grey",), 3: ("red", "green", "blue")}


def walk_of_picture(look: ImageLook) -> Walk:
    """The walk of a look at a picture: each step from its pixels to the output.

    >>> walk = walk_of_picture(look(model, "photo.jpg"))  # doctest: +SKIP
    >>> walk.tape["blocks.0.attention.a"].shape  # the weights a = softmax(e)  # doctest: +SKIP
    (3, 65, 65)
    """
    count = look.run.model.config.prefix + look.grid[0] * look.grid[1]
    if count > walking.LONGEST:
        raise RegardError(
            f"The picture has {count} tokens: a walk takes at most {walking.LONGEST}.", "Take a smaller picture."
        )
    return PictureWalker(look).walk()


def walk_for_picture(look: ImageLook, wanted: bool | None = None) -> Walk | None:
    """A page's walk: if it is wanted, or if nobody said and model and picture are small enough that it costs little."""
    if wanted is not None:
        return walk_of_picture(look) if wanted else None
    if look.grid[0] * look.grid[1] > FEW or walking.bytes_inside(look.run.model) > walking.WHOLE:
        return None
    try:
        walk = walk_of_picture(look)
    except RegardError:  # a score of somebody's own
        return None
    return walk if walk.tape.size <= walking.SMALL else None


class PictureWalker(Walker):
    """Writes the tape of one picture's way through a model."""

    def __init__(self, look: ImageLook) -> None:
        self.picture, self.model = look, look.run.model.eval()
        assert isinstance(look.run.images, Tensor)
        self.images: Float[Tensor, "1 C H W"] = look.run.images
        Parts.__init__(self, self.model, [self.images], self._forward)
        self.config = self.model.config
        self.whole = walking.bytes_inside(self.model) <= walking.WHOLE
        self.chosen: Any = [one for name, one in look.maps.items() if name.startswith(BLOCKS)][-1]
        self.patch_names = [f"patch {place}" for place in self.chosen.rows[self.config.prefix :]]
        tokens = [*self.chosen.rows[: self.config.prefix], *self.patch_names]
        self.kept = {"picture": Side("picture", tokens, [-1] * len(tokens))}
        self.linked: dict[str, tuple[str, list[int]]] = {}
        self._go_along("patches", self.patch_names, [max(0, t - self.config.prefix) for t in self._tokens])

    def _forward(self, images: Float[Tensor, "1 C H W"]) -> Any:
        """The long way, as the look went it: all tokens of the last block are made."""
        encoded = self.model.encode(images)
        if self.model.config.head == "segment":
            return self.model.masks(take_away(encoded, self.model.config.prefix, None), images)
        return self.model.logits(self.model.pooled(encoded, images)) if self.model.config.head != "pixels" else encoded

    @property
    def _tokens(self) -> range:
        return range(len(self.kept["picture"].tokens))

    def _go_along(self, name: str, tokens: list[str], rows: list[int]) -> None:
        """A side that is followed along with the picture's tokens: row `rows[t]` of it when token t is."""
        self.kept[name] = Side(name, tokens, [-1] * len(tokens))
        self.linked[name] = ("picture", rows)

    def words(self, name: str) -> tuple[str, str]:
        return PICTURE_WORDS[name] if name in PICTURE_WORDS else super().words(name)

    def walk(self) -> Walk:
        model, config = self.model, self.config
        x = self.tokens_of_pixels(model.embedding)
        if model.embedding.rotary is not None:
            places = [[0, 0]] * config.prefix + whereabouts(self.picture.grid)[0].tolist()
            self.turns = model.embedding.rotary.rates, places
        for layer, block in enumerate(model.blocks):
            x = self.block(block, x, "Encoder", layer)
        self.turns = None
        if not model.norm_is_last:
            x = self.last_norm(x, model.norm, "The last norm", ViT.encode)
        if config.head == "segment":
            self.segment(x)
        elif config.head != "pixels":
            self.label(x)
        return Walk(self.tape, self.kept, self.focus(), self.ends, self.note(), self.linked)

    def focus(self) -> dict[str, Any]:
        """Where a walk begins: at the patch that matters most to whoever speaks for the picture, in the head that is
        clearest about it."""
        over = self.picture.over_patches(self.chosen.name).reshape(len(self.chosen.weights), -1)
        head = int(np.argmin([entropy(row[None])[0] for row in over / over.sum(1, keepdims=True)]))
        return {
            "attention": self.chosen.name,
            "head": head,
            "picture": self.config.prefix + int(over[head].argmax()),
        }

    # From pixels to tokens

    def tokens_of_pixels(self, module: ImageEmbedding) -> Value:
        self.path = "embedding"
        self.tape.section("The picture becomes tokens", side="picture", part="embedding")
        x = self.stem(module) if module.patches.kind == "stem" else self.flat(module)
        x = self.with_places(module, x)
        if module.prefix is not None:
            rows, axes = list(range(len(module.prefix))), ("picture", "channels")
            first = self.rows(module.prefix, rows, "C", "first", ImageEmbedding._finished, axes)
            if module.learned is not None and module.learned.prefix:
                p = self.rows(module.learned.weight, rows, "P", "first_place", ImageEmbedding._finished, axes)
                first = self.do("add", "with_first_place", ImageEmbedding._finished, [first, p])
            x = self.do("stack", "tokens", put_before, [first, x], axes=axes)
        x = x._replace(axes=("picture", "channels"))
        return self.tape.compare(x, self.own.output(module))

    def flat(self, module: ImageEmbedding) -> Value:
        """Each patch's pixels through a linear map, which may be written as a convolution."""
        project: Any = module.patches.project
        pixels, own = numbers(cut(self.images, module.patch)[0]), self.own.output(project)[0]
        own = own if module.patches.kind == "linear" else _by_cell(own)
        places = [f"{row},{column}" for row in range(module.patch) for column in range(module.patch)]
        colours = COLOURS.get(module.channels, tuple(f"channel {i}" for i in range(module.channels)))
        self._go_along("pixels", [f"{colour} {place}" for colour in colours for place in places], [])
        some, axes = list(range(len(pixels))), ("patches", "pixels")
        size = 4 * (2 * pixels.size + own.size + project.weight.numel())
        if size > STAGE:  # of one patch alone
            some, axes = [self.focus()["picture"] - self.config.prefix], ("one", "pixels")
        given = Value(None, pixels[some], axes)
        title = self.words("pixels")[0]
        if size > STAGE:
            title += f", of {self.patch_names[some[0]]} alone: those of all would be too many to carry"
        x = self.tape.give(given, self.named("pixels"), title, cut)
        x = self.standardised(module, x, len(places))
        params = [Param("W", numbers(project.weight).reshape(len(project.weight), -1), self.names[id(project.weight)])]
        params.append(self.param("b", project.bias))
        title, formula = self.words("token")
        out = (axes[0], "channels")
        x = self.tape.do("linear", self.named("token"), title, formula, Patches.forward, [x], params, axes=out)
        self.tape.compare(x, own[some])
        if size > STAGE:
            whole = Value(None, own.astype(np.float64), ("patches", "channels"))
            x = self.tape.give(whole, self.named("all_tokens"), "The tokens of all patches, given", Patches.forward)
        return x

    def standardised(self, module: ImageEmbedding, x: Value, repeats: int) -> Value:
        """By the mean and the deviation of each channel, which has `repeats` numbers in a row."""
        channels = torch.ones(module.channels, 1)
        params = [
            Param(sign, numbers((channels * one.cpu()).flatten().repeat_interleave(repeats)), f"embedding.{name}")
            for sign, name, one in (("μ", "mean", module.mean), ("σ", "std", module.std))
        ]
        return self.do("standardise", "normalised", ImageEmbedding.normalised, [x], params)

    def stem(self, module: ImageEmbedding) -> Value:
        """Convolutions, each of which halves the sides, until a patch is one cell."""
        convolutions, last = self._stem(module.patches)
        height, width = self.images.shape[-2:]
        stages = sum(3 * height * width * c.out_channels >> 2 * (i + 1) for i, (c, _) in enumerate(convolutions))
        if 4 * (2 * self.images.numel() + stages) > STAGE:
            tokens = Value(None, _by_cell(self.own.output(last)[0]).astype(np.float64), ("patches", "channels"))
            title = "The tokens of all patches, given: the convolutions before them are too large to carry"
            return self.tape.give(tokens, self.named("token"), title, Patches.forward)
        pixels = self.images[0].permute(1, 2, 0).flatten(0, 1)
        axes = (self._cells(height, width), "channels")
        title, _ = self.words("picture")
        x = self.tape.give(Value(None, numbers(pixels), axes), self.named("picture"), title, Patches.forward)
        x = self.standardised(module, x, 1)
        for number, (convolution, norm) in enumerate(convolutions):
            self.path = f"embedding.patches.{number}"
            size = [height, width]
            height, width = (height + 1) // 2, (width + 1) // 2
            axes, own = (self._cells(height, width), "channels"), self.own.output(convolution)[0]
            params = [self.param("w", convolution.weight), self.param("b", convolution.bias)]
            x = self.do(
                "convolve", "convolved", Patches.forward, [x], params, axes=axes, size=size, stride=2, padding=1
            )
            self.tape.compare(x, own.reshape(len(own), -1).T)
            params = [self.param("γ", norm.weight), self.param("β", norm.bias)]
            x = self.do("norm_all", "cell_norm", Patches.forward, [x], params, eps=norm.eps)
            x = self.activate("activated", Patches.forward, x, "gelu", "h = gelu(n)")
        self.path = "embedding"
        weight = Param("W", numbers(last.weight).reshape(len(last.weight), -1), self.names[id(last.weight)])
        title, formula = self.words("token")
        params, axes = [weight, self.param("b", last.bias)], ("patches", "channels")
        x = self.tape.do("linear", self.named("token"), title, formula, Patches.forward, [x], params, axes=axes)
        return self.tape.compare(x, _by_cell(self.own.output(last)[0]))

    @staticmethod
    def _stem(patches: Patches) -> tuple[list[tuple[Any, Any]], Any]:
        """Its convolutions, each with its norm; and the last, which has none."""
        layers: Any = list(patches.project)  # type: ignore[call-overload]
        return list(zip(layers[:-1:3], layers[1:-1:3])), layers[-1]

    def _cells(self, height: int, width: int) -> str:
        """A side for the cells of a stage of the stem; of a patch the one in its middle is followed."""
        name = f"cells {height}×{width}"
        rows, columns = self.picture.grid
        high, wide = height // rows, width // columns
        middles = [
            (p // columns * high + high // 2) * width + p % columns * wide + wide // 2 for p in range(rows * columns)
        ]
        names = [f"cell {i // width},{i % width}" for i in range(height * width)]
        self._go_along(name, names, [middles[max(0, t - self.config.prefix)] for t in self._tokens])
        return name

    def with_places(self, module: ImageEmbedding, x: Value) -> Value:
        """Plus where each patch was, if that is added at all."""
        axes, places = ("patches", "channels"), whereabouts(self.picture.grid, self.images.device)
        if module.sinusoidal is not None:
            codes, every = module.sinusoidal(*places), list(range(len(places[0])))
            p = self.rows(codes, every, "P", "place", SinusoidalGrid.forward, axes, says="place_code")
        elif module.learned is None:
            return x
        elif grid_of(self.images.shape[-2:], module.patch) == module.grid:
            rows = [module.learned.prefix + i for i in range(len(places[0]))]
            p = self.rows(module.learned.weight, rows, "P", "place", LearnedGrid.forward, axes)
        else:
            near = [cubic(places[0][:, i], places[1][:, i], module.grid[i]) for i in range(2)]
            shares = numbers((near[0][:, :, None] * near[1][:, None, :]).flatten(1))
            title, _ = self.words("place_shares")
            s = self.tape.give(Value(None, shares, axes), self.named("place_shares"), title, cubic)
            table = numbers(module.learned.weight[module.learned.prefix :]).T
            params = [Param("P", table, self.names[id(module.learned.weight)])]
            p = self.do("linear", "place", LearnedGrid.forward, [s], params, says="place_mixed")
        return self.do("add", "with_place", ImageEmbedding.forward, [x, p])

    # From tokens to answers

    def patches_alone(self, x: Value) -> Value:
        rows = list(range(self.config.prefix, len(x.x)))
        if self.config.prefix:
            return self.do("take", "patches", take_away, [x], rows=rows, axes=("patches", "channels"))
        return x._replace(axes=("patches", "channels"))

    def label(self, x: Value) -> None:
        """The picture as a whole, and how likely each label is."""
        model, config = self.model, self.config
        called = {"class": "The class token", "mean": "The mean of the patches", "query": "A question to the patches"}
        self.path = "pooled"
        if config.pooling == "query" and model.pooler is not None:
            self._go_along("label", ["question"], [0 for _ in self._tokens])
            says = self.looks(model.pooler.attention)
            self.tape.section(called["query"], side="label", keys="patches", **says)
            patches = self.patches_alone(x)
            self.path = "pooler"
            question = self.rows(model.pooler.question, [0], "Q", "question", QueryPool.forward, ("label", "channels"))
            self.path = "pooler.attention"
            x = self.tape.compare(
                self.attention(model.pooler.attention, question, patches), self.own.output(model.pooler)
            )
        else:
            self.tape.section(called[config.pooling], side="picture", part="pooling")
            x = self._read(x) if config.pooling == "class" else self._mean(x)
        self.path = "pooled"
        if model.norm_is_last:
            x = self.norm(x, model.norm, "norm", ViT.pooled)
        if model.pooled_map is not None:
            x = self.linear(x, model.pooled_map, "mapped", ViT._mapped)
            x = self.activate("activated", ViT._mapped, x, "tanh", "y = tanh(x)")
        if model.output is None:
            return
        self.tape.section("The label", side=x.axes[0], part="output")
        if model.distilled is None:
            self.output(x, model.output, ViT.logits, lambda i: config.labels[i], says="l_labels")
        else:
            self._both(x, model.output, model.distilled)

    def _read(self, x: Value) -> Value:
        if not self.config.distilled:
            return self.do("take", "read", ViT.pooled, [x], rows=[0], axes=ONE)
        self._go_along("read", self.kept["picture"].tokens[:2], [int(t == 1) for t in self._tokens])
        return self.do("take", "read", ViT.pooled, [x], says="read_two", rows=[0, 1], axes=("read", "channels"))

    def _mean(self, x: Value) -> Value:
        return self.do("mean", "patch_mean", ViT.pooled, [self.patches_alone(x)], axes=ONE)

    def _both(self, x: Value, output: nn.Linear, distilled: nn.Linear) -> None:
        """The class token's scores and the distillation token's, and their mean."""
        axes, self.path = ("one", "vocabulary"), "output"
        scores = []
        for row, (name, module, says) in enumerate(
            (("of_class", output, "l_labels"), ("of_distilled", distilled, "l_distilled"))
        ):
            one = self.do("take", name, ViT.logits, [x], rows=[row], axes=ONE)
            scores.append(self.linear(one, module, f"l_{row}", ViT.logits, says=says, axes=axes))
        total = self.do("add", "l_sum", ViT.logits, scores)
        self._likely(self.do("scale", "l", ViT.logits, [total], says="l_mean", by=0.5))

    def _likely(self, scores: Value) -> None:
        """Probabilities of labels, which have names."""
        self.ends = dict(enumerate(self.config.labels))
        own = numbers(self.picture.run.output) if isinstance(self.picture.run.output, Tensor) else None
        assert own is not None
        if self.config.head == "segment":
            middles = np.array(self._middles())
            own = own[0][:, middles[:, 0], middles[:, 1]].T
        self.tape.compare(scores, own)
        self.do("softmax", "p", softmax, [scores])

    def _middles(self) -> list[tuple[int, int]]:
        """The pixel below and right of the middle of each patch."""
        rows, columns = self.picture.grid
        side = self.config.patch
        return [(r * side + side // 2, c * side + side // 2) for r in range(rows) for c in range(columns)]

    def segment(self, x: Value) -> None:
        """Labels of patches, and of the pixel in the middle of each."""
        model, axes = self.model, ("patches", "vocabulary")
        self.path = "patches"
        if model.segmenter is None and model.output is not None:
            self.tape.section("The label of each patch", side="patches", part="output")
            patches = self.patches_alone(x)
            self.path = "output"
            scores = self.linear(patches, model.output, "l_patch", ViT.masks, axes=axes)
        else:
            assert model.segmenter is not None
            scores = self.by_queries(model.segmenter, x, axes)
        self.path = "output"
        rows, shares = self._around()
        self._likely(self.do("blend", "l", ViT._widened, [scores], says="l_pixel", rows=rows, shares=shares))

    def by_queries(self, module: ClassQueries, x: Value, axes: tuple[str, ...]) -> Value:
        """A query for each label goes through some blocks together with the patches, and then they match."""
        where, count, wide = ClassQueries.forward, len(module.queries), ("labels", "channels")
        tokens = [*self.config.labels, *self.patch_names]
        self.kept["labels"] = Side("labels", tokens, [-1] * len(tokens))
        self.tape.section("Queries of labels", side="labels", part="embedding")
        patches = self.patches_alone(x)
        self.path = "segmenter"
        queries = self.rows(module.queries, list(range(count)), "C", "queries", where, wide)
        x = self.do("stack", "with_queries", put_before, [queries, patches], axes=wide)
        for layer, block in enumerate(module.blocks):
            x = self.block(block, x, "Labels and patches", layer)
        x = self.last_norm(x, module.norm, "The segmenter's norm", where)
        self.tape.section("The label of each patch", side="patches", part="output")
        self.path = "segmenter"
        every = list(range(count, len(x.x)))
        k = self.do("take", "of_patches", take_away, [x], rows=every, axes=("patches", "channels"))
        k = self.linear(k, module.of_patch, "patch_map", where)
        q = self.do("take", "of_queries", where, [x], rows=list(range(count)))
        q = self.linear(q, module.of_query, "query_map", where)
        q = self.do("scale", "query_scaled", where, [q], by=q.x.shape[-1] ** -0.5)
        return self.tape.compare(self.do("match", "match", where, [k, q], axes=axes), self.own.output(module))

    def _around(self) -> tuple[list[list[int]], list[list[float]]]:
        """For the pixel in the middle of each patch, the four patches that it lies between, and their shares in it."""
        (rows, columns), side = self.picture.grid, self.config.patch
        found: tuple[list[list[int]], list[list[float]]] = ([], [])
        for y, x in self._middles():
            # Linear between the middles of patches, as torch's bilinear does it.
            ways = []
            for place, count in ((y, rows), (x, columns)):
                at = (place + 0.5) / side - 0.5
                first = min(int(at), count - 1)
                ways.append(((first, 1 - (at - first)), (min(first + 1, count - 1), at - first)))
            found[0].append([row * columns + column for row, _ in ways[0] for column, _ in ways[1]])
            found[1].append([high * wide for _, high in ways[0] for _, wide in ways[1]])
        return found


def _by_cell(own: Float[np.ndarray, "E rows columns"]) -> Float[np.ndarray, "cells E"]:
    """What a convolution gave, a row for each cell."""
    return own.reshape(len(own), -1).T
