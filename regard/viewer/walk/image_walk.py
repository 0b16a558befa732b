"""Builds the walk of an image: every number between its pixels and the model's output."""

from typing import Any

import numpy as np
from torch import Tensor

from regard.errors import RegardError
from regard.evaluation.attention_measures import entropy
from regard.graph import forward_graph
from regard.layers.patches import remove_prefix
from regard.models import ViT
from regard.viewer.image_look import BLOCKS, ImageLook
from regard.viewer.token_axis import TokenAxis
from regard.viewer.walk import limits
from regard.viewer.walk.computation import LAYOUT, Computation
from regard.viewer.walk.module_outputs import ModuleOutputs
from regard.viewer.walk.step_labels import PROBABILITIES, StepLabel
from regard.viewer.walk.trace import Trace, TraceOptions
from regard.viewer.walk.walkthrough import Walk, block_path, inner_bytes, large_model_note

COLORS = {1: ("gray",), 3: ("red", "green", "blue")}


def forward_all_tokens(model: ViT, image: Tensor) -> Any:
    """The forward of the model with all tokens in the last block, as a look records it."""
    encoded = model.encode(image)
    if model.config.head == "segment":
        return model.masks(remove_prefix(encoded, model.config.prefix, None), image)
    return encoded if model.config.head == "pixels" else model.logits(model.pool(encoded, image))


class ImageWalkBuilder:
    """Builds the walk of one image."""

    def __init__(self, look: ImageLook) -> None:
        self.look, self.model, self.config = look, look.run.model.eval(), look.run.model.config
        count = self.config.prefix + look.grid[0] * look.grid[1]
        if count > limits.MAX_TOKENS:
            raise RegardError(
                f"The image has {count} tokens; the step-by-step view supports at most {limits.MAX_TOKENS}.",
                "Use a smaller image.",
            )
        image = look.run.images
        assert isinstance(image, Tensor)
        self.reference = ModuleOutputs(self.model, [self.model, image], forward_all_tokens)
        graph = forward_graph(self.model, image, forward_all_tokens)
        self.computation = Computation(self.model, graph, {"image": image.detach().cpu().double().numpy()})
        self.attention: Any = [one for name, one in look.maps.items() if name.startswith(BLOCKS)][-1]
        prefix, rows = self.config.prefix, self.attention.rows
        self.patches = [f"patch {coordinates}" for coordinates in rows[prefix:]]
        self.tokens = [*rows[:prefix], *self.patches]
        self.names: dict[int, str] = {}

    def build(self) -> Walk:
        title = self.add_output_steps()
        tokens, patches = len(self.tokens), len(self.patches)
        axes = {patches: "patches", tokens: "image", 1: "label"}
        if self.config.head == "segment":
            axes |= {len(self.config.labels) + patches: "labels"}
        block = None if inner_bytes(self.model) <= limits.MAX_MODEL_BYTES else block_path(self.attention.name)
        computation = self.computation
        options = TraceOptions(axes, block, computation.labels, title, self.precomputed())
        trace = Trace(self.model, computation.nodes, computation.inputs, self.reference, computation.values, options)
        sides, linked = self.sides(trace)
        note = None if block is None else large_model_note(block)
        return Walk(trace, sides, self.focus(), self.names, note, linked)

    def add_output_steps(self) -> str:
        """Add the steps after the model's forward: probabilities of labels. Returns their title."""
        if self.config.head in ("none", "pixels"):
            return "Features"
        computation = self.computation
        axes: tuple[str, ...] = ("vocabulary",)
        self.names = dict(enumerate(self.config.labels))
        logits = computation.output.name
        if self.config.head == "segment":
            # The pixel below and to the right of the center of each patch.
            side, axes = self.config.patch, ("patches", "vocabulary")
            computation.labels[logits] = None
            for node in computation.nodes:
                if node.module == "output" and node.op == "linear":
                    computation.labels[node.name] = StepLabel("l_patch", "Logits per patch", "l = x W + b")
            for index, dim in enumerate((2, 3)):
                end = computation.values[logits].shape[dim]
                logits = computation.add(
                    f"center_{index}", "slice", [logits], (), None, dim=dim, start=side // 2, end=end, step=side
                )
            shape = [1, len(self.config.labels), len(self.patches)]
            logits = computation.add("centers", "reshape", [logits], (), None, shape=shape)
            label = StepLabel("l", "Logits of the center pixel of each patch", "l ← Σ weight · l")
            logits = computation.add("logits", "permute", [logits], axes, label, dims=[0, 2, 1])
        computation.add("probabilities", "softmax", [logits], axes, PROBABILITIES, dim=-1)
        return "Label" if self.config.head == "classify" else "Label of each pixel"

    def precomputed(self) -> dict[str, str]:
        """The patch embeddings, if pixels and convolutions are too large for a page."""
        nodes = [node for node in self.computation.nodes if node.module.startswith("embedding.patches")]
        computed = sum(self.computation.values[node.name].size for node in nodes if node.op not in LAYOUT)
        pixels = self.computation.inputs["image"].size
        weights = sum(p.numel() for p in self.model.embedding.patches.parameters())
        if 4 * (2 * pixels + computed + weights) <= limits.MAX_PIXEL_BYTES:
            return {}
        return {nodes[-1].name: "Patch embeddings (precomputed: the pixels are too large to include)"}

    def sides(self, trace: Trace) -> tuple[dict[str, TokenAxis], dict[str, tuple[str, list[int]]]]:
        """The tokens of each axis, and the axes whose selection follows the selected token of the image."""
        sides, linked = {"image": _axis("image", self.tokens)}, {}
        patch = [max(0, t - self.config.prefix) for t in range(len(self.tokens))]

        def follow(name: str, tokens: list[str], rows: list[int]) -> None:
            sides[name], linked[name] = _axis(name, tokens), ("image", rows)

        follow("patches", self.patches, patch)
        names = {name for step in trace.steps if step["title"] for name in step["output"]["axes"]}
        if "label" in names:
            follow("label", ["query"], [0] * len(self.tokens))
        if "labels" in names:
            sides["labels"] = _axis("labels", [*self.config.labels, *self.patches])
        for name in sorted(names):
            if name.startswith("cells "):
                height, width = map(int, name.removeprefix("cells ").split("×"))
                cells = [f"cell {i // width},{i % width}" for i in range(height * width)]
                follow(name, cells, [self._center_cell(one, height, width) for one in patch])
        for step in trace.steps:
            if step["id"] == "embedding.pixels":
                step["output"]["axes"][-1] = "pixels"
                side, channels = self.config.patch, self.config.channels
                colors = COLORS.get(channels, tuple(f"channel {i}" for i in range(channels)))
                coordinates = [f"{row},{column}" for row in range(side) for column in range(side)]
                follow("pixels", [f"{color} {one}" for color in colors for one in coordinates], [])
        return sides, linked

    def _center_cell(self, patch: int, height: int, width: int) -> int:
        """The cell at the center of a patch."""
        rows, columns = self.look.grid
        cell_rows, cell_columns = height // rows, width // columns
        row = patch // columns * cell_rows + cell_rows // 2
        return row * width + patch % columns * cell_columns + cell_columns // 2

    def focus(self) -> dict[str, Any]:
        """The initial selection: the sharpest head, and the patch with its largest weight."""
        weights = self.look.patch_weights(self.attention.name).reshape(len(self.attention.weights), -1)
        head = int(np.argmin([entropy(row[None])[0] for row in weights / weights.sum(1, keepdims=True)]))
        return {
            "attention": self.attention.name,
            "head": head,
            "image": self.config.prefix + int(weights[head].argmax()),
        }


def _axis(name: str, tokens: list[str]) -> TokenAxis:
    return TokenAxis(name, tokens, [-1] * len(tokens))
