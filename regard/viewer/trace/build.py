"""Builds the trace of a look at a text, a translation or an image, and decides whether a page includes it."""

from collections.abc import Mapping
from functools import singledispatch
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import RegardError
from regard.evaluation.teacher_forcing import entropy, mutual_information
from regard.graph import forward_graph
from regard.models import ViT
from regard.models.bert import AnswerHead, MaskedTokenHead, TextHead, TextLabelHead, TokenLabelHead
from regard.models.vit import ImageLabelHead, PixelLabelHead
from regard.viewer import model_run
from regard.viewer.image_look import BLOCKS, ImageLook
from regard.viewer.model_run import ModelRun, is_small, run_model
from regard.viewer.rollout import forward_all_tokens
from regard.viewer.text_look import Look, model_inputs
from regard.viewer.token_axis import TokenAxis
from regard.viewer.trace.computation import LAYOUT, Computation, PageTensor
from regard.viewer.trace.labels import PROBABILITIES, StepLabel
from regard.viewer.trace.steps import Trace, TraceOptions, block_path, large_model_note

# Bytes of a trace up to which a page includes it by default.
MAX_DEFAULT_BYTES = 12 << 20
# Tokens of a trace.
MAX_TOKENS = 512
# Bytes up to which a trace contains the pixels and the computation of the patch embeddings.
MAX_PIXEL_BYTES = 4 << 20
COLORS = {1: ("gray",), 3: ("red", "green", "blue")}


def build_trace(look: Look | ImageLook, tensors: Mapping[str, PageTensor] | None = None) -> Trace:
    """Build the trace of a look: every step from the input to the output.

    `tensors`: the parameters of the model of the page, if it contains one. Then the trace contains no numbers.

    >>> trace = build_trace(look(translator, "The cat sleeps."))  # doctest: +SKIP
    >>> trace["decoder.0.cross.a"].shape  # the weights a = softmax(e)  # doctest: +SKIP
    (4, 5, 6)
    """
    return ImageTraceBuilder(look).build() if isinstance(look, ImageLook) else TextTraceBuilder(look, tensors).build()


def trace_for_page(
    look: Look | ImageLook, include: bool | None = None, tensors: Mapping[str, PageTensor] | None = None
) -> Trace | None:
    """The trace of a page, or None; by default it is included if model and input are small."""
    if include is not None:
        return build_trace(look, tensors) if include else None
    if isinstance(look, ImageLook):
        fits = is_small(look.model, look.grid[0] * look.grid[1], model_run.MAX_PATCHES)
    else:
        fits = look.pipeline is not None and is_small(look.pipeline.model, max(map(len, look.ids)))
    if not fits:
        return None
    try:
        trace = build_trace(look, tensors)
    except RegardError:  # an operation without a primitive
        return None
    return trace if trace.size <= MAX_DEFAULT_BYTES else None


class TextTraceBuilder:
    """Builds the trace of a text, or of a sentence and its translation."""

    def __init__(self, look: Look, tensors: Mapping[str, PageTensor] | None = None) -> None:
        if look.pipeline is None:
            raise RegardError(
                "This look has no model, which the step-by-step view needs.", "Create it with regard.look."
            )
        if (length := max(map(len, look.ids))) > MAX_TOKENS:
            raise RegardError(
                f"The text has {length} tokens; the step-by-step view supports at most {MAX_TOKENS}.",
                "Shorten the text.",
            )
        self.tensors = tensors
        self.look, self.pipeline, self.model = look, look.pipeline, look.pipeline.model.eval()
        self.reference = self.reference_run()
        graph = forward_graph(self.model)
        # A single text is one segment.
        inputs = {name: np.array([look.segments or [0] * len(look.ids[0])]) for name in graph.inputs}
        inputs |= {name: np.array([ids]) for name, ids in zip(graph.inputs, look.ids)}
        self.computation = Computation(self.model, graph, inputs, tensors)
        self.side = "target" if "target" in inputs else "text"
        self.names: dict[int, str] = {}

    def reference_run(self) -> ModelRun:
        """The run of the look or, of a large model or of selected layers, another one that keeps the outputs."""
        look, model = self.look, self.model
        if look.run is not None and look.run.outputs is not None:
            return look.run
        inputs = model_inputs(self.pipeline, look.ids, look.segments)
        with torch.inference_mode():
            return run_model(model, lambda: model(*inputs), keep_outputs=True)

    def build(self) -> Trace:
        title = self.add_output_steps()
        block = None if is_small(self.model, 0) else self.sharpest_block()
        options = TraceOptions(block=block, labels=self.computation.labels, output=title, tensors=self.tensors)
        computation = self.computation
        trace = Trace(self.model, computation.nodes, computation.inputs, self.reference, computation.values, options)
        trace.sides, trace.focus, trace.names, trace.note = self.sides(), self.focus(), self.names, self.note(block)
        return trace

    def add_output_steps(self) -> str:
        """Add the steps after the model's forward: probabilities or the embedding of the text. Returns their title."""
        return add_head_steps(self.pipeline.head, self)

    def add_labels(self, axes: tuple[str, ...], name: str) -> None:
        """Add the probabilities of labels."""
        columns, labels = self.computation.add_softmax(axes, name), self.model.config.labels
        self.names = {i: labels[column] for i, column in enumerate(columns) if column is not None}

    def add_tokens(self) -> None:
        """Add the probabilities of the most likely tokens."""
        computation = self.computation
        top = computation.top_columns(computation.values[computation.output.name])
        columns = computation.add_softmax((self.side, "vocabulary"))
        names = self.pipeline.tokenizers[-1].distinct_names(top, strip=True)
        self.names = {i: names[column] for i, column in enumerate(columns) if column in top}
        if None in columns:
            self.names[len(columns) - 1] = "all others"

    def sides(self) -> dict[str, TokenAxis]:
        """The tokens of each axis; row t of the target predicts the next token."""
        axes = {axis.name: axis for shown in self.look.maps.values() for axis in (shown.queries, shown.keys)}
        if len(self.pipeline.sides) == 1:
            return {side: axes[side] for side in self.pipeline.sides}
        if "target" not in axes and "predicted" in axes:
            forced = [self.pipeline.target_tokenizer.label(i) for i in self.pipeline.special.make_decoder_input([])]
            _, tokens, words, _ = axes["predicted"]
            inner = slice(len(forced) - 1, -1)
            axes["target"] = TokenAxis("", tokens[inner], words[inner]).add_special_tokens("target", forced)
        sides = {}
        for name, ids, tokenizer in zip(("source", "target"), self.look.ids, self.pipeline.tokenizers):
            default = TokenAxis(name, [tokenizer.label(i) for i in ids], [-1] * len(ids))
            sides[name] = axes.get(name, default)
        return sides

    def focus(self) -> dict[str, Any]:
        """The initial selection: the sharpest attention and head, and the token with the sharpest weights."""
        if not self.look.maps:
            return {"attention": None, "head": 0}
        one = self.look.alignment
        head = max(range(one.heads), key=lambda i: mutual_information(one.head_weights(i)))
        weights = one.head_weights(head)
        sharpness = np.log2(np.maximum((weights > 0).sum(1), 1)) - entropy(weights)
        words = np.array(one.queries.words) >= 0
        row = int(np.argmax(np.where(words | ~words.any(), sharpness, -1.0)))
        focus: dict[str, Any] = {"attention": one.name, "head": head}
        if one.kind == "cross":
            return focus | {"target": row, one.keys.name: int(np.argmax(weights[row]))}
        return focus | {one.queries.name: row}

    def sharpest_block(self) -> str:
        """The block of the sharpest attention."""
        return block_path(self.look.alignment.name) if self.look.maps else ""

    def note(self, block: str | None) -> str | None:
        if block is None:
            return None
        if getattr(self.model.config, "is_recurrent", False):
            return (
                "The model is large: only its attention and output are shown. The states of its layers are precomputed."
            )
        return large_model_note(block)


def forward_output(model: ViT, image: Tensor) -> Any:
    """The output of the model, computed from all tokens as a look records it."""
    return forward_all_tokens(model, image)[1]


@singledispatch
def add_head_steps(head: Any, builder: TextTraceBuilder) -> str:
    """Add the steps after the forward of a model with this head, and return their title; None: the next token."""
    builder.add_tokens()
    return "Next token"


@add_head_steps.register
def _add_masked_tokens(head: MaskedTokenHead, builder: TextTraceBuilder) -> str:
    builder.add_tokens()
    return "Token at each position"


@add_head_steps.register
def _add_text_labels(head: TextLabelHead, builder: TextTraceBuilder) -> str:
    builder.add_labels(("vocabulary",), "label")
    return "Label"


@add_head_steps.register
def _add_token_labels(head: TokenLabelHead, builder: TextTraceBuilder) -> str:
    builder.add_labels((builder.side, "vocabulary"), "tag")
    return "Tag of each token"


@add_head_steps.register
def _add_answer(head: AnswerHead, builder: TextTraceBuilder) -> str:
    computation = builder.computation
    builder.names = dict(enumerate(("start", "end")))
    for index, end in builder.names.items():
        output = computation.output.name
        logits = computation.add(f"{end}_logits", "select", [output], (), None, dim=2, index=index)
        label = StepLabel(f"p_{end}", f"Softmax: probability per token as {end} of the answer", PROBABILITIES.formula)
        computation.add(f"{end}_probabilities", "softmax", [logits], (builder.side,), label, dim=-1)
    return "Start and end of the answer"


@add_head_steps.register
def _add_embedding(head: TextHead, builder: TextTraceBuilder) -> str:
    if head.method:  # a head of one's own
        return "Output"
    computation = builder.computation
    x, axes = computation.output.name, ("channels",)
    if builder.side in computation.output.sizes:
        label = StepLabel("mean", "Mean of all tokens", "m = Σ x / T")
        x = computation.add("pooled", "mean", [x], axes, label, dim=[1])
    length = computation.add("length", "linalg_vector_norm", [x], axes, None, ord=2, dim=[-1], keepdim=True)
    length = computation.add("clamped", "clamp_min", [length], axes, None, min=1e-12)
    computation.add("vector", "div", [x, length], axes, StepLabel("vector", "L2-normalized vector", "y = m / |m|"))
    return "Embedding of the text"


class ImageTraceBuilder:
    """Builds the trace of one image."""

    def __init__(self, look: ImageLook) -> None:
        self.look, self.model, self.config = look, look.run.model.eval(), look.run.model.config
        count = self.config.prefix + look.grid[0] * look.grid[1]
        if count > MAX_TOKENS:
            raise RegardError(
                f"The image has {count} tokens; the step-by-step view supports at most {MAX_TOKENS}.",
                "Use a smaller image.",
            )
        image = look.run.images
        assert isinstance(image, Tensor)
        reference = look.run.model_run
        if reference is None or reference.outputs is None:
            with torch.inference_mode():
                reference = run_model(self.model, lambda: forward_output(self.model, image), keep_outputs=True)
        self.reference = reference
        graph = forward_graph(self.model, image, forward_output)
        self.computation = Computation(self.model, graph, {"image": image.detach().cpu().double().numpy()})
        self.attention: Any = [one for name, one in look.maps.items() if name.startswith(BLOCKS)][-1]
        prefix, rows = self.config.prefix, self.attention.rows
        self.patches = [f"patch {coordinates}" for coordinates in rows[prefix:]]
        self.tokens = [*rows[:prefix], *self.patches]
        self.names: dict[int, str] = {}

    def build(self) -> Trace:
        title = self.add_output_steps()
        tokens, patches = len(self.tokens), len(self.patches)
        axes = {patches: "patches", tokens: "image", 1: "label"}
        if self.look.pipeline.head.is_per_pixel:
            axes |= {len(self.config.labels) + patches: "labels"}
        block = None if is_small(self.model, 0) else block_path(self.attention.name)
        computation = self.computation
        options = TraceOptions(axes, block, computation.labels, title, self.precomputed())
        trace = Trace(self.model, computation.nodes, computation.inputs, self.reference, computation.values, options)
        trace.sides, trace.linked = self.sides(trace)
        trace.focus, trace.names = self.focus(), self.names
        trace.note = None if block is None else large_model_note(block)
        return trace

    def add_output_steps(self) -> str:
        """Add the steps after the model's forward: probabilities of labels. Returns their title."""
        return add_image_steps(self.look.pipeline.head, self)

    def add_probabilities(self, logits: str, axes: tuple[str, ...]) -> None:
        """Add the probabilities of the labels."""
        self.names = dict(enumerate(self.config.labels))
        self.computation.add("probabilities", "softmax", [logits], axes, PROBABILITIES, dim=-1)

    def precomputed(self) -> dict[str, str]:
        """The patch embeddings, if pixels and convolutions are too large for a page."""
        nodes = [node for node in self.computation.nodes if node.module.startswith("embedding.patches")]
        computed = sum(self.computation.values[node.name].size for node in nodes if node.op not in LAYOUT)
        pixels = self.computation.inputs["image"].size
        weights = sum(p.numel() for p in self.model.embedding.patches.parameters())
        if 4 * (2 * pixels + computed + weights) <= MAX_PIXEL_BYTES:
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
                follow("pixels", [f"{color} {coordinate}" for color in colors for coordinate in coordinates], [])
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


@singledispatch
def add_image_steps(head: Any, builder: ImageTraceBuilder) -> str:
    """Add the steps after the forward of an image model with this head, and return their title."""
    return "Features"


@add_image_steps.register
def _add_image_labels(head: ImageLabelHead, builder: ImageTraceBuilder) -> str:
    builder.add_probabilities(builder.computation.output.name, ("vocabulary",))
    return "Label"


@add_image_steps.register
def _add_pixel_labels(head: PixelLabelHead, builder: ImageTraceBuilder) -> str:
    # The pixel below and to the right of the center of each patch.
    computation, side, axes = builder.computation, builder.config.patch, ("patches", "vocabulary")
    logits = computation.output.name
    computation.labels[logits] = None
    for node in computation.nodes:
        if node.module == "output" and node.op == "linear":
            computation.labels[node.name] = StepLabel("l_patch", "Logits per patch", "l = x W + b")
    for index, dim in enumerate((2, 3)):
        end = computation.values[logits].shape[dim]
        logits = computation.add(
            f"center_{index}", "slice", [logits], (), None, dim=dim, start=side // 2, end=end, step=side
        )
    shape = [1, len(builder.config.labels), len(builder.patches)]
    logits = computation.add("centers", "reshape", [logits], (), None, shape=shape)
    label = StepLabel("l", "Logits of the center pixel of each patch", "l ← Σ weight · l")
    builder.add_probabilities(computation.add("logits", "permute", [logits], axes, label, dims=[0, 2, 1]), axes)
    return "Label of each pixel"


def _axis(name: str, tokens: list[str]) -> TokenAxis:
    return TokenAxis(name, tokens, [-1] * len(tokens))
