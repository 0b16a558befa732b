/** Selection of another image, where there is a model with several images. */

import { hostForResponse } from "../core/host.js";
import { h, setAttributes, uniqueId } from "../core/dom.js";
import { makeVisible } from "../core/tokens.js";

/** @typedef {import("../core/host.js").Host} Host */

/**
 * A select element of the images that can be requested, or null if there is only one.
 * @param {Host} host @param {(host: Host, texts: Record<string, string>) => Promise<void>} show
 */
export function imageForm(host, show) {
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
      await show(hostForResponse(host, await host.request({ look: { image } })), { image });
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
