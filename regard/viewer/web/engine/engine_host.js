/** The model in a saved page: sends the page's requests to a worker. */

/** @typedef {import("../core/host.js").ModelResponse} ModelResponse */

/**
 * What the model of a page adds to its values: the names of its inputs, and a function that sends requests. Empty if the
 * page has no model.
 * @param {any} scene header of the page's own scene @returns {Record<string, any>}
 */
export function readPageModel(scene) {
  const element = document.getElementById("model");
  if (!element) return {};
  const { fields, precision, change } = JSON.parse(element.textContent);
  /** @type {Map<number, {resolve: (response: ModelResponse) => void, reject: (error: Error) => void}>} */
  const waiting = new Map();
  let count = 0;
  /** @type {Worker | undefined} */
  let worker;
  const start = () => {
    if (worker) return worker;
    const read = (/** @type {string} */ id) => document.getElementById(id).textContent;
    const address = URL.createObjectURL(new Blob([read("model-engine")], { type: "text/javascript" }));
    worker = new Worker(address);
    worker.onmessage = ({ data: { id, body, blobs, error } }) => {
      const { resolve, reject } = waiting.get(id);
      waiting.delete(id);
      if (error) reject(new Error(error));
      else resolve({ body, blob: async (/** @type {number} */ n) => blobs[n] });
    };
    worker.onerror = () => {
      for (const { reject } of waiting.values()) reject(new Error("The model in this page could not be started. Open the page in a current browser."));
      waiting.clear();
    };
    worker.postMessage({ model: read("model-header").trim(), weights: read("model-weights").trim(), template: scene });
    return worker;
  };
  setTimeout(start, 200); // after the first drawing
  /** @param {any} request @returns {Promise<ModelResponse>} */
  const request = (request) =>
    new Promise((resolve, reject) => {
      waiting.set((count += 1), { resolve, reject });
      start().postMessage({ id: count, request });
    });
  return { fields, request, model_note: describeRounding(precision, change) };
}

/** @param {string} precision @param {number | null} change */
function describeRounding(precision, change) {
  const effect = change === null ? "" : ` Rounding changes the output for the first text by at most ${change.toPrecision(2)}.`;
  return `The model runs in this page, with ${precision} weights.${effect}`;
}
