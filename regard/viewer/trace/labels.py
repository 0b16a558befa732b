"""Titles and formulas of the steps of a trace: tables by module class, and a default per operation."""

from typing import NamedTuple


class StepLabel(NamedTuple):
    """Name, title and formula of a step."""

    name: str
    title: str
    formula: str


OptionalLabel = StepLabel | None
"""None: the step is computed but not shown."""

# Activations; elementwise operations whose only reader is an activation are shown as a part of it.
ACTIVATIONS = {"relu": "ReLU", "gelu": "GELU", "silu": "SiLU", "tanh": "tanh", "sigmoid": "sigmoid"}
# Gated linear units by the activation of the gate (Shazeer 2020).
GATED_UNITS = {"relu": "ReGLU", "gelu": "GEGLU", "silu": "SwiGLU", "sigmoid": "GLU"}

# By operation: labels of steps without an entry in another table.
DEFAULTS: dict[str, StepLabel] = {
    "given": StepLabel("given", "Input", "input"),
    "embedding": StepLabel("embedding", "Embedding lookup", "y = E[i]"),
    "gather_rows": StepLabel("rows", "Row lookup", "y = W[i]"),
    "add": StepLabel("add", "Add", "y = a + b"),
    "sub": StepLabel("sub", "Subtract", "y = a − b"),
    "rsub": StepLabel("sub", "Subtract", "y = b − a"),
    "mul": StepLabel("mul", "Multiply", "y = a · b"),
    "div": StepLabel("div", "Divide", "y = a / b"),
    "pow": StepLabel("pow", "Power", "y = aᵇ"),
    "lerp": StepLabel("lerp", "Interpolate", "y = a + w (b − a)"),
    "where": StepLabel("where", "Select", "y = a where c, else b"),
    "masked_fill": StepLabel("masked", "Mask", "y = a, or a constant where masked"),
    "linear": StepLabel("linear", "Linear layer", "y = x W + b"),
    "matmul": StepLabel("matmul", "Matrix product", "y = a b"),
    "conv2d": StepLabel("conv", "Convolution", "y = Σ w · x + b"),
    "layer_norm": StepLabel("norm", "LayerNorm", "n = (x − mean(x)) / √(var(x) + ε)"),
    "rms_norm": StepLabel("norm", "RMSNorm", "n = x / √(mean(x²) + ε)"),
    "group_norm": StepLabel("norm", "GroupNorm", "n = (x − mean(x)) / √(var(x) + ε)"),
    "softmax": StepLabel("softmax", "Softmax", "yᵢ = exp(xᵢ) / Σⱼ exp(xⱼ)"),
    "linalg_vector_norm": StepLabel("length", "Norm", "|x| = √Σ xᵢ²"),
    "mean": StepLabel("mean", "Mean", "m = Σ x / n"),
    "sum": StepLabel("sum", "Sum", "y = Σ x"),
    "cat": StepLabel("cat", "Concatenate", "y = [a; b]"),
    "stack": StepLabel("stack", "Stack", "y = [a, b]"),
    "upsample_bilinear2d": StepLabel("interpolated", "Bilinear interpolation", "y = Σ weight · x"),
    **{name: StepLabel(name, title, f"y = {title}(x)") for name, title in ACTIVATIONS.items()},
    **{
        name: StepLabel(name, name.capitalize(), f"y = {name}(x)")
        for name in ("exp", "log", "sin", "cos", "sqrt", "abs", "neg", "square", "reciprocal", "clamp", "clamp_min")
    },
}

PROBABILITIES = StepLabel("p", "Softmax: probabilities", "p = exp(l) / Σ exp(l)")
_SCORE = StepLabel("qk", "Scores", "eₜₛ = qₜ · kₛ")

# By module class: labels by the key of a step in the module, see `StepLabeler`. Missing classes and steps have the
# default of the operation.
STEP_LABELS: dict[str, dict[str, OptionalLabel]] = {
    "Embedding": {
        "tokens.embedding": StepLabel("x", "Token embeddings", "x = E[token]"),
        "mul": StepLabel("scaled", "Scaled embeddings", "x ← x · √d"),
        "segments.embedding": StepLabel("segment", "Segment embeddings", "s = S[segment]"),
        "add(segments)": StepLabel("with_segment", "Add segment embeddings", "x ← x + s"),
        "positions": StepLabel(
            "position",
            "Sinusoidal positional encoding",
            "p₂ᵢ = sin(position / 10000^(2i/d)), p₂ᵢ₊₁ = cos(position / 10000^(2i/d))",
        ),
        "positions.embedding": StepLabel("position", "Position embeddings", "p = P[position]"),
        "add(positions)": StepLabel("with_position", "Add positional encoding", "x ← x + p"),
    },
    "ImageEmbedding": {
        "given": StepLabel("image", "Image", "pixels from 0 to 1"),
        "sub": None,
        "div": StepLabel("normalized", "Normalized pixels", "x ← (x − μ) / σ"),
        "patches.reshape#3": StepLabel("pixels", "Pixels per patch", "x = [red; green; blue]"),
        "patches.project.linear": StepLabel("token", "Patch embeddings", "t = x W + b"),
        "patches.project.conv2d": StepLabel("token", "Patch embeddings", "t = Σ w · x + b"),
        "patches.project.*.conv2d": StepLabel("convolved", "Convolution", "y = Σ w · x + b"),
        "patches.project.*.group_norm": StepLabel("cell_norm", "GroupNorm", "n = (y − mean(y)) / √(var(y) + ε)"),
        "learned": StepLabel("position", "Position embeddings", "p = P[row, column]"),
        "sinusoidal": StepLabel("position", "Sinusoidal positional encoding", "p = [row; column]"),
        "add(prefix)": StepLabel("prefix", "Add positional encoding to class token and registers", "c ← c + p"),
        "add": StepLabel("with_position", "Add positional encoding", "x ← x + p"),
        "cat": StepLabel("tokens", "Prepend class token and registers", "x = [c; x]"),
    },
    "MultiHeadAttention": {
        "query.linear": StepLabel("q", "Queries", "q = x W_Q + b_Q"),
        "select#0": StepLabel("k", "Keys", "k = x W_K + b_K"),
        "select#1": StepLabel("v", "Values", "v = x W_V + b_V"),
        "query_norm": StepLabel("q_norm", "Normalized queries", ""),
        "key_norm": StepLabel("k_norm", "Normalized keys", ""),
        "rotary#0": StepLabel("q_rotary", "Rotary position (RoPE): queries", "(qᵢ, qᵢ₊d/2) rotated by position · θᵢ"),
        "rotary#1": StepLabel("k_rotary", "Rotary position (RoPE): keys", "(kᵢ, kᵢ₊d/2) rotated by position · θᵢ"),
        "cat#0": StepLabel(
            "q_rotary",
            "Rotary position (RoPE) by row and column: queries",
            "(qᵢ, qᵢ₊d/2) rotated by row · θᵢ, column · θᵢ",
        ),
        "cat#1": StepLabel(
            "k_rotary",
            "Rotary position (RoPE) by row and column: keys",
            "(kᵢ, kᵢ₊d/2) rotated by row · θᵢ, column · θᵢ",
        ),
        "add(RelativeBias)": StepLabel("e_bias", "Add relative position bias", "e ← e + b"),
        "masked_fill#0": StepLabel("e_masked", "Causal mask", "eₜₛ ← −∞ for s > t"),
        "masked_fill#1": None,
        "softmax": StepLabel("a", "Softmax: attention weights", "aₜₛ = exp(eₜₛ) / Σᵢ exp(eₜᵢ)"),
        "matmul": StepLabel("z", "Weighted sum of values", "zₜ = Σₛ aₜₛ vₛ"),
        "out.linear": StepLabel("o", "Concatenate heads, output projection", "o = [z₁; z₂; …] W_O + b_O"),
    },
    "DisentangledAttention": {
        "query.linear#1": StepLabel("q_relative", "Queries of relative positions", "Q = r W_Q + b_Q"),
        "select#2": StepLabel("k_relative", "Keys of relative positions", "K = r W_K + b_K"),
        "matmul#0": StepLabel("qk_relative", "Queries times keys of relative positions", "cₜᵢ = qₜ · Kᵢ"),
        "matmul#1": StepLabel("kq_relative", "Keys times queries of relative positions", "dₛᵢ = kₛ · Qᵢ"),
        "cat": None,
        "matmul#2": StepLabel("qk", "Scores of the contents", "eₜₛ = qₜ · kₛ"),
        "gather#0": StepLabel("c", "Of these, the relative position of each pair", "cₜₛ = cₜᵢ, i = bucket(t − s)"),
        "gather#1": StepLabel("d", "Of these, the relative position of each pair", "dₛₜ = dₛᵢ, i = bucket(t − s)"),
        "add#0": StepLabel("with_c", "Add content-to-position scores", "e ← e + c"),
        "add#1": StepLabel("with_d", "Add position-to-content scores", "e ← e + d"),
        "mul": StepLabel("e", "Scaled scores", "e ← e / √(3 d_k)"),
        "masked_fill#0": StepLabel("e_masked", "Mask", "eₜₛ ← −∞ for masked pairs"),
        "masked_fill#1": None,
        "softmax": StepLabel("a", "Softmax: attention weights", "aₜₛ = exp(eₜₛ) / Σᵢ exp(eₜᵢ)"),
        "matmul#3": StepLabel("z", "Weighted sum of values", "zₜ = Σₛ aₜₛ vₛ"),
    },
    "RelativeEmbedding": {"norm": StepLabel("relative", "Embeddings of relative positions", "r = LayerNorm(R)")},
    "RelativeBias": {"": StepLabel("b", "Relative position bias", "bₜₛ = B[bucket(s − t)]")},
    "DotLike": {
        "matmul": _SCORE,
        "mul": StepLabel("e", "Scaled scores", "e ← e · scale"),
    },
    "ScaledDot": {
        "matmul": _SCORE,
        "mul": StepLabel("e", "Scaled scores", "e ← e / √d_k"),
    },
    "Cosine": {
        "linalg_vector_norm": None,
        "clamp_min": None,
        "exp": None,
        "div#0": StepLabel("q_unit", "Unit-norm queries", "q′ = q / |q|"),
        "div#1": StepLabel("k_unit", "Unit-norm keys", "k′ = k / |k|"),
        "mul(log_scale)": StepLabel("q_scaled", "Scaled queries (learned scale)", "q′ ← q′ · exp(log_scale)"),
        "matmul": StepLabel("cos", "Cosine scores", "eₜₛ = q′ₜ · k′ₛ"),
        "mul": StepLabel("e", "Scaled scores", "e = scale · cos"),
    },
    "General": {
        "matmul#0": StepLabel("q_score", "Query projection of the score", "q′ = q W_a"),
        "matmul#1": StepLabel("e", "Scores", "eₜₛ = q′ₜ · kₛ"),
    },
    "Concat": {
        "matmul#0": StepLabel("q_score", "Query projection of the score", "q′ = q W_b"),
        "matmul#1": StepLabel("k_score", "Key projection of the score", "k′ = k W_c"),
        "add": None,
        "tanh": None,
        "matmul#2": None,
        "reshape#3": StepLabel("e", "Scores", "eₜₛ = w_a · tanh(q′ₜ + k′ₛ)"),
    },
    "Location": {
        "gather_rows": StepLabel("w", "One vector per key position", "wₛ = W_a[s]"),
        "matmul": StepLabel("e", "Scores", "eₜₛ = qₜ · wₛ"),
    },
    "SoftCap": {
        "mul#0": StepLabel("q_scaled", "Scaled queries", "q′ = q · scale"),
        "matmul": StepLabel("qk", "Scores", "eₜₛ = q′ₜ · kₛ"),
        "div": None,
        "tanh": None,
        "mul#1": StepLabel("e", "Soft-capped scores", "e ← c · tanh(e / c)"),
    },
    "ZeroCenteredRMSNorm": {"add": None},  # its gain, 1 + weight
    "FeedForward": {
        "fc1.linear": StepLabel("u", "Hidden layer", "u = x W₁ + b₁"),
        "slice#0": StepLabel("u", "Hidden layer", "u = x W₁ + b₁"),
        "slice#1": StepLabel("g", "Gate projection", "g = x W₃ + b₃"),
        "activation": StepLabel("h", "Activation", "h = {}(u)"),
        "activation(slice)": StepLabel("gate", "Gate ({})", "g ← {}(g)"),
        "mul": StepLabel("h", "Gated hidden layer", "h = u · g"),
        "fc2.linear": StepLabel("f", "Output layer", "f = h W₂ + b₂"),
    },
    "GRU": {
        "linear(weight_ih)": StepLabel("inputs", "Input projection of the gates", "u = x W_x + b_x"),
        "linear(weight_hh)": StepLabel("w", "Recurrent projection of the gates", "w = hₜ₋₁ W_h + b_h"),
        "sigmoid#0": StepLabel("r", "Reset gate", "r = σ(u_r + w_r)"),
        "sigmoid#1": StepLabel("z", "Update gate", "z = σ(u_z + w_z)"),
        "tanh": StepLabel("n", "Candidate state", "n = tanh(u_n + r · w_n)"),
        "add": None,
        "mul": None,
        "lerp": StepLabel("h", "Hidden state", "hₜ = (1 − z) · n + z · hₜ₋₁"),
        "stack": StepLabel("h", "Hidden states of all tokens", "[h₀, h₁, …]"),
    },
    "LSTM": {
        "linear(weight_ih)": StepLabel("inputs", "Input projection of the gates", "u = x W_x + b_x"),
        "linear(weight_hh)": StepLabel("w", "Recurrent projection of the gates", "w = hₜ₋₁ W_h + b_h"),
        "add#0": None,
        "sigmoid#0": StepLabel("f", "Forget gate", "f = σ(u_f + w_f)"),
        "mul#0": StepLabel("kept", "Forget gate times previous cell state", "f · cₜ₋₁"),
        "sigmoid#1": StepLabel("i", "Input gate", "i = σ(u_i + w_i)"),
        "tanh#0": StepLabel("g", "Candidate cell state", "g = tanh(u_g + w_g)"),
        "mul#1": StepLabel("written", "Input gate times candidate", "i · g"),
        "add#1": StepLabel("c", "Cell state", "cₜ = f · cₜ₋₁ + i · g"),
        "sigmoid#2": StepLabel("o", "Output gate", "o = σ(u_o + w_o)"),
        "tanh#1": StepLabel("tanh_c", "tanh of the cell state", "tanh(cₜ)"),
        "mul#2": StepLabel("h", "Hidden state", "hₜ = o · tanh(cₜ)"),
        "stack": StepLabel("h", "Hidden states of all tokens", "[h₀, h₁, …]"),
    },
    "RNN": {
        "linear(weight_ih)": StepLabel("inputs", "Input projection", "u = x W_x + b_x"),
        "linear(weight_hh)": StepLabel("w", "Recurrent projection", "w = hₜ₋₁ W_h + b_h"),
        "add": None,
        "tanh": StepLabel("h", "Hidden state", "hₜ = tanh(u + w)"),
        "stack": StepLabel("h", "Hidden states of all tokens", "[h₀, h₁, …]"),
    },
    "Bidirectional": {"cat": StepLabel("h", "Hidden states of both directions", "hₛ = [h→; h←]")},
    "RecurrentEncoder": {
        "cat": StepLabel("final", "Final hidden states of both directions", "[h→; h←]"),
        "bridges.*.linear": StepLabel("bridge", "Projection of the final states", "u = [h→; h←] W + b"),
        "tanh": StepLabel("first", "Initial state of the decoder: the source as one vector", "s₀ = tanh(u)"),
        "stack": None,
    },
    "StateAttention": {
        "softmax": StepLabel("a", "Softmax: attention weights", "aₜₛ = exp(eₜₛ) / Σᵢ exp(eₜᵢ)"),
        "masked_fill": None,
        "matmul": StepLabel("c", "Weighted sum of encoder states: context vector", "cₜ = Σₛ aₜₛ hₛ"),
    },
    "RecurrentDecoder": {
        "memory.linear": StepLabel("memory", "Encoder states projected to the decoder's width", "m = h W + b"),
        "context.linear": StepLabel("context", "Context projection of the gates", "u = c W_c + b"),
        "add": StepLabel("x_context", "Add context to the inputs of the gates", "u ← u + c W_c"),
        "cat": StepLabel("cs", "Concatenate context vector and state", "[cₜ; sₜ]"),
        "stack": StepLabel("cs", "Context vectors and states of all tokens", "[cₜ; sₜ]"),
        "combine.linear": StepLabel("combined", "Projection of context vector and state", "u = [c; s] W + b"),
        "tanh": StepLabel("attentional", "Attentional states", "s̃ₜ = tanh(W [cₜ; sₜ])"),
    },
    "AttentionPooling": {
        "expand": StepLabel("query", "Learned query", "q = Q"),
        "add": StepLabel("sum", "Residual connection", "x ← x + y"),
    },
    "SegmentationDecoder": {
        "expand": StepLabel("queries", "Class queries (one per label)", "c = C[label]"),
        "cat": StepLabel("with_queries", "Prepend class queries", "x = [c; x]"),
        "of_patch.linear": StepLabel("patch_map", "Projected patches", "k = x W + b"),
        "of_query.linear": StepLabel("query_map", "Projected queries", "q = c W + b"),
        "mul": StepLabel("query_scaled", "Scaled queries", "q ← q / √d"),
        "matmul": StepLabel("match", "Logits per patch", "lₜᵢ = kₜ · qᵢ"),
    },
    "MaskHead": {"dense.linear": StepLabel("dense", "Hidden layer", "y = x W + b")},
    "GPT": {
        "div": None,
        "tanh": None,
        "mul": StepLabel("output.l_capped", "Soft-capped logits", "l ← c · tanh(l / c)"),
    },
    # The model itself.
    "Model": {
        "output.linear": StepLabel("l", "Logits", "l = x W + b"),
        "distilled.linear": StepLabel("l", "Logits of the distillation token", "l′ = x W + b"),
        "widen.linear": StepLabel("widened", "Embedding projection", "y = x W + b"),
        "pooler.linear": StepLabel("pooled", "Pooler", "y = x W + b"),
        "pooled_map.linear": StepLabel("mapped", "Projection of the pooled vector", "y = x W + b"),
        "mul": StepLabel("output.scaled", "Scale by 1/√d", "x ← x / √d"),
        "tanh": StepLabel("output.tanh", "tanh of the pooled vector", "y = tanh(x)"),
        "add": StepLabel("output.l_sum", "Sum of both logits", "l ← l + l′"),
        "div": StepLabel("output.l_mean", "Mean of both logits", "l ← l / 2"),
        "mean": StepLabel("mean", "Mean of all tokens", "m = (x₀ + x₁ + …) / T"),
    },
}
# In a block, outside its sublayers.
BLOCK_LABELS: dict[str, StepLabel] = {
    "add": StepLabel("sum", "Residual connection", "x ← x + {}"),
    "mul": StepLabel("scaled", "LayerScale", "o ← o · λ"),
}
# Classes whose operations are shown as one step, or not at all without an entry in a table.
COLLAPSED = {"Sinusoidal", "SinusoidalGrid", "LearnedGrid", "Rotary", "RotaryGrid", "RelativeBias"}

# Section titles by module path.
SECTIONS = {
    "source_embedding": "Source embedding",
    "target_embedding": "Target embedding",
    "embedding": "Embedding",
    "relative": "Embeddings of relative positions",
    "encoder_norm": "Final norm of the encoder",
    "decoder_norm": "Final norm of the decoder",
    "norm": "Final norm",
    "encoder": "Initial state of the decoder",
    "decoder.attention": "Attention",
    "pooler.attention": "Pooling by a learned query",
    "widen": "Embedding projection",
    "mask_head": "Output head",
    "pooled_map": "Pooled vector",
    "segmenter": "Segmenter",
}
STACKS = {
    "encoder": "Encoder, layer",
    "encoder.layers": "Encoder, layer",
    "decoder": "Decoder, layer",
    "decoder.layers": "Decoder, layer",
    "segmenter.blocks": "Segmenter, layer",
}
SUBLAYERS = {
    "self": "self-attention",
    "masked": "masked self-attention",
    "cross": "cross-attention",
    "feedforward": "feed-forward",
    "forward_layer": "forward",
    "backward_layer": "backward",
}
