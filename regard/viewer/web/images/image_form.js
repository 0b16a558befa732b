/** The picture, to be changed for another where there is a model that looks at several. */

import { hostWith } from "../core/host.js";
import { change, h, uniqueId } from "../core/dom.js";
import { visible } from "../core/tokens.js";

/** @typedef {import("../core/host.js").Host} Host */

/**
 * A choice of the pictures that the model may be asked for; null where there is only one.
 * @param {Host} host @param {(host: Host, texts: Record<string, string>) => Promise<void>} show
 */
export function pictureForm(host, show) {
  /** @type {string[]} */
  const pictures = host.scene.pictures ?? [];
  if (pictures.length < 2) return null;
  const says = h("p", { class: "asked", id: uniqueId("asked"), role: "status" });
  const choice = h(
    "select",
    { name: "picture", "aria-label": "Picture", "aria-describedby": says.id, onchange: () => ask() },
    pictures.map((name) => h("option", { value: name }, visible(name))),
  );
  choice.value = host.scene.texts.source;
  const ask = async () => {
    const picture = choice.value;
    change(choice, { disabled: true });
    says.textContent = "Looking …";
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
    { class: "ask", "data-saved": "no", "aria-label": "Another picture", onsubmit: (/** @type {Event} */ event) => event.preventDefault() },
    h("label", {}, "Picture ", choice),
    says,
  );
  return form;
}
