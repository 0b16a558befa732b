// The page to try models: it sends requests to the native routes and shows the viewer in a frame.
const find = (id) => document.getElementById(id);
const models = new Map();

// Tasks with a result to show, in order of preference: the label of the input, and the request.
const TASKS = {
  translate: { label: "Text", run: translate },
  generate: { label: "Prompt", run: generate },
  classify: { label: "Text", run: (model, text) => send("/api/classify", { model, texts: [text] }) },
  answer: { label: "Question", run: answer },
  embed: { label: "Text", run: (model, text) => send("/api/embed", { model, texts: [text] }) },
  segment: { label: "", run: () => Promise.reject(new Error("Choose an image.")) },
};

function headers() {
  const token = find("token").value.trim();
  return { "Content-Type": "application/json", ...(token && { Authorization: `Bearer ${token}` }) };
}

async function request(path, body) {
  const options = body ? { method: "POST", headers: headers(), body: JSON.stringify(body) } : { headers: headers() };
  const response = await fetch(path, options);
  if (response.status === 401) find("token-row").hidden = false;
  if (!response.ok) {
    const { error } = await response.json();
    throw new Error(typeof error === "string" ? error : error.message);
  }
  return response;
}

const send = async (path, body) => format(await (await request(path, body)).json());

/** The fields of the chosen languages; a model of one pair has none. */
function languages() {
  const [to, source] = [find("to").value, find("from").value];
  return { ...(to && { to }), ...(source && { source_language: source }) };
}

async function translate(model, text) {
  return send("/api/translate", { model, texts: text.split("\n"), ...languages() });
}

async function answer(model, question) {
  return send("/api/answer", { model, questions: [{ question, context: find("context").value }] });
}

async function generate(model, prompt) {
  const body = { model, prompts: [prompt], stream: true, options: { max_len: 64 } };
  const reader = (await request("/api/generate", body)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "",
    text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return text;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events.map((one) => one.slice("data: ".length))) {
      if (event === "[DONE]") continue;
      const piece = JSON.parse(event);
      if (piece.error) throw new Error(piece.error);
      text += piece.text;
      find("output").textContent = text;
    }
  }
}

// A response as text.
function format(result) {
  if (result.translations) return result.translations.map((nBest) => nBest[0].text).join("\n");
  if (result.answers) return result.answers.join("\n");
  if (result.vectors) return `${result.vectors[0].length} dimensions: ${result.vectors[0].slice(0, 8).join(", ")}, …`;
  if (result.masks) return describeMask(result.masks[0], result.labels);
  const ranked = Object.entries(result.results[0].probabilities).sort((a, b) => b[1] - a[1]);
  return ranked
    .slice(0, 10)
    .map(([label, share]) => `${label}  ${(100 * share).toFixed(1)} %`)
    .join("\n");
}

function describeMask(mask, labels) {
  const counts = new Map();
  for (const index of mask.flat()) counts.set(index, (counts.get(index) ?? 0) + 1);
  const total = mask.length * mask[0].length;
  const ranked = [...counts].sort((a, b) => b[1] - a[1]);
  return ranked
    .map(([index, count]) => `${labels[index]}  ${((100 * count) / total).toFixed(1)} % of the pixels`)
    .join("\n");
}

function selected() {
  const model = models.get(find("model").value);
  const task = Object.keys(TASKS).find((name) => model?.tasks.includes(name));
  const isImage = model !== undefined && !model.tasks.some((name) => ["translate", "generate", "embed"].includes(name));
  return { model, task, isImage };
}

function showFields() {
  const { model, task, isImage } = selected();
  const targets = model?.languages ?? [...new Set((model?.language_pairs ?? []).map((pair) => pair[1]))];
  for (const [name, codes] of Object.entries({ to: targets, from: model?.languages ?? [] })) {
    find(name).replaceChildren(...(codes.length > 1 ? codes : []).map((code) => new Option(code, code)));
    find(`${name}-row`).hidden = codes.length < 2;
  }
  find("image-row").hidden = !isImage;
  find("text-row").hidden = isImage;
  find("context-row").hidden = task !== "answer";
  find("text-label").textContent = TASKS[task]?.label ?? "Text";
}

async function readImage() {
  const [file] = find("image").files;
  if (!file) throw new Error("Choose an image.");
  const bytes = new Uint8Array(await file.arrayBuffer());
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return btoa(text);
}

async function run() {
  const { model, task, isImage } = selected();
  find("output").textContent = "";
  const result = isImage
    ? await send(`/api/${task}`, { model: model.id, images: [await readImage()] })
    : await TASKS[task].run(model.id, find("text").value);
  find("output").textContent = result;
}

async function look() {
  const { model, task, isImage } = selected();
  const body = { model: model.id, ...languages() };
  if (isImage) body.image = await readImage();
  else body.text = find("text").value;
  if (task === "answer") body.context = find("context").value;
  const frame = find("attention");
  frame.srcdoc = await (await request("/api/attention", body)).text();
  frame.hidden = false;
}

async function loadModels() {
  const { data } = await (await request("/v1/models")).json();
  const chosen = find("model").value;
  models.clear();
  for (const model of data) models.set(model.id, model);
  find("model").replaceChildren(
    ...data.map(({ id, language_pairs: pairs }) => {
      const option = document.createElement("option");
      option.value = id;
      option.textContent = pairs.length ? `${id} (${pairs.map((pair) => pair.join(" → ")).join(", ")})` : id;
      return option;
    }),
  );
  if (models.has(chosen)) find("model").value = chosen;
  showFields();
}

// Runs an action of a button; errors are shown as sentences.
async function attempt(action, button) {
  find("error").textContent = "";
  if (button) button.disabled = true;
  try {
    await action();
  } catch (error) {
    find("error").textContent = error.message;
  } finally {
    if (button) button.disabled = false;
  }
}

find("run").addEventListener("click", () => attempt(run, find("run")));
find("look").addEventListener("click", () => attempt(look, find("look")));
find("model").addEventListener("change", showFields);
find("token").addEventListener("change", () => attempt(loadModels));
find("token-row").addEventListener("submit", (event) => event.preventDefault());
attempt(loadModels);
