"""The rules that tie the width of a model to its heads."""

from regard.errors import RegardError


def check_heads(width: int, heads: int, kv_heads: int = 0, head_width: int = 0, *, rotary: bool = False) -> None:
    """Refuse numbers of heads that do not fit the width; of `kv_heads` and `head_width` 0 means the usual.

    >>> check_heads(10, 4)
    Traceback (most recent call last):
    regard.errors.RegardError: model.width is 10; it must be a multiple of model.heads (4). Change one of them.
    """
    if width % heads and not head_width:
        raise RegardError(
            f"model.width is {width}; it must be a multiple of model.heads ({heads}).", "Change one of them."
        )
    if kv_heads and heads % kv_heads:
        raise RegardError(f"model.kv_heads is {kv_heads}; it must divide model.heads ({heads}).", "Change one of them.")
    head_width = head_width or width // heads
    if rotary and head_width % 2:
        raise RegardError(
            f"A head is {head_width} wide; rotary positions need an even number.",
            "Change model.width, model.heads or model.positions.",
        )
