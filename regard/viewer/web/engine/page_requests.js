/** Requests of a page: the same as those of regard/viewer/page/requests.py. */

import { explain } from "./explanations.js";
import { runExperiment, sceneOutput } from "./experiments.js";
import { lookAtPixels } from "./image_scenes.js";

/** @typedef {import("./page_engine.js").PageEngine} PageEngine */

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
