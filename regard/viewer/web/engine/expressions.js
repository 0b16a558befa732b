/** Dynamic sizes of a graph: a number, a name, or a list of an operator and its operands. */

/** @typedef {number | string | any[]} Expression */

/** @type {Record<string, (a: number, b: number) => number>} */
const OPERATORS = {
  "+": (a, b) => a + b,
  "*": (a, b) => a * b,
  "//": (a, b) => Math.floor(a / b),
  "%": (a, b) => a - b * Math.floor(a / b),
  max: Math.max,
  min: Math.min,
};

/** @param {Expression} expression @param {Record<string, number>} sizes @returns {number} */
export function evaluateSize(expression, sizes) {
  if (typeof expression === "number") return expression;
  if (typeof expression === "string") return sizes[expression];
  const [operator, ...operands] = expression;
  return operands.map((one) => evaluateSize(one, sizes)).reduce(OPERATORS[operator]);
}

/** Whether an option contains a dynamic size. @param {any} option @returns {boolean} */
export function isDynamic(option) {
  if (Array.isArray(option)) return option.some(isDynamic);
  return option !== null && typeof option === "object" && ("size" in option || Object.values(option).some(isDynamic));
}

/** Replaces dynamic sizes by numbers. @param {any} option @param {Record<string, number>} sizes @returns {any} */
export function resolveSizes(option, sizes) {
  if (Array.isArray(option)) return option.map((one) => resolveSizes(one, sizes));
  if (option === null || typeof option !== "object") return option;
  if ("size" in option) return evaluateSize(option.size, sizes);
  return Object.fromEntries(Object.entries(option).map(([name, one]) => [name, resolveSizes(one, sizes)]));
}
