/** The entry point of the worker that runs the model of a page: loads the model and responds to requests. */

import { decodeBase64 } from "../core/host.js";
import { PageEngine, respond } from "./model.js";

/** Reads JSON that is compressed (zlib) and encoded in base64. @param {string} text */
async function inflateJson(text) {
  const stream = new Blob([decodeBase64(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

/** @type {Promise<{engine: PageEngine, template: any}>} */
let loaded;

/** @param {MessageEvent} event */
async function onRequest({ data }) {
  if (data.model) {
    loaded = inflateJson(data.model).then((header) => ({
      engine: new PageEngine(header, decodeBase64(data.weights)),
      template: data.template,
    }));
    return;
  }
  try {
    const { engine, template } = await loaded;
    const { body, blobs } = respond(engine, template, data.request);
    /** @type {any} */ (self).postMessage({ id: data.id, body, blobs }, [...new Set(blobs)]);
  } catch (error) {
    self.postMessage({ id: data.id, error: String(error?.message ?? error) });
  }
}

// The page has the same script.
if (!globalThis.document) self.onmessage = onRequest;
