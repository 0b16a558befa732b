/**
 * Creation of DOM elements. Text is always inserted as text nodes: nothing from a model or a file is parsed as markup.
 */

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {Record<string, any>} Attributes `class`, `on…` listeners, `data-…`; null and false are left out */

/**
 * Creates an HTML element with attributes and children (strings or elements).
 * @template {keyof HTMLElementTagNameMap} N
 * @param {N} name @param {Attributes} [attributes] @param {...any} children @returns {HTMLElementTagNameMap[N]}
 */
export function html(name, attributes = {}, ...children) {
  return /** @type {any} */ (buildElement(document.createElement(name), attributes, children));
}

/**
 * Creates an SVG element.
 * @param {string} name @param {Attributes} [attributes] @param {...any} children @returns {SVGElement}
 */
export function svgElement(name, attributes = {}, ...children) {
  return /** @type {any} */ (buildElement(document.createElementNS(SVG, name), attributes, children));
}

/** @param {Element} element @param {Attributes} attributes @param {any[]} children */
function buildElement(element, attributes, children) {
  setAttributes(element, attributes);
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== false && child !== undefined),
  );
  return element;
}

/**
 * Sets attributes; null and false remove them, functions are added as listeners.
 * @param {Element} element @param {Attributes} attributes
 */
export function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === null || value === false || value === undefined) element.removeAttribute(name);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
}

/** Replaces the children of an element. @param {Element} element @param {...any} children */
export function setChildren(element, ...children) {
  element.replaceChildren();
  buildElement(element, {}, children);
}

let idCount = 0;
/** Returns an id that is unique in the document, across widgets. @param {string} prefix */
export function uniqueId(prefix) {
  idCount += 1;
  return `regard-${prefix}-${idCount}`;
}

/** A token with its own text direction. @param {string} label @param {boolean} rtl @param {Attributes} [attributes] */
export function tokenText(label, rtl, attributes = {}) {
  return html("bdi", { dir: rtl ? "rtl" : "ltr", ...attributes }, label);
}

/**
 * A select element.
 * @param {string} label @param {Record<string, string>} options @param {(value: string) => void} onSelect
 */
export function picker(label, options, onSelect) {
  const select = html(
    "select",
    { "aria-label": label, onchange: () => onSelect(select.value) },
    Object.entries(options).map(([value, text]) => html("option", { value }, text)),
  );
  return select;
}

/* Text in SVG drawings. */

/** @type {CanvasRenderingContext2D | null} */
let measureContext = null;

/** Width of a text in pixels. @param {string} text @param {string} font */
export function textWidth(text, font) {
  measureContext ??= document.createElement("canvas").getContext("2d");
  measureContext.font = font;
  return measureContext.measureText(text).width;
}

/** A text of an SVG drawing with its own direction; `side` is the side of its anchor: left, middle or right. */
export function label(text, rtl, side, attributes) {
  const anchors = rtl
    ? { left: "end", middle: "middle", right: "start" }
    : { left: "start", middle: "middle", right: "end" };
  return svgElement(
    "text",
    { "text-anchor": anchors[side], direction: rtl ? "rtl" : "ltr", "unicode-bidi": "isolate", ...attributes },
    text,
  );
}
