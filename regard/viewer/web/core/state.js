/**
 * State of the page: the head, figure and overlay on display. It is also written to the address, so that a link
 * restores it.
 */

/**
 * @typedef {{attention: string, head: number | "mean", look?: number}} HeadRef one head of one attention, or the mean
 * of its
 * heads; `look` is the index of the look, where several are compared
 * @typedef {{rows: [number, number], columns: [number, number]}} Zoom ranges of the visible tokens (or words)
 * @typedef {{
 *   selected: HeadRef, added: HeadRef[], other: HeadRef | null, form: string, words: boolean, pin: [number, number] |
 * null, zoom: Zoom | null,
 *   scale: string | null, colors: string, theme: string, view: string, node: number | null,
 *   overlayKind: string | null, label: number | null, follow: boolean, minus: boolean, entries: boolean, search:
 * boolean,
 *   off: string | null, section: number | null, depth: string
 * }} View `added`: heads that are drawn with the selected one, in other colors; `entries`: labels are entries of the
 * vocabulary; `search`: the search tree is open; `off`: the head that the experiment
 *   starts without; `section`: the section that opens in the step-by-step view, `depth` its level of detail. `minus`:
 * whether the difference of two heads is shown. Of an image: `overlayKind` is the kind of overlay, `label` the
 *   label that it explains, `follow` whether the patch under the pointer is the query.
 */

export const DEPTHS = { idea: "Idea", formula: "Formula", numbers: "Numbers" };
export const FORMS = { lines: "Lines", map: "Map", text: "Text", table: "Table" };

/** @param {HeadRef} selected */
const writeHeadRef = (selected) => `${selected.look ? `${selected.look}/` : ""}${selected.attention}:${selected.head}`;

/** @param {string | null} text @returns {HeadRef | null} */
function readHeadRef(text) {
  const found = /^(?:(\d{1,4})\/)?(.+):(mean|\d+)$/.exec(text ?? "");
  if (!found) return null;
  const head = found[3] === "mean" ? "mean" : Number(found[3]);
  return { attention: found[2], head, ...(found[1] ? { look: Number(found[1]) } : {}) };
}

/** Parses integers such as "4-12". @param {string | null} text @param {number} count @returns {number[] | null} */
function readIntegers(text, count) {
  const numbers = (text ?? "").split(/[-,]/).map((part) => (/^\d{1,9}$/.test(part) ? Number(part) : NaN));
  return numbers.length === count && numbers.every(Number.isFinite) ? numbers : null;
}

/** Returns the part of the address after #. Defaults are left out. @param {View} view @returns {string} */
export function writeHash(view) {
  const parts = new URLSearchParams();
  if (view.view !== "attention") parts.set("view", view.view);
  parts.set("at", writeHeadRef(view.selected));
  for (const ref of view.added) parts.append("and", writeHeadRef(ref));
  if (view.other) parts.set("with", writeHeadRef(view.other));
  if (view.minus) parts.set("minus", "1");
  parts.set("as", view.form);
  if (view.words) parts.set("words", "1");
  if (view.pin) parts.set("pin", view.pin.join(","));
  if (view.zoom) parts.set("zoom", [...view.zoom.rows, ...view.zoom.columns].join("-"));
  if (view.scale) parts.set("scale", view.scale);
  if (view.colors !== "blue") parts.set("colors", view.colors);
  if (view.theme !== "auto") parts.set("theme", view.theme);
  if (view.node !== null) parts.set("node", String(view.node));
  if (view.overlayKind) parts.set("over", view.overlayKind);
  if (view.label !== null) parts.set("label", String(view.label));
  if (!view.follow) parts.set("follow", "0");
  if (view.entries) parts.set("entries", "1");
  if (view.search) parts.set("search", "1");
  if (view.off) parts.set("off", view.off);
  if (view.view === "steps") parts.set("depth", view.depth);
  return parts.toString().replaceAll("%3A", ":").replaceAll("%2C", ",").replaceAll("%2F", "/");
}

/**
 * Parses the part of the address after #. Invalid values are ignored.
 * @param {string} hash @returns {Partial<View>}
 */
export function readHash(hash) {
  const parts = new URLSearchParams(hash.replace(/^#/, ""));
  /** @type {Partial<View>} */
  const view = {};
  view.view = /^\w{1,20}$/.test(parts.get("view") ?? "") ? parts.get("view") : "attention";
  const selected = readHeadRef(parts.get("at"));
  if (selected) view.selected = selected;
  view.added = parts
    .getAll("and")
    .map(readHeadRef)
    .filter((ref) => ref !== null);
  view.other = readHeadRef(parts.get("with"));
  if (parts.get("as") in FORMS) view.form = parts.get("as");
  view.minus = parts.get("minus") === "1";
  view.words = parts.get("words") === "1";
  view.pin = /** @type {[number, number] | null} */ (readIntegers(parts.get("pin"), 2));
  const zoom = readIntegers(parts.get("zoom"), 4);
  if (zoom && zoom[0] < zoom[1] && zoom[2] < zoom[3]) {
    view.zoom = { rows: [zoom[0], zoom[1]], columns: [zoom[2], zoom[3]] };
  } else view.zoom = null;
  view.scale = ["linear", "root", "log"].includes(parts.get("scale")) ? parts.get("scale") : null;
  view.colors = parts.get("colors") === "iris" ? "iris" : "blue";
  view.theme = ["light", "dark"].includes(parts.get("theme")) ? parts.get("theme") : "auto";
  view.node = readIntegers(parts.get("node"), 1)?.[0] ?? null;
  view.overlayKind = /^\w{1,20}$/.test(parts.get("over") ?? "") ? parts.get("over") : null;
  view.label = readIntegers(parts.get("label"), 1)?.[0] ?? null;
  view.follow = parts.get("follow") !== "0";
  view.entries = parts.get("entries") === "1";
  view.search = parts.get("search") === "1" || parts.get("view") === "search";
  if (parts.get("depth") in DEPTHS) view.depth = parts.get("depth");
  view.off = readHeadRef(parts.get("off")) ? parts.get("off") : null;
  return view;
}

/** The initial view, without the head. */
export const DEFAULT_VIEW = {
  view: "attention",
  added: [],
  other: null,
  minus: false,
  form: "lines",
  words: false,
  pin: null,
  zoom: null,
  scale: null,
  colors: "blue",
  theme: "auto",
  node: null,
  overlayKind: null,
  label: null,
  follow: true,
  entries: false,
  search: false,
  off: null,
  section: null,
  depth: "numbers",
};

/** Key of the depth in the browser's storage. */
const DEPTH_KEY = "regard-depth";

/** The depth that was selected last in this browser, if storage is available. @returns {Partial<View>} */
export function storedDepth() {
  try {
    const depth = localStorage.getItem(DEPTH_KEY);
    return depth in DEPTHS ? { depth } : {};
  } catch {
    return {}; // storage is disabled
  }
}

/** @param {string} depth */
export function storeDepth(depth) {
  try {
    localStorage.setItem(DEPTH_KEY, depth);
  } catch {
    // Storage is disabled: the depth is remembered until the page is closed.
  }
}

/** A view with listeners, which receive the keys that changed. */
export class State {
  /** @param {View} view */
  constructor(view) {
    this.view = view;
    /**
     * The row and column that were pointed at last, and their attention: another view opens there.
     * @type {{attention: string, cell: [number, number | null]} | null}
     */
    this.pointed = null;
    /** @type {((view: View, changed: Set<string>) => void)[]} */
    this.listeners = [];
  }

  /** @param {(view: View, changed: Set<string>) => void} listener */
  listen(listener) {
    this.listeners.push(listener);
  }

  /** Updates some keys of the view. @param {Partial<View>} part */
  set(part) {
    const before = this.view;
    const changed = new Set(
      Object.keys(part).filter((key) => JSON.stringify(part[key]) !== JSON.stringify(before[key])),
    );
    if (changed.size === 0) return;
    this.view = { ...before, ...part };
    for (const listener of this.listeners) listener(this.view, changed);
  }
}
