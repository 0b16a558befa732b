"""Sizes up to which a page has a walk, and up to which a walk has all of a model."""

# Bytes of parameters, embeddings and output layer aside, up to which a walk has all of them.
WHOLE = 8 << 20
# Bytes of a walk, tokens of a text and patches of an image up to which a page has a walk by default.
SMALL, SHORT, FEW = 12 << 20, 64, 256
# Tokens that a walk has at most.
LONGEST = 512
# Bytes up to which a walk has a whole output layer; tokens per position that are named.
WHOLE_OUTPUT, NAMED = 4 << 20, 10
# Bytes up to which a walk has pixels, and what is computed of them before the first block.
PIXELS = 4 << 20
