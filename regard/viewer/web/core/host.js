/** The environment of the page: a saved page, a notebook or the live page. Only this file distinguishes them. */

import { readPageModel } from "../engine/host.js";

/**
 * @typedef {(n: number) => Promise<ArrayBuffer>} BlobReader
 * @typedef {{body: any, blob: BlobReader}} ModelResponse JSON and the arrays that it refers to
 * @typedef {{scene: any, blob: BlobReader, ownsAddress: boolean, fields: string[], note?: string,
 *   modelTensor?: (index: number) => {data: any, shape: number[]},
 *   request?: (body: any) => Promise<ModelResponse>}} Host
 * `ownsAddress`: whether the address belongs to this page and may hold its state. `request` is defined if there is a
 * model
 * to send requests to; `fields` are the names of its inputs, and `note` and
 * `modelTensor` describe a model in the page.
 * @typedef {{get: (name: string) => any, send?: Function, on?: Function, off?: Function}} Model the part of
 * anywidget's model
 * that is used here
 */

/** Time in milliseconds after which a kernel that has not acknowledged a request is considered unresponsive. */
const KERNEL_TIMEOUT = 10000;
/** The newest scene format that is supported. */
const MAX_FORMAT = 1;

/** @param {Model} model @returns {Host} */
export function createHost(model) {
  const blobs = model.get("blobs");
  const fields = model.get("fields") ?? [];
  const request = model.get("request") ?? ((/** @type {any} */ body) => requestKernel(model, body));
  return {
    scene: parseScene(model.get("scene")),
    blob: cached(blobs ? copyViews(blobs) : model.get("read_blob")),
    ownsAddress: blobs === undefined,
    fields,
    note: model.get("model_note"),
    modelTensor: model.get("model_tensor"),
    request: fields.length ? request : undefined,
  };
}

/**
 * Returns the same host with the scene of a response. @param {Host} host @param {ModelResponse} response
 * @returns {Host}
 */
export function hostForResponse(host, response) {
  return { ...host, scene: parseScene(response.body.scene), blob: response.blob };
}

/** @param {any} json a scene, parsed or not */
function parseScene(json) {
  const scene = typeof json === "string" ? JSON.parse(json) : json;
  if (!(scene?.format <= MAX_FORMAT)) {
    throw new Error("This page was written by a newer version of Regard. Update Regard and open it again.");
  }
  return scene;
}

/** Caches blobs. @param {BlobReader} read @returns {BlobReader} */
function cached(read) {
  /** @type {Map<number, Promise<ArrayBuffer>>} */
  const cache = new Map();
  return (n) => {
    if (!cache.has(n)) cache.set(n, read(n));
    return cache.get(n);
  };
}

/**
 * Returns the model of a saved page, which contains everything, or of the live page, which has a server.
 * @returns {Promise<Model>}
 */
export async function pageModel() {
  const element = document.getElementById("scene");
  const values = element
    ? {
        scene: element.textContent,
        read_blob: readInlineBlob,
        ...readPageModel(JSON.parse(element.textContent), decodeBase64),
      }
    : await fetchLiveValues();
  return { get: (name) => values[name] };
}

/** @param {number} n */
async function readInlineBlob(n) {
  return decodeBase64(document.getElementById(`blob-${n}`).textContent.trim());
}

async function fetchLiveValues() {
  const initial = await requestServer("scene");
  /** The latest input. @type {any} */
  let newest = null;
  const headers = { "Content-Type": "application/json" };
  /** @param {any} content */
  const request = async (content) => {
    if (content.look) newest = content;
    const response = await requestServer("request", { method: "POST", headers, body: JSON.stringify(content) });
    if (content === newest) sessionStorage.setItem(location.pathname, JSON.stringify(content));
    return response;
  };
  // After reloading, a tab shows its own latest input again.
  const latest = sessionStorage.getItem(location.pathname);
  const { body, blob } = latest ? await request(JSON.parse(latest)).catch(() => initial) : initial;
  return { scene: body.scene, fields: initial.body.fields, read_blob: blob, request };
}

/** @param {string} path @param {RequestInit} [options] @returns {Promise<ModelResponse>} */
async function requestServer(path, options) {
  const body = await (await fetchOk(path, options)).json();
  return { body, blob: cached(async (n) => (await fetchOk(`blob/${body.blobs + n}`)).arrayBuffer()) };
}

/** @param {string} path @param {RequestInit} [options] */
async function fetchOk(path, options) {
  const response = await fetch(path, options).catch(() => {
    throw new Error("The Regard server does not respond. Start it again and open the address that it prints.");
  });
  if (response.ok) return response;
  // Its own page has the right origin: only the token can be wrong.
  if (response.status === 403)
    throw Object.assign(new Error("The Regard server was restarted and has a new address."), { link: "/open" });
  const body = await response.json().catch(() => null);
  throw new Error(body?.error ?? `The Regard server responded with status ${response.status}. Reload the page.`);
}

/**
 * Sends a request to the notebook's kernel. The kernel acknowledges a request before it computes the response, which
 * has
 * no time limit.
 * @param {Model} model @param {any} body @returns {Promise<ModelResponse>}
 */
function requestKernel(model, body) {
  // Several views may share one model; each receives every message.
  const id = String(Math.random());
  return new Promise((resolve, reject) => {
    const stopListening = () => {
      clearTimeout(timer);
      model.off("msg:custom", onMessage);
    };
    const fail = () => {
      stopListening();
      reject(
        new Error(
          "The notebook's kernel does not respond. It cannot respond while another cell is running: wait and try again. " +
            "If it has stopped or was restarted, run this cell again.",
        ),
      );
    };
    /** @param {any} message @param {DataView[]} views */
    const onMessage = (message, views) => {
      if (message?.received === id) clearTimeout(timer);
      if (message?.response_to !== id) return;
      stopListening();
      if (message.error) reject(new Error(message.error));
      else resolve({ body: message.response, blob: cached(copyViews(views)) });
    };
    const timer = setTimeout(fail, KERNEL_TIMEOUT);
    model.on("msg:custom", onMessage);
    try {
      model.send({ number: id, request: body });
    } catch {
      fail(); // some notebooks refuse to send to a kernel that has stopped
    }
  });
}

/** @param {string} base64 @returns {ArrayBuffer} */
export function decodeBase64(base64) {
  const fromBase64 = /** @type {any} */ (Uint8Array).fromBase64;
  if (fromBase64) return fromBase64.call(Uint8Array, base64).buffer;
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes.buffer;
}

/** Copies views, so that arrays are aligned. @param {DataView[]} views @returns {BlobReader} */
function copyViews(views) {
  return async (n) => {
    const { buffer, byteOffset, byteLength } = views[n];
    return /** @type {ArrayBuffer} */ (buffer).slice(byteOffset, byteOffset + byteLength);
  };
}
