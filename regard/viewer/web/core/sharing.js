/** Sharing of a view: the code of a frame that embeds it in another page. */

import { h, uniqueId } from "./dom.js";

/** Height of an embedded page in pixels. */
const FRAME_HEIGHT = 860;

/** The HTML code of a frame with the page in a state. @param {string} address of the page, without # @param {string} hash @param {string} title */
export function embedCode(address, hash, title) {
  const escape = (/** @type {string} */ text) => text.replaceAll("&", "&amp;").replaceAll('"', "&quot;").replaceAll("<", "&lt;");
  return `<iframe src="${escape(`${address}#${hash}`)}" title="${escape(title)}" width="100%" height="${FRAME_HEIGHT}" style="border: 0" loading="lazy"></iframe>`;
}

/** The address of the page for other pages: of a local file, its name, so that both can be moved together. */
export function shareableAddress() {
  return location.protocol === "file:" ? location.pathname.split("/").at(-1) : location.href.split("#")[0];
}

/** A dialog with the code of a frame. @param {import("./shell.js").Announcer} announcer @param {HTMLElement} root of the page, which receives the dialog while it is open */
export function embedDialog(announcer, root) {
  const id = uniqueId("embed");
  const code = h("textarea", { class: "embed-code", rows: 4, readonly: true, spellcheck: "false", "aria-label": "HTML code" });
  const copy = async () => {
    code.select();
    try {
      await navigator.clipboard.writeText(code.value);
      announcer.announce("Code copied.");
    } catch {
      announcer.announce("The code could not be copied. It is selected: copy it with Ctrl-C.");
    }
  };
  const dialog = h(
    "dialog",
    { class: "help", "aria-labelledby": id, "data-export": "no", onclose: () => dialog.remove() },
    h("h2", { id }, "Embed this view"),
    h("p", {}, "Paste this code into a web page. The frame opens at this view, layer, head and token", location.protocol === "file:" ? "; put this file next to the web page." : "."),
    code,
    h("p", { class: "actions" }, h("button", { type: "button", class: "small", onclick: copy }, "Copy"), h("button", { type: "button", class: "small", onclick: () => dialog.close() }, "Close")),
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
