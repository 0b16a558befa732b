/** Text in SVG drawings. */

import { s } from "../core/dom.js";

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
  return s(
    "text",
    { "text-anchor": anchors[side], direction: rtl ? "rtl" : "ltr", "unicode-bidi": "isolate", ...attributes },
    text,
  );
}
