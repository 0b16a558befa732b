"""The kernel for additive attention: its error, its speed and its memory beside torch.compile and eager torch.

    python benchmarks/concat.py                  # everything: about two minutes on an H200
    python benchmarks/concat.py --only errors    # or variants, peers, shapes, short, long
    python benchmarks/concat.py --small          # errors of a few small shapes; run twice, the second time, when all
                                                 # is compiled, under compute-sanitizer
    python benchmarks/concat.py --device cpu     # a few small shapes in Triton's interpreter: whether the script runs

Speed is in elements, B·H·T·S·hidden, a second; masked ones are not counted. Times are medians, through `attend`, linear
maps included. Errors are ‖out − exact‖ / ‖exact‖ against the definition in float64 on the same, already rounded,
numbers; beside each the error of the definition itself in the same dtype. Both get parameters in that dtype.
"""

import argparse
import contextlib
import copy
import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import torch
from torch import Tensor

ONLY = ("errors", "variants", "peers", "shapes", "short", "long")
# Rows of the own side, of the other, warps, registers of a thread (None: as the compiler likes).
FORWARD = [(64, 128, 4, None), (64, 64, 4, 168), (64, 128, 8, 128)]
BACKWARD = [(64, 128, 4, None), (64, 64, 4, None), (64, 64, 4, 168), (32, 128, 2, None)]
SECONDS = {"errors": 25, "variants": 40, "peers": 40, "shapes": 60, "short": 20, "long": 10}


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


def error_cases(device: str, small_only: bool = False) -> list[dict]:
    small = [
        dict(B=2, H=2, G=1, T=33, S=45, D=16, hidden=16, heads=True, mask="lengths"),
        dict(B=1, H=1, G=1, T=20, S=20, D=8, Dv=24, hidden=20, mask="causal", scale=20.0),
    ]
    large = [
        dict(B=2, H=4, G=2, T=333, S=257, D=64, hidden=64),
        dict(B=1, H=2, G=2, T=256, S=256, D=64, hidden=64, scale=6.0),
        dict(B=2, H=1, G=1, T=40, S=50, D=64, Dv=200, hidden=1024, mask="lengths"),
        dict(B=3, H=4, G=1, T=130, S=517, D=48, Dv=96, hidden=36, mask="causal+lengths"),
        dict(B=1, H=2, G=2, T=300, S=300, D=128, Dv=256, hidden=128, mask="window"),
        dict(B=4, H=2, G=2, T=1, S=300, D=64, hidden=512),
        dict(B=2, H=4, G=4, T=256, S=256, D=64, hidden=64, heads=True, mask="causal"),
        dict(B=1, H=2, G=2, T=256, S=256, D=64, hidden=64, scale=40.0),
        dict(B=1, H=2, G=2, T=1024, S=1024, D=64, hidden=64),
    ]
    if device == "cpu":
        return [case | dict(dtype=dtype, device=device) for dtype in (torch.float16, torch.float32) for case in small]
    if small_only:
        few = [small[0], dict(B=1, H=2, G=1, T=130, S=140, D=64, hidden=8, mask="causal")]
        return [case | dict(dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.float32) for case in few]
    some = {torch.bfloat16: [*small, *large], torch.float16: large[:3], torch.float32: large[:5]}
    return [case | dict(dtype=dtype, device=device) for dtype, cases in some.items() for case in cases]


def errors(device: str, until: float, small_only: bool = False) -> Iterator[list[str]]:
    yield ["shape", "dtype", "mask", "out", "eager", "q", "eager", "k", "eager", "v", "eager", "parameters", "eager"]
    for i, case in enumerate(error_cases(device, small_only)):
        if time.time() > until:
            yield ["out of time"]
            return
        given = Given(**case, seed=i)
        exact = given.exact().both(formula)
        found, eager = ([error(x, y) for x, y in zip(given.both(f), exact)] for f in (ours, formula))
        # The largest of the parameters' errors is the last.
        pairs = [*zip(found[:4], eager[:4]), (max(found[4:]), max(eager[4:]))]
        worse = any(x > max(1.2 * y, 1e-5) for x, y in pairs)
        sizes = "{B}×{H}/{G} {T}×{S} {D}/{Dv}/{hidden} ·{scale:g}".format(**dict(Dv=case["D"], scale=1.0) | case)
        numbers = [f"{x:.1e}" for pair in pairs for x in pair]
        dtype = str(case["dtype"]).removeprefix("torch.")
        yield [sizes, dtype, case.get("mask", "none"), *numbers, "WORSE" if worse else ""]


def error(one: Tensor, other: Tensor) -> float:
    one, other = one.detach(), other.detach()
    if not torch.isfinite(one).all():
        return float("inf")
    return float((one.double() - other).norm() / other.norm())


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
    from regard.kernels import concat_cuda

    yield ["pass", "rows, columns, warps, registers", "ms", "T elements/s", "error"]
    given = Given(**MAIN)
    with torch.no_grad():
        q, k, v = given.tensors
        a, b = (concat_cuda.project(x, matrix) for x, matrix in zip((q, k), given.score.matrices))
        w = given.score.weight_a.float().reshape(1, -1)
        rest = (None, None, None, given.tensors[0].shape[2], given.tensors[1].shape[2], False, 0)
        kept = concat_cuda.concat_forward(a, b, w, v, *rest)
        passes = {
            "FORWARD": lambda: concat_cuda.concat_forward(a, b, w, v, *rest)[:1],
            "BACKWARD": lambda: concat_cuda.concat_backward(given.grad, a, b, w, v, *kept, *rest),
        }
        for name, variants in (("FORWARD", FORWARD), ("BACKWARD", BACKWARD)):
            usual = passes[name]()
            for tiling in variants:
                what = [name.lower(), str(tiling)]
                if time.time() > until:
                    yield [*what, "out of time"]
                    continue
                with tiled(name, tiling):
                    try:
                        # Wrong numbers are no faster ones: beside those of the tiling that is in use.
                        off = max(error(x, y.double()) for x, y in zip(passes[name](), usual))
                        ms = milliseconds(passes[name])
                    except Exception as problem:  # too many registers, or too much shared memory: a row like any other
                        yield [*what, str(problem)[:60]]
                        continue
                yield [*what, f"{ms:.3f}", f"{given.elements / 1e9 / ms:.2f}", f"{off:.0e}"]


@contextlib.contextmanager
def tiled(table: str, tiling: tuple) -> Iterator[None]:
    from regard.kernels import concat_cuda

    usual = getattr(concat_cuda, table)
    setattr(concat_cuda, table, {256: concat_cuda.ConcatTiling(*tiling)})
    try:
        yield
    finally:
        setattr(concat_cuda, table, usual)


def peers(device: str, until: float) -> Iterator[list[str]]:
    """Ours, compiled and eager at two shapes."""
    return beside([dict(B=B, T=N, S=N) for B, N in ((8, 1024), (2, 4096))], True, until)


def short_cases() -> list[dict]:
    recurrent = dict(H=1, G=1, S=30, D=256, hidden=512)
    return [
        *(recurrent | dict(B=B, T=T) for B, T in ((64, 30), (256, 30), (64, 1))),
        dict(B=800, T=30, S=30),
        dict(B=16, T=128, S=128),
    ]


def short(device: str, until: float) -> Iterator[list[str]]:
    """Ours and eager for short sequences, as recurrent models have them: launching takes longer than computing."""
    return beside(short_cases(), False, until)


def beside(changes: list[dict], compiled: bool, until: float) -> Iterator[list[str]]:
    yield ["shape", "entrant", *TIMES]
    for change in changes:
        given = Given(**MAIN | change)
        entrants = {"ours": ours} | ({"torch.compile": torch.compile(formula)} if compiled else {}) | {"eager": formula}
        for name, function in entrants.items():
            if time.time() > until:
                yield ["out of time"]
                return
            yield [shape_of(MAIN | change), name, *times(given, function)]


def shape_of(case: dict) -> str:
    return "B{B} H{H}/{G} {T}×{S} D{D} hidden {hidden}".format(**case)


def shape_cases() -> list[dict]:
    changes = [
        *(dict(mask=mask) for mask in ("causal", "lengths", "causal+lengths", "window")),
        *(dict(B=max(1, 8 * 1024**2 // N**2), T=N, S=N) for N in (128, 512, 2048, 8192)),
        *(dict(D=D, hidden=D) for D in (16, 32, 128, 256)),
        dict(dtype=torch.float32),
        dict(dtype=torch.float16),
        dict(G=2),
        dict(B=1, T=512, S=512, D=64, hidden=1024),
        dict(B=64, H=1, G=1, T=30, S=30, D=512, hidden=512),
        dict(B=64, H=1, G=1, T=1, S=64, D=512, hidden=512),
    ]
    return [MAIN | one for one in changes]


def shapes(device: str, until: float) -> Iterator[list[str]]:
    """Masks, lengths, widths, dtypes."""
    yield ["shape", "mask", "dtype", *TIMES]
    for case in shape_cases():
        if time.time() > until:
            yield ["out of time"]
            return
        if case["D"] > 256:  # values are narrower
            case["Dv"] = 256
        dtype = str(case["dtype"]).removeprefix("torch.")
        yield [shape_of(case), str(case.get("mask", "none")), dtype, *times(Given(**case), ours)]


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


def compile_all(parts: list[str]) -> None:
    """Every kernel that is going to be asked for, by many processes at once: what they compile is kept on disk."""
    tasks: list[tuple[dict, str, tuple | None]] = [(MAIN, "", None)]
    if "variants" in parts:
        few = MAIN | dict(B=1, H=1, G=1)
        tasks += [(few, "FORWARD", one) for one in FORWARD] + [(few, "BACKWARD", one) for one in BACKWARD]
    tasks += [(case, "", None) for case in (error_cases("cuda") if "errors" in parts else [])]
    tasks += [(case, "", None) for case in (shape_cases() if "shapes" in parts else [])]
    tasks += [(MAIN | case, "", None) for case in (short_cases() if "short" in parts else [])]
    workers = min(12, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, tasks))


def compile_one(task: tuple[dict, str, tuple | None]) -> None:
    case, table, tiling = task
    try:
        with contextlib.nullcontext() if tiling is None else tiled(table, tiling):
            Given(**dict(Dv=min(case["D"], 256)) | case).both(ours)
            torch.cuda.synchronize()
    except Exception as problem:  # whoever asks for it meets it again
        print("  ", task, str(problem)[:100], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=ONLY, default=ONLY)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="errors alone, of small shapes")
    given = parser.parse_args()
    if given.small:
        given.only = ["errors"]
    if given.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        given.only = ["errors"]
    elif not given.small:
        print("compiling …", flush=True)
        start = time.time()
        compile_all(given.only)
        print(f"   {time.time() - start:.0f} s", flush=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    parts = dict(
        errors=functools.partial(errors, small_only=given.small),
        variants=variants,
        peers=peers,
        shapes=shapes,
        short=short,
        long=long,
    )
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
