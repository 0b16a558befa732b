/**
 * Interpreter of graphs: the operations of regard/graph/interpreter.py. No DOM: this also runs under node.
 */

/**
 * @typedef {{data: Float64Array, shape: number[]}} Tensor
 * @typedef {(at: number) => [number, number] | null} Origin the input and the index in it that a number is copied from
 */

/** @param {number[]} shape */
export const sizeOf = (shape) => shape.reduce((product, n) => product * n, 1);

/** Strides of a contiguous tensor. @param {number[]} shape */
export function stridesOf(shape) {
  const strides = new Array(shape.length).fill(1);
  for (let axis = shape.length - 2; axis >= 0; axis--) strides[axis] = strides[axis + 1] * shape[axis + 1];
  return strides;
}

/** @param {number[]} shape @param {(at: number) => number} f @returns {Tensor} */
const fromFunction = (shape, f) => ({ data: Float64Array.from({ length: sizeOf(shape) }, (_, at) => f(at)), shape });

/** Resolves a negative axis. @param {number} dim @param {number[]} shape */
export const axisOf = (dim, shape) => (dim < 0 ? dim + shape.length : dim);

/** @param {number[]} shape @param {number} axis @param {number} size @returns {number[]} */
const withSize = (shape, axis, size) => shape.map((n, i) => (i === axis ? size : n));

/** Index along an axis. @param {number} at @param {number[]} shape @param {number} axis @param {number[]} strides */
const along = (at, shape, axis, strides) => Math.floor(at / strides[axis]) % shape[axis];

/** Shape of tensors that are broadcast against each other. @param {number[][]} shapes */
export function broadcastShape(shapes) {
  const rank = Math.max(...shapes.map((shape) => shape.length));
  return Array.from({ length: rank }, (_, axis) => {
    const sizes = shapes.map((shape) => shape[axis - rank + shape.length] ?? 1);
    return sizes.find((size) => size !== 1) ?? 1;
  });
}

/**
 * Maps an index of a broadcast shape to an index of the tensor. @param {number[]} from @param {number[]} to
 * @returns {(at: number) => number}
 */
export function broadcastIndex(from, to) {
  if (sizeOf(from) === sizeOf(to)) return (at) => at;
  if (sizeOf(from) === 1) return () => 0;
  const [inner, outer] = [stridesOf(from), stridesOf(to)];
  const ahead = to.length - from.length;
  return (at) => {
    let flatIndex = 0;
    for (let axis = 0; axis < from.length; axis++) {
      if (from[axis] !== 1) flatIndex += (Math.floor(at / outer[axis + ahead]) % from[axis]) * inner[axis];
    }
    return flatIndex;
  };
}

/** The error function to fifteen digits: a series near 0, a continued fraction farther out. @param {number} x */
export function erf(x) {
  const a = Math.abs(x);
  if (a > 6) return Math.sign(x);
  if (a < 2.5) {
    let [term, sum] = [a, a];
    for (let n = 1; Math.abs(term) > 1e-17; n++) {
      term *= -(a * a) / n;
      sum += term / (2 * n + 1);
    }
    return (Math.sign(x) * 2 * sum) / Math.sqrt(Math.PI);
  }
  let fraction = 0;
  for (let n = 60; n > 0; n--) fraction = n / 2 / (a + fraction);
  return Math.sign(x) * (1 - Math.exp(-a * a) / ((a + fraction) * Math.sqrt(Math.PI)));
}

/** @param {number} x */
const sigmoid = (x) => 0.5 * (1 + Math.tanh(0.5 * x));
/** @param {number} x */
const geluTanh = (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));

// Layout operations: the shape of the output, and the origin of each number.

/** @type {Record<string, (inputs: Tensor[], options: any) => {shape: number[], from: Origin}>} */
export const LAYOUT_OPS = {
  reshape: (_, { shape }) => ({ shape, from: (at) => [0, at] }),
  permute: ([x], { dims }) => {
    const axes = dims.map((/** @type {number} */ dim) => axisOf(dim, x.shape));
    const shape = axes.map((/** @type {number} */ axis) => x.shape[axis]);
    const [outer, inner] = [stridesOf(shape), stridesOf(x.shape)];
    return {
      shape,
      from: (at) => [
        0,
        axes.reduce(
          (/** @type {number} */ sum, /** @type {number} */ axis, /** @type {number} */ i) =>
            sum + along(at, shape, i, outer) * inner[axis],
          0,
        ),
      ],
    };
  },
  expand: ([x], { shape }) => {
    const index = broadcastIndex(x.shape, shape);
    return { shape, from: (at) => [0, index(at)] };
  },
  slice: ([x], { dim, start, end, step = 1 }) => {
    const axis = axisOf(dim, x.shape);
    const stop = Math.min(end, x.shape[axis]);
    return takeAlong(x, axis, Math.max(0, Math.ceil((stop - start) / step)), (i) => start + i * step);
  },
  select: ([x], { dim, index }) => {
    const axis = axisOf(dim, x.shape);
    const { shape, from } = takeAlong(x, axis, 1, () => (index < 0 ? index + x.shape[axis] : index));
    return { shape: shape.filter((_, i) => i !== axis), from };
  },
  flip: ([x], { dims }) => {
    const strides = stridesOf(x.shape);
    const axes = dims.map((/** @type {number} */ dim) => axisOf(dim, x.shape));
    return {
      shape: x.shape,
      from: (at) => [
        0,
        axes.reduce(
          (/** @type {number} */ sum, /** @type {number} */ axis) =>
            sum + (x.shape[axis] - 1 - 2 * along(at, x.shape, axis, strides)) * strides[axis],
          at,
        ),
      ],
    };
  },
  cat: (inputs, { dim = 0 }) => {
    const axis = axisOf(dim, inputs[0].shape);
    const sizes = inputs.map(({ shape }) => shape[axis]);
    const total = sizes.reduce((sum, n) => sum + n, 0);
    const shape = withSize(inputs[0].shape, axis, total);
    const inner = stridesOf(shape)[axis];
    return {
      shape,
      from: (at) => {
        let [position, which] = [Math.floor(at / inner) % total, 0];
        while (position >= sizes[which]) position -= sizes[which++];
        return [which, (Math.floor(at / inner / total) * sizes[which] + position) * inner + (at % inner)];
      },
    };
  },
  stack: (inputs, { dim = 0 }) => {
    const axis = dim < 0 ? dim + inputs[0].shape.length + 1 : dim;
    const shape = [...inputs[0].shape.slice(0, axis), inputs.length, ...inputs[0].shape.slice(axis)];
    const inner = stridesOf(shape)[axis];
    return {
      shape,
      from: (at) => [
        Math.floor(at / inner) % inputs.length,
        Math.floor(at / inner / inputs.length) * inner + (at % inner),
      ],
    };
  },
  repeat_interleave: ([x], { repeats, dim }) => {
    const axis = axisOf(dim, x.shape);
    return takeAlong(x, axis, x.shape[axis] * repeats, (i) => Math.floor(i / repeats));
  },
  pad: ([x], { pad, value = 0 }) => {
    if (value) throw new Error(`Padding with ${value} is not supported; only 0 is.`);
    const before = x.shape.map((_, axis) => pad[2 * (x.shape.length - 1 - axis)] ?? 0);
    const shape = x.shape.map((n, axis) => n + before[axis] + (pad[2 * (x.shape.length - 1 - axis) + 1] ?? 0));
    const [outer, inner] = [stridesOf(shape), stridesOf(x.shape)];
    return {
      shape,
      from: (at) => {
        let flatIndex = 0;
        for (let axis = 0; axis < shape.length; axis++) {
          const i = along(at, shape, axis, outer) - before[axis];
          if (i < 0 || i >= x.shape[axis]) return null;
          flatIndex += i * inner[axis];
        }
        return [0, flatIndex];
      },
    };
  },
  embedding: ([table, rows]) => {
    const width = table.shape[1];
    return {
      shape: [...rows.shape, width],
      from: (at) => [0, rows.data[Math.floor(at / width)] * width + (at % width)],
    };
  },
  gather_rows: ([x, rows], { dim }) => takeAlong(x, axisOf(dim, x.shape), rows.data.length, (i) => rows.data[i]),
  gather: ([x, rows], { dim }) => {
    const axis = axisOf(dim, x.shape);
    const [outer, inner] = [stridesOf(rows.shape), stridesOf(x.shape)];
    return {
      shape: rows.shape,
      from: (at) => [
        0,
        inner.reduce(
          (sum, stride, i) => sum + (i === axis ? rows.data[at] : along(at, rows.shape, i, outer)) * stride,
          0,
        ),
      ],
    };
  },
  index: (inputs) => {
    const [x, ...indices] = inputs;
    const used = indices.flatMap((one, axis) => (one ? [axis] : []));
    const shape = broadcastShape(used.map((axis) => indices[axis].shape));
    const positions = new Map(used.map((axis) => [axis, broadcastIndex(indices[axis].shape, shape)]));
    // Adjacent indexed axes are replaced in place, others by leading axes (as in NumPy).
    const isAdjacent = used.every((axis, i) => axis === used[0] + i);
    const others = x.shape.flatMap((_, axis) => (positions.has(axis) ? [] : [axis]));
    const first = isAdjacent ? others.filter((axis) => axis < used[0]) : [];
    const last = others.filter((axis) => !first.includes(axis));
    const sizes = [...first.map((axis) => x.shape[axis]), ...shape, ...last.map((axis) => x.shape[axis])];
    const [outer, inner] = [stridesOf(sizes), stridesOf(x.shape)];
    const [inside, count] = [sizeOf(last.map((axis) => x.shape[axis])), sizeOf(shape)];
    return {
      shape: sizes,
      from: (at) => {
        const which = Math.floor(at / inside) % count;
        let flatIndex = 0;
        for (const axis of used) {
          const i = indices[axis].data[positions.get(axis)(which)];
          flatIndex += (i < 0 ? i + x.shape[axis] : i) * inner[axis];
        }
        first.forEach((axis, i) => (flatIndex += along(at, sizes, i, outer) * inner[axis]));
        last.forEach(
          (axis, i) => (flatIndex += along(at, sizes, first.length + shape.length + i, outer) * inner[axis]),
        );
        return [0, flatIndex];
      },
    };
  },
};

/**
 * Selects indices along an axis. @param {Tensor} x @param {number} axis @param {number} size
 * @param {(i: number) => number} which @returns {{shape: number[], from: Origin}}
 */
function takeAlong(x, axis, size, which) {
  const shape = withSize(x.shape, axis, size);
  const inner = stridesOf(x.shape)[axis];
  return {
    shape,
    from: (at) => [
      0,
      (Math.floor(at / inner / size) * x.shape[axis] + which(Math.floor(at / inner) % size)) * inner + (at % inner),
    ],
  };
}

// Elementwise operations: the function, and its expression as text.

/** @param {string} sign @returns {(a: string, b: string) => string} */
const infix = (sign) => (a, b) => `${a} ${sign} ${b}`;
/** @param {string} name @returns {(a: string) => string} */
const call = (name) => (a) => `${name}(${stripParentheses(a)})`;
/** @param {string} text */
const stripParentheses = (text) => (/^\([^()]*\)$/.test(text) ? text.slice(1, -1) : text);

/** @type {Record<string, [(...x: number[]) => number, (...x: string[]) => string]>} */
const ELEMENTWISE_OPS = {
  add: [(a, b) => a + b, infix("+")],
  sub: [(a, b) => a - b, infix("−")],
  rsub: [(a, b) => b - a, (a, b) => `${b} − ${a}`],
  mul: [(a, b) => a * b, (a, b) => `${a}·${b}`],
  div: [(a, b) => a / b, infix("/")],
  pow: [(a, b) => a ** b, (a, b) => `${a}^${b}`],
  maximum: [Math.max, (a, b) => `max(${a}, ${b})`],
  neg: [(a) => -a, (a) => `−${a}`],
  reciprocal: [(a) => 1 / a, (a) => `1 / ${a}`],
  abs: [Math.abs, call("abs")],
  exp: [Math.exp, call("exp")],
  log: [Math.log, call("log")],
  sin: [Math.sin, call("sin")],
  cos: [Math.cos, call("cos")],
  sqrt: [Math.sqrt, call("√")],
  square: [(a) => a * a, (a) => `${a}²`],
  lerp: [(a, b, w) => a + w * (b - a), (a, b, w) => `(1 − ${w})·${a} + ${w}·${b}`],
  lt: [(a, b) => Number(a < b), infix("<")],
  le: [(a, b) => Number(a <= b), infix("≤")],
  gt: [(a, b) => Number(a > b), infix(">")],
  ge: [(a, b) => Number(a >= b), infix("≥")],
  eq: [(a, b) => Number(a === b), infix("=")],
  logical_not: [(a) => Number(!a), call("not")],
  logical_and: [(a, b) => Number(Boolean(a && b)), infix("and")],
  logical_or: [(a, b) => Number(Boolean(a || b)), infix("or")],
  where: [(condition, a, b) => (condition ? a : b), (condition, a, b) => (Number(condition) ? a : b)],
  masked_fill: [(a, mask, value) => (mask ? value : a), (a, mask, value) => (Number(mask) ? value : a)],
  relu: [(a) => Math.max(a, 0), call("relu")],
  silu: [(a) => a * sigmoid(a), call("silu")],
  tanh: [Math.tanh, call("tanh")],
  sigmoid: [sigmoid, call("σ")],
};

/**
 * The function of an elementwise step, its expression, and its scalar arguments. @param {string} op
 * @param {any} options @param {number} inputs
 * @returns {{f: (...x: number[]) => number, text: (...x: string[]) => string, numbers: number[]} | null}
 */
export function elementwiseOf(op, options, inputs) {
  if (op === "gelu") {
    const tanh = options.approximate === "tanh";
    return {
      f: tanh ? geluTanh : (x) => 0.5 * x * (1 + erf(x / Math.SQRT2)),
      text: call(tanh ? "gelu_tanh" : "gelu"),
      numbers: [],
    };
  }
  if (op === "cast") {
    const f =
      options.to === "int"
        ? Math.trunc
        : options.to === "bool"
          ? (/** @type {number} */ x) => Number(x !== 0)
          : (/** @type {number} */ x) => x;
    return { f, text: (x) => x, numbers: [] };
  }
  if (op === "clamp" || op === "clamp_min") {
    const [low, high] = [options.min ?? -Infinity, options.max ?? Infinity];
    return {
      f: (x) => Math.min(Math.max(x, low), high),
      text: (x) =>
        options.max === undefined
          ? `max(${x}, ${formatNumber(low)})`
          : `min(max(${x}, ${formatNumber(low)}), ${formatNumber(high)})`,
      numbers: [],
    };
  }
  if (!(op in ELEMENTWISE_OPS)) return null;
  const [f, text] = ELEMENTWISE_OPS[op];
  const { alpha = 1, ...rest } = options;
  const arity = f.length || 2;
  const numbers = Object.values(rest)
    .filter((x) => typeof x === "number")
    .slice(0, arity - inputs);
  if (alpha === 1) return { f, text, numbers };
  return { f: (a, b) => f(a, alpha * b), text: (a, b) => text(a, `${formatTerm(alpha)}·${b}`), numbers };
}

// Reductions.

/**
 * Offsets along the reduced axes, and the start index for each output. @param {Tensor} x @param {number[]} axes
 * @param {boolean} keep
 */
export function reduction(x, axes, keep) {
  const strides = stridesOf(x.shape);
  const inside = axes.map((axis) => x.shape[axis]);
  const kept = x.shape.flatMap((_, axis) => (axes.includes(axis) ? [] : [axis]));
  const shape = keep ? x.shape.map((n, axis) => (axes.includes(axis) ? 1 : n)) : kept.map((axis) => x.shape[axis]);
  const outer = stridesOf(kept.map((axis) => x.shape[axis]));
  const within = stridesOf(inside);
  const offsets = Array.from({ length: sizeOf(inside) }, (_, i) =>
    axes.reduce((sum, axis, k) => sum + along(i, inside, k, within) * strides[axis], 0),
  );
  const sizes = kept.map((axis) => x.shape[axis]);
  /** @param {number} at */
  const start = (at) => kept.reduce((sum, axis, k) => sum + along(at, sizes, k, outer) * strides[axis], 0);
  return { shape, offsets, start };
}

/** @param {Tensor} x @param {number | number[] | null | undefined} dim */
export const axesOf = (x, dim) =>
  dim === null || dim === undefined ? x.shape.map((_, axis) => axis) : [dim].flat().map((one) => axisOf(one, x.shape));

/**
 * Mean and variance of the group that an index is normalized with. @param {string} op @param {Tensor} x
 * @param {any} options @param {number} at
 */
export function normParts(op, x, options, at) {
  const size =
    op === "group_norm"
      ? sizeOf(x.shape.slice(1)) / options.num_groups
      : sizeOf(options.normalized_shape ?? x.shape.slice(-1));
  const from = Math.floor(at / size) * size;
  let [mean, variance] = [0, 0];
  if (op !== "rms_norm") for (let i = from; i < from + size; i++) mean += x.data[i] / size;
  for (let i = from; i < from + size; i++) variance += (x.data[i] - mean) ** 2 / size;
  return { mean, variance, from, size, eps: options.eps ?? (op === "rms_norm" ? 2 ** -23 : 1e-5) };
}

/**
 * Index of a norm's gain and bias. @param {string} op @param {Tensor} x @param {number} at
 * @param {Tensor | null | undefined} weight
 */
export const gainAt = (op, x, at, weight) =>
  op === "group_norm" ? Math.floor(at / sizeOf(x.shape.slice(2))) % x.shape[1] : at % (weight?.data.length ?? 1);

/**
 * Bilinear interpolation along one axis: indices and weights of the two neighbors. @param {number} i
 * @param {number} count @param {number} size @returns {[number, number][]}
 */
function bilinearWeights(i, count, size) {
  const at = Math.max(((i + 0.5) * count) / size - 0.5, 0);
  const low = Math.floor(at);
  return [
    [low, 1 - (at - low)],
    [Math.min(low + 1, count - 1), at - low],
  ];
}

/**
 * Pairs of indices (image, filter) whose products a convolution sums for one output. @param {Tensor} x
 * @param {Tensor} weight @param {any} options @param {number} at @returns {[number, number][]}
 */
export function convolutionPairs(x, weight, { stride = [1, 1], padding = [0, 0] }, at) {
  const [outputs, channels, high, wide] = weight.shape;
  const [height, width] = x.shape.slice(2);
  const [rows, columns] = convolutionSize(x, weight, { stride, padding });
  const [column, row] = [at % columns, Math.floor(at / columns) % rows];
  const [out, image] = [Math.floor(at / columns / rows) % outputs, Math.floor(at / columns / rows / outputs)];
  /** @type {[number, number][]} */
  const pairs = [];
  for (let c = 0; c < channels; c++) {
    for (let i = 0; i < high; i++) {
      const y = row * stride[0] - padding[0] + i;
      if (y < 0 || y >= height) continue;
      for (let j = 0; j < wide; j++) {
        const z = column * (stride[1] ?? stride[0]) - padding[1] + j;
        if (z >= 0 && z < width)
          pairs.push([((image * channels + c) * height + y) * width + z, ((out * channels + c) * high + i) * wide + j]);
      }
    }
  }
  return pairs;
}

/** Height and width of a convolution's output. @param {Tensor} x @param {Tensor} weight @param {any} options */
const convolutionSize = (x, weight, { stride, padding }) =>
  [0, 1].map((k) => Math.floor((x.shape[2 + k] + 2 * padding[k] - weight.shape[2 + k]) / (stride[k] ?? stride[0])) + 1);

/** Shape of a matrix product, and the indices of the factors of each output. @param {Tensor} a @param {Tensor} b */
export function matmulParts(a, b) {
  const [rows, inside] = [a.shape.length > 1 ? a.shape[a.shape.length - 2] : 1, a.shape[a.shape.length - 1]];
  const columns = b.shape.length > 1 ? b.shape[b.shape.length - 1] : 1;
  const batch = broadcastShape([a.shape.slice(0, -2), b.shape.slice(0, -2)]);
  const [left, right] = [broadcastIndex(a.shape.slice(0, -2), batch), broadcastIndex(b.shape.slice(0, -2), batch)];
  const shape = [...batch, ...(a.shape.length > 1 ? [rows] : []), ...(b.shape.length > 1 ? [columns] : [])];
  /** Start indices in both factors, and the step in the second. @param {number} at */
  const factors = (at) => {
    const [column, row, which] = [at % columns, Math.floor(at / columns) % rows, Math.floor(at / columns / rows)];
    return {
      from: left(which) * rows * inside + row * inside,
      to: right(which) * inside * columns + column,
      step: columns,
    };
  };
  return { shape, inside, factors };
}

/** @type {Record<string, (inputs: Tensor[], options: any) => Tensor>} */
const REDUCTION_OPS = {
  linear: ([x, weight, bias]) => {
    const [outputs, width] = weight.shape;
    return fromFunction([...x.shape.slice(0, -1), outputs], (at) => {
      const [from, to] = [Math.floor(at / outputs) * width, (at % outputs) * width];
      let sum = bias ? bias.data[at % outputs] : 0;
      for (let i = 0; i < width; i++) sum += x.data[from + i] * weight.data[to + i];
      return sum;
    });
  },
  matmul: ([a, b]) => {
    const { shape, inside, factors } = matmulParts(a, b);
    return fromFunction(shape, (at) => {
      const { from, to, step } = factors(at);
      let sum = 0;
      for (let i = 0; i < inside; i++) sum += a.data[from + i] * b.data[to + i * step];
      return sum;
    });
  },
  conv2d: ([x, weight, bias], { stride = [1, 1], padding = [0, 0] }) => {
    const [rows, columns] = convolutionSize(x, weight, { stride, padding });
    return fromFunction([x.shape[0], weight.shape[0], rows, columns], (at) => {
      let sum = bias ? bias.data[Math.floor(at / rows / columns) % weight.shape[0]] : 0;
      for (const [i, k] of convolutionPairs(x, weight, { stride, padding }, at)) sum += x.data[i] * weight.data[k];
      return sum;
    });
  },
  softmax: ([x], { dim }) => {
    const { offsets, start } = reduction(x, axesOf(x, dim), true);
    const y = fromFunction(x.shape, () => 0);
    for (let at = 0; at < x.data.length / offsets.length; at++) {
      const from = start(at);
      const maximum = offsets.reduce((largest, i) => Math.max(largest, x.data[from + i]), -Infinity);
      let total = 0;
      for (const i of offsets) total += y.data[from + i] = Math.exp(x.data[from + i] - maximum);
      for (const i of offsets) y.data[from + i] /= total;
    }
    return y;
  },
  linalg_vector_norm: ([x], { dim, keepdim = false }) =>
    reduce(x, dim, keepdim, (numbers) => Math.sqrt(numbers.reduce((sum, n) => sum + n * n, 0))),
  mean: ([x], { dim, keepdim = false }) =>
    reduce(x, dim, keepdim, (numbers) => numbers.reduce((sum, n) => sum + n, 0) / numbers.length),
  sum: ([x], { dim, keepdim = false }) => reduce(x, dim, keepdim, (numbers) => numbers.reduce((sum, n) => sum + n, 0)),
  layer_norm: (inputs, options) => normalize("layer_norm", inputs, options),
  rms_norm: (inputs, options) => normalize("rms_norm", inputs, options),
  group_norm: (inputs, options) => normalize("group_norm", inputs, options),
  upsample_bilinear2d: ([x], { output_size: [height, width] }) =>
    fromFunction([...x.shape.slice(0, 2), height, width], (at) =>
      bilinearCells(x, height, width, at).reduce((sum, [i, share]) => sum + share * x.data[i], 0),
    ),
};

/** @param {Tensor} x @param {any} dim @param {boolean} keep @param {(numbers: number[]) => number} f */
function reduce(x, dim, keep, f) {
  const { shape, offsets, start } = reduction(x, axesOf(x, dim), keep);
  return fromFunction(shape, (at) => {
    const from = start(at);
    return f(offsets.map((i) => x.data[from + i]));
  });
}

/** @param {string} op @param {Tensor[]} inputs @param {any} options */
function normalize(op, [x, weight, bias], options) {
  const y = fromFunction(x.shape, () => 0);
  for (let at = 0; at < x.data.length; ) {
    const { mean, variance, size, eps } = normParts(op, x, options, at);
    const root = Math.sqrt(variance + eps);
    for (const end = at + size; at < end; at++) {
      const i = gainAt(op, x, at, weight ?? bias);
      y.data[at] = ((x.data[at] - mean) / root) * (weight ? weight.data[i] : 1) + (bias ? bias.data[i] : 0);
    }
  }
  return y;
}

/**
 * Bilinear interpolation: indices and weights of the four neighbors. @param {Tensor} x @param {number} height
 * @param {number} width @param {number} at @returns {[number, number][]}
 */
export function bilinearCells(x, height, width, at) {
  const [rows, columns] = x.shape.slice(2);
  const image = Math.floor(at / width / height) * rows * columns;
  const across = bilinearWeights(at % width, columns, width);
  return bilinearWeights(Math.floor(at / width) % height, rows, height).flatMap(([row, high]) =>
    across.map(([column, wide]) => /** @type {[number, number]} */ ([image + row * columns + column, high * wide])),
  );
}

/** @type {Record<string, (options: any) => Tensor>} */
export const CONSTANT_OPS = {
  arange: ({ start, end, step }) =>
    fromFunction([Math.max(0, Math.ceil((end - start) / step))], (i) => start + i * step),
  full: ({ shape, value }) => fromFunction(shape, () => Number(value)),
};

/**
 * Executes an operation. @param {string} op @param {(Tensor | null)[]} tensors @param {any} options @returns {Tensor}
 */
export function execute(op, tensors, options) {
  const inputs = /** @type {Tensor[]} */ (tensors);
  if (op in CONSTANT_OPS) return CONSTANT_OPS[op](options);
  if (op in LAYOUT_OPS) {
    const { shape, from } = LAYOUT_OPS[op](inputs, options);
    if (op === "reshape") return { data: inputs[0].data, shape };
    return fromFunction(shape, (at) => {
      const origin = from(at);
      return origin === null ? 0 : inputs[origin[0]].data[origin[1]];
    });
  }
  const one = elementwiseOf(op, options, inputs.length);
  if (one !== null) {
    const shape = broadcastShape(inputs.map((x) => x.shape));
    const indices = inputs.map((x) => broadcastIndex(x.shape, shape));
    const numbers = [...inputs.map(() => 0), ...one.numbers];
    return fromFunction(shape, (at) => {
      for (let i = 0; i < inputs.length; i++) numbers[i] = inputs[i].data[indices[i](at)];
      return one.f(...numbers);
    });
  }
  if (!(op in REDUCTION_OPS)) throw new Error(`Unsupported operation: ${op}.`);
  return REDUCTION_OPS[op](inputs, options);
}

/** Formats a number with a few digits. @param {number} x */
export function formatNumber(x) {
  if (x === 0) return "0";
  if (!(Math.abs(x) < 1e38)) return Number.isNaN(x) ? "NaN" : x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  const text =
    size >= 1e5 || size < 1e-4
      ? size.toExponential(2).replace("-", "−")
      : size < 1
        ? size.toPrecision(3)
        : size.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : 3);
  return x < 0 ? `−${text}` : text;
}

/** Formats a factor or summand, in parentheses if it is negative. @param {number} x */
export const formatTerm = (x) => (x < 0 ? `(${formatNumber(x)})` : formatNumber(x));
