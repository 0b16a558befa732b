"""Out-of-memory errors: recognized on all devices, and raised as one exception that the trainer handles."""

import contextlib
import sys
import traceback
from collections.abc import Iterator

import torch

from regard.errors import RegardError


class BatchTooLargeError(Exception):
    """A forward or backward pass ran out of memory; the weights are unchanged."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory could not be allocated.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."))
    True
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


@contextlib.contextmanager
def detect_out_of_memory() -> Iterator[None]:
    """Raise out-of-memory errors as BatchTooLargeError. Activations that their tracebacks refer to are freed."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
        raise BatchTooLargeError from None


@contextlib.contextmanager
def refuse_to_split(step: int, rank: int) -> Iterator[None]:
    """Make out of memory an error, for passes in which other ranks already exchange weights or gradients."""
    try:
        with detect_out_of_memory():
            yield
    except BatchTooLargeError:
        raise report_rank_error(cannot_split_error(step), rank) from None


def report_rank_error(error: RegardError, rank: int) -> RegardError:
    """An error of this rank alone, printed here unless it is rank 0, which only notices that the process ended."""
    if rank:
        print(f"regard: rank {rank}: {error}", file=sys.stderr, flush=True)
    return error


def is_batch_too_large(error: BaseException | None) -> bool:
    """Whether an error is, or followed from, a BatchTooLargeError, as in the capture of a CUDA graph."""
    while error is not None and not isinstance(error, BatchTooLargeError):
        error = error.__context__
    return error is not None


def split_notice(step: int, parts: int) -> str:
    """The warning that batches are processed in parts."""
    return (
        f"Step {step}: out of memory. From now on every batch is processed in {parts} parts, with the same result to "
        "rounding. To avoid this, lower train.batch_tokens (images: train.batch_images) and raise train.accumulate by "
        "the same factor in the next run."
    )


def cannot_split_error(step: int) -> RegardError:
    """The error for a batch that cannot be split, since other ranks already exchange weights or gradients."""
    return RegardError(
        f"Out of memory at step {step}, while ranks exchanged weights or gradients.",
        "Run the same command with more ranks, each of which then gets a smaller part of every batch; or start a new "
        "run with a lower train.batch_tokens (images: train.batch_images) and a higher train.accumulate.",
    )


def does_not_fit_error(step: int) -> RegardError:
    """The error for a single sequence or image that does not fit into memory."""
    return RegardError(
        f"Out of memory at step {step}, although the batch was processed one sequence at a time.",
        "Use a smaller model, lower model.max_len (images: data.size or data.longest), or train on a device with more "
        "memory.",
    )
