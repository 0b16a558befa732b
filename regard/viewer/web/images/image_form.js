/** Selection of another image, where there is a model with several images. */

import { hostWith } from "../core/host.js";
import { change, h, uniqueId } from "../core/dom.js";
import { visible } from "../core/tokens.js";

/** @typedef {import("../core/host.js").Host} Host */

/**
 * A select element of the images that can be requested, or null if there is only one.
 * @param {Host} host @param {(host: Host, texts: Record<string, string>) => Promise<void>} show
 */
export function pictureForm(host, show) {
  /** @type {string[]} */
  const pictures = host.scene.pictures ?? [];
  if (pictures.length < 2) return null;
  const says = h("p", { class: "asked", id: uniqueId("asked"), role: "status" });
  const choice = h(
    "select",
    { name: "picture", "aria-label": "Image", "aria-describedby": says.id, onchange: () => ask() },
    pictures.map((name) => h("option", { value: name }, visible(name))),
  );
  choice.value = host.scene.texts.source;
  const ask = async () => {
    const picture = choice.value;
    change(choice, { disabled: true });
    says.textContent = "Running …";
    delete form.dataset.failed;
    try {
      await show(hostWith(host, await host.ask({ look: { picture } })), { picture });
    } catch (error) {
      form.dataset.failed = "";
      says.textContent = error.message;
      choice.value = host.scene.texts.source;
    } finally {
      change(choice, { disabled: false });
    }
  };
  const form = h(
    "form",
    { class: "ask", "data-saved": "no", "aria-label": "Model input", onsubmit: (/** @type {Event} */ event) => event.preventDefault() },
    h("label", {}, "Image ", choice),
    says,
  );
  return form;
}
