"""Traces agree with the model, and the page computes the same numbers."""

import dataclasses
import importlib
import json
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from regard.attention import Concat, Cosine, Score
from regard.attention.recording import record
from regard.cli.inference.look import run
from regard.errors import RegardError
from regard.graph.interpreter import OPERATIONS
from regard.layers.packed import pack
from regard.models import Seq2SeqConfig
from regard.pipelines import Translator, save
from regard.viewer import build_trace, look, model_run
from regard.viewer.page.text_scene import build_scene
from regard.viewer.text_look import Look
from regard.viewer.trace import build, computation
from regard.viewer.trace.steps import Trace, difference, location
from tests.viewer import text_models
from tests.viewer.browser import bundle_script, node_program
from tests.viewer.text_models import FORMS, SOURCE, TARGET, cached_look, cached_trace, make_look, make_pipeline


def shown(trace: Trace) -> list[dict]:
    return [step for step in trace.steps if step["title"]]


def outputs(pipeline, ids) -> np.ndarray:
    """The model's output."""
    with torch.inference_mode():
        return pipeline.model(*(pack([one]) for one in ids)).double().numpy()


def max_difference(trace: Trace, pipeline, ids) -> float:
    """The largest difference of a trace from the output and the attention weights of the model."""
    own = outputs(pipeline, ids)
    if getattr(pipeline.model.config, "head", "mask") == "none":
        found = trace[[step["id"] for step in shown(trace) if step["output"]["axes"] == ["text", "channels"]][-1]]
    else:
        found = trace["output.l_capped" if getattr(pipeline.model.config, "logit_cap", 0) else "output.l"]
    worst = difference(found, own.reshape(found.shape))
    if not any(step["op"] == "softmax" for step in trace.steps[:-1]):
        return worst
    with torch.inference_mode(), record(pipeline.model) as recording:
        pipeline.model(*(pack([one]) for one in ids))
    for name, recorded in recording.items():
        steps = [step["id"] for step in shown(trace) if step["op"] == "softmax" and step["id"].startswith(f"{name}.")]
        assert len(steps) == len(recorded.calls)
        for step, call in zip(steps, recorded.calls):
            weights = dataclasses.replace(recorded, calls=[call]).weights()[0].numpy()
            worst = max(worst, difference(trace[step], weights))
    return worst


@pytest.mark.parametrize("form", FORMS)
def test_trace_agrees_with_the_model(form):
    seen, trace = cached_look(form), cached_trace(form)
    assert max_difference(trace, seen.pipeline, seen.ids) < 1e-5
    compared = [step["differs"] for step in trace.steps if step["differs"] is not None]
    assert len(compared) > 10
    assert max(compared) < 1e-5
    assert {step["op"] for step in trace.steps} <= set(OPERATIONS)


@pytest.mark.parametrize("form", ["transformer", "luong", "bahdanau", "gpt", "bert"])
def test_trace_depends_on_every_parameter(form):
    """A trace of the old weights no longer agrees after any parameter has changed."""
    seen, trace = make_look(make_pipeline(form)), cached_trace(form)
    for name, parameter in seen.pipeline.model.named_parameters():
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter += 0.01 * torch.randn_like(parameter)
            assert max_difference(trace, seen.pipeline, seen.ids) > 1e-5, name
            parameter.copy_(before)
    assert max_difference(trace, seen.pipeline, seen.ids) < 1e-5


def test_names_formulas_and_axes_of_an_attention():
    trace = cached_trace("rotary, grouped")
    steps = {step["id"]: step for step in shown(trace)}
    q = steps["decoder.0.attention.q"]
    assert (q["title"], q["formula"]) == ("Queries", "q = n W_Q + b_Q")
    assert q["where"] == "regard/layers/attention.py · MultiHeadAttention.forward"
    params = [one for one in q["inputs"] if isinstance(one, dict)]
    assert [one["name"] for one in params] == [f"decoder.0.attention.query.{one}" for one in ("weight", "bias")]
    assert [one["sign"] for one in params] == ["W_Q", "b_Q"]
    assert steps["decoder.0.attention.k"]["output"]["shape"] == [4, 2, 4]
    assert steps["decoder.0.attention.k"]["output"]["axes"] == ["target", "heads", "channels"]
    assert steps["decoder.0.cross.a"]["output"]["axes"] == ["heads", "target", "source"]
    assert steps["decoder.0.cross.k"]["formula"] == "k = m W_K + b_K"
    order = ["q", "q_norm", "q_rotary", "k", "v", "k_norm", "k_rotary", "qk", "e", "e_masked", "a", "z", "o"]
    assert [name for name in steps if name.startswith("decoder.0.attention.")] == [
        f"decoder.0.attention.{name}" for name in order
    ]
    np.testing.assert_allclose(trace["decoder.0.attention.a"].sum(-1), 1.0)
    assert (trace["decoder.0.attention.e_masked"][0, 0, 1:] < -1e38).all()


def test_masks_are_described():
    def masks(trace):
        return {(step["title"], step["formula"]) for step in shown(trace) if "−∞" in (step["formula"] or "")}

    assert masks(cached_trace("llama")) == {("Causal mask", "eₜₛ ← −∞ for s > t")}
    assert masks(cached_trace("modernbert")) == {("Local attention", "eₜₛ ← −∞ for |s − t| > 1")}


@pytest.mark.parametrize("form", FORMS)
def test_every_step_of_built_in_layers_has_a_title(form):
    """Default titles are for custom layers."""
    titles = {step["title"] for step in shown(cached_trace(form))}
    assert not titles & {"Add", "Multiply", "Divide", "Matrix product", "Linear layer", "Concatenate", "Stack", "Mask"}


@pytest.mark.parametrize("form", FORMS[::3])
def test_source_locations_exist(form):
    for where in {step["where"] for step in shown(cached_trace(form))}:
        file, name = where.split(" · ")
        found = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        for part in name.split("."):
            found = getattr(found, part)
        assert callable(found)
        assert file.startswith("regard/")


def test_sections_of_a_transformer():
    sections = cached_trace("transformer").sections
    assert [one["title"] for one in sections[:4]] == [
        "Source embedding",
        "Encoder, layer 1: self-attention",
        "Encoder, layer 1: feed-forward",
        "Final norm of the encoder",
    ]
    cross = next(one for one in sections if one.get("attention") == "decoder.1.cross")
    assert cross | {"side": "target", "keys": "source", "heads": 4, "layer": 1, "part": "attention"} == cross
    assert sections[-1]["title"] == "Next token"


def test_layers_with_shared_weights_are_separate_layers():
    sections = cached_trace("albert").sections
    assert [one["attention"] for one in sections if "attention" in one] == [
        f"blocks.{group}.attention.{call}" for group in (0, 1) for call in (0, 1)
    ]
    assert [one["layer"] for one in sections if "layer" in one] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_steps_of_recurrent_models():
    trace = cached_trace("bahdanau gru of two layers")
    for name in ("decoder.attention.1.e", "decoder.attention.1.a", "decoder.attention.1.c", "decoder.attentional"):
        assert name in trace
    tokens = {(one["side"], one["token"]) for one in trace.sections if "token" in one}
    assert tokens == {("source", t) for t in range(5)} | {("target", t) for t in range(4)}
    gates = [step for step in shown(trace) if step["id"].startswith("encoder.layers.0.backward_layer.2.")]
    assert [step["id"].rpartition(".")[2] for step in gates] == ["w", "r", "n", "z", "h"]
    # Both directions have their state at the same token.
    states = trace["encoder.layers.0.h"]
    np.testing.assert_allclose(trace["encoder.layers.0.forward_layer.2.h"], states[2, :8])
    np.testing.assert_allclose(trace["encoder.layers.0.backward_layer.2.h"], states[2, 8:])


def test_steps_of_a_recurrent_decoder_have_equal_names_at_every_position():
    trace = cached_trace("bahdanau lstm of two layers")
    tokens = [section.get("token") if section.get("side") == "target" else None for section in trace.sections]
    names: dict[int, list[str]] = {}
    for step in shown(trace):
        if (token := tokens[step["section"]]) is not None:
            path, _, name = step["id"].rpartition(".")
            names.setdefault(token, []).append(f"{path.removesuffix(f'.{token}')}.{name}")
    assert len(names) == 4
    assert "decoder.attention.e" in names[0]
    assert all(one == names[0] for one in names.values())


def test_recurrent_model_without_attention(monkeypatch):
    monkeypatch.setitem(text_models.TRANSLATORS, "none", Seq2SeqConfig(width=8, attention="none"))
    pipeline = make_pipeline("none")
    ids = pipeline.teacher_forced([(pipeline.encode_source(SOURCE), pipeline.encode_target(TARGET))])
    seen = Look(SOURCE, TARGET, [], [], {}, pipeline=pipeline, ids=tuple(one.ids.tolist() for one in ids))
    made = build_trace(seen)
    assert max_difference(made, pipeline, seen.ids) < 1e-5
    assert made.focus["attention"] is None
    assert made.sides["source"].tokens == [*SOURCE.split(), "<eos>"]


def test_initial_selection_is_the_token_with_the_sharpest_weights():
    seen = cached_look("transformer")
    focus = cached_trace("transformer").focus
    weights = seen.maps[focus["attention"]].head_weights(focus["head"])
    assert focus["attention"] == seen.alignment.name
    assert weights[focus["target"]].argmax() == focus["source"]
    assert weights[focus["target"]].max() == pytest.approx(weights[:3].max(), abs=0.3)
    assert set(cached_trace("bert").focus) == {"attention", "head", "text"}


def test_most_likely_tokens_have_names():
    vocabulary = cached_look("gpt").pipeline.tokenizer.vocabulary
    best = np.argsort(-cached_trace("gpt")["output.p"], axis=-1)[:, :10]
    assert {cached_trace("gpt").names[i] for i in best.flatten().tolist()} <= set(vocabulary)
    assert cached_trace("classify").names == {0: "good", 1: "bad"}


# Custom scores and layers


class Distance(Score):
    """A custom score: the negative squared distance times a learned factor."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.3))

    def pair_scores(self, q, k):
        return -self.factor * (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)


class Gate(nn.Module):
    """A custom layer: x · sigmoid(W x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.map = nn.Linear(width, width)

    def forward(self, x):
        return x * torch.sigmoid(self.map(x) + 1.0)


class GatedFeedForward(nn.Module):
    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.gate = inner, Gate(width)

    def forward(self, x):
        return self.gate(self.inner(x))


@pytest.mark.parametrize(
    "score", [Concat(4, 4, hidden=6, joint=True), Concat(4, 4, hidden=6, heads=4), Cosine(3.0), Distance()]
)
def test_custom_and_configured_scores(score):
    pipeline = make_pipeline("general, grouped concat")
    for block in pipeline.model.decoder:
        block.cross.score = score
    seen = make_look(pipeline)
    trace = build_trace(seen)
    assert max_difference(trace, pipeline, seen.ids) < 1e-5
    steps = {step["id"]: step for step in shown(trace)}
    assert steps["decoder.0.cross.e"]["output"]["axes"] == ["heads", "target", "source"]


def test_custom_layer_and_score_appear_in_the_trace():
    pipeline = make_pipeline("transformer")
    for block in pipeline.model.decoder:
        block.cross.score = Distance()
        block.feedforward = GatedFeedForward(block.feedforward, 16)
    gate_module = pipeline.model.decoder[0].feedforward.gate
    seen = make_look(pipeline)
    trace = build_trace(seen)
    assert max_difference(trace, pipeline, seen.ids) < 1e-5
    steps = {step["id"]: step for step in shown(trace)}
    gate = [name for name in steps if name.startswith("decoder.0.feedforward.gate")]
    assert gate == [f"decoder.0.feedforward.gate.{name}" for name in ("map", "sigmoid", "mul")]
    assert [steps[name]["title"] for name in gate] == ["Linear layer", "sigmoid", "Multiply"]
    x, product = trace["decoder.0.feedforward.inner.f"], trace["decoder.0.feedforward.gate.mul"]
    with torch.no_grad():
        np.testing.assert_allclose(product, gate_module(torch.from_numpy(x).float()).numpy(), atol=1e-5)
    score = [name.rpartition(".")[2] for name in steps if name.startswith("decoder.0.cross.")]
    assert score[:3] == ["q", "k", "v"]
    assert score[-4:] == ["e", "a", "z", "o"]
    assert len(score) > 7
    titles = {one["title"] for one in trace.sections}
    assert "Decoder, layer 1: feed-forward" in titles
    names = {one["name"] for step in trace.steps for one in step["inputs"] if isinstance(one, dict)}
    assert {"decoder.0.cross.score.factor", "decoder.0.feedforward.gate.map.weight"} <= names
    # The graph is captured again after a module has been replaced.
    pipeline.model.decoder[0].cross.score = Cosine(2.0)
    assert max_difference(build_trace(make_look(pipeline)), pipeline, seen.ids) < 1e-5


# Large models


@pytest.mark.parametrize("form", ["transformer", "luong", "bahdanau", "gpt", "albert"])
def test_trace_of_a_large_model_contains_one_layer(monkeypatch, form):
    seen, whole = cached_look(form), cached_trace(form)
    monkeypatch.setattr(model_run, "MAX_MODEL_BYTES", 0)
    monkeypatch.setattr(computation, "MAX_OUTPUT_BYTES", 0)
    some = build_trace(seen)
    assert whole.note is None
    assert some.note.startswith("The model is large")
    assert len(some.params) < len(whole.params) * 0.8
    given = [step for step in some.steps if step["op"] == "given"]
    assert given
    assert max(step["differs"] for step in some.steps if step["differs"] is not None) < 1e-5
    if form not in ("luong", "bahdanau"):
        layers = {one["attention"] for one in some.sections if one["part"] == "attention"}
        assert some.focus["attention"] in layers
        assert len(layers) < len(seen.maps)
    columns = _columns(some, seen.pipeline)
    np.testing.assert_allclose(some["output.p"][:, : len(columns)], whole["output.p"][:, columns], atol=1e-12)


def _columns(some: Trace, pipeline) -> list[int]:
    tokenizer = pipeline.target_tokenizer if isinstance(pipeline, Translator) else pipeline.tokenizer
    return [tokenizer.vocabulary.index(name) for name in some.names.values() if name != "all others"]


def test_look_without_a_model_raises_an_error():
    with pytest.raises(RegardError, match="has no model"):
        build_trace(dataclasses.replace(cached_look("bert"), pipeline=None))


def test_too_long_texts_raise_an_error(monkeypatch):
    monkeypatch.setattr(build, "MAX_TOKENS", 4)
    with pytest.raises(RegardError, match="5 tokens; the step-by-step view supports at most 4"):
        build_trace(cached_look("transformer"))


# Scenes


def test_scenes_of_small_models_contain_a_trace(monkeypatch):
    seen = cached_look("transformer")
    made = build_scene(seen)
    header = made.header["trace"]
    assert [one["id"] for one in header["steps"]] == [one["id"] for one in cached_trace("transformer").steps]
    assert len(made.blobs[header["params"]["at"]]) == 4 * header["params"]["shape"][0]
    assert header["sides"]["target"]["tokens"] == ["<sos>", "quatre", "trois", "deux"]
    assert header["sides"]["source"]["tokens"] == [*SOURCE.split(), "<eos>"]
    json.dumps(header, allow_nan=False)
    assert build_scene(seen, trace=False).header["trace"] is None
    monkeypatch.setattr(model_run, "MAX_TOKENS", 4)
    assert build_scene(seen).header["trace"] is None
    assert build_scene(seen, trace=True).header["trace"] is not None


def test_large_traces_are_built_on_request_only(monkeypatch):
    seen = cached_look("gpt")
    monkeypatch.setattr(build, "MAX_DEFAULT_BYTES", 1000)
    assert build_scene(seen).header["trace"] is None
    assert build_scene(seen, trace=True).header["trace"] is not None
    monkeypatch.setattr(model_run, "MAX_MODEL_BYTES", 100)
    assert build_scene(seen).header["trace"] is None


def test_trace_option_of_the_command_line(monkeypatch, tmp_path, capsys):
    save(tmp_path / "model", make_pipeline("gpt"))
    monkeypatch.setattr(model_run, "MAX_TOKENS", 1)
    for options, has in (([], False), (["--trace"], True)):
        page = tmp_path / f"{has}.html"
        assert run([str(tmp_path / "model"), SOURCE, "--out", str(page), *options]) == 0
        assert ("Softmax: attention weights" in page.read_text()) == has


def test_trace_of_a_look_at_some_attentions_contains_all():
    pipeline = cached_look("transformer").pipeline
    made = build_trace(look(pipeline, SOURCE, TARGET, layers="*.cross"))
    assert made.sides["target"].tokens == ["<sos>", "quatre", "trois", "deux"]
    assert "encoder.0.attention.a" in made
    encoder = look(pipeline, SOURCE, TARGET, layers="encoder.*")
    assert build_trace(encoder).sides["target"].tokens == ["<sos>", "quatre", "trois", "deux"]


def test_location_of_functions():
    assert location(Trace.__getitem__) == "regard/viewer/trace/steps.py · Trace.__getitem__"
    assert location(json.dumps) == "__init__.py · dumps"


def test_differences():
    infinite = np.array([-np.inf, 1.0])
    assert difference(infinite, infinite + 0.5) == 0.5
    assert difference(infinite, np.array([0.0, 1.0])) == np.inf


# In the page

SCRIPT = """
import { readFileSync } from "node:fs";
import { erf } from "./trace/operations.js";
import { Trace } from "./trace/trace.js";
const numbers = (file) => {
  const bytes = readFileSync(file);
  return new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
};
for (const name of JSON.parse(process.argv[2])) {
  const header = JSON.parse(readFileSync(`FOLDER/${name}.json`, "utf-8"));
  const trace = new Trace(header, numbers(`FOLDER/${name}.params`), numbers(`FOLDER/${name}.outputs`));
  const checks = header.steps.map((_, n) => trace.check(n));
  const made = header.steps.flatMap((step, n) => {
    const { data } = trace.value(n);
    return step.title ? [[step.id, step.op, trace.derivation(n, data.length - 1), data[data.length - 1]]] : [];
  });
  const erfs = [0.1, -0.7, 2.4, 2.6, -3.5, 7].map(erf);
  console.log(JSON.stringify({ name, worst: Math.max(...checks), steps: checks.length, made, erfs }));
}
"""


def in_node(folder: Path, traces: dict[str, Trace]) -> dict[str, dict]:
    """What a page finds of each trace, in one run of node."""
    for number, trace in enumerate(traces.values()):
        (folder / f"{number}.json").write_text(json.dumps({"steps": trace.steps}))
        (folder / f"{number}.params").write_bytes(trace.params)
        (folder / f"{number}.outputs").write_bytes(trace.outputs)
    (folder / "run.mjs").write_text(bundle_script(SCRIPT.replace("FOLDER", folder.as_posix())))
    command = [node_program(), folder / "run.mjs", json.dumps([str(number) for number in range(len(traces))])]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return dict(zip(traces, map(json.loads, ran.stdout.splitlines()), strict=True))


def test_page_computes_the_same_numbers(tmp_path):
    found = in_node(tmp_path, {form: cached_trace(form) for form in FORMS})
    for form, one in found.items():
        assert one["worst"] < 1e-5, form
    erfs = [math.erf(x) for x in (0.1, -0.7, 2.4, 2.6, -3.5, 7)]
    np.testing.assert_allclose(found["bert"]["erfs"], erfs, atol=1e-14)
    for form, one in found.items():
        check_expressions(form, one["made"])


def test_page_detects_a_changed_parameter(tmp_path):
    trace = build_trace(cached_look("bert"))
    raw = bytearray(trace.params)
    raw[2000:2004] = np.float32(4.0).tobytes()
    trace._params._raw = [bytes(raw)]
    assert in_node(tmp_path, {"bert": trace})["bert"]["worst"] > 1e-3


def check_expressions(form: str, made: list) -> None:
    """The expression that the page shows for a number evaluates to that number."""
    for name, op, expression, number in made:
        if expression is not None and number is not None and abs(number) < 1e38:
            # Its numbers are rounded to three decimals.
            assert evaluate_expression(expression) == pytest.approx(number, abs=0.1, rel=0.1), (
                form,
                name,
                op,
                expression,
                number,
            )


def evaluate_expression(made: dict) -> float:
    text = made["before"] + made["sign"].join(made["pieces"]) + made["after"]
    replaced = {"−∞": "-inf", "∞": "inf", "−": "-", "·": "*", "√": "sqrt", "σ": "sigmoid", "²": "**2", "^": "**"}
    for sign, python in replaced.items():
        text = text.replace(sign, python)
    names = ("relu", "gelu", "silu", "tanh", "sigmoid", "abs", "exp", "log", "sin", "cos", "sqrt")
    known = {name: (lambda x, f=OPERATIONS[name]: float(f(np.float64(x)))) for name in names}
    known |= {"gelu_tanh": lambda x: float(OPERATIONS["gelu"](np.float64(x), "tanh")), "inf": math.inf}
    known |= {"max": max, "min": min}
    return eval(text, {"__builtins__": {}}, known)
