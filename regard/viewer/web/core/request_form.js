/** Input fields of the model, where there is a model to send requests to. */

import { hostForResponse } from "./host.js";
import { h, setChildren, uniqueId } from "./dom.js";
import { dropDown, icon, topBar } from "./shell.js";

/** @typedef {import("./host.js").Host} Host */

const FIELD_NAMES = { source: "Sentence", target: "Translation", beside: "Other sentence", context: "Context" };
const FIELD_HINTS = { source: "A sentence to inspect", target: "Translation (default: the model’s output)", context: "The passage that the question is about", beside: "A sentence to compare with" };

const SEARCHES = { beam: "Beam search", greedy: "Greedy search", sample: "Sampling" };

/**
 * Fields for the texts that the model takes, and a submit button. The response replaces the scene.
 * @param {Host} host @param {Record<string, string> | undefined} texts contents of the fields; by default the scene's texts
 * @param {(host: Host, contents: () => Record<string, string>) => Promise<void>} show
 */
export function requestForm(host, texts = requestTexts(host.scene), show) {
  const status = h("p", { class: "request-status", id: uniqueId("status"), role: "status" });
  const fields = host.fields.map((name) =>
    h("textarea", {
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
  const button = h("button", { type: "submit" }, "Run");
  // A translator in the page itself: its search can be chosen.
  const search = host.note && host.fields.includes("target") ? h("select", { name: "search", "aria-label": "Search" }, Object.entries(SEARCHES).map(([value, name]) => h("option", { value }, name))) : null;
  if (search) search.value = texts.search ?? "beam";

  /** @returns {Record<string, string>} */
  const contents = () => Object.fromEntries([...fields, ...(search ? [search] : [])].map((field) => [field.name, field.value]));
  const submit = async () => {
    const number = ++submissions;
    const values = contents();
    status.textContent = "Running …";
    delete form.dataset.failed;
    try {
      const inputs = Object.fromEntries(host.fields.map((name) => [name, values[name]]).filter(([name, text]) => name === "source" || text.trim()));
      const options = search && search.value !== "beam" ? { search: { method: search.value, seed: Date.now() % 2 ** 31 } } : {};
      const response = await host.request({ look: { ...inputs, ...options } });
      if (number === submissions) await show(hostForResponse(host, response), contents);
    } catch (error) {
      if (number !== submissions) return;
      form.dataset.failed = "";
      setChildren(status, error.message, error.link ? [" ", h("a", { href: error.link }, "Open it")] : "");
    }
  };
  const form = h(
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
export const noteMenu = (note) => dropDown(h("span", { class: "visually-hidden" }, "About the model"), icon("M12 11v6M12 7v.5M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18Z"), "menu-items request-note", h("p", {}, note));

/** Returns the texts of the request that a scene answers. @param {any} scene @returns {Record<string, string>} */
function requestTexts(scene) {
  const [first, second] = (scene.compared ?? [scene]).map((one) => one.texts.source);
  return { source: first, beside: second ?? "", context: scene.texts?.context ?? "" };
}

/** The page before the first request. @param {Host} host @param {HTMLElement} root with the form */
export function welcome(host, root) {
  root.prepend(topBar(host.scene, null, []));
  root.append(h("h1", { class: "welcome" }, "Enter a sentence to see what the model attends to."));
  root.removeAttribute("data-busy");
  return { view: {}, end: () => root.remove() };
}
