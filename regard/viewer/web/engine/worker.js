/** The worker that runs a model inside a page: answers the requests that a live page sends to Python. */

import { decodeBase64 } from "../core/host.js";
import { runExperiment, sceneOutput } from "./experiments.js";
import { explain } from "./explanations.js";
import { PageEngine } from "./model.js";
import { lookAtPixels } from "./scenes.js";

/* Requests of a page: the same as those of regard/viewer/page/requests.py. */

/**
 * @param {PageEngine} engine @param {any} template header of the page's own scene @param {any} request
 * @returns {{body: any, blobs: ArrayBuffer[]}}
 */
export function respond(engine, template, request) {
  if (request.look && engine.image) return lookAtPixels(engine, request.look, template);
  if (request.look) {
    const { source, target, context, search } = request.look;
    const look = engine.look(source, { target: target?.trim() ? target : null, context, options: search });
    const { scene, blobs } = engine.buildScene(look, template);
    return { body: { scene: { ...scene, ...sceneOutput(engine, look) } }, blobs };
  }
  if (request.experiment) return { body: runExperiment(engine, request.experiment, template), blobs: [] };
  if (request.explain) return { body: explain(engine, request.explain), blobs: [] };
  throw new Error("Unsupported request. Supported: look, experiment, explain.");
}

/* Worker entry point: loads the model of a page and responds to its requests. */

/** Reads JSON that is compressed (zlib) and encoded in base64. @param {string} text */
async function inflateJson(text) {
  const stream = new Blob([decodeBase64(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

/** @type {Promise<{engine: PageEngine, template: any}>} */
let loaded;

self.onmessage = async ({ data }) => {
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
};
