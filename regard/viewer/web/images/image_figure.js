/**
 * An image with its patches and an overlay: weights, with one color per patch, or the labels of its pixels.
 *
 * A patch has one weight and one color: a smooth map would suggest details that the model does not have. The image under
 * weights is gray, so that every color stands for a weight.
 */

import { colorRamp, scaleToUnit } from "../core/colors.js";
import { h, s, setAttributes, setChildren } from "../core/dom.js";

/** Opacity of the overlay, and the gray levels of black and white below it. */
const OVERLAY_OPACITY = 0.8;
const GRAY_OF_BLACK = 26;
const GRAY_OF_WHITE = 204;
/** Opacity of labels, and of labels that are not selected. */
const LABEL_OPACITY = 0.55;
const FAINT_LABEL_OPACITY = 0.06;
/** Images smaller than this, in pixels, are enlarged without interpolation. */
const MIN_SMOOTH_SIZE = 160;
/** Minimum size of patches with grid lines, in pixels on the screen. */
const MIN_GRID_PATCH = 7;

/** @typedef {{pixels: Uint8Array, height: number, width: number, channels: number, rows: number, columns: number}} ImagePixels */
/** @typedef {{numbers: Uint8Array | Uint16Array, colors: number[][]}} PixelLabels */

/**
 * The color map of an overlay, from zero to the maximum: brighter is more, on light pages too.
 * @param {string} colors @param {string} scale @param {number} maximum
 */
export function overlayColormap(colors, scale, maximum) {
  const shades = colorRamp(colors, true);
  /** @param {number} weight */
  const from = (weight) => 3 * Math.round(255 * scaleToUnit(scale, maximum > 0 ? weight / maximum : 0));
  return {
    /** @param {ArrayLike<number>} weights @param {Uint8ClampedArray} pixels r g b a @param {number} opacity */
    paint(weights, pixels, opacity) {
      for (let i = 0; i < weights.length; i++) {
        const at = from(weights[i]);
        for (let c = 0; c < 3; c++) pixels[4 * i + c] = shades[at + c];
        // Over an image, small weights are nearly transparent, so that the image stays visible.
        pixels[4 * i + 3] = opacity === 1 ? 255 : 255 * opacityOf(at / 3 / 255, opacity);
      }
    },
  };
}

/** Opacity of a fraction of the color range. @param {number} fraction @param {number} opacity of the largest weight */
const opacityOf = (fraction, opacity) => opacity * (0.25 + 0.75 * fraction);

/** Paints weights of patches into a canvas, one pixel per patch. @param {HTMLCanvasElement} canvas @param {number} rows @param {number} columns @param {ArrayLike<number>} weights @param {string} colors @param {string} scale @param {number} [opacity] */
export function paintPatches(canvas, rows, columns, weights, colors, scale, opacity = 1) {
  [canvas.width, canvas.height] = [columns, rows];
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  let maximum = 0;
  for (let i = 0; i < weights.length; i++) maximum = Math.max(maximum, weights[i]);
  overlayColormap(colors, scale, maximum).paint(weights, image.data, opacity);
  context.putImageData(image, 0, 0);
}

/** Paints the color scale, as it looks over medium gray. @param {HTMLCanvasElement} canvas @param {string} colors */
export function paintLegend(canvas, colors) {
  [canvas.width, canvas.height] = [256, 1];
  const context = canvas.getContext("2d");
  const image = context.createImageData(256, 1);
  const shades = colorRamp(colors, true);
  const gray = (GRAY_OF_BLACK + GRAY_OF_WHITE) / 2;
  for (let i = 0; i < 256; i++) {
    const opacity = opacityOf(i / 255, OVERLAY_OPACITY);
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = opacity * shades[3 * i + c] + (1 - opacity) * gray;
    image.data[4 * i + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}

/** Paints an image in color or gray. @param {HTMLCanvasElement} canvas @param {ImagePixels} imagePixels @param {boolean} gray */
export function paintImage(canvas, { pixels, height, width, channels }, gray) {
  [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const [green, blue] = channels === 3 ? [1, 2] : [0, 0];
  for (let i = 0, from = 0, to = 0; i < width * height; i++, from += channels, to += 4) {
    const [r, g, b] = [pixels[from], pixels[from + green], pixels[from + blue]];
    if (gray) {
      const light = (0.299 * r + 0.587 * g + 0.114 * b) / 255;
      image.data[to] = image.data[to + 1] = image.data[to + 2] = GRAY_OF_BLACK + (GRAY_OF_WHITE - GRAY_OF_BLACK) * light;
    } else {
      image.data[to] = r;
      image.data[to + 1] = g;
      image.data[to + 2] = b;
    }
    image.data[to + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}

export class PatchFigure {
  /**
   * @param {{point: (patch: number | null, pixel: number | null) => void, pin: (patch: number) => void}} handlers event handlers
   */
  constructor(handlers) {
    this.handlers = handlers;
    this.imageCanvas = h("canvas", { class: "base-image" });
    this.overlayCanvas = h("canvas", { class: "overlay" });
    this.marks = s("svg", { class: "marks", "aria-hidden": "true" });
    this.element = h(
      "div",
      {
        class: "figure patches",
        tabindex: 0,
        role: "application",
        "aria-roledescription": "image with patches",
        onpointermove: (event) => this.onPointerMove(event),
        onpointerleave: (event) => event.pointerType === "mouse" && handlers.point(null, null),
        onclick: (event) => {
          const at = this.positionAt(event);
          if (at) handlers.pin(at.patch);
        },
      },
      this.imageCanvas,
      this.overlayCanvas,
      this.marks,
    );
    /** @type {ImagePixels | null} */
    this.imagePixels = null;
    this.paintedBase = "";
    this.outlined = { query: null, cursor: null, pinned: false };
  }

  /** @param {ImagePixels} imagePixels */
  setImage(imagePixels) {
    this.imagePixels = imagePixels;
    this.element.style.setProperty("--aspect", String(imagePixels.width / imagePixels.height));
    this.element.toggleAttribute("data-coarse", Math.max(imagePixels.width, imagePixels.height) < MIN_SMOOTH_SIZE);
  }

  /** @param {PointerEvent} event */
  onPointerMove(event) {
    const at = this.positionAt(event);
    this.handlers.point(at?.patch ?? null, at?.pixel ?? null);
  }

  /** The patch and pixel under the pointer. @param {MouseEvent} event */
  positionAt(event) {
    if (!this.imagePixels) return null;
    const { width, height, rows, columns } = this.imagePixels;
    const box = this.imageCanvas.getBoundingClientRect();
    const [x, y] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    if (x < 0 || y < 0 || x >= 1 || y >= 1) return null;
    return {
      patch: Math.floor(y * rows) * columns + Math.floor(x * columns),
      pixel: Math.floor(y * height) * width + Math.floor(x * width),
    };
  }

  /** The center pixel of a patch. @param {number} patch */
  centerPixel(patch) {
    const { width, height, rows, columns } = this.imagePixels;
    const [row, column] = [Math.floor(patch / columns), patch % columns];
    return Math.floor(((row + 0.5) * height) / rows) * width + Math.floor(((column + 0.5) * width) / columns);
  }

  /** Shows the image without an overlay. */
  showImage() {
    this.paintBase(false);
    setAttributes(this.overlayCanvas, { hidden: true });
  }

  /** Shows weights of patches. @param {ArrayLike<number>} weights @param {string} colors @param {string} scale */
  showWeights(weights, colors, scale) {
    this.paintBase(true);
    setAttributes(this.overlayCanvas, { hidden: false });
    paintPatches(this.overlayCanvas, this.imagePixels.rows, this.imagePixels.columns, weights, colors, scale, OVERLAY_OPACITY);
  }

  /** Shows labels of pixels. @param {PixelLabels} labels @param {number | null} highlighted the highlighted label */
  showLabels({ numbers, colors }, highlighted) {
    this.paintBase(true);
    setAttributes(this.overlayCanvas, { hidden: false });
    const { width, height } = this.imagePixels;
    [this.overlayCanvas.width, this.overlayCanvas.height] = [width, height];
    const context = this.overlayCanvas.getContext("2d");
    const image = context.createImageData(width, height);
    for (let i = 0; i < numbers.length; i++) {
      const color = colors[numbers[i]];
      const opacity = highlighted === null ? LABEL_OPACITY : numbers[i] === highlighted ? 0.75 : FAINT_LABEL_OPACITY;
      image.data.set([color[0], color[1], color[2], 255 * opacity], 4 * i);
    }
    context.putImageData(image, 0, 0);
  }

  /** @param {boolean} gray */
  paintBase(gray) {
    const base = gray ? "gray" : "color";
    if (this.paintedBase !== base) paintImage(this.imageCanvas, this.imagePixels, gray);
    this.paintedBase = base;
  }

  /** Outlines the query patch and the patch under the pointer. @param {{query: number | null, cursor: number | null, pinned: boolean}} outlined */
  mark(outlined) {
    this.outlined = outlined;
    this.layout();
  }

  /** Draws grid lines and outlines at the current size. */
  layout() {
    const box = this.imageCanvas.getBoundingClientRect();
    if (!this.imagePixels || !box.width) return;
    const { rows, columns } = this.imagePixels;
    const [wide, high] = [box.width / columns, box.height / rows];
    setAttributes(this.marks, { width: box.width, height: box.height });
    const across = Array.from({ length: rows - 1 }, (_, i) => `M0 ${((i + 1) * high).toFixed(2)}H${box.width}`);
    const down = Array.from({ length: columns - 1 }, (_, i) => `M${((i + 1) * wide).toFixed(2)} 0V${box.height}`);
    /** @param {number | null} patch @param {string} kind */
    const frame = (patch, kind) => {
      if (patch === null) return null;
      const corner = { x: (patch % columns) * wide, y: Math.floor(patch / columns) * high, width: wide, height: high };
      // Two outlines, visible on any color.
      return [s("rect", { class: `outer ${kind}`, ...corner }), s("rect", { class: `inner ${kind}`, ...corner })];
    };
    const { query, cursor, pinned } = this.outlined;
    setChildren(
      this.marks,
      Math.min(wide, high) >= MIN_GRID_PATCH ? s("path", { class: "patch-lines", d: [...across, ...down].join("") }) : null,
      cursor === query ? null : frame(cursor, "pointed"),
      frame(query, pinned ? "query pinned" : "query"),
    );
  }
}
