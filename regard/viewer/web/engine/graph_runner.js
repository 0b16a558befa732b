/** Runs a graph (regard/graph/writer.py) on new inputs. No DOM: this runs in a worker, and under node. */

import { isDynamic, resolveSizes } from "./expressions.js";
import { compute } from "./fast_operations.js";
import { MatrixKernel } from "./matrix_kernel.js";

/**
 * @typedef {import("./fast_operations.js").Tensor} Tensor
 * @typedef {{op: string, in: (number | null)[], out: number, options?: any, kind?: string, body?: Body, isDynamic?: boolean,
 *   frees?: number[]}} Step
 * @typedef {{inputs: number[], steps: Step[], outputs: number[]}} Body
 * @typedef {{inputs: {name: string, slot: number, shape: any[]}[], tensors: [number, number][], steps: Step[],
 *   outputs: Record<string, number>, slots: number, positions?: [number, number][], layers?: Record<string, number[]>,
 *   attentions?: import("./interventions.js").AttentionPart[]}} GraphJson
 * @typedef {{replaced: Map<number, (value: Tensor, iteration: number) => Tensor>, bypassed: Map<number, number>}} Edits
 * changes of a run, by slot: functions of a step's value, and slots whose value replaces that of a step
 */

export class GraphRunner {
  /** @param {GraphJson} json @param {Tensor[]} tensors parameters and constants @param {MatrixKernel} kernel */
  constructor(json, tensors, kernel) {
    this.json = json;
    this.kernel = kernel;
    /** @type {(Tensor | undefined)[]} */
    this.constants = new Array(json.slots);
    for (const [slot, tensor] of json.tensors) this.constants[slot] = tensors[tensor];
    /** Steps that an edit may change are never computed in advance. */
    const parts = (json.attentions ?? []).flatMap(({ scale, masks, weights, context }) => [scale, ...masks, weights, context]);
    this.variable = new Set([...(json.positions ?? []).map(([slot]) => slot), ...parts, ...Object.values(json.layers ?? {}).flat()]);
    this.steps = this.prepare(json.steps);
    const lastUse = new Map();
    this.steps.forEach((step, n) => {
      lastUse.set(step.out, n);
      for (const slot of usedSlots(step)) lastUse.set(slot, n);
    });
    const kept = new Set(Object.values(json.outputs));
    this.steps.forEach((step) => (step.frees = []));
    for (const [slot, n] of lastUse) if (!kept.has(slot)) this.steps[n].frees.push(slot);
  }

  /** Computes steps without inputs in advance. @param {Step[]} steps @returns {Step[]} the others */
  prepare(steps) {
    return steps.filter((step) => {
      step.isDynamic = isDynamic(step.options ?? {});
      if (step.body) {
        step.body.steps = this.prepare(step.body.steps);
        return true;
      }
      const isConstant = !step.isDynamic && !this.variable.has(step.out) && step.in.every((slot) => slot === null || this.constants[slot]);
      if (isConstant) this.constants[step.out] = this.computeStep(step, this.constants, {});
      return !isConstant;
    });
  }

  /** @param {Step} step @param {(Tensor | undefined)[]} values @param {Record<string, number>} sizes */
  computeStep(step, values, sizes) {
    const options = step.isDynamic ? resolveSizes(step.options, sizes) : (step.options ?? {});
    return compute(step.op, step.in.map((slot) => (slot === null ? null : values[slot])), options, this.kernel, step.kind);
  }

  /**
   * @param {Record<string, Tensor>} inputs by name
   * @param {Set<number>} [recorded] slots whose values are returned too, one per iteration of a loop
   * @param {Edits} [edits]
   * @returns {{outputs: Record<string, Tensor>, values: Map<number, Tensor[]>}}
   */
  run(inputs, recorded = new Set(), edits = undefined) {
    const values = this.constants.slice();
    /** @type {Record<string, number>} */
    const sizes = {};
    for (const { name, slot, shape } of this.json.inputs) {
      values[slot] = inputs[name];
      shape.forEach((size, axis) => {
        if (typeof size === "string") sizes[size] = inputs[name].shape[axis];
      });
    }
    /** @type {Map<number, Tensor[]>} */
    const collected = new Map([...recorded].map((slot) => [slot, this.constants[slot] ? [this.constants[slot]] : []]));
    this.runSteps(this.steps, values, sizes, collected, edits, 0);
    const outputs = Object.fromEntries(Object.entries(this.json.outputs).map(([name, slot]) => [name, values[slot]]));
    return { outputs, values: collected };
  }

  /** @param {Step[]} steps @param {(Tensor | undefined)[]} values @param {Record<string, number>} sizes @param {Map<number, Tensor[]>} collected @param {Edits | undefined} edits @param {number} iteration */
  runSteps(steps, values, sizes, collected, edits, iteration) {
    for (const step of steps) {
      const other = edits?.bypassed.get(step.out);
      let value = other !== undefined ? values[other] : step.body ? this.scan(step, values, sizes, collected, edits) : this.computeStep(step, values, sizes);
      const replace = edits?.replaced.get(step.out);
      if (replace) value = replace(value, iteration);
      values[step.out] = value;
      collected.get(step.out)?.push(value);
      // Without edits, values that no other step reads are released.
      if (!edits && step.frees) for (const slot of step.frees) values[slot] = undefined;
    }
  }

  /** @param {Step} step @param {(Tensor | undefined)[]} values @param {Record<string, number>} sizes @param {Map<number, Tensor[]>} collected @param {Edits | undefined} edits @returns {Tensor} */
  scan(step, values, sizes, collected, edits) {
    const { inputs, steps, outputs } = step.body;
    let state = values[step.in[0]];
    const elements = values[step.in[1]];
    const [count, ...shape] = elements.shape;
    const size = elements.data.length / count;
    let stacked = null;
    for (let i = 0; i < count; i++) {
      values[inputs[0]] = state;
      values[inputs[1]] = { data: elements.data.subarray(i * size, (i + 1) * size), shape };
      this.runSteps(steps, values, sizes, collected, edits, i);
      state = values[outputs[0]];
      const { data, shape: each } = values[outputs[1]];
      stacked ??= { data: new Float32Array(count * data.length), shape: [count, ...each] };
      stacked.data.set(data, i * data.length);
    }
    return stacked;
  }
}

/** Slots that a step, or the body of a loop, reads. @param {Step} step @returns {number[]} */
function usedSlots(step) {
  const own = step.in.filter((slot) => slot !== null);
  return step.body ? [...own, ...step.body.outputs, ...step.body.steps.flatMap(usedSlots)] : own;
}
