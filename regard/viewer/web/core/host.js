/** The environment of the page: a saved page, a notebook or the live page. Only this file distinguishes them. */

/**
 * @typedef {(n: number) => Promise<ArrayBuffer>} Blobs
 * @typedef {{told: any, blob: Blobs}} Answer the model's response: JSON and the arrays that it refers to
 * @typedef {{scene: any, blob: Blobs, addressed: boolean, asks: string[], ask?: (request: any) => Promise<Answer>}} Host
 * `addressed`: whether the address belongs to this page and may hold its state. `ask` is defined if there is a model to
 * send requests to; `asks` are the names of its input fields.
 * @typedef {{get: (name: string) => any, send?: Function, on?: Function, off?: Function}} Model the part of anywidget's model
 * that is used here
 */

/** Time in milliseconds after which a kernel that has not acknowledged a request is considered unresponsive. */
const KERNEL_PATIENCE = 10000;
/** The newest scene format that is supported. */
const FORMAT = 1;

/** @param {Model} model @returns {Host} */
export function hostOf(model) {
  const blobs = model.get("blobs");
  const asks = model.get("asks") ?? [];
  const ask = model.get("ask") ?? ((/** @type {any} */ request) => askKernel(model, request));
  return {
    scene: sceneOf(model.get("scene")),
    blob: onceEach(blobs ? viewsOf(blobs) : model.get("read_blob")),
    addressed: blobs === undefined,
    asks,
    ask: asks.length ? ask : undefined,
  };
}

/** Returns the same host with the scene of a response. @param {Host} host @param {Answer} answer @returns {Host} */
export function hostWith(host, answer) {
  return { ...host, scene: sceneOf(answer.told.scene), blob: answer.blob };
}

/** @param {any} given JSON, parsed or not */
function sceneOf(given) {
  const scene = typeof given === "string" ? JSON.parse(given) : given;
  if (!(scene?.format <= FORMAT)) {
    throw new Error("This page was written by a newer version of Regard. Update Regard and open it again.");
  }
  return scene;
}

/** Caches blobs. @param {Blobs} read @returns {Blobs} */
function onceEach(read) {
  /** @type {Map<number, Promise<ArrayBuffer>>} */
  const kept = new Map();
  return (n) => {
    if (!kept.has(n)) kept.set(n, read(n));
    return kept.get(n);
  };
}

/** Returns the model of a saved page, which contains everything, or of the live page, which has a server. @returns {Promise<Model>} */
export async function pageModel() {
  const element = document.getElementById("scene");
  const values = element ? { scene: element.textContent, read_blob: blobInside } : await liveValues();
  return { get: (name) => values[name] };
}

/** @param {number} n */
async function blobInside(n) {
  return decoded(document.getElementById(`blob-${n}`).textContent.trim());
}

async function liveValues() {
  const { told, blob } = await askServer("scene");
  /** @param {any} request */
  const ask = (request) => askServer("ask", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(request) });
  return { scene: told.scene, asks: told.asks, read_blob: blob, ask };
}

/** @param {string} path @param {RequestInit} [options] @returns {Promise<Answer>} */
async function askServer(path, options) {
  const told = await (await fetched(path, options)).json();
  return { told, blob: onceEach(async (n) => (await fetched(`blob/${told.blobs + n}`)).arrayBuffer()) };
}

/** @param {string} path @param {RequestInit} [options] */
async function fetched(path, options) {
  const answer = await fetch(path, options).catch(() => {
    throw new Error("The Regard server does not respond. Start it again and open the address that it prints.");
  });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  throw new Error(told?.error ?? `The Regard server responded with status ${answer.status}. Reload the page.`);
}

/**
 * Sends a request to the notebook's kernel. The kernel acknowledges a request before it computes the response, which has
 * no time limit.
 * @param {Model} model @param {any} request @returns {Promise<Answer>}
 */
function askKernel(model, request) {
  // Several views may share one model; each receives every message.
  const number = String(Math.random());
  return new Promise((resolve, reject) => {
    const end = () => {
      clearTimeout(waiting);
      model.off("msg:custom", hear);
    };
    const giveUp = () => {
      end();
      reject(
        new Error(
          "The notebook's kernel does not respond. It cannot respond while another cell is running: wait and try again. " +
            "If it has stopped or was restarted, run this cell again.",
        ),
      );
    };
    /** @param {any} message @param {DataView[]} views */
    const hear = (message, views) => {
      if (message?.heard === number) clearTimeout(waiting);
      if (message?.answers !== number) return;
      end();
      if (message.error) reject(new Error(message.error));
      else resolve({ told: message.told, blob: onceEach(viewsOf(views)) });
    };
    const waiting = setTimeout(giveUp, KERNEL_PATIENCE);
    model.on("msg:custom", hear);
    try {
      model.send({ number, ask: request });
    } catch {
      giveUp(); // some notebooks refuse to send to a kernel that has stopped
    }
  });
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

/** Copies views, so that arrays are aligned. @param {DataView[]} views @returns {Blobs} */
function viewsOf(views) {
  return async (n) => /** @type {ArrayBuffer} */ (views[n].buffer).slice(views[n].byteOffset, views[n].byteOffset + views[n].byteLength);
}
