"""A Transformer of ours as two graphs for ONNX Runtime: one reads a batch of sources, one takes a step of the decoder.

encoder.onnx         ids (B, S), mask (B, S) → memory_keys_i, memory_values_i (B, G, S, D) for each layer of the decoder
decoder_step.onnx    last (B, K), mask (B, S), memory_keys_i, memory_values_i, keys_i, values_i (B·K, G, P, D)
                     → logits (B, K, V), new_keys_i, new_values_i (B·K, G, P + 1, D)

The mask is true where there is a token. K hypotheses of a sentence look at its keys and values, which exist once;
keys_i and values_i are those of the P tokens before the last one, none at first. No position reaches max_len.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.attention.scores import Concat, Cosine, General, Location, ScaledDot
from regard.data.tokenizer import FOREIGN
from regard.errors import RegardError
from regard.files import write_whole
from regard.folder import FORMAT, OPENED, Translator, write_tokenizers
from regard.interop.extras import need
from regard.layers.embeddings import Embedding
from regard.layers.feedforward import FeedForward
from regard.layers.multihead import MultiHead
from regard.layers.positions import Learned, RelativeBias, Rotary, Sinusoidal
from regard.models.transformer import Transformer

ENCODER, STEP = "encoder.onnx", "decoder_step.onnx"
OPSET = 20  # the first that has Gelu
# A file of theirs cannot be larger than this, unless the weights lie beside it.
LARGEST = 2_000_000_000


def export_onnx(translator: Translator, folder: str | Path) -> None:
    """Writes the two graphs in float32, with the tokeniser and config.json; `open_onnx` makes a translator of them."""
    onnx, folder, model = need("onnx", "onnx"), Path(folder), translator.model
    if (folder / ENCODER).exists() or (folder / "config.json").exists():
        raise RegardError(f"{folder}: there is a model already.", "Name another folder.")
    if not isinstance(model, Transformer):
        raise RegardError("Transformers become graphs, and this is a recurrent model.", "Train a Transformer.")
    write_tokenizers(folder, *translator.tokenizers)
    beside = sum(4 * parameter.numel() for parameter in model.parameters()) > LARGEST
    for name, graph in ((ENCODER, encoder_graph(onnx, model)), (STEP, step_graph(onnx, model))):
        onnx.save_model(graph, folder / name, save_as_external_data=beside, location=f"{name}.data")
    source, target = translator.tokenizers
    table: dict[str, Any] = {"format": FORMAT, "family": "transformer", "shared_tokenizer": source is target}
    if translator.languages:
        table["languages"] = list(translator.languages)
    # Another program's tokeniser is known by it.
    if translator.special != OPENED["transformer"].special or source.kind == FOREIGN:
        table["special"] = dataclasses.asdict(translator.special)
    table |= dataclasses.asdict(model.config)
    write_whole(folder / "config.json", (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode())


Sizes = list[str | int]
Kinds = dict[str, tuple[int, Sizes]]  # of each input its type and sizes
Places = dict[str, tuple[str, Sizes]]  # of each output the node that it comes from, and sizes


class Graph:
    """Nodes, one after another, each known by the name of what it gives."""

    def __init__(self, onnx: Any, model: Transformer) -> None:
        self.onnx = onnx
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.nodes: list[Any] = []
        self.weights: dict[str, np.ndarray] = {}

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        return self.several(kind, 1, *inputs, **attributes)[0]

    def several(self, kind: str, count: int, *inputs: str, **attributes: Any) -> list[str]:
        outputs = [f"{kind.lower()}_{len(self.nodes)}_{i}" for i in range(count)]
        self.nodes.append(self.onnx.helper.make_node(kind, inputs, outputs, **attributes))
        return outputs

    def given(self, value: Any, dtype: type = np.int64) -> str:
        """A constant."""
        name = f"given_{len(self.weights)}"
        self.weights[name] = np.asarray(value, dtype)
        return name

    def weight(self, tensor: Tensor) -> str:
        """A parameter, which has one name wherever it is used."""
        name = self.names[id(tensor)]
        self.weights[name] = tensor.detach().float().cpu().numpy()
        return name

    def reshape(self, x: str, *shape: int) -> str:
        """0 stands for a size that stays, -1 for one that follows from the others."""
        return self.add("Reshape", x, self.given(shape))

    def times(self, x: str, factor: float) -> str:
        return x if factor == 1.0 else self.add("Mul", x, self.given(factor, np.float32))

    def made(self, name: str, inputs: Kinds, outputs: Places) -> Any:
        """The finished graph."""
        helper, real = self.onnx.helper, self.onnx.TensorProto.FLOAT
        self.nodes += [helper.make_node("Identity", [made], [told]) for told, (made, _) in outputs.items()]
        graph = helper.make_graph(
            self.nodes,
            name,
            [helper.make_tensor_value_info(told, kind, sizes) for told, (kind, sizes) in inputs.items()],
            [helper.make_tensor_value_info(told, real, sizes) for told, (_, sizes) in outputs.items()],
            [self.onnx.numpy_helper.from_array(array, told) for told, array in self.weights.items()],
        )
        opset = helper.make_opsetid("", OPSET)
        return helper.make_model(graph, opset_imports=[opset], ir_version=9, producer_name="regard")


# -- the two graphs --------------------------------------------------------------------------------------------------


def encoder_graph(onnx: Any, model: Transformer) -> Any:
    g, types = Graph(onnx, model), onnx.TensorProto
    count = g.add("Squeeze", g.add("Shape", "ids", start=1, end=2))
    places = _range(g, count)
    bias = _relative(g, model.encoder_bias, model.config.max_len, places, places)
    hidden = _hidden(g)
    x = _embedding(g, model.source_embedding, model.config.max_len, "ids", places)
    for block in model.encoder:

        def regard(y: str, attention: MultiHead = block.attention) -> str:
            q, (k, v) = _queries(g, attention, y, places), _keys_values(g, attention, y, places)
            return _attend(g, attention, q, _heads_first(g, k), _heads_first(g, v), hidden, bias)

        x = _residual(g, block, "attention", x, regard)
        x = _residual(g, block, "feedforward", x, lambda y, network=block.feedforward: _feedforward(g, network, y))
    x = _norm(g, model.encoder_norm, x)
    outputs: Places = {}
    for i, cross in enumerate(block.cross for block in model.decoder):
        k, v = _keys_values(g, cross, x, None)
        sizes: Sizes = ["B", cross.kv_heads, "S", cross.head_width]
        outputs |= {f"memory_keys_{i}": (_heads_first(g, k), sizes), f"memory_values_{i}": (_heads_first(g, v), sizes)}
    inputs: Kinds = {"ids": (types.INT64, ["B", "S"]), "mask": (types.BOOL, ["B", "S"])}
    return g.made("encoder", inputs, outputs)


def step_graph(onnx: Any, model: Transformer) -> Any:
    g, types, config = Graph(onnx, model), onnx.TensorProto, model.config
    past = g.add("Shape", "keys_0", start=2, end=3)  # [P]
    count = g.add("Squeeze", g.add("Add", past, g.given([1])))
    bias = _relative(g, model.decoder_bias, config.max_len, past, _range(g, count))
    hidden = _hidden(g)
    x = _embedding(g, model.target_embedding, config.max_len, "last", past)
    whole = g.add("Concat", g.add("Shape", "last"), g.given([config.width]), axis=0)  # [B, K, E]
    outputs: Places = {}
    for i, block in enumerate(model.decoder):

        def regard_self(y: str, i: int = i, attention: MultiHead = block.attention) -> str:
            heads, groups, width = attention.heads, attention.kv_heads, attention.head_width
            q = g.reshape(_queries(g, attention, y, past), -1, 1, heads, width)
            k, v = (g.reshape(new, -1, groups, 1, width) for new in _keys_values(g, attention, y, past))
            k, v = g.add("Concat", f"keys_{i}", k, axis=2), g.add("Concat", f"values_{i}", v, axis=2)
            sizes: Sizes = ["R", groups, "P + 1", width]
            outputs.update({f"new_keys_{i}": (k, sizes), f"new_values_{i}": (v, sizes)})
            return g.add("Reshape", _attend(g, attention, q, k, v, None, bias), whole)

        def regard_source(y: str, i: int = i, attention: MultiHead = block.cross) -> str:
            q = _queries(g, attention, y, None)
            return _attend(g, attention, q, f"memory_keys_{i}", f"memory_values_{i}", hidden, None)

        x = _residual(g, block, "attention", x, regard_self)
        x = _residual(g, block, "cross", x, regard_source)
        x = _residual(g, block, "feedforward", x, lambda y, network=block.feedforward: _feedforward(g, network, y))
    x = g.times(_norm(g, model.decoder_norm, x), model.output_factor)
    logits: Places = {"logits": (_linear(g, model.output, x), ["B", "K", config.target_vocab])}
    inputs: Kinds = {"last": (types.INT64, ["B", "K"]), "mask": (types.BOOL, ["B", "S"])}
    for i, block in enumerate(model.decoder):
        groups, width = block.cross.kv_heads, block.cross.head_width
        inputs |= dict.fromkeys((f"memory_keys_{i}", f"memory_values_{i}"), (types.FLOAT, ["B", groups, "S", width]))
        inputs |= dict.fromkeys((f"keys_{i}", f"values_{i}"), (types.FLOAT, ["R", groups, "P", width]))
    return g.made("decoder_step", inputs, logits | outputs)


# -- the layers ------------------------------------------------------------------------------------------------------


def _range(g: Graph, count: str) -> str:
    return g.add("Range", g.given(0), count, g.given(1))


def _hidden(g: Graph) -> str:
    """0 where there is a token and -inf where there is none, (B, 1, 1, S): what is added to the scores."""
    mask = g.add("Where", "mask", g.given(0.0, np.float32), g.given(-np.inf, np.float32))
    return g.add("Unsqueeze", mask, g.given([1, 2]))


def _linear(g: Graph, linear: nn.Linear, x: str) -> str:
    x = g.add("MatMul", x, g.add("Transpose", g.weight(linear.weight), perm=[1, 0]))
    return x if linear.bias is None else g.add("Add", x, g.weight(linear.bias))


def _norm(g: Graph, norm: nn.Module, x: str) -> str:
    if isinstance(norm, nn.LayerNorm):
        return g.add("LayerNormalization", x, g.weight(norm.weight), g.weight(norm.bias), axis=-1, epsilon=norm.eps)
    if isinstance(norm, nn.RMSNorm):
        power = g.add("ReduceMean", g.add("Mul", x, x), g.given([-1]))
        root = g.add("Sqrt", g.add("Add", power, g.given(norm.eps, np.float32)))
        return g.add("Mul", g.add("Div", x, root), g.weight(norm.weight))
    return x  # nothing to be done


def _residual(g: Graph, block: Any, name: str, x: str, sublayer: Callable[[str], str]) -> str:
    norm = getattr(block, f"{name}_norm")
    if block.norm_first:
        return g.add("Add", x, sublayer(_norm(g, norm, x)))
    return _norm(g, norm, g.add("Add", x, sublayer(x)))


def _embedding(g: Graph, embedding: Embedding, max_len: int, ids: str, places: str) -> str:
    x = g.times(g.add("Gather", g.weight(embedding.tokens.weight), ids), embedding.scale)
    if isinstance(embedding.positions, Sinusoidal):
        table = Sinusoidal(embedding.positions.width, max_len, embedding.positions.halves).table
        x = g.add("Add", x, g.add("Gather", g.given(table.numpy(), np.float32), places))
    elif isinstance(embedding.positions, Learned):
        rows = g.add("Add", places, g.given(embedding.positions.offset))
        x = g.add("Add", x, g.add("Gather", g.weight(embedding.positions.weight), rows))
    return _norm(g, embedding.norm, x)


def _feedforward(g: Graph, network: FeedForward, x: str) -> str:
    x = _linear(g, network.inner, x)
    gates = {"swiglu": "silu", "geglu": "gelu_tanh"}
    if network.activation in gates:
        value, gate = g.several("Split", 2, x, axis=-1, num_outputs=2)
        return _linear(g, network.outer, g.add("Mul", value, _activated(g, gates[network.activation], gate)))
    return _linear(g, network.outer, _activated(g, network.activation, x))


def _activated(g: Graph, name: str, x: str) -> str:
    if name == "silu":
        return g.add("Mul", x, g.add("Sigmoid", x))
    if name in ("gelu", "gelu_tanh"):
        return g.add("Gelu", x, approximate="tanh" if name == "gelu_tanh" else "none")
    x = g.add("Relu", x)
    return g.add("Mul", x, x) if name == "relu2" else x


def _relative(g: Graph, bias: RelativeBias | None, max_len: int, p: str, s: str) -> str | None:
    """The numbers (H, T, S) for queries at p and keys at s, out of those for every distance that can be."""
    if bias is None:
        return None
    reach = max_len - 1
    with torch.no_grad():
        numbers = bias(torch.tensor([reach]), torch.arange(2 * max_len - 1))[:, 0]  # (H, distances)
    gap = g.add("Sub", g.add("Unsqueeze", s, g.given([0])), g.add("Unsqueeze", p, g.given([1])))
    return g.add("Gather", g.given(numbers.cpu().numpy(), np.float32), g.add("Add", gap, g.given(reach)), axis=1)


def _turned(g: Graph, rotary: Rotary | None, x: str, places: str | None) -> str:
    if rotary is None or places is None:
        return x
    rates = g.given(rotary.rates.cpu().numpy()[None, None], np.float32)
    turn = g.add("Cast", g.add("Unsqueeze", places, g.given([1, 2])), to=g.onnx.TensorProto.FLOAT)
    angle = g.add("Mul", turn, rates)  # (T, 1, D / 2)
    cos, sin = g.add("Cos", angle), g.add("Sin", angle)
    a, b = g.several("Split", 2, x, axis=-1, num_outputs=2)
    first = g.add("Sub", g.add("Mul", a, cos), g.add("Mul", b, sin))
    second = g.add("Add", g.add("Mul", b, cos), g.add("Mul", a, sin))
    return g.add("Concat", first, second, axis=-1)


def _queries(g: Graph, attention: MultiHead, x: str, places: str | None) -> str:
    """(B, T, H, D)"""
    q = g.reshape(_linear(g, attention.query, x), 0, 0, attention.heads, attention.head_width)
    return _turned(g, attention.rotary, _norm(g, attention.query_norm, q), places)


def _keys_values(g: Graph, attention: MultiHead, x: str, places: str | None) -> tuple[str, str]:
    """(B, S, G, D)"""
    halves = g.several("Split", 2, _linear(g, attention.key_value, x), axis=-1, num_outputs=2)
    k, v = (g.reshape(half, 0, 0, attention.kv_heads, attention.head_width) for half in halves)
    return _turned(g, attention.rotary, _norm(g, attention.key_norm, k), places), v


def _heads_first(g: Graph, x: str) -> str:
    return g.add("Transpose", x, perm=[0, 2, 1, 3])


def _attend(g: Graph, attention: MultiHead, q: str, k: str, v: str, hidden: str | None, bias: str | None) -> str:
    """Queries (B, T, H, D), keys and values (B, G, S, D): the definition, with all of the T×S weights."""
    heads, width = attention.heads, attention.head_width
    share = heads // attention.kv_heads
    if share > 1:
        k, v = (_repeated(g, x, share, heads, width) for x in (k, v))
    scores = _scores(g, attention, _heads_first(g, q), k)
    for added in (bias, hidden):
        scores = scores if added is None else g.add("Add", scores, added)
    mean = g.add("MatMul", g.add("Softmax", scores, axis=-1), v)
    return _linear(g, attention.out, g.reshape(_heads_first(g, mean), 0, 0, heads * width))


def _repeated(g: Graph, x: str, times: int, heads: int, width: int) -> str:
    """Each of the groups as often as heads share it."""
    many = g.add("Expand", g.add("Unsqueeze", x, g.given([2])), g.given([1, 1, times, 1, 1]))
    return g.reshape(many, 0, heads, -1, width)


def _scores(g: Graph, attention: MultiHead, q: str, k: str) -> str:
    """(B, H, T, D) and (B, H, S, D) to (B, H, T, S), by the score's definition."""
    score = attention.score
    if isinstance(score, Concat):
        q, k = g.add("MatMul", q, g.weight(score.weight_q)), g.add("MatMul", k, g.weight(score.weight_k))
        pairs = g.add("Add", g.add("Unsqueeze", q, g.given([3])), g.add("Unsqueeze", k, g.given([2])))
        sums = g.add("MatMul", g.add("Tanh", pairs), g.add("Unsqueeze", g.weight(score.weight_a), g.given([1])))
        return g.add("Squeeze", sums, g.given([-1]))
    if isinstance(score, Location):
        count = g.add("Shape", k, start=2, end=3)
        k = g.add("Slice", g.weight(score.weight), g.given([0]), count, g.given([1]))
        return g.add("MatMul", q, g.add("Transpose", k, perm=[0, 2, 1]))
    if isinstance(score, General):
        q = g.add("MatMul", q, g.weight(score.weight))
    if isinstance(score, Cosine):
        q, k = (_directed(g, x) for x in (q, k))
        scale = score.log_scale
        q = g.times(q, score.scale) if scale is None else g.add("Mul", q, g.add("Exp", g.weight(scale)))
    if isinstance(score, ScaledDot):
        q = g.times(q, attention.head_width**-0.5)
    return g.add("MatMul", q, g.add("Transpose", k, perm=[0, 1, 3, 2]))


def _directed(g: Graph, x: str) -> str:
    length = g.add("ReduceL2", x, g.given([-1]))
    return g.add("Div", x, g.add("Max", length, g.given(1e-6, np.float32)))
