"""Which models a page contains, and how its file stores them."""

import base64
import copy
import json
import re
import zlib
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models, normalizers

from regard.attention import Score
from regard.data import Tokenizer
from regard.data.text.tokenizer import FOREIGN_KIND
from regard.errors import RegardError
from regard.layers.packed import pack
from regard.models import Seq2SeqConfig, make_model
from regard.pipelines import Translator
from regard.pipelines.sentence_embedding import SentenceConfig, SentenceEmbedding
from regard.viewer import look
from regard.viewer.page import model as page_model
from regard.viewer.page.html import PageModel, render_page
from regard.viewer.page.model import build_page_model, model_for_page, round_tensor, tokenizer_header
from regard.viewer.page.text_scene import Scene, build_scene
from tests.viewer.text_models import SOURCE, make_pipeline


def test_small_models_are_included_by_default(monkeypatch):
    seen = look(make_pipeline("classify"), SOURCE)
    monkeypatch.setattr(page_model, "build_page_model", lambda look, precision: precision)
    assert model_for_page(seen) == model_for_page(seen, True) == "float32"
    monkeypatch.setattr(page_model, "MAX_FLOAT32_BYTES", 100)
    assert model_for_page(seen) == model_for_page(seen, True) == "float16"
    assert model_for_page(seen, "int8") == "int8"
    assert model_for_page(seen, False) is None
    monkeypatch.setattr(page_model, "MAX_DEFAULT_BYTES", 100)
    assert model_for_page(seen) is None
    monkeypatch.setattr(page_model, "MAX_FLOAT16_BYTES", 100)
    assert model_for_page(seen, True) == "int8"


def test_unsupported_models_are_left_out_or_refused():
    tokenizer = Tokenizer.train([SOURCE], "word")
    blind = Seq2SeqConfig(width=8, attention="none", source_vocab=8, target_vocab=8)
    without_attention = look(Translator(make_model(blind).eval(), tokenizer, tokenizer), SOURCE, SOURCE)
    ensemble = look(make_pipeline("luong"), SOURCE, SOURCE)
    members = replace(ensemble.pipeline, ensemble_members=[ensemble.pipeline.model])
    layers = SentenceEmbedding(SentenceConfig(layers=("tanh",)), [(torch.eye(16), None)])
    projected = look(replace(make_pipeline("embed"), sentence=layers), SOURCE)
    cases = [(projected, "linear layers"), (without_attention, "without attention")]
    with pytest.raises(RegardError, match="has no model"):
        model_for_page(replace(ensemble, pipeline=None), True)
    for seen, message in [*cases, (replace(ensemble, pipeline=members), "an ensemble")]:
        assert model_for_page(seen) is None
        with pytest.raises(RegardError, match=f"cannot contain .*{message}"):
            model_for_page(seen, True)


def test_unknown_scores_are_refused():
    class Distance(Score):
        def pair_scores(self, q, k):
            return -(q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)

    pipeline = make_pipeline("embed")
    seen = look(pipeline, SOURCE)
    for block in pipeline.model.blocks:
        block.attention.score = Distance()
    assert model_for_page(seen) is None
    with pytest.raises(RegardError, match=r"blocks\.0\.attention cannot be found in the model's graph"):
        model_for_page(seen, True)


def test_unsupported_tokenizers_are_refused():
    library = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    library.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.ByteLevel()])
    with pytest.raises(RegardError, match="cannot run the normalizer ByteLevel of this tokenizer"):
        tokenizer_header(Tokenizer(library, FOREIGN_KIND))
    words = Tokenizer.train(["a b"], "word")
    words.backend_tokenizer.add_tokens(["new"])
    with pytest.raises(RegardError, match="added tokens"):
        tokenizer_header(words)


def test_precisions_round_matrices_only():
    matrix, vector = torch.randn(5, 70), torch.randn(7)
    matrix[:, 64:] *= 1e-3
    for precision, size, error in (("float32", 1400, 0), ("float16", 700, 1e-3), ("int8", 5 * 3 * 2 + 350, 0.005)):
        stored = round_tensor(matrix, precision)
        assert (stored.rounded - matrix)[:, 64:].abs().max() <= error * 1e-3 * matrix.abs().max()
        assert (stored.kind, len(stored.raw)) == (precision, size)
        assert (stored.rounded - matrix).abs().max() <= error * matrix.abs().max()
        assert round_tensor(vector, precision).kind == "float32"
        assert torch.equal(round_tensor(vector, precision).rounded, vector)
    assert round_tensor(torch.full((2, 2), 1e-12), "int8").rounded.abs().max() < 1e-7
    for value, precision in ((1e6, "float16"), (1e9, "int8")):
        with pytest.raises(RegardError, match=f"range of {precision}"):
            round_tensor(torch.full((2, 2), value), precision)


def test_page_stores_the_model_and_allows_its_worker(tmp_path):
    seen = look(make_pipeline("classify"), SOURCE)
    model = build_page_model(seen)
    assert 0 < model.header["change"] < 0.1
    scene = build_scene(seen, tensors=model.tensors)
    text = render_page(scene, model).decode()
    assert "worker-src blob:" in text
    parts = dict(re.findall(r'<script type="text/plain" id="model-(\w+)">(.*?)</script>', text, re.S))
    header = json.loads(zlib.decompress(base64.b64decode(parts["header"])))
    assert header["trace"]["steps"][0]["op"] == scene.header["trace"]["steps"][0]["op"]
    weights = base64.b64decode(parts["weights"])
    assert len(weights) < 2.2 * sum(p.numel() for p in seen.pipeline.model.parameters()) + 4000
    lookup = next(step for step in scene.header["trace"]["steps"] if step["op"] == "embedding")
    first = header["tensors"][lookup["inputs"][0]["tensor"]]
    table = np.frombuffer(weights, "<f2", np.prod(first["shape"]), first["at"]).reshape(first["shape"])
    np.testing.assert_allclose(table, seen.pipeline.model.embedding.tokens.weight.detach(), atol=1e-2)
    # The step-by-step view carries no numbers of its own.
    assert scene.header["trace"]["params"] is None
    assert scene.header["trace"]["outputs"] is None
    assert text.count("self.onmessage") == 1
    seen.save(tmp_path / "page.html", with_model="float16")
    assert (tmp_path / "page.html").read_bytes() == render_page(scene, model)
    with pytest.raises(RegardError, match="Only a page"):
        seen.save(tmp_path / "map.png", with_model=True)


@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
def test_steps_state_how_far_rounded_weights_are_from_the_model(precision):
    """`differs` of the queries is the largest difference of what the page computes from the model's own values."""
    seen = look(make_pipeline("transformer"), SOURCE, "un")
    steps = build_scene(seen, tensors=build_page_model(seen, precision).tensors).header["trace"]["steps"]
    module = copy.deepcopy(seen.pipeline.model)
    inputs = []
    module.encoder[0].attention.query.register_forward_hook(lambda module, args, out: inputs.extend([args[0], out]))
    sequences = [pack([ids]) for ids in seen.ids]
    with torch.no_grad():
        module(*sequences)
        exact = inputs[1]
        for parameter in module.parameters():
            parameter.copy_(round_tensor(parameter, precision).rounded)
        module(*sequences)
    step = next(one for one in steps if one["id"] == "encoder.0.attention.q")
    expected = float((inputs[3] - exact).abs().max() / max(1.0, float(exact.abs().max())))
    assert step["differs"] == pytest.approx(expected, rel=0.05, abs=1e-6)
    assert (precision == "float32") == (step["differs"] < 1e-6)


def test_page_without_model_allows_no_worker():
    text = render_page(Scene({"title": "", "format": 1}, [])).decode()
    assert "worker-src 'none'" in text
    assert 'id="model"' not in text


def test_page_limits_include_the_model(monkeypatch):
    monkeypatch.setattr("regard.viewer.page.html.MAX_BYTES", 1000)
    model = PageModel({"fields": [], "precision": "int8", "change": None, "head": "", "tensors": []}, bytes(2000), {})
    with pytest.raises(RegardError, match="--no-with-model"):
        render_page(Scene({"title": ""}, []), model)


def test_trace_values_are_samples():
    scene = build_scene(look(make_pipeline("classify"), SOURCE), trace=True)
    outputs = [step["output"] for step in scene.header["trace"]["steps"] if step.get("output")]
    sizes = [int(np.prod(one["shape"])) for one in outputs]
    assert max(sizes) > 60
    stored = sum(-(-size // one["every"]) for size, one in zip(sizes, outputs))
    assert scene.header["trace"]["outputs"]["shape"] == [stored]
