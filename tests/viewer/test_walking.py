"""The walk: its numbers are those of the model, and a page that computes them again finds them again."""

import dataclasses
import importlib
import json
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.attention import SCORES, Concat, Cosine, Score
from regard.attention.recording import record
from regard.cli.look import run
from regard.data import Tokenizer
from regard.errors import RegardError
from regard.folder import LanguageModel, TextEncoder, Translator, save
from regard.layers.packed import pack
from regard.models import BertConfig, GPTConfig, Seq2SeqConfig, TransformerConfig, make_model
from regard.models.transformer import t5_small
from regard.viewer import look, walk_parts, walking
from regard.viewer.scene import scene_of
from regard.viewer.tape import FUNCTIONS, OPERATIONS, Param, Tape, difference, location
from regard.viewer.walking import Walk, walk_of
from tests.viewer.browsing import node_program

SOURCE, TARGET = "one two three four", "quatre trois deux"
WORDS = [*SOURCE.split(), *TARGET.split()]
SMALL = dict(width=16, heads=4, feedforward=16, encoder_layers=1, decoder_layers=2, dropout=0.1)
READER = dict(width=16, heads=4, feedforward=16, layers=2, dropout=0.1)
WEB = Path(walking.__file__).parent / "web"


def three(score: str) -> dict:
    return dict(encoder_score=score, decoder_score=score, cross_score=score)


# Every score, every family, every form that a config can ask for.
TRANSLATORS = {
    **{f"transformer {one}": TransformerConfig(**SMALL, **three(one)) for one in SCORES},
    "rotary, grouped": TransformerConfig(**SMALL, positions="rotary", kv_heads=2, qk_norm=True, cross_score="general"),
    "grouped concat": TransformerConfig(**SMALL, kv_heads=2, **three("concat")),
    "post, learned": TransformerConfig(**SMALL, norm="post", positions="learned", position_offset=2, tied=False),
    "BART": TransformerConfig(**SMALL, norm="post", embedding_norm=True, output_bias=True, activation="gelu"),
    "T5": t5_small(**SMALL, head_width=8),
    "T5, tied": t5_small(**SMALL, tied=True, output_scale=True, relative_buckets=8, relative_distance=6),
    "swiglu": TransformerConfig(**SMALL, activation="swiglu", bias=False, norm_kind="rms", qk_norm=True),
    "halves": TransformerConfig(**SMALL, positions="sinusoidal_halves", activation="silu"),
    **{
        f"{place} {one}": Seq2SeqConfig(width=8, attention=place, score=one)
        for place in ("luong", "bahdanau")
        for one in SCORES
    },
    **{
        f"{place} {cell} of two layers": Seq2SeqConfig(width=8, layers=2, attention=place, cell=cell, score="concat")
        for place in ("luong", "bahdanau")
        for cell in ("gru", "lstm")
    },
}
READERS = {
    **{f"gpt {one}": GPTConfig(**READER, score=one) for one in SCORES},
    "llama": GPTConfig(**READER, kv_heads=2, activation="swiglu", rotary_factor=2.0, rotary_context=4, head_width=6),
    "gpt2": GPTConfig(
        **READER, norm_kind="layer", qk_norm=False, activation="gelu_tanh", positions="learned", bias="all"
    ),
    "qkv biases, untied": GPTConfig(**READER, bias="qkv", tied=False),
    "bert": BertConfig(**READER),
    "bert, pre": BertConfig(**READER, norm="pre", norm_eps=1e-5, positions="rotary", segments=0),
    "albert": BertConfig(**(READER | dict(layers=4)), groups=2, embedding_width=8),
    "classify": BertConfig(**READER, head="classify", pooler="tanh", labels=("good", "bad")),
    "answer": BertConfig(**READER, head="answer", score="cosine"),
    "nothing": BertConfig(**READER, head="none", positions="sinusoidal"),
}
FORMS = [*TRANSLATORS, *READERS]


def bundle_of(form: str):
    torch.manual_seed(0)
    config = (TRANSLATORS | READERS)[form]
    tokenizer = Tokenizer.train([" ".join(WORDS)], "word", mask=isinstance(config, BertConfig))
    size = tokenizer.vocab_size
    if form in READERS:
        kind = LanguageModel if isinstance(config, GPTConfig) else TextEncoder
        return kind(opinionated(make_model(dataclasses.replace(config, vocab=size))), tokenizer)
    model = make_model(dataclasses.replace(config, source_vocab=size, target_vocab=size))
    return Translator(opinionated(model), tokenizer, tokenizer)


def opinionated(model):
    """Weights that matter, and biases and gains that are not 0 and 1, so that none of them can be forgotten."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 1.5
            else:
                parameter += 0.3 * torch.randn_like(parameter)
    return model.eval()


def looked(form: str, bundle=None):
    return look(bundle or bundle_of(form), SOURCE, TARGET if form in TRANSLATORS else None)


def outputs(bundle, ids) -> np.ndarray:
    """What the model itself says, as whoever uses it would ask."""
    with torch.inference_mode():
        return bundle.model(*(pack([one]) for one in ids)).double().numpy()


def apart(walk: Walk, bundle, ids) -> float:
    """How far the walk is from the model: from its output, and from the weights of its attentions."""
    tape, config = walk.tape, bundle.model.config
    own = outputs(bundle, ids)
    if getattr(config, "head", "mask") == "none":
        found = tape[
            next(step["id"] for step in reversed(tape.steps) if step["output"]["axes"] == ["text", "channels"])
        ]
    else:
        found = tape["head.l" if getattr(config, "head", "") == "answer" else "output.l"]
    worst = difference(found, own)
    with torch.inference_mode(), record(bundle.model) as recording:
        bundle.model(*(pack([one]) for one in ids))
    for name, recorded in recording.items():
        steps = [step["id"] for step in tape.steps if step["op"] == "softmax" and step["id"].startswith(f"{name}.")]
        many = len(recorded.calls) > 1 and "decoder.attention" not in name
        weights = list(recorded.calls) if many else [None]
        assert steps
        if "decoder.attention" in name and len(steps) > 1:  # before each step of a recurrent decoder
            joined = np.concatenate([tape[one] for one in steps], axis=1)
            worst = max(worst, difference(joined, recorded.weights()[0].numpy()))
            continue
        assert len(steps) == len(weights)
        for step, call in zip(steps, weights):
            one = recorded if call is None else dataclasses.replace(recorded, calls=[call])
            worst = max(worst, difference(tape[step], one.weights()[0].numpy()))
    return worst


@pytest.mark.parametrize("form", FORMS)
def test_the_walk_ends_where_the_model_ends(form):
    bundle = bundle_of(form)
    seen = looked(form, bundle)
    walk = walk_of(seen)
    assert apart(walk, bundle, seen.ids) < 1e-5
    compared = [step["differs"] for step in walk.tape.steps if step["differs"] is not None]
    assert len(compared) > 10
    assert max(compared) < 1e-5
    assert {step["op"] for step in walk.tape.steps} <= set(OPERATIONS)


@pytest.mark.parametrize("form", ["transformer scaled_dot", "luong general", "bahdanau concat", "gpt dot", "bert"])
def test_a_walk_is_no_copy_of_what_the_model_says(form):
    """Whichever weight changes in the model, the walk of the old one no longer fits it."""
    bundle = bundle_of(form)
    seen = looked(form, bundle)
    walk = walk_of(seen)
    for name, parameter in bundle.model.named_parameters():
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter += 0.01 * torch.randn_like(parameter)
            assert apart(walk, bundle, seen.ids) > 1e-5, name
            parameter.copy_(before)
    assert apart(walk, bundle, seen.ids) < 1e-5


def test_the_steps_of_attention_are_named_and_say_where_they_are_computed():
    tape = walk_of(looked("rotary, grouped")).tape
    steps = {step["id"]: step for step in tape.steps}
    q = steps["decoder.0.attention.q"]
    assert (q["formula"], q["where"]) == ("q = x W_q + b_q", "regard/layers/multihead.py · MultiHead.queries")
    assert [one["name"] for one in q["params"]] == [f"decoder.0.attention.query.{one}" for one in ("weight", "bias")]
    assert steps["decoder.0.attention.k_heads"]["output"]["shape"] == [4, 2, 4]
    assert steps["decoder.0.cross.a"]["output"]["axes"] == ["heads", "target", "source"]
    order = ["q", "q_heads", "q_norm", "q_turned", "qk", "e", "e_masked", "a", "z", "joined", "o"]
    places = [list(steps).index(f"decoder.0.attention.{name}") for name in order]
    assert places == sorted(places)
    np.testing.assert_allclose(tape["decoder.0.attention.a"].sum(-1), 1.0)
    assert np.isneginf(tape["decoder.0.attention.e_masked"][0, 0, 1:]).all()


@pytest.mark.parametrize("form", FORMS[::3])
def test_every_place_that_is_named_exists(form):
    for where in {step["where"] for step in walk_of(looked(form)).tape.steps}:
        file, name = where.split(" · ")
        found = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        for part in name.split("."):
            found = getattr(found, part)
        assert callable(found)
        assert file.startswith("regard/")


def test_all_words_are_said(monkeypatch):
    said = set()

    class Heard(dict):
        def __getitem__(self, name):
            said.add(name)
            return super().__getitem__(name)

    monkeypatch.setattr(walk_parts, "WORDS", Heard(walk_parts.WORDS))
    for form in FORMS:
        walk_of(looked(form))
    bundle = bundle_of("transformer dot")
    for block in bundle.model.decoder:
        block.cross.score = Cosine(3.0)
    walk_of(looked("transformer dot", bundle))
    assert said == set(walk_parts.WORDS)


def test_recurrent_steps_by_their_names():
    tape = walk_of(looked("bahdanau gru of two layers")).tape
    for name in ("decoder.attention.1.e", "decoder.attention.1.a", "decoder.attention.1.c", "decoder.attentional"):
        assert name in tape
    tokens = {(one["side"], one["token"]) for one in tape.sections if "token" in one}
    assert tokens == {("source", t) for t in range(5)} | {("target", t) for t in range(4)}


def test_it_begins_at_the_token_that_looks_most_clearly():
    seen = looked("transformer scaled_dot")
    focus = walk_of(seen).focus
    weights = seen.maps[focus["attention"]].of(focus["head"])
    assert focus["attention"] == seen.alignment.name
    assert weights[focus["target"]].argmax() == focus["source"]
    assert weights[focus["target"]].max() == pytest.approx(weights[:3].max(), abs=0.3)
    assert set(walk_of(looked("bert")).focus) == {"attention", "head", "text"}


def test_the_likeliest_tokens_have_names():
    bundle = bundle_of("gpt dot")
    walk = walk_of(looked("gpt dot", bundle))
    vocabulary = bundle.tokenizer.vocabulary
    best = np.argsort(-walk.tape["output.p"], axis=-1)[:, :10]
    assert {walk.names[i] for i in best.flatten().tolist()} <= set(vocabulary)
    assert walk_of(looked("classify")).names == {0: "good", 1: "bad"}


@pytest.mark.parametrize("score", [Concat(4, 4, hidden=6, joint=True), Concat(4, 4, hidden=6, heads=4), Cosine(3.0)])
def test_scores_in_other_forms(score):
    bundle = bundle_of("transformer dot")
    for block in bundle.model.decoder:
        block.cross.score = score
    seen = looked("transformer dot", bundle)
    assert apart(walk_of(seen), bundle, seen.ids) < 1e-5


# Large models


@pytest.mark.parametrize("form", ["transformer scaled_dot", "luong general", "bahdanau general", "gpt dot", "albert"])
def test_of_large_models_one_layer_is_carried(monkeypatch, form):
    bundle = bundle_of(form)
    seen = looked(form, bundle)
    whole = walk_of(seen)
    monkeypatch.setattr(walking, "WHOLE", 0)
    monkeypatch.setattr(walk_parts, "WHOLE_OUTPUT", 0)
    some = walk_of(seen)
    assert whole.note is None
    assert some.note.startswith("The model is large")
    assert len(some.tape.params) < len(whole.tape.params) * 0.8
    given = [step for step in some.tape.steps if step["op"] == "given"]
    assert given
    assert max(step["differs"] for step in some.tape.steps if step["differs"] is not None) < 1e-5
    chosen = some.focus["attention"]
    if form not in ("luong general", "bahdanau general"):
        layers = {one["attention"] for one in some.tape.sections if one["part"] == "attention"}
        assert chosen in layers
        assert len(layers) < len(seen.maps)
    np.testing.assert_allclose(some.tape["output.p"], whole.tape["output.p"][:, _columns(some, bundle)], atol=1e-12)


def _columns(walk: Walk, bundle) -> list[int]:
    tokenizer = bundle.target_tokenizer if isinstance(bundle, Translator) else bundle.tokenizer
    return [tokenizer.vocabulary.index(walk.names[i]) for i in range(walk.tape["output.p"].shape[1])]


def test_what_cannot_be_walked_through():
    class Distance(Score):
        def pair(self, q, k):
            return -torch.cdist(q, k)

    bundle = bundle_of("transformer dot")
    for block in bundle.model.decoder:
        block.cross.score = Distance()
    with pytest.raises(RegardError, match="cannot compute the score Distance"):
        walk_of(looked("transformer dot", bundle))
    with pytest.raises(RegardError, match="does not know its model"):
        walk_of(dataclasses.replace(looked("bert"), bundle=None))


@pytest.mark.parametrize("changes", [{"cell": "rnn"}, {"bidirectional": False}])
def test_recurrent_layers_without_a_walk(changes):
    torch.manual_seed(0)
    tokenizer = Tokenizer.train(["one two three"], "word")
    sizes = dict(width=8, source_vocab=tokenizer.vocab_size, target_vocab=tokenizer.vocab_size, shared_vocab=True)
    translator = Translator(make_model(Seq2SeqConfig(**sizes, **changes)).eval(), tokenizer, tokenizer)
    seen = look(translator, "one two", "three")
    assert seen.maps["decoder.attention"].weights.shape == (1, 2, 3)
    with pytest.raises(RegardError, match="no walk through this kind of recurrent layer"):
        walk_of(seen)


def test_texts_that_are_too_long(monkeypatch):
    monkeypatch.setattr(walking, "LONGEST", 4)
    with pytest.raises(RegardError, match="5 tokens: a walk takes at most 4"):
        walk_of(looked("transformer dot"))


# Scenes


def test_scenes_of_small_models_have_a_walk(monkeypatch):
    seen = looked("transformer dot")
    made = scene_of(seen)
    walk = made.header["walk"]
    assert [one["id"] for one in walk["steps"]] == [one["id"] for one in walk_of(seen).tape.steps]
    assert len(made.blobs[walk["params"]["at"]]) == 4 * walk["params"]["shape"][0]
    assert walk["sides"]["target"]["tokens"] == ["<sos>", "quatre", "trois", "deux"]
    assert walk["sides"]["source"]["tokens"] == [*SOURCE.split(), "<eos>"]
    assert scene_of(seen, walk=False).header["walk"] is None
    monkeypatch.setattr(walking, "SHORT", 4)
    assert scene_of(seen).header["walk"] is None
    assert scene_of(seen, walk=True).header["walk"] is not None


def test_large_walks_are_made_on_request_alone(monkeypatch):
    seen = looked("gpt dot")
    monkeypatch.setattr(walking, "SMALL", 1000)
    assert scene_of(seen).header["walk"] is None
    assert scene_of(seen, walk=True).header["walk"] is not None
    monkeypatch.setattr(walking, "WHOLE", 100)
    assert scene_of(seen).header["walk"] is None


def test_the_command_line_asks_for_a_walk(monkeypatch, tmp_path, capsys):
    save(tmp_path / "model", bundle_of("gpt dot"))
    monkeypatch.setattr(walking, "SHORT", 1)
    for options, has in (([], False), (["--walk"], True)):
        page = tmp_path / f"{has}.html"
        assert run([str(tmp_path / "model"), SOURCE, "--out", str(page), *options]) == 0
        assert ("What each token asks" in page.read_text()) == has


def test_looks_at_some_attentions_walk_through_all():
    seen = look(bundle_of("transformer dot"), SOURCE, TARGET, layers="*.cross")
    walk = walk_of(seen)
    assert walk.sides["target"].tokens == ["<sos>", "quatre", "trois", "deux"]
    assert "encoder.0.attention.a" in walk.tape
    encoder = look(bundle_of("transformer dot"), SOURCE, TARGET, layers="encoder.*")
    assert walk_of(encoder).sides["target"].tokens == ["<sos>", "quatre", "trois", "deux"]


# The tape, and its twin in the page


def test_a_tape_refuses_what_it_has_not_written():
    tape = Tape()
    tape.section("A section")
    with tape.silent():
        hidden = tape.do(
            "given", "x", "", "", Tape.do, params=[Param("", np.ones((1, 2)), "")], axes=("text", "channels")
        )
    assert not tape.steps
    with pytest.raises(ValueError, match="y is made of what is not on the tape"):
        tape.do("scale", "y", "", "", Tape.do, [hidden], by=2.0)
    assert tape.do("scale", "y", "", "", Tape.do, [tape.give(hidden, "x", "", Tape.do)], by=2.0).x.tolist() == [[2, 2]]


def test_locations_follow_the_code():
    assert location(Tape.do) == "regard/viewer/tape.py · Tape.do"
    assert location(json.dumps) == "__init__.py · dumps"


def test_differences():
    infinite = np.array([-np.inf, 1.0])
    assert difference(infinite, infinite + 0.5) == 0.5
    assert difference(infinite, np.array([0.0, 1.0])) == np.inf


SCRIPT = """
import { readFileSync } from "node:fs";
import { Tape, erf } from "FOLDER/tape.mjs";
const numbers = (file) => {
  const bytes = readFileSync(file);
  return new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
};
for (const name of JSON.parse(process.argv[2])) {
  const walk = JSON.parse(readFileSync(`FOLDER/${name}.json`, "utf-8"));
  const tape = new Tape(walk, numbers(`FOLDER/${name}.params`), numbers(`FOLDER/${name}.outputs`));
  const checks = walk.steps.map((_, n) => tape.check(n));
  const shapes = walk.steps.every((step, n) => String(tape.value(n).shape) === String(step.output.shape));
  const made = walk.steps.map((step, n) => {
    const { data } = tape.value(n);
    return [step.op, tape.made(n, data.length - 1), data[data.length - 1]];
  });
  const erfs = [0.1, -0.7, 2.4, 2.6, -3.5, 7].map(erf);
  console.log(JSON.stringify({ name, worst: Math.max(...checks), steps: checks.length, shapes, made, erfs }));
}
"""


def test_the_page_finds_the_same_numbers(tmp_path):
    """One run of node for all forms; then one with a weight that was changed on the way, which must be noticed."""
    node = node_program()
    shutil.copy(WEB / "tape.js", tmp_path / "tape.mjs")
    forms = {str(i): form for i, form in enumerate(FORMS)}
    for number, form in forms.items():
        _write(tmp_path, number, walk_of(looked(form)).tape)
    spoilt = walk_of(looked("bert")).tape
    spoilt._params[5] = (
        np.where(np.arange(len(spoilt._params[5]) // 4) == 0, 3.0, np.frombuffer(spoilt._params[5], "<f4"))
        .astype("<f4")
        .tobytes()
    )
    _write(tmp_path, "spoilt", spoilt)
    (tmp_path / "run.mjs").write_text(SCRIPT.replace("FOLDER", tmp_path.as_posix()))
    names = [*forms, "spoilt"]
    ran = subprocess.run([node, tmp_path / "run.mjs", json.dumps(names)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [one["name"] for one in found] == names
    for one in found[:-1]:
        assert one["shapes"]
        assert one["worst"] < 1e-5, forms[one["name"]]
    assert found[-1]["worst"] > 1e-3
    assert {op for one in found for op, *_ in one["made"]} == set(OPERATIONS)
    erfs = [math.erf(x) for x in (0.1, -0.7, 2.4, 2.6, -3.5, 7)]
    np.testing.assert_allclose(found[0]["erfs"], erfs, atol=1e-14)
    for op, made, number in [row for one in found for row in one["made"]]:
        if made is not None and number is not None and all(math.isfinite(x) for x in [number]):
            said = _worked_out(made)
            # Its numbers are rounded to three digits after the point.
            assert said == pytest.approx(number, abs=0.1, rel=0.1), (op, made, number)


def _write(folder: Path, name: str, tape: Tape) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"steps": tape.steps}))
    (folder / f"{name}.params").write_bytes(tape.params)
    (folder / f"{name}.outputs").write_bytes(tape.outputs)


def _worked_out(made: dict) -> float:
    """What the sentence that a page writes comes to, if one takes it at its word."""
    text = made["before"] + made["sign"].join(made["pieces"]) + made["after"]
    for sign, python in {"−∞": "-inf", "−": "-", "·": "*", "√": "sqrt", "σ": "sigmoid"}.items():
        text = text.replace(sign, python)
    known = {name: (lambda x, f=f: float(f(np.float64(x)))) for name, f in FUNCTIONS.items()}
    known |= dict(exp=math.exp, sqrt=math.sqrt, cos=math.cos, sin=math.sin, inf=math.inf)
    return eval(text, {"__builtins__": {}}, known)
