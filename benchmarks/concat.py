"""Kernel of additive attention: error, speed and memory, against torch.compile and eager torch.

    python benchmarks/concat.py                  # all parts: about two minutes on an H200
    python benchmarks/concat.py --only errors    # or variants, peers, shapes, short, long
    python benchmarks/concat.py --small          # errors of a few small shapes; once the kernels are compiled, run
                                                 # it again under compute-sanitizer
    python benchmarks/concat.py --device cpu     # a few small shapes in Triton's interpreter, to test the script

Speed is in elements, B·H·T·S·hidden, per second, without masked ones. Times are medians, through `attend`, including
linear layers. Errors are ‖out − exact‖ / ‖exact‖ against the reference in float64 on the same, already rounded, inputs;
next to each is the error of the eager formula in the same dtype. Both get parameters in that dtype.
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
# Rows, columns, warps, registers per thread (None: chosen by the compiler).
FORWARD = [(64, 128, 4, None), (64, 64, 4, 168), (64, 128, 8, 128)]
BACKWARD = [(64, 128, 4, None), (64, 64, 4, None), (64, 64, 4, 168), (32, 128, 2, None)]
SECONDS = {"errors": 25, "variants": 40, "peers": 40, "shapes": 60, "short": 20, "long": 10}


class Inputs:
    """Queries, keys, values, score, mask, and the gradient of the output."""

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
        fraction = {"none": 1, "causal": 0.5, "lengths": 0.75, "window": 1 / 8, "causal+lengths": 0.46}[mask]
        self.elements = B * H * T * S * hidden * fraction

    def forward(self, function: Callable[..., Tensor]) -> Tensor:
        return function(*self.tensors, self.score, self.mask)

    def forward_backward(self, function: Callable[..., Tensor]) -> list[Tensor]:
        out = self.forward(function)
        return [out, *torch.autograd.grad(out, [*self.tensors, *self.score.parameters()], self.grad)]

    def exact(self) -> "Inputs":
        double = copy.copy(self)
        double.tensors = [x.detach().double().requires_grad_() for x in self.tensors]
        double.score, double.grad = copy.deepcopy(self.score).double(), self.grad.double()
        return double


def regard_attention(q, k, v, score, mask):
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
        selected = [small[0], dict(B=1, H=2, G=1, T=130, S=140, D=64, hidden=8, mask="causal")]
        return [
            case | dict(dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.float32) for case in selected
        ]
    by_dtype = {torch.bfloat16: [*small, *large], torch.float16: large[:3], torch.float32: large[:5]}
    return [case | dict(dtype=dtype, device=device) for dtype, cases in by_dtype.items() for case in cases]


def errors(device: str, until: float, small_only: bool = False) -> Iterator[list[str]]:
    yield ["shape", "dtype", "mask", "out", "eager", "q", "eager", "k", "eager", "v", "eager", "parameters", "eager"]
    for i, case in enumerate(error_cases(device, small_only)):
        if time.time() > until:
            yield ["out of time"]
            return
        inputs = Inputs(**case, seed=i)
        exact = inputs.exact().forward_backward(formula)
        actual, eager = (
            [error(x, y) for x, y in zip(inputs.forward_backward(f), exact)] for f in (regard_attention, formula)
        )
        # The last pair is the largest error of the parameters.
        pairs = [*zip(actual[:4], eager[:4]), (max(actual[4:]), max(eager[4:]))]
        is_worse = any(x > max(1.2 * y, 1e-5) for x, y in pairs)
        sizes = "{B}×{H}/{G} {T}×{S} {D}/{Dv}/{hidden} ·{scale:g}".format(**dict(Dv=case["D"], scale=1.0) | case)
        cells = [f"{x:.1e}" for pair in pairs for x in pair]
        dtype = str(case["dtype"]).removeprefix("torch.")
        yield [sizes, dtype, case.get("mask", "none"), *cells, "WORSE" if is_worse else ""]


def error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach(), expected.detach()
    if not torch.isfinite(actual).all():
        return float("inf")
    return float((actual.double() - expected).norm() / expected.norm())


def milliseconds(function: Callable[[], object], repeat: float = 150) -> float:
    from triton.testing import do_bench

    return do_bench(function, warmup=25, rep=repeat, return_mode="median")


def peak(function: Callable[[], object]) -> float:
    """Peak memory of a call in GiB, minus the memory in use before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def times(inputs: Inputs, function: Callable[..., Tensor]) -> list[str]:
    """Forward (without gradients), forward and backward, elements per second, and the memory of each."""

    def run_forward() -> Tensor:
        with torch.no_grad():
            return inputs.forward(function)

    try:
        forward, both = milliseconds(run_forward), milliseconds(lambda: inputs.forward_backward(function))
        peaks = peak(run_forward), peak(lambda: inputs.forward_backward(function))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return ["out of memory"]
    rate = inputs.elements / 1e9
    return [
        f"{forward:.3f}",
        f"{both:.3f}",
        f"{rate / forward:.2f}",
        f"{rate / both:.2f}",
        *(f"{x:.3f}" for x in peaks),
    ]


TIMES = ["forward ms", "with backward ms", "T elements/s", "with backward", "GiB", "GiB"]
MAIN = dict(B=8, H=8, G=8, T=1024, S=1024, D=64, hidden=64, dtype=torch.bfloat16, device="cuda")


def variants(device: str, until: float) -> Iterator[list[str]]:
    """Tile sizes at the main shape, in the order of FORWARD and BACKWARD; forward and backward separately."""
    from regard.kernels.triton import concat

    yield ["pass", "rows, columns, warps, registers", "ms", "T elements/s", "error"]
    inputs = Inputs(**MAIN)
    with torch.no_grad():
        q, k, v = inputs.tensors
        a, b = (concat.project(x, matrix) for x, matrix in zip((q, k), inputs.score.matrices))
        w = inputs.score.weight_a.float().reshape(1, -1)
        rest = (None, None, None, inputs.tensors[0].shape[2], inputs.tensors[1].shape[2], False, 0)
        saved = concat.concat_forward(a, b, w, v, *rest)
        passes = {
            "FORWARD": lambda: concat.concat_forward(a, b, w, v, *rest)[:1],
            "BACKWARD": lambda: concat.concat_backward(inputs.grad, a, b, w, v, *saved, *rest),
        }
        for name, variants in (("FORWARD", FORWARD), ("BACKWARD", BACKWARD)):
            expected = passes[name]()
            for tiling in variants:
                label = [name.lower(), str(tiling)]
                if time.time() > until:
                    yield [*label, "out of time"]
                    continue
                with override_tiling(name, tiling):
                    try:
                        # Compared with the default tiling, since wrong results must not count.
                        deviation = max(error(x, y.double()) for x, y in zip(passes[name](), expected))
                        ms = milliseconds(passes[name])
                    except Exception as problem:  # too many registers, or too much shared memory
                        yield [*label, str(problem)[:60]]
                        continue
                yield [*label, f"{ms:.3f}", f"{inputs.elements / 1e9 / ms:.2f}", f"{deviation:.0e}"]


@contextlib.contextmanager
def override_tiling(table: str, tiling: tuple) -> Iterator[None]:
    """Use one tiling temporarily."""
    from regard.kernels.triton import concat

    default = getattr(concat, table)
    setattr(concat, table, {256: concat.ConcatTiling(*tiling)})
    try:
        yield
    finally:
        setattr(concat, table, default)


def peers(device: str, until: float) -> Iterator[list[str]]:
    """Regard, compiled and eager formula at two shapes."""
    return compare([dict(B=B, T=N, S=N) for B, N in ((8, 1024), (2, 4096))], True, until)


def short_cases() -> list[dict]:
    recurrent = dict(H=1, G=1, S=30, D=256, hidden=512)
    return [
        *(recurrent | dict(B=B, T=T) for B, T in ((64, 30), (256, 30), (64, 1))),
        dict(B=800, T=30, S=30),
        dict(B=16, T=128, S=128),
    ]


def short(device: str, until: float) -> Iterator[list[str]]:
    """Regard and the eager formula for short sequences, as in recurrent models: launch overhead dominates."""
    return compare(short_cases(), False, until)


def compare(changes: list[dict], compiled: bool, until: float) -> Iterator[list[str]]:
    yield ["shape", "implementation", *TIMES]
    for change in changes:
        inputs = Inputs(**MAIN | change)
        implementations = {"Regard": regard_attention}
        implementations |= ({"torch.compile": torch.compile(formula)} if compiled else {}) | {"eager": formula}
        for name, function in implementations.items():
            if time.time() > until:
                yield ["out of time"]
                return
            yield [describe_shape(MAIN | change), name, *times(inputs, function)]


def describe_shape(case: dict) -> str:
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
    return [MAIN | change for change in changes]


def shapes(device: str, until: float) -> Iterator[list[str]]:
    """Masks, lengths, widths, dtypes."""
    yield ["shape", "mask", "dtype", *TIMES]
    for case in shape_cases():
        if time.time() > until:
            yield ["out of time"]
            return
        if case["D"] > 256:  # the value width is limited to 256
            case["Dv"] = 256
        dtype = str(case["dtype"]).removeprefix("torch.")
        yield [describe_shape(case), str(case.get("mask", "none")), dtype, *times(Inputs(**case), regard_attention)]


def long(device: str, until: float) -> Iterator[list[str]]:
    """One head with 65536 queries and keys, timed once."""
    yield ["shape", "forward ms", "with backward ms", "T elements/s", "with backward", "GiB"]
    inputs = Inputs(**MAIN | dict(B=1, H=1, G=1, T=65536, S=65536))
    timings = []
    for function in (lambda: inputs.forward(regard_attention), lambda: inputs.forward_backward(regard_attention)):
        function()
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        timings.append(1e3 * (time.perf_counter() - start))
    rates = [f"{inputs.elements / 1e9 / ms:.2f}" for ms in timings]
    memory = peak(lambda: inputs.forward_backward(regard_attention))
    yield ["B1 H1 N65536 D64", *(f"{ms:.1f}" for ms in timings), *rates, f"{memory:.3f}"]


def compile_all(parts: list[str]) -> None:
    """Compile all needed kernels in parallel processes; the compiled kernels are cached on disk."""
    tasks: list[tuple[dict, str, tuple | None]] = [(MAIN, "", None)]
    if "variants" in parts:
        small = MAIN | dict(B=1, H=1, G=1)
        tasks += [(small, "FORWARD", tiling) for tiling in FORWARD]
        tasks += [(small, "BACKWARD", tiling) for tiling in BACKWARD]
    tasks += [(case, "", None) for case in (error_cases("cuda") if "errors" in parts else [])]
    tasks += [(case, "", None) for case in (shape_cases() if "shapes" in parts else [])]
    tasks += [(MAIN | case, "", None) for case in (short_cases() if "short" in parts else [])]
    workers = min(12, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, tasks))


def compile_one(task: tuple[dict, str, tuple | None]) -> None:
    case, table, tiling = task
    try:
        with contextlib.nullcontext() if tiling is None else override_tiling(table, tiling):
            Inputs(**dict(Dv=min(case["D"], 256)) | case).forward_backward(regard_attention)
            torch.cuda.synchronize()
    except Exception as problem:  # will be raised again when the kernel is used
        print("  ", task, str(problem)[:100], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=ONLY, default=ONLY)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="only errors, of small shapes")
    options = parser.parse_args()
    if options.small:
        options.only = ["errors"]
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        options.only = ["errors"]
    elif not options.small:
        print("compiling …", flush=True)
        start = time.time()
        compile_all(options.only)
        print(f"   {time.time() - start:.0f} s", flush=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    parts = dict(
        errors=functools.partial(errors, small_only=options.small),
        variants=variants,
        peers=peers,
        shapes=shapes,
        short=short,
        long=long,
    )
    tables = {}
    for name in options.only:
        print(f"{name} …", flush=True)
        tables[name] = []
        start = time.time()
        for row in parts[name](options.device, start + SECONDS[name]):
            print("  ", *row, flush=True)
            tables[name].append(row)
        torch._dynamo.reset()
    for name, (head, *rows) in tables.items():
        print(f"\n{name}\n\n| {' | '.join(head)} |\n|{' --- |' * len(head)}")
        for row in rows:
            print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
