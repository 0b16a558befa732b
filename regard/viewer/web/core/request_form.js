/** Forms for new input: texts, images, and the page before the first request. */

import { html, setAttributes, setChildren, uniqueId } from "./dom.js";
import { hostForResponse } from "./host.js";
import { dropDown, icon, topBar } from "./shell.js";
import { makeVisible } from "./tokens.js";

/* Input fields of the model, where there is a model to send requests to. */

/** @typedef {import("./host.js").Host} Host */

const FIELD_NAMES = { source: "Sentence", target: "Translation", beside: "Other sentence", context: "Context" };
const FIELD_HINTS = {
  source: "A sentence to inspect",
  target: "Translation (default: the model’s output)",
  context: "The passage that the question is about",
  beside: "A sentence to compare with",
};

const SEARCHES = { beam: "Beam search", greedy: "Greedy search", sample: "Sampling" };

/**
 * Fields for the texts that the model takes, and a submit button. The response replaces the scene.
 * @param {Host} host
 * @param {Record<string, string> | undefined} texts contents of the fields; by default the scene's texts
 * @param {(host: Host, contents: () => Record<string, string>) => Promise<void>} show
 */
export function requestForm(host, texts = requestTexts(host.scene), show) {
  const status = html("p", { class: "request-status", id: uniqueId("status"), role: "status" });
  const fields = host.fields.map((name) =>
    html("textarea", {
      name,
      rows: 1,
      dir: "auto",
      spellcheck: "false",
      "aria-label": FIELD_NAMES[name],
      "aria-describedby": status.id,
      placeholder: FIELD_HINTS[name],
      onkeydown: (event) => {
        if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
        event.preventDefault();
        form.requestSubmit();
      },
    }),
  );
  for (const field of fields) field.value = texts[field.name] ?? "";
  status.textContent = host.scene.warning ?? "";
  // Texts may be edited and submitted while the model runs: the response to the last one is shown.
  let submissions = 0;
  const button = html("button", { type: "submit" }, "Run");
  // A translator in the page itself: its search can be chosen.
  const search =
    host.note && host.fields.includes("target")
      ? html(
          "select",
          { name: "search", "aria-label": "Search" },
          Object.entries(SEARCHES).map(([value, name]) => html("option", { value }, name)),
        )
      : null;
  if (search) search.value = texts.search ?? "beam";

  /** @returns {Record<string, string>} */
  const contents = () =>
    Object.fromEntries([...fields, ...(search ? [search] : [])].map((field) => [field.name, field.value]));
  const submit = async () => {
    const number = ++submissions;
    const values = contents();
    status.textContent = "Running …";
    delete form.dataset.failed;
    try {
      const inputs = Object.fromEntries(
        host.fields.map((name) => [name, values[name]]).filter(([name, text]) => name === "source" || text.trim()),
      );
      const options =
        search && search.value !== "beam" ? { search: { method: search.value, seed: Date.now() % 2 ** 31 } } : {};
      const response = await host.request({ look: { ...inputs, ...options } });
      if (number === submissions) await show(hostForResponse(host, response), contents);
    } catch (error) {
      if (number !== submissions) return;
      form.dataset.failed = "";
      setChildren(status, error.message, error.link ? [" ", html("a", { href: error.link }, "Open it")] : "");
    }
  };
  const form = html(
    "form",
    {
      class: "request-form",
      "data-export": "no",
      "aria-label": "Model input",
      onsubmit: (event) => {
        event.preventDefault();
        submit();
      },
    },
    fields,
    search ?? "",
    button,
    host.note ? noteMenu(host.note) : "",
    status,
  );
  return form;
}

/** A button that shows a note on the model in the page. @param {string} note */
const noteMenu = (note) =>
  dropDown(
    html("span", { class: "visually-hidden" }, "About the model"),
    icon("M12 11v6M12 7v.5M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18Z"),
    "menu-items request-note",
    html("p", {}, note),
  );

/** Returns the texts of the request that a scene answers. @param {any} scene @returns {Record<string, string>} */
function requestTexts(scene) {
  const [first, second] = (scene.compared ?? [scene]).map((one) => one.texts.source);
  return { source: first, beside: second ?? "", context: scene.texts?.context ?? "" };
}

/** The page before the first request. @param {Host} host @param {HTMLElement} root with the form */
export function welcome(host, root) {
  root.prepend(topBar(host.scene, null, []));
  root.append(html("h1", { class: "welcome" }, "Enter a sentence to see what the model attends to."));
  root.removeAttribute("data-busy");
  return { view: {}, end: () => root.remove() };
}

/*
 * Image files as input of the model in a page: decoded by the browser, scaled and cropped like
 * regard/data/images/image_decoding.py.
 */

/**
 * Decodes an image file to the size of the model's input. @param {Blob} file
 * @param {number[]} shape height, width and channels @returns {Promise<Uint8Array>}
 */
async function readPixels(file, [height, width, channels]) {
  // Color profiles are ignored, as by Pillow.
  const bitmap = await createImageBitmap(file, { colorSpaceConversion: "none" }).catch(() => {
    throw new Error("This file is not an image that the browser can open. Choose a PNG, JPEG or WebP file.");
  });
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "high";
  // Transparent areas are white.
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  // The image covers the input; its center is kept.
  const scale = Math.max(height / bitmap.height, width / bitmap.width);
  const [innerWidth, innerHeight] = [width / scale, height / scale];
  context.drawImage(
    bitmap,
    (bitmap.width - innerWidth) / 2,
    (bitmap.height - innerHeight) / 2,
    innerWidth,
    innerHeight,
    0,
    0,
    width,
    height,
  );
  bitmap.close();
  return toChannels(context.getImageData(0, 0, width, height).data, channels);
}

/**
 * @param {Uint8ClampedArray} rgba
 * @param {number} channels 3, or 1 for the luminance (ITU-R 601-2, with the rounding of Pillow) @returns {Uint8Array}
 */
function toChannels(rgba, channels) {
  const out = new Uint8Array((rgba.length / 4) * channels);
  for (let i = 0, at = 0; i < rgba.length; i += 4) {
    const [red, green, blue] = [rgba[i], rgba[i + 1], rgba[i + 2]];
    if (channels === 1) out[at++] = (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16;
    else for (const value of [red, green, blue]) out[at++] = value;
  }
  return out;
}

/* Selection of another image: one of the images of a live page, or any file in a page that contains its model. */

/**
 * A field for image files (a page with its model), or a select element of the images that can be requested; null if
 * there
 * is only one.
 * @param {Host} host @param {(host: Host, contents: () => Record<string, string>) => Promise<void>} show
 */
export function imageForm(host, show) {
  if (host.note) return fileForm(host, show);
  /** @type {string[]} */
  const imageNames = host.scene.images ?? [];
  if (imageNames.length < 2) return null;
  const status = html("p", { class: "request-status", id: uniqueId("status"), role: "status" });
  const choice = html(
    "select",
    { name: "image", "aria-label": "Image", "aria-describedby": status.id, onchange: () => submit() },
    imageNames.map((name) => html("option", { value: name }, makeVisible(name))),
  );
  choice.value = host.scene.texts.source;
  const submit = async () => {
    const image = choice.value;
    setAttributes(choice, { disabled: true });
    status.textContent = "Running …";
    delete form.dataset.failed;
    try {
      await show(hostForResponse(host, await host.request({ look: { image } })), () => ({ image }));
    } catch (error) {
      form.dataset.failed = "";
      status.textContent = error.message;
      choice.value = host.scene.texts.source;
    } finally {
      setAttributes(choice, { disabled: false });
    }
  };
  const form = html(
    "form",
    {
      class: "request-form",
      "data-export": "no",
      "aria-label": "Model input",
      onsubmit: (/** @type {Event} */ event) => event.preventDefault(),
    },
    html("label", {}, "Image ", choice),
    status,
  );
  return form;
}

/**
 * A field for an image file, which can also be dropped. @param {Host} host
 * @param {(host: Host, contents: () => Record<string, string>) => Promise<void>} show
 */
function fileForm(host, show) {
  const { shape } = host.scene.image.pixels;
  const status = html("p", { class: "request-status", id: uniqueId("status"), role: "status" });
  const input = html("input", {
    type: "file",
    name: "image",
    accept: "image/*",
    "aria-describedby": status.id,
    onchange: () => submit(input.files[0]),
  });
  // A file may be dropped while another one is processed: the last one is shown.
  let submissions = 0;
  /** @param {File | undefined} file */
  const submit = async (file) => {
    if (!file) return;
    const number = ++submissions;
    setAttributes(input, { disabled: true });
    status.textContent = "Running …";
    delete form.dataset.failed;
    try {
      const pixels = await readPixels(file, shape);
      if (number !== submissions) return;
      const response = await host.request({ look: { image: file.name, pixels } });
      if (number === submissions) await show(hostForResponse(host, response), () => ({ image: file.name }));
    } catch (error) {
      if (number !== submissions) return;
      form.dataset.failed = "";
      status.textContent = error.message;
    } finally {
      if (number === submissions) setAttributes(input, { disabled: false });
    }
  };
  /** @param {DragEvent} event @param {boolean} isOver */
  const drag = (event, isOver) => {
    event.preventDefault();
    setAttributes(form, { "data-dragged": isOver });
  };
  const form = html(
    "form",
    {
      class: "request-form file-form",
      "data-export": "no",
      "aria-label": "Model input",
      onsubmit: (/** @type {Event} */ event) => event.preventDefault(),
      ondragover: (/** @type {DragEvent} */ event) => drag(event, true),
      ondragleave: (/** @type {DragEvent} */ event) => drag(event, false),
      ondrop: (/** @type {DragEvent} */ event) => {
        drag(event, false);
        submit(event.dataTransfer.files[0]);
      },
    },
    html("label", {}, "Open another image, or drop it here ", input),
    noteMenu(`${host.note} Images are scaled and cropped to ${shape[0]} × ${shape[1]} pixels and stay on this device.`),
    status,
  );
  return form;
}
