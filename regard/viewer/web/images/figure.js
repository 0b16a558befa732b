/** Images with overlays over the patches, their labels and legends, and the choice of a patch. */

import { colorRamp, scaleToUnit } from "../core/colors.js";
import { html, setAttributes, setChildren, svgElement } from "../core/dom.js";
import { formatWeight, makeVisible } from "../core/tokens.js";
import { rowEntropy, topK } from "../weights/maths.js";

/*
 * * An image with its patches and an overlay: weights, with one color per patch, or the labels of its pixels.
 *
 * A patch has one weight and one color: a smooth map would suggest details that the model does not have. The image
 * under
 * weights is gray, so that every color stands for a weight.
 */

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

/**
 * @typedef {{pixels: Uint8Array, height: number, width: number, channels: number, rows: number, columns: number}}
 * ImagePixels
 */
/** @typedef {{numbers: Uint8Array | Uint16Array, colors: number[][]}} PixelLabels */

/**
 * The color map of an overlay, from zero to the maximum: brighter is more, on light pages too.
 * @param {string} colors @param {string} scale @param {number} maximum
 */
function overlayColormap(colors, scale, maximum) {
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

/**
 * Paints weights of patches into a canvas, one pixel per patch. @param {HTMLCanvasElement} canvas @param {number} rows
 * @param {number} columns @param {ArrayLike<number>} weights @param {string} colors @param {string} scale
 * @param {number} [opacity]
 */
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
function paintLegend(canvas, colors) {
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

/**
 * Paints an image in color or gray. @param {HTMLCanvasElement} canvas @param {ImagePixels} imagePixels
 * @param {boolean} gray
 */
export function paintImage(canvas, { pixels, height, width, channels }, gray) {
  [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const [green, blue] = channels === 3 ? [1, 2] : [0, 0];
  for (let i = 0, from = 0, to = 0; i < width * height; i++, from += channels, to += 4) {
    const [r, g, b] = [pixels[from], pixels[from + green], pixels[from + blue]];
    if (gray) {
      const light = (0.299 * r + 0.587 * g + 0.114 * b) / 255;
      image.data[to] =
        image.data[to + 1] =
        image.data[to + 2] =
          GRAY_OF_BLACK + (GRAY_OF_WHITE - GRAY_OF_BLACK) * light;
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
   * @param {{point: (patch: number | null, pixel: number | null) => void, pin: (patch: number) => void}} handlers
   * event handlers
   */
  constructor(handlers) {
    this.handlers = handlers;
    this.imageCanvas = html("canvas", { class: "base-image" });
    this.overlayCanvas = html("canvas", { class: "overlay" });
    this.marks = svgElement("svg", { class: "marks", "aria-hidden": "true" });
    this.element = html(
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
    paintPatches(
      this.overlayCanvas,
      this.imagePixels.rows,
      this.imagePixels.columns,
      weights,
      colors,
      scale,
      OVERLAY_OPACITY,
    );
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

  /**
   * Outlines the query patch and the patch under the pointer.
   * @param {{query: number | null, cursor: number | null, pinned: boolean}} outlined
   */
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
      return [
        svgElement("rect", { class: `outer ${kind}`, ...corner }),
        svgElement("rect", { class: `inner ${kind}`, ...corner }),
      ];
    };
    const { query, cursor, pinned } = this.outlined;
    setChildren(
      this.marks,
      Math.min(wide, high) >= MIN_GRID_PATCH
        ? svgElement("path", { class: "patch-lines", d: [...across, ...down].join("") })
        : null,
      cursor === query ? null : frame(cursor, "pointed"),
      frame(query, pinned ? "query pinned" : "query"),
    );
  }
}

/* Selection of a token of an image: patches lie over the image, other tokens next to it. */

/** A small image with the right aspect ratio. @param {any} scene @param {...any} children */
function smallImage(scene, ...children) {
  const { pixels, grid } = scene.image;
  const [height, width] = pixels.shape;
  const element = html("div", { class: "small-image" }, children);
  for (const [name, value] of Object.entries({ aspect: width / height, rows: grid[0], columns: grid[1] }))
    element.style.setProperty(`--${name}`, String(value));
  element.toggleAttribute("data-coarse", Math.max(height, width) < 160);
  return element;
}

/**
 * A canvas with the image in color or gray, painted when its pixels are loaded.
 * @param {import("../core/host.js").Host} host @param {boolean} gray
 */
function imageCanvas(host, gray) {
  const { pixels, grid } = host.scene.image;
  const [height, width, channels] = pixels.shape;
  const canvas = html("canvas", { "aria-hidden": "true" });
  host
    .blob(pixels.at)
    .then((buffer) =>
      paintImage(
        canvas,
        { pixels: new Uint8Array(buffer), height, width, channels, rows: grid[0], columns: grid[1] },
        gray,
      ),
    );
  return canvas;
}

/** The image in color. @param {import("../core/host.js").Host} host */
export function imageThumbnail(host) {
  return smallImage(host.scene, imageCanvas(host, false));
}

/**
 * Weights over patches as an overlay of the image. @param {import("../core/host.js").Host} host
 * @param {string} side of the weights @param {Float64Array} weights
 */
export function patchOverlay(host, side, weights) {
  const [rows, columns] = host.scene.image.grid;
  const start = host.scene.image.first[side];
  const overlay = html("canvas", { class: "overlay", "aria-hidden": "true" });
  paintPatches(overlay, rows, columns, weights.subarray(start, start + rows * columns), "iris", "linear", 0.65);
  return smallImage(host.scene, imageCanvas(host, true), overlay);
}

/**
 * Moves the buttons of patches onto a small image. Those of other tokens stay in their row.
 * @param {import("../core/host.js").Host} host @param {string} side of the tokens
 * @param {HTMLElement} group of all buttons, which handles
 * left and right @param {HTMLElement[]} buttons
 */
export function placePatchButtons(host, side, group, buttons) {
  const { grid, first } = host.scene.image;
  const columns = grid[1];
  const start = first[side] ?? 0;
  const patches = html("div", { class: "patch-buttons" }, buttons.slice(start));
  const image = smallImage(host.scene, imageCanvas(host, false), patches);
  for (const button of buttons.slice(start)) {
    // The label becomes a tooltip.
    const name = button.textContent;
    button.replaceChildren();
    setAttributes(button, { "aria-label": name, title: name });
  }
  patches.addEventListener("keydown", (event) => {
    const now = buttons.indexOf(/** @type {any} */ (event.target));
    const by = { ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (by === undefined || now < start) return;
    event.preventDefault();
    event.stopPropagation();
    const next = buttons[now + by];
    if (!next || now + by < start) return;
    next.focus();
    next.click();
  });
  group.classList.add("with-image");
  group.replaceChildren(...buttons.slice(0, start), image);
  return html("div", {}, group);
}

/* Details next to an image: the largest weights, the predictions, the colors of labels. */

/**
 * An overlay: one number per patch, the numbers of tokens that are not patches, and what they describe.
 * @typedef {{patches: Float64Array, others: {name: string, weight: number}[], subject: string, verb: string, rounded:
 * boolean}} Overlay
 */

/** Number of listed patches. */
const MAX_LISTED_PATCHES = 6;

/** The label of a patch. @param {number} patch @param {number} columns */
export function patchLabel(patch, columns) {
  return `patch ${Math.floor(patch / columns)},${patch % columns}`;
}

/** Formats a fraction as a percentage. @param {number} share */
export function formatPercent(share) {
  const percent = 100 * share;
  if (percent === 0 || percent >= 99.95) return `${percent.toFixed(0)}%`;
  if (percent < 0.01) return "< 0.01%";
  return `${percent < 1 ? Number(percent.toPrecision(2)) : percent.toFixed(1)}%`;
}

/** The largest numbers of an overlay, of patches and other tokens. @param {Overlay} overlay @param {number} columns */
export function largestWeights(overlay, columns) {
  const numbers = [...overlay.others.map(({ weight }) => weight), ...overlay.patches];
  return topK(Float64Array.from(numbers), MAX_LISTED_PATCHES)
    .filter((i) => numbers[i] >= 0.00005)
    .map((i) => {
      const patch = i - overlay.others.length;
      return {
        patch: patch < 0 ? null : patch,
        name: patch < 0 ? overlay.others[i].name : patchLabel(patch, columns),
        weight: numbers[i],
      };
    });
}

/**
 * The numbers of an overlay. @param {Overlay | null} overlay @param {number | null} cursor @param {boolean} pinned
 * @param {number} columns
 */
export function overlayDetails(overlay, cursor, pinned, columns) {
  if (!overlay) return [html("p", { class: "hint" }, "Point at a patch to see its weight; arrow keys work too.")];
  const best = largestWeights(overlay, columns);
  const top = best[0]?.weight ?? 1;
  const all =
    overlay.patches.reduce((sum, weight) => sum + weight, 0) +
    overlay.others.reduce((sum, { weight }) => sum + weight, 0);
  const rest = all - best.reduce((sum, { weight }) => sum + weight, 0);
  const others = overlay.patches.length + overlay.others.length - best.length;
  const bits = rowEntropy(Float64Array.from([...overlay.others.map(({ weight }) => weight), ...overlay.patches]));
  return html(
    "div",
    { class: "one" },
    html(
      "h2",
      {},
      html("bdi", { class: "subject" }, overlay.subject),
      html("span", { class: "verb" }, ` ${overlay.verb}`),
      pinned ? html("span", { class: "pinned" }, "pinned") : null,
    ),
    cursor === null
      ? null
      : html(
          "p",
          { class: "exact" },
          patchLabel(cursor, columns),
          " ",
          html("output", { "aria-live": "off" }, formatWeight(overlay.patches[cursor], overlay.rounded)),
        ),
    html(
      "ol",
      { class: "ranks" },
      best.map(({ patch, name, weight }) => {
        const bar = html("span", { class: "bar" });
        bar.style.width = `${(100 * weight) / top}%`;
        return html(
          "li",
          { class: patch !== null && patch === cursor ? "on" : "" },
          html("span", { class: "name" }, html("bdi", {}, name)),
          html("span", { class: "track" }, bar),
          html("span", { class: "weight" }, weight.toFixed(overlay.rounded ? 3 : 4)),
        );
      }),
    ),
    html(
      "p",
      { class: "secondary" },
      all > 0
        ? `${others > 0 ? `${others} others: ${Math.max(0, rest).toFixed(4)} in total. ` : ""}Entropy ${bits.toFixed(2)} bits, as for a uniform distribution over ${(2 ** bits).toFixed(1)} tokens.`
        : "All weights are 0.",
    ),
    overlay.rounded
      ? html(
          "p",
          { class: "secondary" },
          "To keep this page small, q and k are quantized to 16 bits: weights are accurate to about three digits.",
        )
      : null,
  );
}

/** A list of labels, one of which can be selected. */
export class LabelList {
  /**
   * @param {string} title @param {string} about
   * @param {{number: number, name: string, share: number, color?: number[]}[]} labels
   * @param {string} kind the class of the section @param {(number: number | null) => void} onSelect
   */
  constructor(title, about, labels, kind, onSelect) {
    this.buttons = labels.map(({ number, name, share, color }) => {
      const marker = html("span", { class: color ? "swatch" : "track", "aria-hidden": "true" });
      if (color) marker.style.background = `rgb(${color.join(", ")})`;
      else {
        const bar = html("span", { class: "bar" });
        bar.style.width = `${100 * share}%`;
        marker.append(bar);
      }
      const words = html("span", { class: "name" }, html("bdi", {}, makeVisible(name)));
      return html(
        "button",
        {
          type: "button",
          "data-label": number,
          "aria-pressed": "false",
          title: makeVisible(name),
          onclick: (/** @type {Event} */ event) =>
            onSelect(
              /** @type {HTMLElement} */ (event.currentTarget).getAttribute("aria-pressed") === "true" ? null : number,
            ),
        },
        color ? [marker, words] : [words, marker],
        html("span", { class: "share" }, formatPercent(share)),
      );
    });
    this.list = html(
      "ul",
      { class: "label-list" },
      this.buttons.map((button) => html("li", {}, button)),
    );
    this.element = html(
      "section",
      { class: kind, "aria-label": title },
      html("h2", {}, title),
      this.list,
      html("p", { class: "about" }, about),
    );
  }

  /** @param {number | null} number */
  mark(number) {
    for (const button of this.buttons)
      setAttributes(button, { "aria-pressed": String(Number(button.dataset.label) === number) });
  }
}

/**
 * The fraction of pixels of each label, in descending order. @param {Uint8Array | Uint16Array} numbers
 * @param {number} count
 */
export function labelFractions(numbers, count) {
  const shares = new Float64Array(count);
  for (const number of numbers) shares[number] += 1 / numbers.length;
  return Array.from(shares, (share, number) => ({ number, share })).sort((a, b) => b.share - a.share);
}

/** The color scale. @param {Overlay} overlay @param {string} colors @param {string} scale */
export function overlayLegend(overlay, colors, scale) {
  const maximum = overlay.patches.reduce((largest, weight) => Math.max(largest, weight), 0);
  const sum = overlay.patches.reduce((total, weight) => total + weight, 0);
  const canvas = html("canvas", {});
  paintLegend(canvas, colors);
  const ticks = (scale === "log" ? [0.001, 0.01, 0.1, 1] : [0, 0.5, 1]).map((share) => {
    const tick = html("span", { class: "tick" }, formatPercent(share * maximum));
    tick.style.left = `${100 * scaleToUnit(scale, share)}%`;
    return tick;
  });
  return [
    html("span", { class: "name" }, overlay.verb === "attends to" ? "Weight" : "Fraction"),
    html("div", { class: "scale" }, canvas, html("div", { class: "ticks" }, ticks)),
    html("span", { class: "together" }, `all patches ${formatPercent(sum)}`),
  ];
}
