/** The layout of a search tree. */

import { formatScore, importance, isDiscarded } from "./candidates.js";

/** @typedef {import("./candidates.js").Candidate} Candidate */

/** Sizes of the drawing in pixels. */
export const LANE = 40;
const DISCARDED_LANE = 27;
export const TOP = 30;
const GAP = 38;
const MIN_GAP = 14;
export const FONT = 15;
export const DISCARDED_FONT = 13.5;

let labelContext = null;
/** Width of a label in pixels. @param {string} label @param {number} size */
function nodeLabelWidth(label, size) {
  labelContext ??= document.createElement("canvas").getContext("2d");
  labelContext.font = `600 ${size}px ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", "Liberation Sans", Arial, sans-serif`;
  return labelContext.measureText(label).width;
}

/** Width of the score next to a finished candidate. @param {Candidate} candidate */
const scoreWidth = (candidate) => (candidate.ends && candidate.score !== null ? 11 + nodeLabelWidth(formatScore(candidate.score), 13) : 0);

/**
 * Computes the layout of a tree. Each step is a column. Hypotheses that are kept stay in one lane as long as possible, the
 * best one in the first; discarded candidates are placed below.
 * Columns move together if the tree is wider than the available width.
 * @param {Candidate[]} nodes @param {number} steps @param {number} [available]
 */
export function layoutTree(nodes, steps, available = Infinity) {
  const natural = layoutWithGap(nodes, steps, GAP);
  if (natural.width <= available) return natural;
  return layoutWithGap(nodes, steps, Math.max(MIN_GAP, GAP - (natural.width - available) / Math.max(1, steps - 1)));
}

/** @param {Candidate[]} nodes @param {number} steps @param {number} gap between columns */
function layoutWithGap(nodes, steps, gap) {
  const byStep = Array.from({ length: steps }, (_, step) => nodes.filter((candidate) => candidate.step === step));
  /** @type {Map<number, number>} */
  const lanes = new Map();
  let lastLane = 0;
  for (const column of byStep) {
    const taken = new Set();
    const inOrder = column.filter((candidate) => !isDiscarded(candidate)).sort((a, b) => importance(b) - importance(a) || a.index - b.index);
    for (const candidate of inOrder) {
      const preferred = candidate.state === "best" ? 0 : Math.max(1, lanes.get(candidate.parent) ?? 1);
      let lane = preferred;
      // The free lane nearest to the parent's, below it if two are equally near; the first is reserved for the best hypothesis.
      for (let away = 1; taken.has(lane); away++) {
        lane = !taken.has(preferred + away) || preferred - away < 1 ? preferred + away : preferred - away;
      }
      taken.add(lane);
      lanes.set(candidate.index, lane);
      lastLane = Math.max(lastLane, lane);
    }
  }
  /** @type {Map<number, {x: number, y: number, width: number, height: number}>} */
  const boxes = new Map();
  const columns = [];
  const discardedTop = TOP + (lastLane + 1) * LANE + 14;
  let x = 34;
  let rows = 0;
  /** The right edge of the boxes and scores. */
  let right = x;
  for (const column of byStep) {
    const sizes = new Map(column.map((candidate) => [candidate.index, Math.max(34, nodeLabelWidth(candidate.label, isDiscarded(candidate) ? DISCARDED_FONT : FONT) + (isDiscarded(candidate) ? 14 : 26))]));
    const widest = Math.max(...sizes.values(), 34);
    const ends = Math.max(0, ...column.map(scoreWidth));
    columns.push(x);
    const left = column.filter(isDiscarded);
    rows = Math.max(rows, left.length);
    for (const candidate of column) {
      const discarded = isDiscarded(candidate);
      const height = discarded ? 22 : 30;
      const y = discarded ? discardedTop + left.indexOf(candidate) * DISCARDED_LANE : TOP + lanes.get(candidate.index) * LANE + (LANE - height) / 2;
      boxes.set(candidate.index, { x, y, width: sizes.get(candidate.index), height });
      right = Math.max(right, x + sizes.get(candidate.index) + scoreWidth(candidate));
    }
    x += widest + Math.max(gap, ends + 12);
  }
  const height = rows ? discardedTop + rows * DISCARDED_LANE + 4 : discardedTop - 10;
  return {
    boxes, columns, width: right + 8, height, separatorY: rows ? discardedTop - 8 : 0,
    /** Path of the edge from the parent to a candidate. @param {Candidate} candidate */
    edge(candidate) {
      const to = boxes.get(candidate.index);
      const from = candidate.parent === null ? { x: 0, y: TOP, width: 11, height: LANE } : boxes.get(candidate.parent);
      const [x1, y1, x2, y2] = [from.x + from.width, from.y + from.height / 2, to.x, to.y + to.height / 2];
      const bend = Math.min(60, (x2 - x1) * 0.55);
      return `M${roundToTenth(x1)} ${roundToTenth(y1)}C${roundToTenth(x1 + bend)} ${roundToTenth(y1)} ${roundToTenth(x2 - bend)} ${roundToTenth(y2)} ${roundToTenth(x2)} ${roundToTenth(y2)}`;
    },
  };
}

/** @param {number} value */
function roundToTenth(value) {
  return Math.round(value * 10) / 10;
}
