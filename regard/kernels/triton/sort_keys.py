"""Triton functions that select the largest elements: integer keys that order (value, index) pairs."""

from regard.kernels.triton.support import tl, triton

LOWEST_KEY = tl.constexpr(-0x7FFFFFFFFFFFFFFF)


@triton.jit
def make_keys(x, index):
    """Integers of 64 bits ordered like (x, −index). NaN is the largest x."""
    bits = tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def split_keys(keys):
    """x and index of `make_keys`."""
    ordered = (keys >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True), 0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def largest_keys(keys, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The COUNT largest of different keys in descending order; then LOWEST_KEY."""
    j = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), LOWEST_KEY, tl.int64)
    for i in tl.static_range(COUNT):
        top = tl.max(keys, 0)
        largest = tl.where(j == i, top, largest)
        keys = tl.where(keys == top, LOWEST_KEY, keys)
    return largest
