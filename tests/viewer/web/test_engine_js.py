"""The model in a page gives the same scenes and experiments as Python, for every family, score and intervention."""

import base64
import copy
import json
import random
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from regard.attention import ScaledDot
from regard.decode import DecodeConfig
from regard.decode.search import draw
from regard.models import make_model
from regard.pipelines import TextEncoder, TextGenerator, Translator
from regard.pipelines.sentence_embedding import SentenceConfig, SentenceEmbedding
from regard.viewer import build_trace, look
from regard.viewer.experiments import handle_experiment
from regard.viewer.page.explanations import handle_explanation
from regard.viewer.page.image_scene import build_image_scene
from regard.viewer.page.model import Precision, build_page_model, round_tensor
from regard.viewer.page.requests import TextRequestHandler
from regard.viewer.page.text_scene import Scene, build_scene
from regard.viewer.trace.steps import Trace
from tests.viewer.browser import bundle_script, node_program
from tests.viewer.image_models import cached_look as cached_image_look
from tests.viewer.text_models import SOURCE, WORDS, cached_look, make_look

FORMS = ["transformer", "dot, cosine, location", "general, grouped concat", "rotary, grouped", "T5"]
FORMS += ["luong lstm of two layers", "bahdanau"]
FORMS += ["llama", "gemma", "gpt2", "bert, pre", "albert", "classify", "answer", "embed", "modernbert"]
ROUNDED: dict[str, tuple[str, Precision]] = {
    "transformer, float16": ("transformer", "float16"),
    "transformer, int8": ("transformer", "int8"),
}
MAX_OUTPUT = 12
NEW_IMAGE = "new.png"
CONTEXT = "four two three, one one four two"
IMAGE_FORMS = ["distilled", "query", "convolution", "stem", "rotary", "gray, post", "linear", "queries"]
# Forms whose page has the step-by-step view.
TRACED = ("transformer", "llama", "classify", "luong lstm of two layers", "bahdanau")
SCRIPT = """
import { readFileSync, writeFileSync } from "node:fs";
import { PageEngine, respond } from "./engine/model.js";
import { drawToken, seededRandom } from "./engine/search.js";
import { Trace } from "./trace/trace.js";
const draws = JSON.parse(readFileSync("FOLDER/draws.json", "utf-8")).map(({ logprobs, u, options }) =>
  drawToken(Float32Array.from(logprobs), u, options));
/** The values of the step-by-step view. */
const traceValues = (engine, header) => {
  if (!header) return null;
  const trace = new Trace(header, new Float32Array(0), new Float32Array(0), (index) => engine.tensors[index]);
  const values = {};
  header.steps.forEach(({ id, output }, n) => {
    if (id) values[id] = { data: [...trace.value(n).data], shape: output.shape };
  });
  const shown = header.steps.filter(({ title }) => title);
  shown.forEach((step) => (step.section = header.sections[step.section]));
  return { values, shown, focus: header.focus, names: header.names, sides: header.sides };
};
const random = seededRandom(1);
const uniform = Array.from({ length: 20000 }, random);
writeFileSync("FOLDER/draws.out", JSON.stringify({ draws, uniform }));
for (const n of Array(COUNT).keys()) {
  const { header, scene, requests } = JSON.parse(readFileSync(`FOLDER/${n}.json`, "utf-8"));
  const weights = readFileSync(`FOLDER/${n}.bin`);
  const buffer = weights.buffer.slice(weights.byteOffset, weights.byteOffset + weights.length);
  const results = [true, false].map((fast) => {
    const engine = new PageEngine(structuredClone(header), buffer, fast);
    return requests.map((request) => {
      if (request.explain && !fast) return { body: null };
      try {
        if (request.look?.pixels) request.look.pixels = Uint8Array.from(request.look.pixels);
        const { body, blobs } = respond(engine, scene, request);
        if (body.scene) body.scene.trace = traceValues(engine, body.scene.trace);
        return { body, blobs: blobs.map((blob) => Buffer.from(blob).toString("base64")) };
      } catch (error) {
        return { body: { error: error.stack } };
      }
    });
  });
  writeFileSync(`FOLDER/${n}.out`, JSON.stringify(results));
}
"""


def make_requests(pipeline: Any, seen: Any) -> list[dict[str, Any]]:
    """Looks at random sentences, and experiments with every intervention that the model supports."""
    texts = [" ".join(random.choices(WORDS, k=length)) for length in (1, 4, 7)]
    requests: list[dict[str, Any]] = [{"look": {"source": text}} for text in texts]
    context = {"context": CONTEXT} if seen.context else {}
    if context:
        requests.append({"look": {"source": texts[1], "context": f"{texts[2]}. {CONTEXT}"}})
    if isinstance(pipeline, Translator):
        requests.append({"look": {"source": texts[1], "target": texts[2]}})
        requests.append({"look": {"source": texts[2], "search": {"method": "greedy", "min_len": 3}}})
        # Without rules the output would begin with these tokens; the first one may be forced.
        ids = pipeline.translate([texts[1]], DecodeConfig(method="greedy", min_len=3))[0][0].hypothesis.ids
        for method in ("greedy", "beam"):
            for rules in (
                {"suppress_sequences": [[ids[1]], [7]]},
                {"suppress_sequences": [ids[:2], ids[:3], [pipeline.special.sos, ids[0]]]},
                {"begin_suppress_tokens": ids[:2]},
            ):
                requests.append({"look": {"source": texts[1], "search": {"method": method, "min_len": 3, **rules}}})
    if getattr(pipeline.model.config, "head", "") == "mask":
        masked = f"{WORDS[0]} <mask> {WORDS[2]} <mask>"
        requests += [{"look": {"source": masked}}, {"experiment": {"source": masked, "changes": []}}]
    maps = list(seen.maps.values())
    last, first = maps[-1], maps[0]
    row, module = len(first.rows) // 2, re.sub(r"\.\d+$", "", first.name)
    weights = np.random.default_rng(0).dirichlet(np.ones(len(first.columns))).tolist()
    changes: list[list[dict[str, Any]]] = [
        [],
        [{"change": "head", "attention": last.name, "head": last.heads - 1}],
        [{"change": "layer", "layer": module}],
    ]
    if not (isinstance(pipeline, TextEncoder) and pipeline.sentence.config.max_len):  # the embedded text is shorter
        changes.append([{"change": "row", "attention": first.name, "head": 0, "row": row, "weights": weights}])
    model = pipeline.model
    if hasattr(model, "encoder_norm") or hasattr(model, "blocks"):
        changes.append([{"change": "layer", "layer": module.rsplit(".", 1)[0]}])
    if any(one.kind == "masked" for one in maps):
        changes.append([{"change": "mask"}])
    if any(type(one.recorded.calls[0].score).__name__ == "ScaledDot" for one in maps):
        changes.append([{"change": "scale"}, {"change": "head", "attention": first.name, "head": 0}])
    if getattr(model.config, "positions", "none") != "none":
        changes.append([{"change": "positions"}])
    for i, one in enumerate(changes):
        shown = {"attention": last.name, "head": "mean" if i % 2 else 0}
        requests.append({"experiment": {"source": SOURCE, "changes": one, "shown": shown, **context}})
    if isinstance(pipeline, Translator):
        requests.append({"experiment": {"source": SOURCE, "changes": changes[1], "target": texts[1]}})
        requests.append(
            {"experiment": {"source": SOURCE, "changes": changes[1], "prefix": WORDS[5], "instead": texts[0]}}
        )
    if isinstance(pipeline, TextGenerator):
        requests.append({"experiment": {"source": SOURCE, "changes": changes[1], "prefix": f" {WORDS[5]}"}})
    return requests + explain_requests(build_scene(seen, trace=False))


def explain_requests(scene: Scene) -> list[dict[str, Any]]:
    """Every measure of the output of a scene; effects of the first and the last attention."""
    explained = scene.header["explained"]
    if explained is None:
        return []
    output = {name: explained[name] for name in ("inputs", "steps")}
    names = [scene.header["attentions"][i]["name"] for i in (0, -1)]
    effects = [{"explain": output | {"measure": "effects", "attention": name}} for name in names]
    return effects + [{"explain": output | {"measure": one}} for one in explained["measures"] if one != "effects"]


def with_ends(pipeline: Any) -> Any:
    """The pipeline with further tokens that end an output."""
    return replace(pipeline, special=replace(pipeline.special, other_eos=(6, 9)))


def with_languages(pipeline: Any) -> Any:
    """The pipeline with tokens of languages after the source and at the start of the target (mBART)."""
    return replace(pipeline, special=replace(pipeline.special, after_end=7, sos=8))


def with_problem(pipeline: Any, problem: str) -> Any:
    model = make_model(replace(pipeline.model.config, problem_type=problem)).eval()
    model.load_state_dict(pipeline.model.state_dict())
    return replace(pipeline, model=model)


def with_pooling(pipeline: Any) -> Any:
    config = SentenceConfig(("cls", "weightedmean", "max"), max_len=5, prompt="one ", dimensions=20)
    return replace(pipeline, sentence=SentenceEmbedding(config))


# Other pipelines of the same models.
VARIANTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "transformer with several ends": ("transformer", with_ends),
    "transformer with languages": ("transformer", with_languages),
    "llama with several ends": ("llama", with_ends),
    "labels of several kinds": ("classify", partial(with_problem, problem="multi_label")),
    "regression": ("classify", partial(with_problem, problem="regression")),
    "pooling": ("embed", with_pooling),
}


def round_pipeline(pipeline: Any, precision: Precision) -> Any:
    """A copy of a pipeline with the weights that a page stores."""
    model = copy.deepcopy(pipeline.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(round_tensor(parameter, precision).rounded)
    return replace(pipeline, model=model)


def make_image_requests(seen: Any) -> list[dict[str, Any]]:
    """Experiments with every intervention on the image of a page."""
    first, *_, last = seen.maps.values()
    weights = np.random.default_rng(0).dirichlet(np.ones(len(last.columns))).tolist()
    changes: list[list[dict[str, Any]]] = [
        [],
        [{"change": "head", "attention": first.name, "head": 1}],
        [{"change": "layer", "layer": "blocks.1"}],
        [{"change": "positions"}],
        [{"change": "row", "attention": last.name, "head": 0, "row": 0, "weights": weights}],
    ]
    if isinstance(last.recorded.calls[0].score, ScaledDot):
        changes.append([{"change": "scale"}])
    shown = {"attention": last.name, "head": "mean"}
    requests = [{"experiment": {"source": seen.name, "changes": one, "shown": shown}} for one in changes]
    pixels = new_pixels(seen).flatten().tolist()
    new_image = [{"look": {"image": NEW_IMAGE, "pixels": pixels}}, {"experiment": {"source": NEW_IMAGE, "changes": []}}]
    return [*requests, *explain_requests(build_image_scene(seen, trace=False)), *new_image]


def new_pixels(seen: Any) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, seen.pixels.shape, np.uint8)


def expected_response(pipeline: Any, request: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
    if "explain" in request:
        return TextRequestHandler(pipeline).handle(request)
    if "experiment" in request:
        return handle_experiment(pipeline, request["experiment"]), []
    source, target, search, context = (request["look"].get(name) for name in ("source", "target", "search", "context"))
    config = search and DecodeConfig(**tupled(search))
    scene = build_scene(look(pipeline, source, target, config=config, context=context), trace=False)
    return {"scene": scene.header}, scene.blobs


def tupled(value: Any) -> Any:
    """JSON with tuples in place of lists."""
    if isinstance(value, dict):
        return {name: tupled(one) for name, one in value.items()}
    return tuple(map(tupled, value)) if isinstance(value, list) else value


def differences(expected: Any, found: Any, path: str = "") -> list[str]:
    """The paths at which two JSON values differ; numbers may differ by rounding."""
    if isinstance(expected, dict) and isinstance(found, dict):
        keys = {*expected, *found}
        return [d for key in sorted(keys) for d in differences(expected.get(key), found.get(key), f"{path}.{key}")]
    if isinstance(expected, list | tuple) and isinstance(found, list) and len(expected) == len(found):
        return [d for i, pair in enumerate(zip(expected, found)) for d in differences(*pair, f"{path}[{i}]")]
    if isinstance(expected, float) and isinstance(found, float | int) and not isinstance(found, bool):
        return [] if abs(expected - found) <= 3e-5 * max(1, abs(expected)) else [f"{path}: {expected} != {found}"]
    return [] if expected == found else [f"{path}: {expected!r} != {found!r}"]


def drop_ties(decode: dict[str, Any], other: dict[str, Any]) -> None:
    """Remove the steps of two searches from the first one in which rounding may decide between two candidates."""
    totals: dict[int, list[float]] = {}
    for node in decode["nodes"]:
        totals.setdefault(node["step"], []).append(node["total"])
    ties = [step for step, one in totals.items() if np.diff(sorted(one)).min(initial=1) < 1e-4]
    if ties:
        for one in (decode, other):
            one["nodes"] = [node for node in one["nodes"] if node["step"] < min(ties)]
            one["weights"] = one["omitted"] = None


def compare_blobs(expected: dict[str, Any], blobs: list[bytes], found: dict[str, Any], other: list[str]) -> None:
    """Compare the arrays that two scenes refer to, and remove them from the headers."""
    pairs = [*zip(expected["attentions"], found["attentions"])]
    if expected["decode"]:
        drop_ties(expected["decode"], found["decode"])
        pairs.append((expected["decode"], found["decode"]))
    for left, right in pairs:
        for name in {"q", "k", "w", "bias", "weights"} & left.keys():
            one, two = left.pop(name), right.pop(name)
            assert (one is None) == (two is None), (left.get("name"), name)
            if one is None:
                continue
            x = np.frombuffer(blobs[one["at"]], "<f4").reshape(one["shape"])
            y = np.frombuffer(base64.b64decode(other[two["at"]]), "<f4").reshape(two["shape"])
            if name == "k" and x.shape[1] != y.shape[1]:  # distinct heads only
                x = np.repeat(x, y.shape[1] // x.shape[1], 1)
            np.testing.assert_allclose(y, x, atol=1e-4 if name == "bias" else 2e-5, rtol=2e-5)


def compare_traces(pipeline: Any, request: dict[str, Any], found: dict[str, Any] | None, form: str) -> None:
    """Compare the step-by-step view with that of Python, for targets that Python encodes alike."""
    assert (found is not None) == (form in TRACED)
    if found is None or (isinstance(pipeline, Translator) and "target" not in request):
        return
    trace = build_trace(look(pipeline, request["source"], request.get("target")))
    assert trace.focus == found["focus"]
    assert {str(column): name for column, name in trace.names.items()} == found["names"]
    assert {name: {"tokens": one.tokens, "words": one.words} for name, one in trace.sides.items()} == found["sides"]
    assert differences(shown_steps(trace), [{name: step[name] for name in SHOWN} for step in found["shown"]]) == []
    for name, value in found["values"].items():
        expected = trace[name]
        np.testing.assert_allclose(np.array(value["data"]), expected.reshape(-1), atol=1e-5, rtol=1e-5)
        assert np.prod(value["shape"]) == expected.size


# What the page shows of a step besides its numbers; `output`: shape and names of axes.
SHOWN = ("id", "op", "title", "formula", "where", "section", "output")


def shown_steps(trace: Trace) -> list[dict[str, Any]]:
    """The steps with a title, and their sections."""
    steps = [step for step in trace.steps if step["title"]]
    return [
        {name: step[name] for name in SHOWN}
        | {"section": trace.sections[step["section"]]}
        | {"output": {name: step["output"][name] for name in ("shape", "axes")}}
        for step in steps
    ]


def compare_attributions(expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Compare attributions by central differences with those by autograd."""
    for side, values in expected.items():
        np.testing.assert_allclose(found[side], values, atol=1e-3 * max(1, np.abs(values).max()), err_msg=side)


def make_draws() -> list[dict[str, Any]]:
    generator = np.random.default_rng(2)
    options = [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.8), (0.9, 6, 0.7), (1.0, 1, 1.0)]
    return [
        {
            "logprobs": torch.from_numpy(generator.normal(size=12) * 2).log_softmax(-1).tolist(),
            "u": generator.random(),
            "options": dict(zip(("temperature", "top_k", "top_p"), options[i % len(options)])),
        }
        for i in range(120)
    ]


DRAWS = make_draws()


def make_form_look(form: str) -> Any:
    """The look at the model of a form or variant, with which its page is written."""
    if form in VARIANTS:
        base, vary = VARIANTS[form]
        return make_look(vary(cached_look(base).pipeline))
    return look(cached_look(form).pipeline, SOURCE, context=CONTEXT) if form == "answer" else cached_look(form)


@pytest.fixture(scope="module", autouse=True)
def short_outputs():
    """Random models rarely output <eos>: limit the length of their outputs."""
    limit = DecodeConfig.limit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeConfig, "limit", lambda config, length: min(limit(config, length), MAX_OUTPUT))
        yield


@pytest.fixture(scope="module")
def answers(tmp_path_factory, short_outputs):
    """For each form: a look, requests, and the responses of the page with and without WebAssembly."""
    random.seed(5)
    folder = tmp_path_factory.mktemp("engine")
    cases = {}
    for n, form in enumerate((*FORMS, *VARIANTS, *ROUNDED, *IMAGE_FORMS)):
        base, precision = ROUNDED.get(form, (form, "float32"))
        seen = cached_image_look(form) if form in IMAGE_FORMS else make_form_look(base)
        model = build_page_model(seen, precision)
        if form in ROUNDED:
            seen = replace(seen, pipeline=round_pipeline(seen.pipeline, precision))
            scene, requests = build_scene(seen, trace=False), make_requests(seen.pipeline, seen)
            assert 1e-5 < model.header["change"] < 0.5
        elif form not in IMAGE_FORMS:
            scene = build_scene(seen, trace=form in TRACED, tensors=model.tensors)
            requests = make_requests(seen.pipeline, seen)
        else:
            scene, requests = build_image_scene(seen, trace=False), make_image_requests(seen)
        header = model.header | {"trace": scene.trace_template}
        if "search" in header:
            header["search"] = header["search"] | {"max_len": min(header["search"]["max_len"], MAX_OUTPUT)}
        (folder / f"{n}.json").write_text(json.dumps({"header": header, "scene": scene.header, "requests": requests}))
        (folder / f"{n}.bin").write_bytes(model.weights)
        cases[form] = seen, requests
    (folder / "draws.json").write_text(json.dumps(DRAWS))
    script = SCRIPT.replace("FOLDER", str(folder)).replace("COUNT", str(len(cases)))
    (folder / "run.mjs").write_text(bundle_script(script), "utf-8")
    done = subprocess.run([node_program(), str(folder / "run.mjs")], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    cases["draws"] = json.loads((folder / "draws.out").read_text())
    return {"draws": cases.pop("draws")} | {
        form: (*case, *json.loads((folder / f"{n}.out").read_text())) for n, (form, case) in enumerate(cases.items())
    }


@pytest.mark.parametrize("form", [*FORMS, *VARIANTS, *ROUNDED])
def test_page_responds_like_python(answers, form):
    seen, requests, *runs = answers[form]
    pipeline = seen.pipeline
    for i, request in enumerate(requests):
        expected, blobs = expected_response(pipeline, request)
        for results in runs:
            found = results[i]["body"]
            if found is None:  # requested once, with WebAssembly
                assert "explain" in request
            elif "attribution" in found:
                compare_attributions(expected["attribution"], found["attribution"])
            elif "explain" in request:
                assert differences(expected, found) == [], request
            elif "scene" in found:
                wanted = json.loads(json.dumps(expected["scene"]))
                compare_traces(pipeline, request["look"], found["scene"].pop("trace"), form)
                del wanted["trace"]
                compare_blobs(wanted, blobs, found["scene"], results[i]["blobs"])
                assert differences(wanted, found["scene"]) == [], request
            else:
                for one, other in ((expected[side], found[side]) for side in ("before", "after")):
                    assert one["text"] == other["text"], request
                    assert tokens_of(one) == tokens_of(other), request
                    assert differences(one, other) == [], request
                assert differences(expected["similarity"], found["similarity"]) == [], request


def compare_image_scenes(scene: Any, found: dict[str, Any], blobs: list[str]) -> None:
    """Compare the scene of a new image with Python's; what needs gradients is missing."""
    expected = json.loads(json.dumps(scene.header)) | {"decode": None}
    compare_blobs(expected, scene.blobs, found, blobs)
    for label in expected["image"]["labels"]:
        for gradients in ("rollout", "attribution"):
            label.pop(gradients, None)
    for name in ("pixels", "mask"):
        one, two = expected["image"].pop(name), found["image"].pop(name)
        assert (one is None) == (two is None)
        if one is not None:
            assert scene.blobs[one.pop("at")] == base64.b64decode(blobs[two.pop("at")])
            assert one == two
    assert differences(expected, found) == []


def tokens_of(outcome: dict[str, Any]) -> list[str]:
    return [step["token"] for step in outcome["steps"]]


@pytest.mark.parametrize("form", IMAGE_FORMS)
def test_page_runs_experiments_on_images_like_python(answers, form):
    seen, requests, *runs = answers[form]
    new_look = replace(look(seen.pipeline, new_pixels(seen)), name=NEW_IMAGE)
    for i, request in enumerate(requests):
        if "look" in request:
            scene = build_image_scene(new_look, trace=False)
            for results in runs:
                compare_image_scenes(scene, results[i]["body"]["scene"], results[i]["blobs"])
            continue
        if "explain" in request:
            expected = handle_explanation(seen, request["explain"])
        else:
            is_new = request["experiment"]["source"] == NEW_IMAGE
            image = new_look.run.images[0] if is_new else seen.run.images[0]
            expected = handle_experiment(seen.pipeline, request["experiment"], image)
        for results in runs[: 1 if "explain" in request else 2]:
            assert differences(expected, results[i]["body"]) == [], request


def test_sampling_draws_like_python(answers):
    found = answers["draws"]
    for one, token in zip(DRAWS, found["draws"]):
        logprobs = torch.tensor([[one["logprobs"]]])
        assert token == draw(logprobs, torch.tensor([[one["u"]]]), **one["options"]).item(), one
    uniform = np.array(found["uniform"])
    assert 0 <= uniform.min() < uniform.max() < 1
    assert abs(np.histogram(uniform, 20, (0, 1))[0] - 1000).max() < 150
