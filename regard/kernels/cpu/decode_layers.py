"""All layers of a decoding step in one call: for a few rows, the calls of single kernels take longer than they do.

Reference: the same kernels around matrix products of torch, in regard.decode.steppers.compiled.
"""

from regard.kernels.cpu.decode_attention import cross_attention, self_attention
from regard.kernels.cpu.decode_choice import best_tokens_rows, finish_rows, start_rows
from regard.kernels.cpu.decode_rows import activate_rows, add_norm_rows, multiply_few_rows
from regard.kernels.cpu.packed_product import LANES, multiply_panels
from regard.kernels.cpu.support import jit

# Outputs of the last layer that are multiplied at once: their products stay in the cache of the processor.
_COLUMNS = 1024


@jit
def multiply_rows(x, weight, first, y):
    """y = x weight^T for the outputs from `first` onwards. The weight (N, K) is for a few rows, panels are for any
    number of them.
    """
    if weight.ndim == 3:
        multiply_panels(x, weight, first // LANES, y)
    else:
        multiply_few_rows(x, weight[first : first + y.shape[1]], y)


@jit
def count_inputs(weight):
    """The number of inputs of a weight (N, K) or of its panels."""
    if weight.ndim == 3:
        return weight.shape[1] * weight.shape[2] // LANES
    else:
        return weight.shape[1]


@jit
def run_layers(
    x, inputs, products, scales, layers, caches, ancestors, positions, lengths, distance_bias, rotary, norm_first
):
    """Apply the layers of a decoder to the residual stream x.

    `inputs` and `products` are flat buffers; the first `x.size` elements of `inputs` are the input of the first layer,
    and finally that of the output layer. A layer is a tuple of sublayers: self-attention, cross-attention (without
    weights: none) and feed-forward network, as in `PackedDecoder.layers`.
    """
    R, E = x.shape
    current = inputs[: R * E].reshape(R, E)
    for i in range(len(layers)):
        attention, cross, feedforward = layers[i]
        keys, values, source_keys, source_values = caches[i]
        joint, out, norm, (factor, q_gain, k_gain, eps) = attention
        y = products[: R * len(joint[1])].reshape(R, len(joint[1]))
        hidden = inputs[: R * count_inputs(out[0])].reshape(R, count_inputs(out[0]))
        multiply_rows(current, joint[0], 0, y)
        self_attention(
            y,
            scales,
            joint[1],
            joint[2],
            keys,
            values,
            ancestors,
            positions,
            factor,
            distance_bias,
            q_gain,
            k_gain,
            eps,
            rotary,
            hidden,
            scales,
        )
        add_output(x, hidden, out, norm, norm_first, products, current, scales)
        query, out, norm, (factor, q_gain, k_gain, eps) = cross
        if len(query[1]):
            y = products[: R * len(query[1])].reshape(R, len(query[1]))
            hidden = inputs[: R * count_inputs(out[0])].reshape(R, count_inputs(out[0]))
            multiply_rows(current, query[0], 0, y)
            cross_attention(
                y,
                scales,
                query[1],
                query[2],
                source_keys,
                source_values,
                lengths,
                positions,
                factor,
                q_gain,
                eps,
                hidden,
                scales,
            )
            add_output(x, hidden, out, norm, norm_first, products, current, scales)
        inner, out, norm, activation = feedforward
        y = products[: R * len(inner[1])].reshape(R, len(inner[1]))
        hidden = inputs[: R * count_inputs(out[0])].reshape(R, count_inputs(out[0]))
        multiply_rows(current, inner[0], 0, y)
        activate_rows(y, scales, inner[1], inner[2], activation, hidden, scales)
        add_output(x, hidden, out, norm, norm_first, products, current, scales)


@jit
def add_output(x, hidden, layer, norm, norm_first, products, current, scales):
    """The output layer of a sublayer, the residual sum and the next norm."""
    weight, scale, bias = layer
    gain, norm_bias, eps, is_rms = norm
    y = products[: len(x) * len(scale)].reshape(len(x), len(scale))
    multiply_rows(hidden, weight, 0, y)
    add_norm_rows(x, y, scales, scale, bias, gain, norm_bias, eps, is_rms, norm_first, current, scales)


@jit
def choose_tokens(
    inputs, products, scales, layer, positions, columns, refused, banned, eos, forced, ban_eos, top, ids, statistics
):
    """The best tokens of each row: `start_rows`, `best_tokens_rows` and `finish_rows`."""
    weight, scale, bias = layer
    R, V, K = len(top), len(scale), count_inputs(weight)
    x = inputs[: R * K].reshape(R, K)
    start_rows(top, ids, statistics)
    for first in range(0, V, _COLUMNS):
        count = min(_COLUMNS, V - first)
        y = products[: R * count].reshape(R, count)
        multiply_rows(x, weight, first, y)
        part = slice(first, first + count)
        best_tokens_rows(
            y, scales, scale[part], bias[part], first, positions, columns, refused, banned, eos, forced, ban_eos, top,
            ids, statistics,
        )  # fmt: skip
    finish_rows(forced, columns, top, ids, statistics)
