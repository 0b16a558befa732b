"""The numbers of the walk through an attention: those of the model, for every family, score and form."""

import base64
import json
import subprocess

import numpy as np
import pytest

from regard.viewer.page.text_scene import build_scene
from tests.viewer.browser import bundle_script, node_program
from tests.viewer.text_models import FORMS, cached_look

SCRIPT = """
import { readAttention } from "./trace/attention_steps.js";
import { Trace } from "./trace/trace.js";
import { readFileSync } from "node:fs";
const numbers = (text) => new Float32Array(Uint8Array.from(Buffer.from(text, "base64")).buffer);
const found = JSON.parse(readFileSync(0, "utf-8")).map(({ header, params, outputs, requests }) => {
  const trace = new Trace(header, numbers(params), numbers(outputs));
  return requests.map(({ softmax, start }) => {
    const one = readAttention(trace, softmax, () => start);
    const list = (vector) => vector && Array.from(vector.x);
    return { ...one, query: list(one.query), keys: one.keys.map(list), values: one.values.map(list),
      output: list(one.output), ...Object.fromEntries(["products", "scaled", "scores", "weights"].map((name) =>
        [name, Array.from(one[name])])) };
  });
});
console.log(JSON.stringify(found));
"""


def softmax_steps(trace):
    """Index and section of every attention's weights."""
    for n, step in enumerate(trace["steps"]):
        section = trace["sections"][step["section"]] if step["title"] else {}
        if step["op"] == "softmax" and "attention" in section:
            yield n, section


@pytest.mark.parametrize("form", FORMS)
def test_walks_multiply_query_and_keys_and_sum_the_values(form):
    """In every head and row."""
    seen = cached_look(form)
    scene = build_scene(seen, trace=True, explain=False)
    header = scene.header["trace"]
    blobs = [base64.b64encode(scene.blobs[header[part]["at"]]).decode() for part in ("params", "outputs")]
    requests, weights = [], []
    for n, section in softmax_steps(header):
        rows = seen.maps[section["attention"]].weights
        # The steps of a recurrent decoder are one per token.
        rows = rows if "token" not in section else rows[:, [section["token"]]]
        for index, row in enumerate(rows.reshape(-1, rows.shape[-1])):
            requests.append({"softmax": n, "start": index * len(row)})
            weights.append(row)
    case = {"header": header, "params": blobs[0], "outputs": blobs[1], "requests": requests}
    program = [node_program(), "--input-type=module", "-e", bundle_script(SCRIPT)]
    ran = subprocess.run(program, input=json.dumps([case]), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    missing = set()
    for one, expected in zip(json.loads(ran.stdout)[0], weights, strict=True):
        np.testing.assert_allclose(one["weights"], expected, atol=2e-5)
        exp = np.exp(np.array(one["scores"]) - max(one["scores"]))
        np.testing.assert_allclose(one["weights"], exp / exp.sum(), atol=1e-9)
        np.testing.assert_allclose(one["output"], np.array(one["weights"]) @ one["values"], atol=1e-9)
        missing.add(one["query"] is None)
        if one["query"] is not None:
            np.testing.assert_allclose(one["products"], np.array(one["keys"]) @ one["query"], atol=1e-9)
            scale = 1.0 if one["scale"] is None else one["scale"]
            np.testing.assert_allclose(one["scaled"], scale * np.array(one["products"]), atol=1e-9)
    # Only additive scores have no query.
    assert (True in missing) == (form in ("general, grouped concat", "bahdanau", "gpt2"))
