"""Which tracer is running a model: torch.export or torch.compile."""

import torch


def is_exporting() -> bool:
    """Whether torch.export traces the code.

    In torch 2.11 `torch.compiler.is_exporting()` is also true under torch.compile.

    >>> is_exporting()
    False
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
