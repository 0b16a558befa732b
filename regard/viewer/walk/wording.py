"""Titles and formulas of a walk's steps: tables by module class, and a default for every operation."""

from typing import NamedTuple


class Words(NamedTuple):
    """Name, title and formula of a step."""

    name: str
    title: str
    formula: str


Entry = Words | None
"""None: the step is computed and not shown."""

# Activations; other elementwise operations that feed one of them are shown as a part of it.
ACTIVATIONS = {"relu": "ReLU", "gelu": "GELU", "silu": "SiLU", "tanh": "tanh", "sigmoid": "sigmoid"}

# By operation: what a step is called that no other table names.
DEFAULTS: dict[str, Words] = {
    "given": Words("given", "Given", "given"),
    "embedding": Words("embedding", "Rows of a table", "y = E[i]"),
    "gather_rows": Words("rows", "Rows of a table", "y = W[i]"),
    "add": Words("add", "Add", "y = a + b"),
    "sub": Words("sub", "Subtract", "y = a − b"),
    "rsub": Words("sub", "Subtract", "y = b − a"),
    "mul": Words("mul", "Multiply", "y = a · b"),
    "div": Words("div", "Divide", "y = a / b"),
    "pow": Words("pow", "Power", "y = aᵇ"),
    "lerp": Words("lerp", "Interpolate", "y = a + w (b − a)"),
    "where": Words("where", "Choose", "y = a where c, else b"),
    "masked_fill": Words("masked", "Mask", "y = a, or a constant where masked"),
    "linear": Words("linear", "Linear layer", "y = x W + b"),
    "matmul": Words("matmul", "Matrix product", "y = a b"),
    "conv2d": Words("conv", "Convolution", "y = Σ w · x + b"),
    "layer_norm": Words("norm", "Layer norm", "n = (x − mean(x)) / √(var(x) + ε)"),
    "rms_norm": Words("norm", "RMS norm", "n = x / √(mean(x²) + ε)"),
    "group_norm": Words("norm", "Group norm", "n = (x − mean(x)) / √(var(x) + ε)"),
    "softmax": Words("softmax", "Softmax", "yᵢ = exp(xᵢ) / Σⱼ exp(xⱼ)"),
    "linalg_vector_norm": Words("length", "Length", "|x| = √Σ xᵢ²"),
    "mean": Words("mean", "Mean", "m = Σ x / n"),
    "sum": Words("sum", "Sum", "y = Σ x"),
    "cat": Words("cat", "Concatenate", "y = [a; b]"),
    "stack": Words("stack", "Stack", "y = [a, b]"),
    "upsample_bilinear2d": Words("interpolated", "Bilinear interpolation", "y = Σ share · x"),
    **{name: Words(name, called, f"y = {called}(x)") for name, called in ACTIVATIONS.items()},
    **{
        name: Words(name, name.capitalize(), f"y = {name}(x)")
        for name in ("exp", "log", "sin", "cos", "sqrt", "abs", "neg", "square", "reciprocal", "clamp", "clamp_min")
    },
}

PROBABILITIES = Words("p", "Probabilities", "p = exp(l) / Σ exp(l)")
_SCORE = Words("qk", "Scores", "eₜₛ = qₜ · kₛ")

# By class: words by a key that says which step of the module it is, see `StepWords`. Classes and steps that are missing
# have the default of the operation.
WORDS: dict[str, dict[str, Entry]] = {
    "Embedding": {
        "tokens.embedding": Words("x", "Token embeddings", "x = E[token]"),
        "mul": Words("scaled", "Scaled embeddings", "x ← x · √d"),
        "segments.embedding": Words("segment", "Segment embeddings", "s = S[segment]"),
        "add(segments)": Words("with_segment", "Segment embeddings added", "x ← x + s"),
        "positions": Words("position", "Sinusoidal positions", "p = sin and cos of position / 10000^(2i/d)"),
        "positions.embedding": Words("position", "Position embeddings", "p = P[position]"),
        "add(positions)": Words("with_position", "Positions added", "x ← x + p"),
    },
    "ImageEmbedding": {
        "given": Words("image", "Image", "pixels from 0 to 1"),
        "sub": None,
        "div": Words("normalized", "Normalized pixels", "x ← (x − μ) / σ"),
        "patches.reshape#3": Words("pixels", "Pixels of each patch", "x = [red; green; blue]"),
        "patches.project.linear": Words("token", "Patch embeddings", "t = x W + b"),
        "patches.project.conv2d": Words("token", "Patch embeddings", "t = Σ w · x + b"),
        "patches.project.*.conv2d": Words("convolved", "Convolution", "y = Σ w · x + b"),
        "patches.project.*.group_norm": Words("cell_norm", "Group norm", "n = (y − mean(y)) / √(var(y) + ε)"),
        "learned": Words("position", "Position embeddings", "p = P[row, column]"),
        "sinusoidal": Words("position", "Sinusoidal positions", "p = [row; column]"),
        "add(prefix)": Words("prefix", "Class token and registers with positions", "c ← c + p"),
        "add": Words("with_position", "Positions added", "x ← x + p"),
        "cat": Words("tokens", "Class token and registers prepended", "x = [c; x]"),
    },
    "MultiHead": {
        "query.linear": Words("q", "Queries", "q = x W_q + b_q"),
        "select#0": Words("k", "Keys", "k = x W_k + b_k"),
        "select#1": Words("v", "Values", "v = x W_v + b_v"),
        "query_norm": Words("q_norm", "Normalized queries", ""),
        "key_norm": Words("k_norm", "Normalized keys", ""),
        "rotary#0": Words("q_rotary", "Queries rotated by their positions", "(qᵢ, qᵢ₊D/2) rotated by position · θᵢ"),
        "rotary#1": Words("k_rotary", "Keys rotated by their positions", "(kᵢ, kᵢ₊D/2) rotated by position · θᵢ"),
        "cat#0": Words(
            "q_rotary", "Queries rotated by row and column", "(qᵢ, qᵢ₊D/2) rotated by row · θᵢ, column · θᵢ"
        ),
        "cat#1": Words("k_rotary", "Keys rotated by row and column", "(kᵢ, kᵢ₊D/2) rotated by row · θᵢ, column · θᵢ"),
        "add(RelativeBias)": Words("e_bias", "Relative position bias added", "e ← e + b"),
        "masked_fill#0": Words("e_masked", "Causal mask", "eₜₛ ← −∞ for s > t"),
        "masked_fill#1": None,
        "softmax": Words("a", "Attention weights", "aₜₛ = exp(eₜₛ) / Σᵢ exp(eₜᵢ)"),
        "matmul": Words("z", "Attention output", "zₜ = Σₛ aₜₛ vₛ"),
        "out.linear": Words("o", "Output projection", "o = z W_o + b_o"),
    },
    "RelativeBias": {"": Words("b", "Relative position bias", "bₜₛ = B[bucket(s − t)]")},
    "DotLike": {
        "matmul": _SCORE,
        "mul": Words("e", "Scaled scores", "e ← e · scale"),
    },
    "ScaledDot": {
        "matmul": _SCORE,
        "mul": Words("e", "Scaled scores", "e ← e / √D"),
    },
    "Cosine": {
        "linalg_vector_norm": None,
        "clamp_min": None,
        "exp": None,
        "div#0": Words("q_unit", "Queries of length 1", "q′ = q / |q|"),
        "div#1": Words("k_unit", "Keys of length 1", "k′ = k / |k|"),
        "mul(log_scale)": Words("q_scaled", "Queries times the learned scale", "q′ ← q′ · exp(log_scale)"),
        "matmul": Words("cos", "Cosine scores", "eₜₛ = q′ₜ · k′ₛ"),
        "mul": Words("e", "Scaled scores", "e = scale · cos"),
    },
    "General": {
        "matmul#0": Words("q_score", "Queries of the score", "q′ = q W_a"),
        "matmul#1": Words("e", "Scores", "eₜₛ = q′ₜ · kₛ"),
    },
    "Concat": {
        "matmul#0": Words("q_score", "Queries of the score", "q′ = q W_b"),
        "matmul#1": Words("k_score", "Keys of the score", "k′ = k W_c"),
        "add": None,
        "tanh": None,
        "matmul#2": None,
        "reshape#3": Words("e", "Scores", "eₜₛ = w_a · tanh(q′ₜ + k′ₛ)"),
    },
    "Location": {
        "gather_rows": Words("w", "A vector for each key position", "wₛ = W_a[s]"),
        "matmul": Words("e", "Scores", "eₜₛ = qₜ · wₛ"),
    },
    "FeedForward": {
        "inner.linear": Words("u", "Hidden layer", "u = x W₁ + b₁"),
        "slice#0": Words("u", "Hidden layer", "u = x W₁ + b₁"),
        "slice#1": Words("g", "Gate", "g = x W₃ + b₃"),
        "activation": Words("h", "Activation", "h = {}(u)"),
        "activation(slice)": Words("gate", "Activation of the gate", "g ← {}(g)"),
        "mul": Words("h", "Gated hidden layer", "h = u · g"),
        "outer.linear": Words("f", "Output layer", "f = h W₂ + b₂"),
    },
    "GRU": {
        "linear(weight_ih)": Words("inputs", "Inputs of the gates", "u = x W_x + b_x"),
        "linear(weight_hh)": Words("w", "Recurrent inputs of the gates", "w = hₜ₋₁ W_h + b_h"),
        "sigmoid#0": Words("r", "Reset gate", "r = σ(u_r + w_r)"),
        "sigmoid#1": Words("z", "Update gate", "z = σ(u_z + w_z)"),
        "tanh": Words("n", "Candidate state", "n = tanh(u_n + r · w_n)"),
        "add": None,
        "mul": None,
        "lerp": Words("h", "Next state", "hₜ = (1 − z) · n + z · hₜ₋₁"),
        "stack": Words("h", "States of all tokens", "[h₀, h₁, …]"),
    },
    "LSTM": {
        "linear(weight_ih)": Words("inputs", "Inputs of the gates", "u = x W_x + b_x"),
        "linear(weight_hh)": Words("w", "Recurrent inputs of the gates", "w = hₜ₋₁ W_h + b_h"),
        "add#0": None,
        "sigmoid#0": Words("f", "Forget gate", "f = σ(u_f + w_f)"),
        "mul#0": Words("kept", "Part of the cell that is kept", "f · cₜ₋₁"),
        "sigmoid#1": Words("i", "Input gate", "i = σ(u_i + w_i)"),
        "tanh#0": Words("g", "Candidate cell", "g = tanh(u_g + w_g)"),
        "mul#1": Words("written", "Part of the cell that is new", "i · g"),
        "add#1": Words("c", "Cell", "cₜ = f · cₜ₋₁ + i · g"),
        "sigmoid#2": Words("o", "Output gate", "o = σ(u_o + w_o)"),
        "tanh#1": Words("tanh_c", "tanh of the cell", "tanh(cₜ)"),
        "mul#2": Words("h", "Next state", "hₜ = o · tanh(cₜ)"),
        "stack": Words("h", "States of all tokens", "[h₀, h₁, …]"),
    },
    "RNN": {
        "linear(weight_ih)": Words("inputs", "Inputs", "u = x W_x + b_x"),
        "linear(weight_hh)": Words("w", "Recurrent inputs", "w = hₜ₋₁ W_h + b_h"),
        "add": None,
        "tanh": Words("h", "Next state", "hₜ = tanh(u + w)"),
        "stack": Words("h", "States of all tokens", "[h₀, h₁, …]"),
    },
    "Bidirectional": {"cat": Words("h", "States of both directions", "hₛ = [h→; h←]")},
    "Encoder": {
        "cat": Words("final", "Final states of both directions", "[h→; h←]"),
        "bridges.*.linear": Words("bridge", "Bridge to the decoder", "u = [h→; h←] W + b"),
        "tanh": Words("first", "Initial state of the decoder: the source as one vector", "s₀ = tanh(u)"),
        "stack": None,
    },
    "StateAttention": {
        "softmax": Words("a", "Attention weights", "aₜₛ = exp(eₜₛ) / Σᵢ exp(eₜᵢ)"),
        "masked_fill": None,
        "matmul": Words("c", "Context vector", "cₜ = Σₛ aₜₛ hₛ"),
    },
    "Decoder": {
        "memory.linear": Words("memory", "Encoder states in the decoder's width", "h = h W + b"),
        "context.linear": Words("context", "Context vector as input of the gates", "u = c W_c + b"),
        "add": Words("x_context", "Inputs of the gates, with the context", "u ← u + c W_c"),
        "cat": Words("cs", "Context vector and state", "[cₜ; sₜ]"),
        "stack": Words("cs", "Context vectors and states of all tokens", "[cₜ; sₜ]"),
        "combine.linear": Words("combined", "Combination of context vector and state", "u = [c; s] W + b"),
        "tanh": Words("attentional", "Attentional states", "s̃ₜ = tanh(W [cₜ; sₜ])"),
    },
    "QueryPool": {"expand": Words("question", "Learned query", "q = Q")},
    "ClassQueries": {
        "expand": Words("queries", "A learned query for each label", "c = C[label]"),
        "cat": Words("with_queries", "Queries prepended to the patches", "x = [c; x]"),
        "of_patch.linear": Words("patch_map", "Projected patches", "k = x W + b"),
        "of_query.linear": Words("query_map", "Projected queries", "q = c W + b"),
        "mul": Words("query_scaled", "Scaled queries", "q ← q / √d"),
        "matmul": Words("match", "Logits of each patch", "lₜᵢ = kₜ · qᵢ"),
    },
    "MaskHead": {"dense.linear": Words("dense", "Hidden layer", "y = x W + b")},
    # of a whole model
    "Model": {
        "output.linear": Words("l", "Logits", "l = x W + b"),
        "distilled.linear": Words("l", "Logits of the distillation token", "l′ = x W + b"),
        "widen.linear": Words("widened", "Embeddings in the model's width", "y = x W + b"),
        "pooler.linear": Words("pooled", "Pooler", "y = x W + b"),
        "pooled_map.linear": Words("mapped", "Linear map of the pooled vector", "y = x W + b"),
        "mul": Words("output.scaled", "Scaled by 1/√d", "x ← x / √d"),
        "tanh": Words("output.tanh", "tanh of the pooled vector", "y = tanh(x)"),
        "add": Words("output.l_sum", "Sum of both logits", "l ← l + l′"),
        "div": Words("output.l_mean", "Mean of both logits", "l ← l / 2"),
        "mean": Words("mean", "Mean of the patches", "m = (x₀ + x₁ + …) / T"),
    },
}
# In a block, outside of its sublayers.
BLOCK_WORDS: dict[str, Words] = {
    "add": Words("sum", "Residual connection", "x ← x + {}"),
    "mul": Words("scaled", "Layer scale", "o ← o · λ"),
}
# Classes whose operations are shown as one step, or not at all where no table has words for it.
COLLAPSED = {"Sinusoidal", "SinusoidalGrid", "LearnedGrid", "Rotary", "RotaryGrid", "RelativeBias"}

# Section titles by the path of a module.
SECTIONS = {
    "source_embedding": "Source embedding",
    "target_embedding": "Target embedding",
    "embedding": "Embedding",
    "encoder_norm": "Final norm of the encoder",
    "decoder_norm": "Final norm of the decoder",
    "norm": "Final norm",
    "encoder": "Initial state of the decoder",
    "decoder.attention": "Attention",
    "pooler.attention": "Pooling by a learned query",
    "widen": "Wider embeddings",
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
