"""Size limits of walks: when a page includes one, and how much of a model it contains."""

# Bytes of parameters, without embeddings and output layer, up to which a walk contains the full model.
MAX_MODEL_BYTES = 8 << 20
# Bytes of a walk, tokens of a text and patches of an image up to which a page includes a walk by default.
MAX_DEFAULT_BYTES, MAX_DEFAULT_TOKENS, MAX_DEFAULT_PATCHES = 12 << 20, 64, 256
# Tokens of a walk.
MAX_TOKENS = 512
# Bytes up to which a walk contains the full output layer; named output tokens per position.
MAX_OUTPUT_BYTES, TOP_TOKENS = 4 << 20, 10
# Bytes up to which a walk contains the pixels and the computation of the patch embeddings.
MAX_PIXEL_BYTES = 4 << 20
