"""All layers of a decoding step of a few rows in one call: the calls of single kernels would take longer than they do.

Plain twin: the same kernels around matrix products of torch, in regard.decode.engine.workspace.
"""

from regard.kernels.decode_attention_cpu import cross_attention, self_attention
from regard.kernels.decode_choice_cpu import best_tokens_rows, finish_rows, start_rows
from regard.kernels.decode_rows_cpu import activate_rows, add_norm_rows, multiply_few_rows
from regard.kernels.numba_support import jit


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
        y = products[: R * len(joint[0])].reshape(R, len(joint[0]))
        hidden = inputs[: R * out[0].shape[1]].reshape(R, out[0].shape[1])
        multiply_few_rows(current, joint[0], y)
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
        if len(query[0]):
            y = products[: R * len(query[0])].reshape(R, len(query[0]))
            hidden = inputs[: R * out[0].shape[1]].reshape(R, out[0].shape[1])
            multiply_few_rows(current, query[0], y)
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
        y = products[: R * len(inner[0])].reshape(R, len(inner[0]))
        hidden = inputs[: R * out[0].shape[1]].reshape(R, out[0].shape[1])
        multiply_few_rows(current, inner[0], y)
        activate_rows(y, scales, inner[1], inner[2], activation, hidden, scales)
        add_output(x, hidden, out, norm, norm_first, products, current, scales)


@jit
def add_output(x, hidden, layer, norm, norm_first, products, current, scales):
    """The output layer of a sublayer, the residual sum and the next norm."""
    weight, scale, bias = layer
    gain, norm_bias, eps, is_rms = norm
    y = products[: len(x) * len(weight)].reshape(len(x), len(weight))
    multiply_few_rows(hidden, weight, y)
    add_norm_rows(x, y, scales, scale, bias, gain, norm_bias, eps, is_rms, norm_first, current, scales)


@jit
def choose_tokens(
    inputs, products, scales, layer, positions, columns, banned, eos, forced, ban_eos, top, ids, statistics
):
    """The best tokens of a few rows: `start_rows`, `best_tokens_rows` and `finish_rows`."""
    weight, scale, bias = layer
    R = len(top)
    y = products[: R * len(weight)].reshape(R, len(weight))
    multiply_few_rows(inputs[: R * weight.shape[1]].reshape(R, weight.shape[1]), weight, y)
    start_rows(top, ids, statistics)
    best_tokens_rows(y, scales, scale, bias, 0, positions, columns, banned, eos, forced, ban_eos, top, ids, statistics)
    finish_rows(forced, columns, top, ids, statistics)
