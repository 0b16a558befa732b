"""The kernel for additive attention: its error, its speed and its memory beside torch.compile and eager torch.

    python benchmarks/concat.py                  # everything: about two minutes on an H200
    python benchmarks/concat.py --only errors    # or variants, peers, shapes, long
    python benchmarks/concat.py --device cpu     # a few small shapes in Triton's interpreter: whether the script runs

Speed is in elements, B·H·T·S·hidden, a second; masked ones are not counted. Times are medians, through `attend`, linear
maps included. Errors are ‖out − exact‖ / ‖exact‖ against the definition in float64 on the same, already rounded,
numbers; beside each the error of the definition itself in the same dtype. Both get parameters in that dtype.
"""

import argparse
import copy
import os
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

ONLY = ("errors", "variants", "peers", "shapes", "long")
# Rows of the own side, of the other, warps, registers of a thread (None: as the compiler likes).
FORWARD = [
    (64, 128, 4, None),
    (64, 64, 4, 168),
    (64, 64, 4, None),
    (64, 128, 8, 128),
    (64, 256, 8, None),
    (128, 128, 8, None),
]
BACKWARD = [
    (64, 64, 4, None),
    (64, 64, 4, 168),
    (64, 64, 4, 128),
    (64, 128, 4, None),
    (64, 32, 4, 168),
    (128, 64, 8, None),
]
SECONDS = {"errors": 40, "variants": 70, "peers": 45, "shapes": 40, "long": 30}


class Given:
    """Queries, keys, values, a score and a mask, and what flows back."""

    def __init__(self, B, H, G, T, S, D, hidden, dtype, device, mask="none", Dv=None, heads=False, seed=0, scale=1.0):
        from regard.attention import Concat, causal, padding, window

        Dv = Dv or D
        torch.manual_seed(seed)
        shapes = ((B, H, T, D), scale), ((B, G, S, D), scale), ((B, G, S, Dv), 1.0)
        self.tensors = [(torch.randn(shape, device=device) * f).to(dtype).requires_grad_() for shape, f in shapes]
        self.grad = torch.randn(B, H, T, Dv, device=device).to(dtype)
        self.score = Concat(D, D, hidden=hidden, heads=H if heads else None).to(device, dtype)
        lengths = torch.linspace(S // 2, S, B, device=device).int()
        masks = {
            "none": None,
            "causal": causal(),
            "lengths": padding(lengths),
            "window": window(max(1, S // 8)),
            "causal+lengths": causal() & padding(lengths),
        }
        self.mask = masks[mask]
        part = {"none": 1, "causal": 0.5, "lengths": 0.75, "window": 1 / 8, "causal+lengths": 0.46}[mask]
        self.elements = B * H * T * S * hidden * part

    def forward(self, function: Callable[..., Tensor]) -> Tensor:
        return function(*self.tensors, self.score, self.mask)

    def both(self, function: Callable[..., Tensor]) -> list[Tensor]:
        out = self.forward(function)
        return [out, *torch.autograd.grad(out, [*self.tensors, *self.score.parameters()], self.grad)]

    def exact(self) -> "Given":
        double = copy.copy(self)
        double.tensors = [x.detach().double().requires_grad_() for x in self.tensors]
        double.score, double.grad = copy.deepcopy(self.score).double(), self.grad.double()
        return double


def ours(q, k, v, score, mask):
    from regard.attention import attend, use

    with use("concat"):
        return attend(q, k, v, score=score, mask=mask)


def formula(q, k, v, score, mask):
    from regard.attention.reference import reference

    return reference(q, k, v, score, mask)


def errors(device: str, until: float) -> Iterator[list[str]]:
    yield ["shape", "dtype", "mask", "out", "eager", "q", "eager", "k", "eager", "v", "eager", "parameters", "eager"]
    small = device == "cpu"
    cases = [
        # B, H, G, T, S, D, Dv, hidden, heads of the score's own, mask, scale of q and k
        (2, 2, 1, 33, 45, 16, 16, 16, True, "lengths", 1.0),
        (1, 1, 1, 20, 20, 8, 24, 20, False, "causal", 20.0),
    ]
    if not small:
        cases += [
            (2, 4, 2, 333, 257, 64, 64, 64, False, "none", 1.0),
            (2, 4, 4, 256, 256, 64, 64, 64, True, "causal", 1.0),
            (3, 4, 1, 130, 517, 48, 96, 36, False, "causal+lengths", 1.0),
            (1, 2, 2, 300, 300, 128, 256, 128, False, "window", 1.0),
            (2, 1, 1, 40, 50, 64, 200, 1024, False, "lengths", 1.0),
            (4, 2, 2, 1, 300, 64, 64, 512, False, "none", 1.0),
            (1, 2, 2, 256, 256, 64, 64, 64, False, "none", 6.0),
            (1, 2, 2, 256, 256, 64, 64, 64, False, "none", 40.0),
            (1, 2, 2, 1024, 1024, 64, 64, 64, False, "none", 1.0),
        ]
    for dtype in (torch.bfloat16, torch.float16, torch.float32)[1 if small else 0 :]:
        for i, (B, H, G, T, S, D, Dv, hidden, heads, mask, scale) in enumerate(cases):
            if time.time() > until:
                yield ["out of time"]
                return
            given = Given(B, H, G, T, S, D, hidden, dtype, device, mask, Dv, heads, seed=i, scale=scale)
            exact = given.exact().both(formula)
            found, eager = ([error(x, y) for x, y in zip(given.both(f), exact)] for f in (ours, formula))
            # The largest of the parameters' errors is the last.
            pairs = [*zip(found[:4], eager[:4]), (max(found[4:]), max(eager[4:]))]
            worse = any(x > max(1.2 * y, 1e-5) for x, y in pairs)
            sizes = f"{B}×{H}/{G} {T}×{S} {D}/{Dv}/{hidden}" + ("" if scale == 1 else f" ·{scale:g}")
            numbers = [f"{x:.1e}" for pair in pairs for x in pair]
            yield [sizes, str(dtype).removeprefix("torch."), mask, *numbers, "WORSE" if worse else ""]


def error(one: Tensor, other: Tensor) -> float:
    if not torch.isfinite(one).all():
        return float("inf")
    return float((one.detach().double() - other).norm() / other.norm())


def milliseconds(function: Callable[[], object], repeat: float = 150) -> float:
    from triton.testing import do_bench

    return do_bench(function, warmup=25, rep=repeat, return_mode="median")


def peak(function: Callable[[], object]) -> float:
    """GiB beyond what was there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def times(given: Given, function: Callable[..., Tensor]) -> list[str]:
    """Forward (without gradients), forward and backward, elements a second, and the memory of each."""

    def alone() -> Tensor:
        with torch.no_grad():
            return given.forward(function)

    try:
        one, both = milliseconds(alone), milliseconds(lambda: given.both(function))
        peaks = peak(alone), peak(lambda: given.both(function))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return ["out of memory"]
    rate = given.elements / 1e9
    return [f"{one:.3f}", f"{both:.3f}", f"{rate / one:.2f}", f"{rate / both:.2f}", *(f"{x:.3f}" for x in peaks)]


TIMES = ["forward ms", "with backward ms", "T elements/s", "with backward", "GiB", "GiB"]
MAIN = dict(B=8, H=8, G=8, T=1024, S=1024, D=64, hidden=64, dtype=torch.bfloat16, device="cuda")


def variants(device: str, until: float) -> Iterator[list[str]]:
    """Tile sizes at the main shape, in the order of FORWARD and BACKWARD; each pass by itself."""
    from regard.attention.kernels import concat

    yield ["pass", "rows, columns, warps, registers", "ms", "T elements/s"]
    given = Given(**MAIN)
    usual = concat.FORWARD, concat.BACKWARD
    with torch.no_grad():
        q, k, v = given.tensors
        a, b, _ = given.score.fold(q, k)
        a, b = a.mT.contiguous(), b.mT.contiguous()
        w = given.score.weight_a.float().reshape(1, -1)
        rest = (None, None, None, 1024, 1024, False, 0)
        kept = concat.attend_concat(a, b, w, v, *rest)
        for name, tilings in (("forward", FORWARD), ("backward", BACKWARD)):
            for tiling in tilings:
                if time.time() > until:
                    yield ["out of time"]
                    break
                try:
                    if name == "forward":
                        concat.FORWARD = {256: concat.Tiling(*tiling)}
                        ms = milliseconds(lambda: concat.attend_concat(a, b, w, v, *rest))
                    else:
                        concat.BACKWARD = {256: concat.Tiling(*tiling)}
                        ms = milliseconds(lambda: concat.attend_concat_backward(given.grad, a, b, w, v, *kept, *rest))
                except Exception as problem:  # too many registers, or too much shared memory: a row like any other
                    yield [name, str(tiling), str(problem)[:60]]
                    continue
                yield [name, str(tiling), f"{ms:.3f}", f"{given.elements / 1e9 / ms:.2f}"]
            concat.FORWARD, concat.BACKWARD = usual


def peers(device: str, until: float) -> Iterator[list[str]]:
    """Ours, compiled and eager at two shapes."""
    yield ["shape", "entrant", *TIMES]
    for B, N in ((8, 1024), (2, 4096)):
        given = Given(**MAIN | dict(B=B, T=N, S=N))
        entrants = {"ours": ours, "torch.compile": torch.compile(formula), "eager": formula}
        for name, function in entrants.items():
            if time.time() > until:
                yield ["out of time"]
                return
            yield [f"B{B} H8 N{N} D64", name, *times(given, function)]


def shapes(device: str, until: float) -> Iterator[list[str]]:
    """Widths, lengths, masks, dtypes."""
    yield ["shape", "mask", "dtype", *TIMES]
    many = [
        *(dict(D=D, hidden=D) for D in (16, 32, 128, 256)),
        dict(B=1, H=8, G=8, T=512, S=512, D=64, hidden=1024),
        *(dict(B=max(1, 8 * 1024**2 // N**2), T=N, S=N) for N in (128, 512, 2048, 8192)),
        *(dict(mask=mask) for mask in ("causal", "lengths", "causal+lengths", "window")),
        dict(G=2),
        dict(dtype=torch.float32),
        dict(dtype=torch.float16),
        dict(B=64, H=1, G=1, T=1, S=64, D=512, hidden=512),
    ]
    for changes in many:
        if time.time() > until:
            yield ["out of time"]
            return
        sizes = MAIN | changes
        given = Given(**sizes)
        shape = "B{B} H{H}/{G} {T}×{S} D{D} hidden {hidden}".format(**sizes)
        dtype = str(sizes["dtype"]).removeprefix("torch.")
        yield [shape, str(sizes.get("mask", "none")), dtype, *times(given, ours)]


def long(device: str, until: float) -> Iterator[list[str]]:
    """One head of 65536 queries and keys: one pass, since it takes long."""
    yield ["shape", "forward ms", "with backward ms", "T elements/s", "with backward", "GiB"]
    given = Given(**MAIN | dict(B=1, H=1, G=1, T=65536, S=65536))
    found = []
    for function in (lambda: given.forward(ours), lambda: given.both(ours)):
        function()
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - start))
    rates = [f"{given.elements / 1e9 / ms:.2f}" for ms in found]
    yield ["B1 H1 N65536 D64", *(f"{ms:.1f}" for ms in found), *rates, f"{peak(lambda: given.both(ours)):.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=ONLY, default=ONLY)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    if given.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        given.only = ["errors"]
    torch.backends.cuda.matmul.allow_tf32 = False
    parts = dict(errors=errors, variants=variants, peers=peers, shapes=shapes, long=long)
    tables = {}
    for name in given.only:
        print(f"{name} …", flush=True)
        tables[name] = []
        start = time.time()
        for row in parts[name](given.device, start + SECONDS[name]):
            print("  ", *row, flush=True)
            tables[name].append(row)
        torch._dynamo.reset()
    for name, (head, *rows) in tables.items():
        print(f"\n{name}\n\n| {' | '.join(head)} |\n|{' --- |' * len(head)}")
        for row in rows:
            print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
