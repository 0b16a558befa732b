/** Colors of weights and of changes, and their legends. */

import { html, setChildren } from "./dom.js";
import { withMinus } from "./tokens.js";

/*
 * * Color maps of weights, computed in OKLCH, where equal steps look equal: lightness is monotonic (decreasing on light
 * pages, increasing on dark ones), so the order remains visible to color-blind readers and in black and white.
 */

/** @typedef {[number, number, number]} Rgb from 0 to 255 */

export const COLORS = { blue: "Blue", iris: "Iris" };
export const SCALES = { linear: "Linear", root: "Square root", log: "Logarithmic" };
/** The smallest weight of a logarithmic scale. */
const LOG_SCALE_MIN = 1e-4;
const STEPS = 256;

/**
 * Converts OKLCH (lightness 0 to 1, chroma, hue in degrees) to sRGB. Chroma is reduced until the color is in gamut.
 * @param {number} lightness @param {number} chroma @param {number} hue @returns {Rgb}
 */
function oklch(lightness, chroma, hue) {
  const angle = (hue * Math.PI) / 180;
  for (let c = chroma; ; c -= 0.002) {
    const a = Math.max(0, c) * Math.cos(angle);
    const b = Math.max(0, c) * Math.sin(angle);
    // Björn Ottosson's matrices (2020): OKLab to LMS, to linear sRGB.
    const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
    const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
    const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
    const linear = [
      4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
      -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
      -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
    ];
    if (c <= 0 || linear.every((x) => x > -0.0005 && x < 1.0005)) {
      return /** @type {Rgb} */ (
        linear.map((x) => {
          const bounded = Math.max(0, Math.min(1, x));
          const encoded = bounded <= 0.0031308 ? 12.92 * bounded : 1.055 * bounded ** (1 / 2.4) - 0.055;
          return Math.round(255 * encoded);
        })
      );
    }
  }
}

/**
 * The color of a fraction between 0 (slightly different from the background) and 1.
 * @param {string} name @param {boolean} dark @param {number} fraction @returns {Rgb}
 */
function shade(name, dark, fraction) {
  const lightness = dark ? 0.265 + 0.675 * fraction : 0.972 - 0.69 * fraction;
  const paper = 0.01 * (1 - fraction);
  if (name === "iris") {
    // From yellow and green to violet; on dark pages in reverse.
    const hue = dark ? 290 - 190 * fraction : 100 + 190 * fraction;
    return oklch(lightness, paper + 0.15 * Math.min(1, 5 * fraction), hue);
  }
  // One hue; the chroma is largest at medium lightness, where the gamut is widest.
  const chroma = 0.15 * Math.sin(Math.PI * fraction ** 0.85) ** 0.8 + (dark ? 0 : 0.07 * fraction);
  const hue = name === "rust" ? 62 + (dark ? 10 : -14) * fraction : 252 + (dark ? -14 : 10) * fraction;
  return oklch(lightness, paper + Math.max(0, chroma), hue);
}

/** @type {Map<string, Uint8ClampedArray>} */
const colorRamps = new Map();

/** The 256 colors of a map, as consecutive r, g, b. @param {string} name @param {boolean} dark */
export function colorRamp(name, dark) {
  const key = `${name} ${dark}`;
  if (!colorRamps.has(key)) {
    const colors = new Uint8ClampedArray(3 * STEPS);
    for (let i = 0; i < STEPS; i++) colors.set(shade(name, dark, i / (STEPS - 1)), 3 * i);
    colorRamps.set(key, colors);
  }
  return colorRamps.get(key);
}

/** The fraction of the color range that shows a weight. @param {string} scale @param {number} weight */
export function scaleToUnit(scale, weight) {
  if (!(weight > 0)) return 0;
  if (scale === "root") return Math.min(1, Math.sqrt(weight));
  if (scale === "log") return Math.max(0, Math.min(1, 1 - Math.log(weight) / Math.log(LOG_SCALE_MIN)));
  return Math.min(1, weight);
}

/** The tick weights of a color scale. @param {string} scale */
export function legendTicks(scale) {
  if (scale === "log") return [LOG_SCALE_MIN, 1e-3, 1e-2, 0.1, 1];
  return scale === "root" ? [0, 0.01, 0.1, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1];
}

/** Relative luminance from 0 to 1 (WCAG). @param {number} r @param {number} g @param {number} b */
export function luminance(r, g, b) {
  const [red, green, blue] = [r, g, b].map((x) => (x <= 10 ? x / 3294.6 : ((x / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

/**
 * A color map: the color of a weight, and the color of text on it.
 * @param {string} name @param {string} scale @param {boolean} dark
 */
export function createColormap(name, scale, dark) {
  const colors = colorRamp(name, dark);
  /** @param {number} weight */
  const step = (weight) => Math.round(scaleToUnit(scale, weight) * (STEPS - 1));
  return {
    /** @param {number} weight */
    css(weight) {
      const i = 3 * step(weight);
      return `rgb(${colors[i]}, ${colors[i + 1]}, ${colors[i + 2]})`;
    },
    /** Whether white text has more contrast than black on a weight's color. @param {number} weight */
    needsLightText(weight) {
      const i = 3 * step(weight);
      return luminance(colors[i], colors[i + 1], colors[i + 2]) < 0.179;
    },
    /** Writes the colors of weights. @param {Float32Array} weights @param {Uint8ClampedArray} pixels r g b a */
    paint(weights, pixels) {
      for (let i = 0; i < weights.length; i++) {
        const from = 3 * step(weights[i]);
        const to = 4 * i;
        pixels[to] = colors[from];
        pixels[to + 1] = colors[from + 1];
        pixels[to + 2] = colors[from + 2];
        pixels[to + 3] = 255;
      }
    },
  };
}

/**
 * A diverging color map for differences: blue above zero, orange below, which color-blind readers can distinguish, with
 * equal lightness on both sides.
 * @param {string} scale @param {boolean} dark
 */
export function createDivergingColormap(scale, dark) {
  const [more, less] = [colorRamp("blue", dark), colorRamp("rust", dark)];
  /** @param {number} fraction from -1 to 1 @returns {Rgb} */
  const color = (fraction) => {
    const side = fraction < 0 ? less : more;
    const i = 3 * Math.round(Math.min(1, Math.abs(fraction)) * (STEPS - 1));
    return [side[i], side[i + 1], side[i + 2]];
  };
  /** @param {number} difference */
  const signedFraction = (difference) => Math.sign(difference) * scaleToUnit(scale, Math.abs(difference));
  /** @param {Float32Array} fractions @param {Uint8ClampedArray} pixels r g b a */
  const paintShares = (fractions, pixels) =>
    fractions.forEach((fraction, i) => pixels.set([...color(fraction), 255], 4 * i));
  return {
    /** @param {number} difference */
    css: (difference) => `rgb(${color(signedFraction(difference)).join(", ")})`,
    /** @param {number} difference */
    needsLightText: (difference) => luminance(...color(signedFraction(difference))) < 0.179,
    /** @param {Float32Array} differences @param {Uint8ClampedArray} pixels */
    paint: (differences, pixels) => paintShares(differences.map(signedFraction), pixels),
    paintShares,
  };
}

/* The color scale below a figure. */

/**
 * Draws the color scale of weights.
 * @param {HTMLElement} element @param {string} colors @param {string} scale @param {boolean} dark
 * @param {boolean} hasGold whether gold links are marked
 */
export function drawColorScale(element, colors, scale, dark, hasGold) {
  const ramp = colorRamp(colors, dark);
  const canvas = html("canvas", { width: 256, height: 1 });
  const context = canvas.getContext("2d");
  const image = context.createImageData(256, 1);
  for (let i = 0; i < 256; i++) image.data.set([...ramp.subarray(3 * i, 3 * i + 3), 255], 4 * i);
  context.putImageData(image, 0, 0);
  const ticks = legendTicks(scale).map((weight) => {
    const tick = html("span", { class: "tick" }, String(weight));
    tick.style.left = `${100 * scaleToUnit(scale, weight)}%`;
    return tick;
  });
  setChildren(
    element,
    html("span", { class: "name" }, "Weight"),
    html("div", { class: "scale" }, canvas, html("div", { class: "ticks" }, ticks)),
    hasGold ? html("span", { class: "gold-key" }, html("i", { "aria-hidden": "true" }), "gold link") : null,
  );
}

/* Colors and formats of signed numbers: changes of log-probabilities. */

/** The part of the color range that is used: the ends of both hues look alike. */
const USED_RANGE = 0.75;

/** The diverging color map of fractions from −1 to 1. @param {boolean} dark */
export function signedColormap(dark) {
  const whole = createDivergingColormap("linear", dark);
  return {
    /** @param {number} fraction */
    css: (fraction) => whole.css(USED_RANGE * fraction),
    /** @param {number} fraction */
    needsLightText: (fraction) => whole.needsLightText(USED_RANGE * fraction),
  };
}

/** Formats a change of a log-probability with its sign. @param {number} x */
export function formatChange(x) {
  if (Math.abs(x) < 5e-4)
    return Math.abs(x) < 5e-7 ? "0" : `${x < 0 ? "−" : "+"}${withMinus(Math.abs(x).toExponential(0))}`;
  return `${x < 0 ? "−" : "+"}${Math.abs(x) >= 10 ? Math.abs(x).toFixed(0) : Math.abs(x).toPrecision(2)}`;
}

/**
 * A legend of a diverging color scale from −maximum to maximum. @param {any} colormap @param {number} maximum
 * @param {string} low @param {string} high
 */
export function divergingLegend(colormap, maximum, low, high) {
  const stops = Array.from({ length: 21 }, (_, i) => colormap.css((i - 10) / 10));
  const bar = html("span", { class: "diverging", "aria-hidden": "true" });
  bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  return html(
    "p",
    { class: "diverging-legend" },
    html("span", {}, `${formatChange(-maximum)} ${low}`),
    bar,
    html("span", {}, `${formatChange(maximum)} ${high}`),
  );
}
