/**
 * An image with its patches and an overlay: weights, with one color per patch, or the labels of its pixels.
 *
 * A patch has one weight and one color: a smooth map would suggest details that the model does not have. The image under
 * weights is gray, so that every color stands for a weight.
 */

import { ramp, shareOf } from "../core/colors.js";
import { change, fill, h, s } from "../core/dom.js";

/** Opacity of the overlay, and the gray levels of black and white below it. */
const OPAQUE = 0.65;
const DARKEST = 26;
const LIGHTEST = 204;
/** Opacity of labels, and of labels that are not selected. */
const OPAQUE_LABEL = 0.55;
const FAINT_LABEL = 0.06;
/** Images smaller than this, in pixels, are enlarged without interpolation. */
const COARSE = 160;
/** Minimum size of patches with grid lines, in pixels on the screen. */
const LINED = 7;

/** @typedef {{pixels: Uint8Array, height: number, width: number, channels: number, rows: number, columns: number}} Photo */
/** @typedef {{numbers: Uint8Array | Uint16Array, colours: number[][]}} PixelLabels */

/**
 * The color map of an overlay, from zero to the maximum: brighter is more, on light pages too.
 * @param {string} colours @param {string} scale @param {number} most
 */
export function veilOf(colours, scale, most) {
  const shades = ramp(colours, true);
  /** @param {number} weight */
  const from = (weight) => 3 * Math.round(255 * shareOf(scale, most > 0 ? weight / most : 0));
  return {
    /** @param {ArrayLike<number>} weights @param {Uint8ClampedArray} pixels r g b a @param {number} opaque */
    fill(weights, pixels, opaque) {
      for (let i = 0; i < weights.length; i++) {
        const at = from(weights[i]);
        for (let c = 0; c < 3; c++) pixels[4 * i + c] = shades[at + c];
        pixels[4 * i + 3] = 255 * opaque;
      }
    },
  };
}

/** Paints weights of patches into a canvas, one pixel per patch. @param {HTMLCanvasElement} canvas @param {number} rows @param {number} columns @param {ArrayLike<number>} weights @param {string} colours @param {string} scale @param {number} [opaque] */
export function paintPatches(canvas, rows, columns, weights, colours, scale, opaque = 1) {
  [canvas.width, canvas.height] = [columns, rows];
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  let most = 0;
  for (let i = 0; i < weights.length; i++) most = Math.max(most, weights[i]);
  veilOf(colours, scale, most).fill(weights, image.data, opaque);
  context.putImageData(image, 0, 0);
}

/** Paints the color scale, as it looks over medium gray. @param {HTMLCanvasElement} canvas @param {string} colours */
export function paintLegend(canvas, colours) {
  [canvas.width, canvas.height] = [256, 1];
  const context = canvas.getContext("2d");
  const image = context.createImageData(256, 1);
  const shades = ramp(colours, true);
  const grey = (DARKEST + LIGHTEST) / 2;
  for (let i = 0; i < 256; i++) {
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = OPAQUE * shades[3 * i + c] + (1 - OPAQUE) * grey;
    image.data[4 * i + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}

/** Paints an image in color or gray. @param {HTMLCanvasElement} canvas @param {Photo} photo @param {boolean} grey */
export function paintPhoto(canvas, { pixels, height, width, channels }, grey) {
  [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const [green, blue] = channels === 3 ? [1, 2] : [0, 0];
  for (let i = 0, from = 0, to = 0; i < width * height; i++, from += channels, to += 4) {
    const [r, g, b] = [pixels[from], pixels[from + green], pixels[from + blue]];
    if (grey) {
      const light = (0.299 * r + 0.587 * g + 0.114 * b) / 255;
      image.data[to] = image.data[to + 1] = image.data[to + 2] = DARKEST + (LIGHTEST - DARKEST) * light;
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
   * @param {{point: (patch: number | null, pixel: number | null) => void, pin: (patch: number) => void}} told event handlers
   */
  constructor(told) {
    this.told = told;
    this.photoCanvas = h("canvas", { class: "photo" });
    this.veilCanvas = h("canvas", { class: "veil" });
    this.marks = s("svg", { class: "marks", "aria-hidden": "true" });
    this.element = h(
      "div",
      {
        class: "figure patches",
        tabindex: 0,
        role: "application",
        "aria-roledescription": "image with patches",
        onpointermove: (event) => this.hear(event),
        onpointerleave: (event) => event.pointerType === "mouse" && told.point(null, null),
        onclick: (event) => {
          const at = this.at(event);
          if (at) told.pin(at.patch);
        },
      },
      this.photoCanvas,
      this.veilCanvas,
      this.marks,
    );
    /** @type {Photo | null} */
    this.photo = null;
    this.painted = "";
    this.marked = { asker: null, cursor: null, pinned: false };
  }

  /** @param {Photo} photo */
  setPhoto(photo) {
    this.photo = photo;
    this.element.style.setProperty("--aspect", String(photo.width / photo.height));
    this.element.toggleAttribute("data-coarse", Math.max(photo.width, photo.height) < COARSE);
  }

  /** @param {PointerEvent} event */
  hear(event) {
    const at = this.at(event);
    this.told.point(at?.patch ?? null, at?.pixel ?? null);
  }

  /** The patch and pixel under the pointer. @param {MouseEvent} event */
  at(event) {
    if (!this.photo) return null;
    const { width, height, rows, columns } = this.photo;
    const box = this.photoCanvas.getBoundingClientRect();
    const [x, y] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    if (x < 0 || y < 0 || x >= 1 || y >= 1) return null;
    return {
      patch: Math.floor(y * rows) * columns + Math.floor(x * columns),
      pixel: Math.floor(y * height) * width + Math.floor(x * width),
    };
  }

  /** The center pixel of a patch. @param {number} patch */
  middleOf(patch) {
    const { width, height, rows, columns } = this.photo;
    const [row, column] = [Math.floor(patch / columns), patch % columns];
    return Math.floor(((row + 0.5) * height) / rows) * width + Math.floor(((column + 0.5) * width) / columns);
  }

  /** Shows the image without an overlay. */
  showPhoto() {
    this.paintBelow(false);
    change(this.veilCanvas, { hidden: true });
  }

  /** Shows weights of patches. @param {ArrayLike<number>} weights @param {string} colours @param {string} scale */
  showWeights(weights, colours, scale) {
    this.paintBelow(true);
    change(this.veilCanvas, { hidden: false });
    paintPatches(this.veilCanvas, this.photo.rows, this.photo.columns, weights, colours, scale, OPAQUE);
  }

  /** Shows labels of pixels. @param {PixelLabels} labels @param {number | null} chosen the highlighted label */
  showLabels({ numbers, colours }, chosen) {
    this.paintBelow(true);
    change(this.veilCanvas, { hidden: false });
    const { width, height } = this.photo;
    [this.veilCanvas.width, this.veilCanvas.height] = [width, height];
    const context = this.veilCanvas.getContext("2d");
    const image = context.createImageData(width, height);
    for (let i = 0; i < numbers.length; i++) {
      const colour = colours[numbers[i]];
      const opaque = chosen === null ? OPAQUE_LABEL : numbers[i] === chosen ? 0.75 : FAINT_LABEL;
      image.data.set([colour[0], colour[1], colour[2], 255 * opaque], 4 * i);
    }
    context.putImageData(image, 0, 0);
  }

  /** @param {boolean} grey */
  paintBelow(grey) {
    const wanted = grey ? "grey" : "colours";
    if (this.painted !== wanted) paintPhoto(this.photoCanvas, this.photo, grey);
    this.painted = wanted;
  }

  /** Outlines the query patch and the patch under the pointer. @param {{asker: number | null, cursor: number | null, pinned: boolean}} marked */
  mark(marked) {
    this.marked = marked;
    this.lay();
  }

  /** Draws grid lines and outlines at the current size. */
  lay() {
    const box = this.photoCanvas.getBoundingClientRect();
    if (!this.photo || !box.width) return;
    const { rows, columns } = this.photo;
    const [wide, high] = [box.width / columns, box.height / rows];
    change(this.marks, { width: box.width, height: box.height });
    const across = Array.from({ length: rows - 1 }, (_, i) => `M0 ${((i + 1) * high).toFixed(2)}H${box.width}`);
    const down = Array.from({ length: columns - 1 }, (_, i) => `M${((i + 1) * wide).toFixed(2)} 0V${box.height}`);
    /** @param {number | null} patch @param {string} kind */
    const frame = (patch, kind) => {
      if (patch === null) return null;
      const corner = { x: (patch % columns) * wide, y: Math.floor(patch / columns) * high, width: wide, height: high };
      // Two outlines, visible on any color.
      return [s("rect", { class: `outer ${kind}`, ...corner }), s("rect", { class: `inner ${kind}`, ...corner })];
    };
    const { asker, cursor, pinned } = this.marked;
    fill(
      this.marks,
      Math.min(wide, high) >= LINED ? s("path", { class: "patch-lines", d: [...across, ...down].join("") }) : null,
      cursor === asker ? null : frame(cursor, "pointed"),
      frame(asker, pinned ? "asker pinned" : "asker"),
    );
  }
}
