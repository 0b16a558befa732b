/** Figures as SVG and PNG files, and the dialog for sharing a page. */

import { html, svgElement, uniqueId } from "./dom.js";
import { truncate } from "./tokens.js";

/*
 * * Export of what is on the screen. Every text, box, canvas and drawing of a part of the page is written as SVG, at
 * its
 * position and with its computed style; a PNG is a rasterized SVG. Controls are left out.
 */

/** Style properties that a shape may get from the style sheet, with their default values. */
const SHAPE_STYLE = {
  fill: "rgb(0, 0, 0)",
  "fill-opacity": "1",
  stroke: "none",
  "stroke-width": "1px",
  "stroke-opacity": "1",
  "stroke-dasharray": "none",
  "stroke-linecap": "butt",
  opacity: "1",
  "mix-blend-mode": "normal",
};
const TEXT_STYLE = {
  "font-family": "",
  "font-size": "",
  "font-weight": "400",
  "font-style": "normal",
  "font-variant-numeric": "normal",
};

/** Characters that are invalid in XML. */
const INVALID_XML = /[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\u{10000}-\u{10ffff}]/gu;

/** @param {CSSStyleDeclaration} style */
const isInvisible = (style) => style.display === "none" || style.visibility !== "visible" || style.opacity === "0";

/** @param {string} color */
const isTransparent = (color) => color === "transparent" || /^rgba\(.*, 0\)$/.test(color);

/**
 * Returns a part of the page as SVG. @param {HTMLElement} root @param {string} [caption] written into the lower margin
 * @returns {SVGElement}
 */
export function renderSvg(root, caption = "") {
  const frame = root.getBoundingClientRect();
  const margin = 24;
  const [width, height] = [Math.ceil(frame.width + 2 * margin), Math.ceil(frame.height + 2 * margin)];
  const paper = getComputedStyle(root.closest(".regard")).backgroundColor;
  const svg = svgElement("svg", {
    xmlns: "http://www.w3.org/2000/svg",
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
  });
  svg.append(svgElement("rect", { width, height, fill: paper }));
  // Integer offsets, so that glyphs fall on the same pixels as on the screen.
  drawElement(root, svg, margin - Math.floor(frame.left), margin - Math.floor(frame.top));
  if (caption) {
    const { color, fontFamily } = getComputedStyle(root.closest(".regard"));
    const text = truncate(caption, Math.floor(frame.width / 6));
    svg.append(
      svgElement(
        "text",
        { x: margin, y: height - 7, fill: color, "font-family": fontFamily, "font-size": 11 },
        text.replace(INVALID_XML, "\ufffd"),
      ),
    );
  }
  return svg;
}

/** @param {Element} element @param {SVGElement} parent @param {number} dx @param {number} dy */
function drawElement(element, parent, dx, dy) {
  const style = getComputedStyle(element);
  if (
    isInvisible(style) ||
    element.classList.contains("visually-hidden") ||
    element.getAttribute("data-export") === "no"
  )
    return;
  if (!element.checkVisibility()) return; // inside a closed <details>
  const box = element.getBoundingClientRect();
  if (box.width * box.height > 0) drawBox(style, box, parent, dx, dy);
  if (element instanceof SVGSVGElement) {
    const copy = /** @type {SVGElement} */ (element.cloneNode(true));
    copyStyle(element, copy);
    copy.setAttribute("x", String(box.left + dx));
    copy.setAttribute("y", String(box.top + dy));
    parent.append(copy);
    return;
  }
  if (style.overflowX !== "visible" || element instanceof HTMLCanvasElement)
    parent = createClipGroup(style, box, parent, dx, dy);
  if (element instanceof HTMLCanvasElement) {
    if (element.width * element.height > 0) parent.append(canvasImage(element, style, box, dx, dy));
  } else if (element instanceof HTMLSelectElement) {
    drawText(
      element.selectedOptions[0]?.textContent ?? "",
      style,
      box.left + parseFloat(style.paddingLeft),
      box,
      parent,
      dx,
      dy,
    );
  } else {
    for (const child of element.childNodes) {
      if (child instanceof Element) drawElement(child, parent, dx, dy);
      else if (child instanceof Text) drawWrappedText(child, style, parent, dx, dy);
    }
  }
}

/**
 * Returns a group that is clipped to a box.
 * @param {CSSStyleDeclaration} style @param {DOMRect} box @param {SVGElement} parent @param {number} dx
 * @param {number} dy
 */
function createClipGroup(style, box, parent, dx, dy) {
  const id = uniqueId("clip");
  const cornerRadius = Math.min(parseFloat(style.borderTopLeftRadius) || 0, box.height / 2);
  const edge = svgElement("rect", {
    x: box.left + dx,
    y: box.top + dy,
    width: box.width,
    height: box.height,
    rx: cornerRadius,
  });
  const group = svgElement("g", { "clip-path": `url(#${id})` });
  parent.append(svgElement("clipPath", { id }, edge), group);
  return group;
}

/**
 * Draws the background, border and outline of a box.
 * @param {CSSStyleDeclaration} style @param {DOMRect} box @param {SVGElement} parent @param {number} dx
 * @param {number} dy
 */
function drawBox(style, box, parent, dx, dy) {
  const radius = Math.min(parseFloat(style.borderTopLeftRadius) || 0, box.height / 2);
  /** @param {number} inset @param {Record<string, any>} attributes */
  const frame = (inset, attributes) =>
    parent.append(
      svgElement("rect", {
        x: box.left + dx + inset,
        y: box.top + dy + inset,
        width: Math.max(0, box.width - 2 * inset),
        height: Math.max(0, box.height - 2 * inset),
        rx: Math.max(0, radius - inset),
        fill: "none",
        ...attributes,
      }),
    );
  if (!isTransparent(style.backgroundColor)) frame(0, { fill: style.backgroundColor });
  // An outline is written as a shadow without blur.
  const ring = /^(rgba?\([^)]*\)) 0px 0px 0px ([\d.]+)px$/.exec(style.boxShadow);
  if (ring) frame(-Number(ring[2]) / 2, { stroke: ring[1], "stroke-width": ring[2] });
  const [top, bottom, left] = [style.borderTopWidth, style.borderBottomWidth, style.borderLeftWidth].map(parseFloat);
  if (top > 0 && left > 0) {
    if (!isTransparent(style.borderTopColor)) frame(top / 2, { stroke: style.borderTopColor, "stroke-width": top });
    return;
  }
  /** @param {number} y @param {string} stroke @param {number} width */
  const rule = (y, stroke, width) => {
    if (width > 0 && !isTransparent(stroke))
      parent.append(
        svgElement("path", { d: `M${box.left + dx} ${y + dy}h${box.width}`, stroke, "stroke-width": width }),
      );
  };
  rule(box.top + top / 2, style.borderTopColor, top);
  rule(box.bottom - bottom / 2, style.borderBottomColor, bottom);
}

/**
 * @param {HTMLCanvasElement} canvas @param {CSSStyleDeclaration} style @param {DOMRect} box @param {number} dx
 * @param {number} dy
 */
function canvasImage(canvas, style, box, dx, dy) {
  const isMirrored = style.transform.startsWith("matrix(-1");
  const image = svgElement("image", {
    href: canvas.toDataURL(),
    width: box.width,
    height: box.height,
    preserveAspectRatio: "none",
    style: "image-rendering: pixelated",
  });
  const [x, y] = [box.left + dx, box.top + dy];
  image.setAttribute("transform", isMirrored ? `translate(${x + box.width} ${y}) scale(-1 1)` : `translate(${x} ${y})`);
  return image;
}

/** Copies the computed style of a drawing to its clone. @param {Element} original @param {Element} copy */
function copyStyle(original, copy) {
  const style = getComputedStyle(original);
  if (isInvisible(style) && original.tagName !== "svg") {
    copy.remove();
    return;
  }
  const names = original.tagName === "text" ? { ...SHAPE_STYLE, ...TEXT_STYLE } : SHAPE_STYLE;
  if (["g", "svg"].includes(original.tagName)) {
    if (style.opacity !== "1") copy.setAttribute("opacity", style.opacity);
  } else {
    for (const [name, defaultValue] of Object.entries(names)) {
      const value = style.getPropertyValue(name);
      if (value === defaultValue) continue;
      if (name === "mix-blend-mode" || name === "font-variant-numeric") copy.setAttribute("style", `${name}: ${value}`);
      else copy.setAttribute(name, value);
    }
  }
  copy.removeAttribute("class");
  copy.removeAttribute("aria-hidden");
  // Backwards, because removing a child shifts those after it.
  for (let i = original.children.length - 1; i >= 0; i--) copyStyle(original.children[i], copy.children[i]);
}

/**
 * Draws a text node line by line, as it is wrapped on the screen.
 * @param {Text} node @param {CSSStyleDeclaration} style @param {SVGElement} parent @param {number} dx
 * @param {number} dy
 */
function drawWrappedText(node, style, parent, dx, dy) {
  const range = document.createRange();
  /** @type {{text: string, left: number, right: number, box: DOMRect}[]} */
  const lines = [];
  for (const { 0: word, index } of node.data.matchAll(/\S+/gu)) {
    range.setStart(node, index);
    range.setEnd(node, index + word.length);
    const box = range.getBoundingClientRect();
    if (box.width * box.height === 0) continue;
    const last = lines.at(-1);
    if (last && Math.abs(last.box.top - box.top) < box.height / 2) {
      last.text += ` ${word}`;
      last.left = Math.min(last.left, box.left);
      last.right = Math.max(last.right, box.right);
    } else lines.push({ text: word, left: box.left, right: box.right, box });
  }
  for (const line of lines) {
    drawText(line.text, style, style.direction === "rtl" ? line.right : line.left, line.box, parent, dx, dy);
  }
}

/**
 * @param {string} text @param {CSSStyleDeclaration} style @param {number} x @param {DOMRect} box
 * @param {SVGElement} parent @param {number} dx @param {number} dy
 */
function drawText(text, style, x, box, parent, dx, dy) {
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = `${style.fontStyle} ${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  const { fontBoundingBoxAscent: ascent, fontBoundingBoxDescent: descent } = pen.measureText("x");
  const upper = style.textTransform === "uppercase";
  parent.append(
    svgElement(
      "text",
      {
        x: x + dx,
        y: box.top + dy + (box.height - ascent - descent) / 2 + ascent,
        fill: style.color,
        direction: style.direction === "rtl" ? "rtl" : null,
        "font-family": style.fontFamily,
        "font-size": style.fontSize,
        "font-weight": style.fontWeight === "400" ? null : style.fontWeight,
        "font-style": style.fontStyle === "normal" ? null : style.fontStyle,
        "letter-spacing": style.letterSpacing === "normal" ? null : style.letterSpacing,
        style: style.fontVariantNumeric === "normal" ? null : `font-variant-numeric: ${style.fontVariantNumeric}`,
      },
      (upper ? text.toUpperCase() : text).replace(INVALID_XML, "\ufffd"),
    ),
  );
}

/** @param {SVGElement} svg @returns {string} */
export function serializeSvg(svg) {
  return new XMLSerializer().serializeToString(svg);
}

/**
 * Converts an SVG to PNG, at twice the resolution of the screen or its device pixel ratio, whichever is higher.
 * @param {SVGElement} svg @returns {Promise<Blob>}
 */
export async function png(svg) {
  const resolution = Math.max(2, window.devicePixelRatio || 1);
  const [width, height] = ["width", "height"].map((side) => Number(svg.getAttribute(side)));
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(serializeSvg(svg))}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width * resolution, height * resolution];
  const context = canvas.getContext("2d");
  context.scale(resolution, resolution);
  context.drawImage(image, 0, 0);
  return new Promise((resolve, reject) => {
    canvas.toBlob(
      (blob) => (blob ? resolve(blob) : reject(new Error("The image is too large to be exported."))),
      "image/png",
    );
  });
}

/** Offers a file for download. @param {Blob} blob @param {string} name */
export function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/* Sharing of a view: the code of a frame that embeds it in another page. */

/** Height of an embedded page in pixels. */
const FRAME_HEIGHT = 860;

/**
 * The HTML code of a frame with the page in a state. @param {string} address of the page, without #
 * @param {string} hash @param {string} title
 */
export function embedCode(address, hash, title) {
  const attribute = (/** @type {string} */ text) =>
    text.replaceAll("&", "&amp;").replaceAll('"', "&quot;").replaceAll("<", "&lt;");
  return `<iframe src="${attribute(`${address}#${hash}`)}" title="${attribute(title)}" width="100%" height="${FRAME_HEIGHT}" style="border: 0" loading="lazy"></iframe>`;
}

/** The address of the page for other pages: of a local file, its name, so that both can be moved together. */
export function shareableAddress() {
  return location.protocol === "file:" ? location.pathname.split("/").at(-1) : location.href.split("#")[0];
}

/**
 * A dialog with the code of a frame. @param {import("./shell.js").Announcer} announcer
 * @param {HTMLElement} root of the page, which receives the dialog while it is open
 */
export function embedDialog(announcer, root) {
  const id = uniqueId("embed");
  const code = html("textarea", {
    class: "embed-code",
    rows: 4,
    readonly: true,
    spellcheck: "false",
    "aria-label": "HTML code",
  });
  const copy = async () => {
    code.select();
    try {
      await navigator.clipboard.writeText(code.value);
      announcer.announce("Code copied.");
    } catch {
      announcer.announce("The code could not be copied. It is selected: copy it with Ctrl-C.");
    }
  };
  const dialog = html(
    "dialog",
    { class: "help", "aria-labelledby": id, "data-export": "no", onclose: () => dialog.remove() },
    html("h2", { id }, "Embed this view"),
    html(
      "p",
      {},
      "Paste this code into a web page. The frame opens at this view, layer, head and token",
      location.protocol === "file:" ? "; put this file next to the web page." : ".",
    ),
    code,
    html(
      "p",
      { class: "actions" },
      html("button", { type: "button", class: "small", onclick: copy }, "Copy"),
      html("button", { type: "button", class: "small", onclick: () => dialog.close() }, "Close"),
    ),
  );
  return {
    /** @param {string} text */
    open(text) {
      code.value = text;
      root.append(dialog);
      dialog.showModal();
      code.select();
    },
  };
}
