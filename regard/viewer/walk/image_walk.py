"""The walk of an image: every number between its pixels and the model's output."""

from typing import Any

import numpy as np
from torch import Tensor

from regard.errors import RegardError
from regard.evaluation.attention_measures import entropy
from regard.layers.patches import take_away
from regard.models import ViT
from regard.program import forward_program
from regard.viewer.image_look import BLOCKS, ImageLook
from regard.viewer.text_look import Side
from regard.viewer.walk import limits
from regard.viewer.walk.computation import LAYOUT, Computation
from regard.viewer.walk.module_outputs import ModuleOutputs
from regard.viewer.walk.trace import Extent, Trace
from regard.viewer.walk.walkthrough import Walk, block_of, bytes_inside, large_note
from regard.viewer.walk.wording import PROBABILITIES, Words

COLORS = {1: ("gray",), 3: ("red", "green", "blue")}


def forward_all_tokens(model: ViT, image: Tensor) -> Any:
    """The model's forward with all tokens in the last block, as a look records it."""
    encoded = model.encode(image)
    if model.config.head == "segment":
        return model.masks(take_away(encoded, model.config.prefix, None), image)
    return encoded if model.config.head == "pixels" else model.logits(model.pooled(encoded, image))


class ImageWalk:
    """The walk of one image."""

    def __init__(self, look: ImageLook) -> None:
        self.look, self.model, self.config = look, look.run.model.eval(), look.run.model.config
        count = self.config.prefix + look.grid[0] * look.grid[1]
        if count > limits.LONGEST:
            raise RegardError(
                f"The image has {count} tokens: a walk takes at most {limits.LONGEST}.", "Use a smaller image."
            )
        image = look.run.images
        assert isinstance(image, Tensor)
        self.own = ModuleOutputs(self.model, [self.model, image], forward_all_tokens)
        program = forward_program(self.model, image, forward_all_tokens)
        self.made = Computation(self.model, program, {"image": image.detach().cpu().double().numpy()})
        self.chosen: Any = [one for name, one in look.maps.items() if name.startswith(BLOCKS)][-1]
        prefix, rows = self.config.prefix, self.chosen.rows
        self.patches = [f"patch {place}" for place in rows[prefix:]]
        self.tokens = [*rows[:prefix], *self.patches]
        self.names: dict[int, str] = {}

    def walk(self) -> Walk:
        title = self.end()
        tokens, patches = len(self.tokens), len(self.patches)
        axes = {patches: "patches", tokens: "picture", 1: "label"}
        if self.config.head == "segment":
            axes |= {len(self.config.labels) + patches: "labels"}
        block = None if bytes_inside(self.model) <= limits.WHOLE else block_of(self.chosen.name)
        extent = Extent(axes, block, self.made.words, title, self.given())
        trace = Trace(self.model, self.made.nodes, self.made.inputs, self.own, self.made.values, extent)
        sides, linked = self.sides(trace)
        note = None if block is None else large_note(block)
        return Walk(trace, sides, self.focus(), self.names, note, linked)

    def end(self) -> str:
        """Add what comes after the model's forward: probabilities of labels. Returns a title."""
        if self.config.head in ("none", "pixels"):
            return "Features"
        made = self.made
        axes: tuple[str, ...] = ("vocabulary",)
        self.names = dict(enumerate(self.config.labels))
        logits = made.output.name
        if self.config.head == "segment":
            # The pixel below and right of the middle of each patch.
            side, axes = self.config.patch, ("patches", "vocabulary")
            made.words[logits] = None
            for node in made.nodes:
                if node.module == "output" and node.op == "linear":
                    made.words[node.name] = Words("l_patch", "Logits of each patch", "l = x W + b")
            for number, dim in enumerate((2, 3)):
                end = made.values[logits].shape[dim]
                logits = made.add(
                    f"middle_{number}", "slice", [logits], (), None, dim=dim, start=side // 2, end=end, step=side
                )
            shape = [1, len(self.config.labels), len(self.patches)]
            logits = made.add("middles", "reshape", [logits], (), None, shape=shape)
            words = Words("l", "Logits of the pixel in the middle of each patch", "l ← Σ share · l")
            logits = made.add("logits", "permute", [logits], axes, words, dims=[0, 2, 1])
        made.add("probabilities", "softmax", [logits], axes, PROBABILITIES, dim=-1)
        return "Label" if self.config.head == "classify" else "Label of each pixel"

    def given(self) -> dict[str, str]:
        """Patch embeddings, where pixels and convolutions are too large to be carried."""
        nodes = [node for node in self.made.nodes if node.module.startswith("embedding.patches")]
        computed = sum(self.made.values[node.name].size for node in nodes if node.op not in LAYOUT)
        pixels = self.made.inputs["image"].size
        weights = sum(p.numel() for p in self.model.embedding.patches.parameters())
        if 4 * (2 * pixels + computed + weights) <= limits.PIXELS:
            return {}
        return {nodes[-1].name: "Patch embeddings, given: the pixels are too large to be carried"}

    def sides(self, trace: Trace) -> tuple[dict[str, Side], dict[str, tuple[str, list[int]]]]:
        """The tokens of each axis, and those that follow the chosen token of the image."""
        sides, linked = {"picture": _side("picture", self.tokens)}, {}
        patch = [max(0, t - self.config.prefix) for t in range(len(self.tokens))]

        def follow(name: str, tokens: list[str], rows: list[int]) -> None:
            sides[name], linked[name] = _side(name, tokens), ("picture", rows)

        follow("patches", self.patches, patch)
        names = {name for step in trace.steps if step["title"] for name in step["output"]["axes"]}
        if "label" in names:
            follow("label", ["query"], [0] * len(self.tokens))
        if "labels" in names:
            sides["labels"] = _side("labels", [*self.config.labels, *self.patches])
        for name in sorted(names):
            if name.startswith("cells "):
                height, width = map(int, name.removeprefix("cells ").split("×"))
                cells = [f"cell {i // width},{i % width}" for i in range(height * width)]
                follow(name, cells, [self._middle(one, height, width) for one in patch])
        for step in trace.steps:
            if step["id"] == "embedding.pixels":
                step["output"]["axes"][-1] = "pixels"
                side, channels = self.config.patch, self.config.channels
                colors = COLORS.get(channels, tuple(f"channel {i}" for i in range(channels)))
                places = [f"{row},{column}" for row in range(side) for column in range(side)]
                follow("pixels", [f"{color} {place}" for color in colors for place in places], [])
        return sides, linked

    def _middle(self, patch: int, height: int, width: int) -> int:
        """The cell in the middle of a patch."""
        rows, columns = self.look.grid
        high, wide = height // rows, width // columns
        return (patch // columns * high + high // 2) * width + patch % columns * wide + wide // 2

    def focus(self) -> dict[str, Any]:
        """Where a walk begins: at the patch with the largest weight, in the head that is clearest about it."""
        over = self.look.over_patches(self.chosen.name).reshape(len(self.chosen.weights), -1)
        head = int(np.argmin([entropy(row[None])[0] for row in over / over.sum(1, keepdims=True)]))
        return {
            "attention": self.chosen.name,
            "head": head,
            "picture": self.config.prefix + int(over[head].argmax()),
        }


def _side(name: str, tokens: list[str]) -> Side:
    return Side(name, tokens, [-1] * len(tokens))
