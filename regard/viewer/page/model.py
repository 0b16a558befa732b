"""The model of a page: graphs, rounded weights and tokenizers, with which the page runs new input by itself.

The page interprets the graphs in a worker (web/engine); it answers the requests that a live page sends to Python.
"""

import copy
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import singledispatch
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention import Concat, ScaledDot
from regard.data import Tokenizer
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.graph import Graph, capture, forward_graph
from regard.graph.entries import batch_entries, for_single_input
from regard.graph.interpreter import collect_tensors
from regard.graph.parts import AttentionSteps, find_parts
from regard.graph.writer import GraphWriter
from regard.models import family_name
from regard.pipelines import TextEncoder
from regard.viewer.image_look import ImageLook
from regard.viewer.outcomes import TOP_K
from regard.viewer.page.html import PageModel
from regard.viewer.page.image_scene import with_axes
from regard.viewer.page.requests import TextRequestHandler
from regard.viewer.page.text_scene import attention_headers
from regard.viewer.text_look import AttentionMap, Look, model_inputs
from regard.viewer.trace.build import forward_output
from regard.viewer.trace.computation import PageTensor

logger = logging.getLogger("regard")

Precision = Literal["float32", "float16", "int8"]
# Bytes of float16 weights up to which a page contains its model by default, and those up to which it stores float32 and
# float16.
MAX_DEFAULT_BYTES, MAX_FLOAT32_BYTES, MAX_FLOAT16_BYTES = 4 << 20, 1 << 20, 8 << 20
# Numbers of a row that share a scale (int8).
GROUP_SIZE = 32
# Graphs of decoding, besides that of `forward`.
_DECODING = ("encoder", "prompt", "decoder_step")


class RoundedTensor(NamedTuple):
    """A tensor as a page stores it, and the numbers that the page computes with."""

    kind: str
    raw: bytes
    rounded: Float[Tensor, "..."]


def model_for_page(look: Look | ImageLook, include: bool | Precision | None = None) -> PageModel | None:
    """The model of a page, or None; by default a small model is included."""
    if include is False or (include is None and look.pipeline is None):
        return None
    if look.pipeline is None:
        raise RegardError("This look has no model, which the page would contain.", "Create it with regard.look.")
    model = look.run.model if isinstance(look, ImageLook) else look.pipeline.model
    size = 2 * sum(parameter.numel() for parameter in model.parameters())
    if include is None and size > MAX_DEFAULT_BYTES:
        return None
    precision: Precision = "int8"
    if size <= MAX_FLOAT16_BYTES:
        precision = "float32" if size <= MAX_FLOAT32_BYTES else "float16"
    try:
        return build_page_model(look, include if isinstance(include, str) else precision)
    except (RegardError, RuntimeError):  # torch.export raises a RuntimeError
        if include is None:  # an operation or a tokenizer without a primitive
            return None
        raise


def build_page_model(look: Look | ImageLook, precision: Precision = "float16") -> PageModel:
    """Build the model of a page from a look at one of its inputs.

    >>> build_page_model(look(translator, "The cat sleeps.")).header["fields"]  # doctest: +SKIP
    ['source', 'target']
    """
    if getattr(look.pipeline, "ensemble_members", ()):
        raise RegardError("A page cannot contain an ensemble.", "Look at one of its models.")
    if isinstance(look, ImageLook):
        model = look.run.model
        images = look.run.images
        if not look.pipeline.head.runs_on_page or not isinstance(images, Tensor):
            raise RegardError("A page cannot contain a model that reconstructs images.", "Use --no-with-model.")
        graphs = {"forward": NamedGraph(forward_graph(model, images, forward_output), ("output",))}
        maps: Mapping[str, AttentionMap] = {name: with_axes(one) for name, one in look.maps.items()}
    else:
        model = look.pipeline.model
        if not getattr(look.pipeline.head, "runs_on_page", True):
            raise RegardError("A page cannot contain a tagging model.", "Use --no-with-model.")
        if not look.maps:
            raise RegardError("A page cannot contain a model without attention.", "Use --no-with-model.")
        graphs, maps = page_graphs(model), look.maps
    weights = PageWeights()
    written = {key: _write_graph(named, model, weights) for key, named in graphs.items()}
    weights.round(precision)
    names = ("name", "kind", "layer", "heads", "rows", "columns", "score", "mask")
    header = {
        "kind": type(look.pipeline).__name__,
        "family": family_name(model.config),
        "precision": precision,
        "change": None if precision == "float32" else _largest_change(look, weights),
        "graphs": written,
        "head": getattr(look.pipeline.head, "name", ""),
        "labels": list(getattr(model.config, "labels", ())),
        "problem_type": getattr(model.config, "problem_type", "single_label"),
        "attentions": [{name: one[name] for name in names} for one in attention_headers(maps, [])],
    }
    header |= _image_input(look, weights) if isinstance(look, ImageLook) else _text_input(look)
    forward = collect_tensors(graphs["forward"].graph, model)
    tensors = {
        name: PageTensor(weights.indices[id(tensor)], weights.rounded[id(tensor)])
        for name, tensor in forward.items()
        if id(tensor) in weights.indices
    }
    return PageModel(header | {"tensors": weights.headers}, bytes(weights.raw), tensors)


def _text_input(look: Look) -> dict[str, Any]:
    pipeline = look.pipeline
    return own_header(pipeline) | {
        "fields": TextRequestHandler(pipeline).fields,
        "tokenizers": [tokenizer_header(one) for one in dict.fromkeys(pipeline.tokenizers)],
        "special": asdict(pipeline.special),
        "search": _search_options(look),
    }


@singledispatch
def own_header(pipeline: Any) -> dict[str, Any]:
    """The keys of a page's model that differ among classes of pipelines."""
    return {"length_limit": pipeline.length_limit}


@own_header.register
def _encoder_header(encoder: TextEncoder) -> dict[str, Any]:
    sentence = encoder.sentence.config
    if not encoder.head.method and any(layer != "normalize" for layer in sentence.layers):
        raise RegardError("A page cannot contain embeddings with linear layers.", "Use --no-with-model.")
    # Longer contexts would be split into windows.
    limit = encoder.model.config.max_len if "context" in encoder.fields else encoder.length_limit
    return {"sentence": asdict(sentence), "length_limit": limit}


def _image_input(look: ImageLook, weights: "PageWeights") -> dict[str, Any]:
    """The first image of the page, on which experiments run; the reader may open others."""
    assert isinstance(look.run.images, Tensor)
    image = weights.add(look.run.images)
    weights.round("float32")
    return {"fields": ["image"], "image": image, "tokenizers": [], "special": {}}


class PageWeights:
    """The tensors of a page: their headers and bytes. Tied weights are stored once."""

    def __init__(self) -> None:
        self.indices: dict[int, int] = {}
        """index by the identity of a tensor"""
        self.tensors: list[Tensor] = []
        self.headers: list[dict[str, Any]] = []
        self.raw = bytearray()
        self.rounded: dict[int, Tensor] = {}
        """by the identity of a tensor, the numbers that the page computes with"""

    def add(self, tensor: Tensor) -> int:
        """The index of a tensor, which is added if it is new."""
        if id(tensor) not in self.indices:
            self.indices[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self.indices[id(tensor)]

    def round(self, precision: Precision) -> None:
        """Store the tensors that were added since the last call."""
        for tensor in self.tensors[len(self.headers) :]:
            stored = round_tensor(tensor, precision)
            self.headers.append({"shape": list(tensor.shape), "type": stored.kind, "at": len(self.raw)})
            self.raw += stored.raw + b"\0" * (-len(stored.raw) % 4)
            self.rounded[id(tensor)] = stored.rounded


class NamedGraph(NamedTuple):
    """A graph and the names of its outputs."""

    graph: Graph
    outputs: Sequence[str]


_graphs: WeakKeyDictionary[nn.Module, dict[str, NamedGraph]] = WeakKeyDictionary()


def page_graphs(model: nn.Module) -> dict[str, NamedGraph]:
    """The graphs of `forward` and of decoding, cached per model."""
    if model not in _graphs:
        graphs = {"forward": NamedGraph(forward_graph(model), ("output",))}
        # The example inputs of decoding are on the CPU.
        is_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
        on_cpu = model if is_cpu else copy.deepcopy(model).cpu()
        for name, entry in batch_entries(on_cpu).items():
            if name in _DECODING:
                one = for_single_input(entry)
                graph = capture(on_cpu, one.call, one.inputs, one.sizes)
                graphs[name] = NamedGraph(graph, one.outputs)
        _graphs[model] = graphs
    return _graphs[model]


def _write_graph(named: NamedGraph, model: nn.Module, weights: PageWeights) -> dict[str, Any]:
    graph, outputs = named
    parts = find_parts(graph, model)
    tensors = collect_tensors(graph, model)
    order = {name: index for index, name in enumerate(tensors)}
    writer = GraphWriter(graph, order, [name for attention in parts.attentions for name in (attention.q, attention.k)])
    written = writer.write(outputs)
    values = list(tensors.values())
    return written | {
        "tensors": [[slot, weights.add(values[index])] for slot, index in written["tensors"]],
        "attentions": [_write_attention(attention, model, writer, weights) for attention in parts.attentions],
        "layers": {path: [writer.slot(name) for name in names] for path, names in parts.layers.items()},
        "embeddings": [writer.slot(name) for name in parts.embeddings],
        "streams": [writer.slot(name) for name in parts.streams],
        "positions": [[writer.slot(step), writer.slot(value)] for step, value in parts.positions.items()],
    }


def _write_attention(
    one: AttentionSteps, model: nn.Module, writer: GraphWriter, weights: PageWeights
) -> dict[str, Any]:
    def slot(name: str | None) -> int | None:
        return None if name is None else writer.slot(name)

    module = model.get_submodule(one.attention)
    return {
        "attention": one.attention,
        "kind": module.kind,
        "heads": getattr(module, "heads", 1),
        "isScaledDot": isinstance(module.score, ScaledDot),
        "q": slot(one.q),
        "k": slot(one.k),
        "w": weights.add(module.score.weight_a) if isinstance(module.score, Concat) else None,
        "scale": slot(one.scale),
        "bias": slot(one.bias),
        "biasValue": slot(one.bias_value),
        "masks": [slot(name) for name in one.masks],
        "weights": slot(one.weights),
        "context": slot(one.context),
    }


@torch.no_grad()
def round_tensor(tensor: Tensor, precision: Precision) -> RoundedTensor:
    """A tensor in the precision of a page. Vectors (biases, gains, rates) stay float32.

    int8 has a scale per 32 numbers of a row: first all scales as float16, then the numbers.

    >>> round_tensor(torch.tensor([[1.0, 1 / 3]]), "float16").rounded[0, 1].item()
    0.333251953125
    """
    x = tensor.detach().cpu().float()
    if precision == "float32" or not tensor.is_floating_point() or x.dim() < 2:
        return RoundedTensor("float32", x.numpy().astype("<f4").tobytes(), x)
    if precision == "float16":
        half = x.half()
        if not half.isfinite().all():
            raise RegardError("Some weights exceed the range of float16.", 'Pass with_model="int8" or "float32".')
        return RoundedTensor("float16", half.numpy().astype("<f2").tobytes(), half.float())
    rows = x.flatten(1)
    groups = F.pad(rows, (0, -rows.shape[1] % GROUP_SIZE)).unflatten(1, (-1, GROUP_SIZE))
    scales = (groups.abs().amax(-1, keepdim=True) / 127).half()
    if not scales.isfinite().all():
        raise RegardError("Some weights exceed the range of int8 with float16 scales.", 'Pass with_model="float32".')
    steps = scales.float().clamp(min=2**-24)  # the smallest positive float16
    numbers = (groups / steps).round().clamp(-127, 127)
    raw = steps.half().numpy().astype("<f2").tobytes()
    raw += numbers.to(torch.int8).flatten(1)[:, : rows.shape[1]].contiguous().numpy().tobytes()
    return RoundedTensor("int8", raw, (numbers * steps).flatten(1)[:, : rows.shape[1]].reshape(x.shape))


# Parts of tokenizers that web/engine/tokenizer.js supports, besides sequences of them.
_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Replace", "Prepend", "Strip"}
_NORMALIZERS |= {"BertNormalizer", "Precompiled", "Nmt"}
_PRE_TOKENIZERS = {"Metaspace", "Split", "ByteLevel", "BertPreTokenizer", "Whitespace", "WhitespaceSplit"}
_PRE_TOKENIZERS |= {"Punctuation", "Digits"}
_MODELS = {"WordLevel", "WordPiece", "BPE", "Unigram"}
_DECODERS = {"Metaspace", "ByteLevel", "WordPiece", "Fuse", "Replace", "Strip", "ByteFallback"}


def tokenizer_header(tokenizer: Tokenizer) -> dict[str, Any]:
    """A tokenizer as JSON for a page. Raises an error for one that a page cannot run."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    supported = {"normalizer": _NORMALIZERS, "pre_tokenizer": _PRE_TOKENIZERS, "model": _MODELS, "decoder": _DECODERS}
    for part, kinds in supported.items():
        for kind in _part_kinds(content[part]):
            if kind not in kinds:
                raise RegardError(f"A page cannot run the {part} {kind} of this tokenizer.", "Use --no-with-model.")
    if any(not one["special"] for one in content["added_tokens"]):
        raise RegardError("A page cannot run a tokenizer with added tokens in texts.", "Use --no-with-model.")
    parts = (*supported, "added_tokens")
    return {"kind": tokenizer.kind, "exact": tokenizer.is_exact, "json": {part: content[part] for part in parts}}


def _part_kinds(part: Any) -> list[str]:
    """The types of a part of a tokenizer; of a sequence, those of its elements."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        elements = next(value for value in part.values() if isinstance(value, list))
        return [kind for element in elements for kind in _part_kinds(element)]
    return [part["type"]]


def _search_options(look: Look) -> dict[str, Any]:
    default = DecodeConfig()
    config = look.search[1] if look.search else getattr(look.pipeline, "decoding", default)
    ignored = ("repetition_penalty", "no_repeat_ngram_size", "coverage_penalty", "early_stopping", "shortlist")
    if changed := [name for name in ignored if getattr(config, name) != getattr(default, name)]:
        logger.warning("The page decodes new input without these options: %s.", ", ".join(changed))
    names = ["method", "beam", "n_best", "length_penalty", "patience", "max_len", "max_ratio", "max_extra", "min_len"]
    names += ["unknown", "suppress_sequences", "begin_suppress_tokens", "temperature", "top_k", "top_p", "seed"]
    return {name: getattr(config, name) for name in names}


@torch.no_grad()
def _largest_change(look: Look | ImageLook, weights: PageWeights) -> float:
    """The largest change, by the rounding of weights, of the log-probabilities of the most likely outputs at each
    position of the look; of a model without a head or a regression, of a number of its output (the embedding)."""
    model = look.run.model if isinstance(look, ImageLook) else look.pipeline.model
    rounded = copy.deepcopy(model)
    originals = dict(model.named_parameters())
    for name, parameter in rounded.named_parameters():
        if id(originals[name]) in weights.rounded:
            parameter.copy_(weights.rounded[id(originals[name])])
    head, problem = look.pipeline.head, getattr(model.config, "problem_type", "")
    if isinstance(look, Look) and head is not None and not head.method:
        encoders = look.pipeline, replace(look.pipeline, model=rounded)  # type: ignore[arg-type]
        first, second = (encoder.embed(look.source, truncate=True) for encoder in encoders)
        return float(abs(first - second).max())
    if isinstance(look, ImageLook):
        assert isinstance(look.run.images, Tensor)
        before, after = look.run.output, forward_output(rounded.eval(), look.run.images)
        assert isinstance(before, Tensor)
    else:
        assert look.run is not None
        inputs = model_inputs(look.pipeline, look.ids, look.segments)
        before, after = look.run.output, rounded.eval()(*inputs)
    before, after = before.float(), after.float()
    if (head is not None and not head.method) or problem == "regression":
        return float((before - after).abs().max())
    if problem == "multi_label":
        return float((F.logsigmoid(before) - F.logsigmoid(after)).abs().max())
    axis = -1 if head is None else head.label_axis
    before, after = before.log_softmax(axis), after.log_softmax(axis)
    likeliest = before.topk(min(TOP_K, before.shape[axis]), dim=axis).indices
    return float((before - after).abs().gather(axis, likeliest).max())
