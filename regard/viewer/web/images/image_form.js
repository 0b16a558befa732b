/** Selection of another image: one of the images of a live page, or any file in a page that contains its model. */

import { hostForResponse } from "../core/host.js";
import { h, setAttributes, uniqueId } from "../core/dom.js";
import { noteMenu } from "../core/request_form.js";
import { makeVisible } from "../core/tokens.js";
import { readPixels } from "./image_file.js";

/** @typedef {import("../core/host.js").Host} Host */

/**
 * A field for image files (a page with its model), or a select element of the images that can be requested; null if there
 * is only one.
 * @param {Host} host @param {(host: Host, contents: () => Record<string, string>) => Promise<void>} show
 */
export function imageForm(host, show) {
  if (host.note) return fileForm(host, show);
  /** @type {string[]} */
  const imageNames = host.scene.images ?? [];
  if (imageNames.length < 2) return null;
  const status = h("p", { class: "request-status", id: uniqueId("status"), role: "status" });
  const choice = h(
    "select",
    { name: "image", "aria-label": "Image", "aria-describedby": status.id, onchange: () => submit() },
    imageNames.map((name) => h("option", { value: name }, makeVisible(name))),
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
  const form = h(
    "form",
    { class: "request-form", "data-export": "no", "aria-label": "Model input", onsubmit: (/** @type {Event} */ event) => event.preventDefault() },
    h("label", {}, "Image ", choice),
    status,
  );
  return form;
}

/** A field for an image file, which can also be dropped. @param {Host} host @param {(host: Host, contents: () => Record<string, string>) => Promise<void>} show */
function fileForm(host, show) {
  const { shape } = host.scene.image.pixels;
  const status = h("p", { class: "request-status", id: uniqueId("status"), role: "status" });
  const input = h("input", { type: "file", name: "image", accept: "image/*", "aria-describedby": status.id, onchange: () => submit(input.files[0]) });
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
  const form = h(
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
    h("label", {}, "Open another image, or drop it here ", input),
    noteMenu(`${host.note} Images are scaled and cropped to ${shape[0]} × ${shape[1]} pixels and stay on this device.`),
    status,
  );
  return form;
}
