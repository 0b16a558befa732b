/** Form for the model's input, where there is a model to send requests to. */

import { hostWith } from "./host.js";
import { change, h, uniqueId } from "./dom.js";
import { topBar } from "./shell.js";

/** @typedef {import("./host.js").Host} Host */

const FIELD_NAMES = { source: "Sentence", target: "Translation", beside: "Other sentence", context: "Context" };
const FIELD_HINTS = { source: "A sentence to inspect", target: "Translation (default: the model’s output)", context: "The passage that the question is about", beside: "A sentence to compare with" };

/**
 * Fields for the texts that the model takes, and a submit button. The response replaces the scene.
 * @param {Host} host @param {Record<string, string> | undefined} texts contents of the fields; by default the scene's texts
 * @param {(host: Host, texts: Record<string, string>) => Promise<void>} show
 */
export function askForm(host, texts = writtenIn(host.scene), show) {
  const says = h("p", { class: "asked", id: uniqueId("asked"), role: "status" });
  const fields = host.asks.map((name) =>
    h("textarea", {
      name,
      rows: 1,
      dir: "auto",
      spellcheck: "false",
      "aria-label": FIELD_NAMES[name],
      "aria-describedby": says.id,
      placeholder: FIELD_HINTS[name],
      onkeydown: (event) => {
        if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
        event.preventDefault();
        form.requestSubmit();
      },
    }),
  );
  for (const field of fields) field.value = texts[field.name] ?? "";
  const button = h("button", { type: "submit" }, "Run");

  const ask = async () => {
    const written = Object.fromEntries(fields.map((field) => [field.name, field.value]));
    if (button.disabled) return;
    change(button, { disabled: true });
    says.textContent = "Running …";
    delete form.dataset.failed;
    try {
      const wanted = Object.fromEntries(Object.entries(written).filter(([name, text]) => name === "source" || text.trim()));
      await show(hostWith(host, await host.ask({ look: wanted })), written);
    } catch (error) {
      form.dataset.failed = "";
      says.textContent = error.message;
    } finally {
      change(button, { disabled: false });
    }
  };
  const form = h(
    "form",
    {
      class: "ask",
      "data-saved": "no",
      "aria-label": "Model input",
      onsubmit: (event) => {
        event.preventDefault();
        ask();
      },
    },
    fields,
    button,
    says,
  );
  return form;
}

/** Returns the texts of the request that a scene answers. @param {any} scene @returns {Record<string, string>} */
function writtenIn(scene) {
  const [first, second] = (scene.compared ?? [scene]).map((one) => one.texts.source);
  return { source: first, beside: second ?? "" };
}

/** The page before the first request. @param {Host} host @param {HTMLElement} root @param {HTMLElement} form */
export function welcome(host, root, form) {
  root.append(topBar(host.scene, null, []), form, h("h1", { class: "welcome" }, "Enter a sentence to see what the model attends to."));
  root.removeAttribute("data-busy");
  return { view: {}, end: () => root.remove() };
}
