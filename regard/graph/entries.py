"""Entry points of each model family that are captured as graphs: `forward`, and the steps of decoding."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.graph.capture import capture
from regard.graph.steps import Graph
from regard.layers.kv_cache import CrossAttentionCache, FunctionalKVCache
from regard.layers.packed import Padded
from regard.layers.recurrent import PARTS
from regard.models import FAMILIES, Bert, Seq2Seq, ViT, family_name
from regard.models.decoder import Decoder, DecoderState
from regard.models.seq2seq import Seq2SeqState


class EntryPoint(NamedTuple):
    """A call of a model: a function, example inputs by name, names of dynamic sizes per axis, names of outputs."""

    call: Callable[..., Any]
    inputs: Mapping[str, Tensor]
    sizes: Mapping[str, Sequence[str | None]]
    outputs: Sequence[str] = ("output",)


def forward_entry(model: Any, image: Tensor | None = None) -> EntryPoint:
    """`forward` of one example: ids (1, S) of source and target, or of a text (with its segments); or an image.

    Dynamic sizes have the names of the inputs.
    """
    device = next(model.parameters()).device
    # Example lengths must differ from each other and from 1, or torch.export would relate or specialize them.
    tokens = [torch.zeros(1, length, dtype=torch.long, device=device) for length in (5, 7)]
    match FAMILIES[family_name(model.config)].pipeline:
        case "translator":
            sizes = {name: (None, name) for name in ("source", "target")}
            return EntryPoint(_forward_pair, dict(zip(sizes, tokens)), sizes)
        case "image_model":
            if image is None:
                raise RegardError("The graph of an image model needs an image.", "Pass image=…")
            return EntryPoint(_forward_image, {"image": image}, {})
    if getattr(model.config, "segments", 0) > 1:
        inputs = {"text": tokens[0], "segments": torch.zeros_like(tokens[0])}
        return EntryPoint(_forward_text, inputs, dict.fromkeys(inputs, (None, "text")))
    return EntryPoint(_forward_text, {"text": tokens[0]}, {"text": (None, "text")})


def _forward_pair(model: Any, source: Tensor, target: Tensor) -> Tensor:
    return model(Padded(source), Padded(target))


def _forward_text(model: Any, text: Tensor, *segments: Tensor) -> Tensor:
    return model(Padded(text), *segments)


def _forward_image(model: Any, image: Tensor) -> Tensor:
    return model(image)


_graphs: WeakKeyDictionary[nn.Module, dict[Any, Graph]] = WeakKeyDictionary()


def forward_graph(model: nn.Module, image: Tensor | None = None, call: Callable[..., Any] | None = None) -> Graph:
    """The graph of a model's `forward`, cached per model (for image models: per image size).

    `call`, a function of the model and the inputs, replaces `forward`.

    >>> from regard.models.gpt import GPT, GPTConfig
    >>> model = GPT(GPTConfig(width=8, heads=2, layers=1, feedforward=16, vocab=11))
    >>> graph = forward_graph(model)
    >>> graph.inputs, graph.steps[-1].module, graph is forward_graph(model)
    (('text',), 'output', True)
    """
    graphs = _graphs.setdefault(model, {})
    # Replacing a submodule invalidates the cached graph.
    key = None if image is None else tuple(image.shape), call, tuple(map(id, model.modules()))
    if key not in graphs:
        entry = forward_entry(model, image)
        graphs[key] = capture(model, call or entry.call, entry.inputs, entry.sizes)
    return graphs[key]


# -- batches and decoding ----------------------------------------------------------------------------------------------


def batch_entries(model: nn.Module) -> dict[str, EntryPoint]:
    """Entry points that run a model on batches, by name. Each becomes an ONNX graph.

    encoder        ids (B, S), mask (B, S) → memory_* (one row per sentence); recurrent models: also cells
    prompt         language models: ids (B, S), mask (B, S) → logits (B, S, V), state
    decoder_step   last (B, K), outputs of the encoder, state of B·K hypotheses → logits (B, K, V), new state
    model          text encoders: ids, mask → output of the head; image models: images (B, C, H, W) → logits

    The mask is true at tokens and false at padding, which is on the right. Tensors of the new state are named new_*.
    """
    stack = getattr(model, "stack", None)
    if isinstance(stack, Decoder):
        return _translator_entries(model) if stack.has_cross else _language_entries(model)
    match model:
        case Seq2Seq():
            return _seq2seq_entries(model)
        case Bert():
            inputs = _tokens() | (
                {"segments": torch.zeros(3, 5, dtype=torch.long)} if model.config.segments > 1 else {}
            )
            outputs = ("output",) if model.output is None else ("output", "encoded")
            return {"model": EntryPoint(_bert, inputs, dict.fromkeys(inputs, ("B", "S")), outputs)}
        case ViT():
            config = model.config
            images = {"images": torch.zeros(3, config.channels, config.image_height, config.image_width)}
            return {"model": EntryPoint(_forward_image, images, {"images": ("B",)})}
    raise RegardError(f"{type(model).__name__} is not supported.", "Use a model of one of Regard's families.")


def for_single_input(entry: EntryPoint) -> EntryPoint:
    """An entry point for batches, restricted to one input: B is 1, and R, the number of hypotheses, is K.

    >>> from regard.models.gpt import GPT, GPTConfig
    >>> model = GPT(GPTConfig(width=8, heads=2, layers=1, feedforward=16, vocab=11))
    >>> entry = for_single_input(batch_entries(model)["decoder_step"])
    >>> entry.inputs["last"].shape, entry.sizes["last"], entry.sizes["lengths"]
    (torch.Size([1, 2]), (None, 'K'), ('K',))
    """
    hypotheses = next((x.shape[1] for name, x in entry.inputs.items() if name == "last"), 1)
    inputs, sizes = dict(entry.inputs), dict(entry.sizes)
    for key, names in entry.sizes.items():
        for axis, count in enumerate({"B": 1, "R": hypotheses}.get(str(name)) for name in names):
            inputs[key] = inputs[key] if count is None else inputs[key].narrow(axis, 0, count).contiguous()
        sizes[key] = tuple(None if name == "B" else "K" if name == "R" else name for name in names)
    return entry._replace(inputs=inputs, sizes=sizes)


def _tokens() -> dict[str, Tensor]:
    return {"ids": torch.zeros(3, 5, dtype=torch.long), "mask": torch.ones(3, 5, dtype=torch.bool)}


def _padded(ids: Tensor, mask: Tensor) -> Padded:
    return Padded(ids, mask.sum(1))


def _bert(model: Bert, ids: Tensor, mask: Tensor, segments: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """The output of the model, and with a head that of its encoder, for embeddings."""
    tokens = _padded(ids, mask)
    encoded = model.encode(tokens, segments)
    return encoded if model.output is None else (model.output(model.head_features(encoded, tokens)), encoded)


def _translator_entries(model: Any) -> dict[str, EntryPoint]:
    """Of a model whose decoder stack attends to the output of an encoder."""
    blocks = model.stack.blocks
    masks = [block.attention.mask for block in blocks]
    groups, width = blocks[0].cross.kv_heads, blocks[0].cross.head_width
    memory = [f"memory_{kind}_{i}" for i in range(len(blocks)) for kind in ("keys", "values")]
    state_names = [name.removeprefix("memory_") for name in memory]

    def encode(model: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor for cache in model.start(_padded(ids, mask)).memory for tensor in (cache.k, cache.v))

    def step(model: Any, last: Tensor, mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        sources, states = _pairs(tensors[: len(memory)]), _pairs(tensors[len(memory) :])
        caches = [FunctionalKVCache(k, v, mask=one) for (k, v), one in zip(states, masks)]
        stored = [CrossAttentionCache(k, v, mask.sum(1)) for k, v in sources]
        state = DecoderState(torch.full_like(last, states[0][0].shape[2]), list(caches), stored)
        logits, _ = model.step(state, last)
        return logits, *(tensor for cache in caches for tensor in cache.tensors)

    sizes: dict[str, Sequence[str | None]] = {"last": ("B", "K"), "mask": ("B", "S")}
    sizes |= dict.fromkeys(memory, ("B", None, "S")) | dict.fromkeys(state_names, ("R", None, "P"))
    inputs = {"last": torch.zeros(3, 2, dtype=torch.long), "mask": torch.ones(3, 5, dtype=torch.bool)}
    inputs |= {name: torch.zeros(3, groups, 5, width) for name in memory}
    inputs |= {name: torch.zeros(6, groups, 4, width) for name in state_names}
    return {
        "encoder": EntryPoint(encode, _tokens(), dict.fromkeys(_tokens(), ("B", "S")), memory),
        "decoder_step": EntryPoint(step, inputs, sizes, ("logits", *(f"new_{name}" for name in state_names))),
    }


def _seq2seq_entries(model: Seq2Seq) -> dict[str, EntryPoint]:
    config = model.config
    memory = ("memory",) if config.attention != "none" else ()

    def encode(model: Seq2Seq, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        state = model.start(_padded(ids, mask))
        return state.cells[:, 0], *(() if state.memory is None else (state.memory.k,))

    def step(model: Seq2Seq, last: Tensor, mask: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        *sources, cells = tensors
        caches = [CrossAttentionCache(k, k, mask.sum(1)) for k in sources]
        state = Seq2SeqState(cells.reshape(*last.shape, *cells.shape[1:]), caches[0] if caches else None)
        logits, state = model.step(state, last)
        return logits, state.cells.flatten(0, 1)

    cells = torch.zeros(6, config.layers, PARTS[config.cell], config.width)
    inputs = {"last": torch.zeros(3, 2, dtype=torch.long), "mask": torch.ones(3, 5, dtype=torch.bool)}
    inputs |= {name: torch.zeros(3, 1, 5, config.width) for name in memory} | {"cells": cells}
    sizes = {"last": ("B", "K"), "mask": ("B", "S"), "memory": ("B", None, "S"), "cells": ("R",)}
    return {
        "encoder": EntryPoint(encode, _tokens(), dict.fromkeys(_tokens(), ("B", "S")), ("cells", *memory)),
        "decoder_step": EntryPoint(step, inputs, sizes, ("logits", "new_cells")),
    }


def _language_entries(model: Any) -> dict[str, EntryPoint]:
    """Of a model whose decoder stack continues a prompt."""
    blocks = model.stack.blocks
    attention, masks = blocks[0].attention, [block.attention.mask for block in blocks]
    state_names = [f"{kind}_{i}" for i in range(len(blocks)) for kind in ("keys", "values")]

    def prompt(model: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        tokens = _padded(ids, mask)
        caches = [FunctionalKVCache(mask=mask, prompts=tokens.offsets) for mask in masks]
        logits = model.stack.logits(model.stack.features(tokens, caches=caches))
        return logits, mask.sum(1), *(tensor for cache in caches for tensor in cache.tensors)

    def step(model: Any, last: Tensor, lengths: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        caches = [FunctionalKVCache(k, v, lengths, mask) for (k, v), mask in zip(_pairs(tensors), masks)]
        logits, _ = model.step(DecoderState(lengths.reshape(last.shape), list(caches)), last)
        return logits, lengths + 1, *(tensor for cache in caches for tensor in cache.tensors)

    inputs = {"last": torch.zeros(3, 2, dtype=torch.long), "lengths": torch.full((6,), 4)}
    inputs |= {name: torch.zeros(6, attention.kv_heads, 5, attention.head_width) for name in state_names}
    sizes = {"last": ("B", "K"), "lengths": ("R",)} | dict.fromkeys(state_names, ("R", None, "P"))
    return {
        "prompt": EntryPoint(
            prompt, _tokens(), dict.fromkeys(_tokens(), ("B", "S")), ("logits", "lengths", *state_names)
        ),
        "decoder_step": EntryPoint(
            step, inputs, sizes, ("logits", *(f"new_{name}" for name in ("lengths", *state_names)))
        ),
    }


def _pairs(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(tensors[::2], tensors[1::2]))
