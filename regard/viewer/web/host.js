/** Where the page runs: a saved page, a notebook, the live page. This file alone knows the difference. */

/**
 * @typedef {{scene: any, blob: (n: number) => Promise<ArrayBuffer>, addressed: boolean}} Host
 * `addressed`: whether the address belongs to this view, and may hold it
 * @typedef {{get: (name: string) => any}} Model anywidget's model, as far as it is used
 */

/** The newest form of scenes that is understood. */
const FORMAT = 1;

/** @param {Model} model @returns {Host} */
export function hostOf(model) {
  const given = model.get("scene");
  const scene = typeof given === "string" ? JSON.parse(given) : given;
  if (!(scene?.format <= FORMAT)) {
    throw new Error("This was written by a newer Regard than the one that shows it. Update Regard, then open it again.");
  }
  const blobs = model.get("blobs");
  const read = blobs ? async (/** @type {number} */ n) => bufferOf(blobs[n]) : model.get("read_blob");
  /** @type {Map<number, Promise<ArrayBuffer>>} */
  const kept = new Map();
  return {
    scene,
    addressed: blobs === undefined,
    blob(n) {
      if (!kept.has(n)) kept.set(n, read(n));
      return kept.get(n);
    },
  };
}

/** The model of a saved page or of the live page: what stands in the document, or else what the server gives. @returns {Model} */
export function pageModel() {
  const values = {
    scene: document.getElementById("scene").textContent,
    /** @param {number} n */
    read_blob: async (n) => {
      const element = document.getElementById(`blob-${n}`);
      if (element) return decoded(element.textContent.trim());
      const answer = await fetch(`blob/${n}`);
      if (!answer.ok) throw new Error(`The numbers of blob ${n} could not be fetched (${answer.status}).`);
      return answer.arrayBuffer();
    },
  };
  return { get: (name) => values[name] };
}

/** @param {string} base64 @returns {ArrayBuffer} */
export function decoded(base64) {
  const quick = /** @type {any} */ (Uint8Array).fromBase64;
  if (quick) return quick.call(Uint8Array, base64).buffer;
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes.buffer;
}

/** A copy that begins at a multiple of what its numbers are long. @param {DataView} view @returns {ArrayBuffer} */
function bufferOf(view) {
  return /** @type {ArrayBuffer} */ (view.buffer).slice(view.byteOffset, view.byteOffset + view.byteLength);
}
