"""The page's interpreter of graphs agrees with NumPy's, operation by operation, on random inputs."""

import json
import subprocess

import numpy as np
import pytest

from regard.graph.interpreter import OPERATIONS
from tests.viewer.browser import bundle_script, node_program

ROUNDS = 12
SCRIPT = """
import { readFileSync } from "node:fs";
import { execute } from "./trace/operations.js";
import { compute } from "./engine/graph_runner.js";
import { MatrixKernel } from "./engine/graph_runner.js";
const kernel = new MatrixKernel();
const single = (one) => one && { data: Float32Array.from(one.data), shape: one.shape };
const tensor = (one) => one && { data: Float64Array.from(one.data), shape: one.shape };
const cases = JSON.parse(readFileSync("FOLDER/cases.json", "utf-8"));
console.log(JSON.stringify(cases.map(({ op, inputs, options }) => {
  const { data, shape } = execute(op, inputs.map(tensor), options);
  const fast = compute(op, inputs.map(single), options, kernel);
  return { data: [...data], shape, fast: { data: [...fast.data], shape: fast.shape } };
})));
"""


class Random:
    """Random shapes, arrays and options."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def size(self, low=1, high=5) -> int:
        return int(self.random.integers(low, high))

    def shape(self, low=1, high=5) -> tuple[int, ...]:
        return tuple(self.size() for _ in range(self.size(low, high)))

    def array(self, *shape: int) -> np.ndarray:
        return self.random.normal(size=shape or self.shape())

    def positive(self) -> np.ndarray:
        return np.abs(self.array()) + 0.1

    def bools(self, *shape: int) -> np.ndarray:
        return self.random.random(shape or self.shape()) < 0.5

    def ints(self, below: int, *shape: int) -> np.ndarray:
        return self.random.integers(0, below, shape)

    def axis(self, x: np.ndarray) -> int:
        return int(self.random.integers(-x.ndim, x.ndim))

    def partner(self, x: np.ndarray) -> np.ndarray:
        """An array that is broadcast against another one."""
        shape = [size if self.random.random() < 0.6 else 1 for size in x.shape]
        return self.array(*shape[self.size(0, len(shape)) :]) if len(shape) > 1 else self.array(*shape)


def binary(r: Random):
    x = r.array()
    y = r.partner(x)
    return ([x, y] if r.random.random() < 0.5 else [y, x]), {}


def comparison(r: Random):
    x = r.ints(3, *r.shape())
    return ([x, r.ints(3, *x.shape)], {}) if r.random.random() < 0.5 else ([x], {"other": 1})


def unary(r: Random):
    return [r.array()], {}


def positive(r: Random):
    return [r.positive()], {}


def logical(r: Random):
    x = r.bools()
    return [x, r.bools(*x.shape)], {}


def reducing(r: Random):
    x = r.array()
    dims = sorted(r.random.choice(x.ndim, r.size(1, x.ndim + 1), replace=False).tolist())
    return [x], {"dim": dims, "keepdim": bool(r.random.random() < 0.5)}


def norm(r: Random, with_bias: bool):
    x = r.array(*r.shape(1, 4), 4)
    params = [r.array(4) for _ in range(r.size(0, 3 if with_bias else 2))]
    return [x, *params], {"normalized_shape": [4], "eps": 1e-5}


def group_norm(r: Random):
    x = r.array(r.size(), 4, r.size(), r.size(2))
    return [x, r.array(4), r.array(4)], {"num_groups": int(r.random.choice([1, 2, 4])), "eps": 1e-5}


def slice_(r: Random):
    x = r.array()
    axis = r.axis(x)
    start = r.size(0, x.shape[axis])
    return [x], {"dim": axis, "start": start, "end": x.shape[axis] + r.size(0, 3), "step": r.size(1, 3)}


def select(r: Random):
    x = r.array()
    axis = r.axis(x)
    return [x], {"dim": axis, "index": int(r.random.integers(-x.shape[axis], x.shape[axis]))}


def cat(r: Random):
    x = r.array()
    axis = r.axis(x)
    shapes = [tuple(r.size() if i == axis % x.ndim else n for i, n in enumerate(x.shape)) for _ in range(3)]
    return [r.array(*shape) for shape in shapes], {"dim": axis}


def stack(r: Random):
    x = r.array()
    return [x, r.array(*x.shape)], {"dim": int(r.random.integers(-x.ndim - 1, x.ndim + 1))}


def expand(r: Random):
    x = r.partner(r.array())
    shape = [n if n > 1 else r.size() for n in x.shape]
    return [x], {"shape": [r.size(), *shape]}


def gather(r: Random):
    x = r.array()
    axis = r.axis(x)
    rows = r.ints(x.shape[axis], *(r.size() if i == axis % x.ndim else n for i, n in enumerate(x.shape)))
    return [x, rows], {"dim": axis}


def index(r: Random):
    x = r.array(*r.shape(2, 5))
    first = r.size(0, x.ndim - 1)
    shape = r.shape(1, 3)
    indices = [None] * first + [r.ints(x.shape[first], *shape), r.ints(x.shape[first + 1], *shape)]
    return [x, *indices[: first + 1 + r.size(0, 2)]], {}


def matmul(r: Random):
    batch, inside = r.shape(1, 3), r.size()
    a = r.array(*batch, r.size(), inside)
    b = r.array(*(batch if r.random.random() < 0.5 else ()), inside, r.size())
    return [a, b], {}


def linear(r: Random):
    x, outputs = r.array(), r.size()
    params = [r.array(outputs, x.shape[-1]), r.array(outputs)]
    return [x, *params[: r.size(1, 3)]], {}


def conv2d(r: Random):
    channels, outputs, side = r.size(), r.size(), r.size(1, 4)
    x = r.array(r.size(), channels, r.size(4, 7), r.size(4, 7))
    stride, padding = [r.size(1, 3)] * 2, [r.size(0, 2)] * 2
    return [x, r.array(outputs, channels, side, side), r.array(outputs)], {"stride": stride, "padding": padding}


def pad(r: Random):
    x = r.array()
    return [x], {"pad": [r.size(0, 3) for _ in range(2 * r.size(1, x.ndim + 1))]}


def lerp(r: Random):
    x = r.array()
    return [x, r.array(*x.shape), r.array(*x.shape)], {}


def reshape(r: Random):
    x = r.array()
    return [x], {"shape": [*x.shape[1:], x.shape[0]]}


def permute(r: Random):
    x = r.array()
    return [x], {"dims": r.random.permutation(x.ndim).tolist()}


def embedding(r: Random):
    return [r.array(5, r.size()), r.ints(5, *r.shape(1, 3))], {}


def choice(r: Random):
    x = r.array()
    return ([r.bools(*x.shape), x, r.partner(x)], {}) if r.random.random() < 0.5 else ([x > 0, x], {"other": 0.5})


def masked(r: Random):
    x = r.array()
    return [x, r.bools(*x.shape)], {"value": -3.4028234663852886e38}


CASES = {
    "arange": lambda r: ([], {"start": r.size(-3, 3), "end": r.size(3, 9), "step": r.size(1, 3)}),
    "full": lambda r: ([], {"shape": list(r.shape()), "value": 0.5}),
    "reshape": reshape,
    "permute": permute,
    "expand": expand,
    "slice": slice_,
    "select": select,
    "flip": lambda r: ([x := r.array()], {"dims": [r.axis(x)]}),
    "cat": cat,
    "stack": stack,
    "repeat_interleave": lambda r: ([x := r.array()], {"repeats": r.size(), "dim": r.axis(x)}),
    "pad": pad,
    "cast": lambda r: ([3 * r.array()], {"to": str(r.random.choice(["int", "float", "double", "bool"]))}),
    "embedding": embedding,
    "gather_rows": lambda r: ([x := r.array(), r.ints(x.shape[-1], 3)], {"dim": -1}),
    "gather": gather,
    "index": index,
    **dict.fromkeys(["add", "sub", "rsub"], lambda r: (binary(r)[0], {"alpha": 2} if r.size() > 2 else {})),
    **dict.fromkeys(["mul", "div", "maximum"], binary),
    "pow": lambda r: ([r.positive()], {"exponent": 1.5}),
    **dict.fromkeys(["neg", "reciprocal", "abs", "exp", "sin", "cos", "square"], unary),
    **dict.fromkeys(["log", "sqrt"], positive),
    **dict.fromkeys(["relu", "silu", "tanh", "sigmoid"], unary),
    "gelu": lambda r: ([3 * r.array()], {"approximate": str(r.random.choice(["none", "tanh"]))}),
    "clamp": lambda r: ([r.array()], {"min": -0.5, "max": 0.5} if r.size() > 2 else {"min": None, "max": 0.3}),
    "clamp_min": lambda r: ([r.array()], {"min": 0.2}),
    "lerp": lerp,
    **dict.fromkeys(["lt", "le", "gt", "ge", "eq"], comparison),
    "logical_not": lambda r: ([r.bools()], {}),
    **dict.fromkeys(["logical_and", "logical_or"], logical),
    "where": choice,
    "masked_fill": masked,
    "linear": linear,
    "matmul": matmul,
    "conv2d": conv2d,
    "layer_norm": lambda r: norm(r, True),
    "rms_norm": lambda r: norm(r, False),
    "group_norm": group_norm,
    "softmax": lambda r: ([x := 3 * r.array()], {"dim": r.axis(x)}),
    "linalg_vector_norm": lambda r: (lambda inputs, options: (inputs, options | {"ord": 2}))(*reducing(r)),
    "mean": reducing,
    "sum": reducing,
    "upsample_bilinear2d": lambda r: (
        [r.array(1, 2, r.size(2), r.size(2))],
        {"output_size": [r.size(2, 9), r.size(2, 9)], "align_corners": False, "scale_factors": None},
    ),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, list]:
    """Cases of every operation with the results of NumPy and of the page, from one run of node."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "run.mjs").write_text(bundle_script(SCRIPT.replace("FOLDER", folder.as_posix())))
    made = [(op, *make(Random(seed))) for op, make in CASES.items() for seed in range(ROUNDS)]
    cases = [{"op": op, "inputs": [_plain(x) for x in inputs], "options": options} for op, inputs, options in made]
    (folder / "cases.json").write_text(json.dumps(cases))
    ran = subprocess.run([node_program(), folder / "run.mjs"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, list] = {op: [] for op in CASES}
    for (op, inputs, options), one in zip(made, json.loads(ran.stdout), strict=True):
        found[op].append((np.asarray(OPERATIONS[op](*inputs, **options), float), one, inputs, options))
    return found


def _plain(x: np.ndarray | None) -> dict | None:
    return None if x is None else {"data": np.asarray(x, float).flatten().tolist(), "shape": list(x.shape)}


def test_every_operation_has_a_case():
    assert set(CASES) == set(OPERATIONS)


@pytest.mark.parametrize("op", CASES)
def test_page_agrees_with_numpy(results, op):
    for expected, found, inputs, options in results[op]:
        assert found["shape"] == list(expected.shape), ([x.shape for x in inputs if x is not None], options)
        np.testing.assert_allclose(found["data"], expected.flatten(), rtol=1e-12, atol=1e-12)
        # The engine of a page computes in float32.
        assert found["fast"]["shape"] == found["shape"]
        np.testing.assert_allclose(found["fast"]["data"], expected.flatten(), rtol=2e-5, atol=2e-5)


MATRICES = """
import { MatrixKernel } from "./engine/graph_runner.js";
const random = (size) => Float32Array.from({ length: size }, () => Math.random() * 2 - 1);
const kernels = [new MatrixKernel(true), new MatrixKernel(false)];
if (!kernels[0].run) throw new Error("WebAssembly SIMD is not available.");
let worst = 0;
for (let round = 0; round < 60; round++) {
  const [rows, inside, columns] = [1, 40, 40].map((least) => least + Math.floor(Math.random() * 90));
  const [x, weight, bias, b] = [rows * inside, columns * inside, columns, inside * columns].map(random);
  const results = kernels.map((kernel) => {
    const product = new Float32Array(rows * columns);
    kernel.multiply(x, 0, b, 0, rows, inside, columns, product, 0);
    return [product, ...[bias, null].map((shift) => kernel.linear(x, weight, shift, rows, inside, columns))];
  });
  results[0].forEach((fast, i) => {
    fast.forEach((number, at) => (worst = Math.max(worst, Math.abs(number - results[1][i][at]))));
  });
}
console.log(worst);
"""


def test_matrix_products_in_webassembly_equal_their_reference(tmp_path):
    (tmp_path / "run.mjs").write_text(bundle_script(MATRICES), "utf-8")
    done = subprocess.run([node_program(), tmp_path / "run.mjs"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout) < 2e-5
