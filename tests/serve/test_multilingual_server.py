"""A server with a translator into several languages."""

import torch

from regard.data import Tokenizer
from regard.data.text.language_pairs import parse_language_pairs
from regard.models import make_model
from regard.models.transformer import TransformerConfig
from regard.pipelines import Translator, load, save
from regard.serve.client import connect
from regard.serve.model_registry import ModelRegistry
from tests.serve.conftest import run_in_thread


def make_multilingual() -> Translator:
    tokenizer = Tokenizer.train(["one two three un deux trois eins zwei drei"], "word", tags=["<2de>", "<2fr>"])
    size = tokenizer.vocab_size
    config = TransformerConfig(
        width=16, heads=2, feedforward=16, encoder_layers=1, decoder_layers=1, max_len=32, shared_vocab=True, tied=False
    )
    torch.manual_seed(0)
    model = make_model(type(config)(**{**vars(config), "source_vocab": size, "target_vocab": size}))
    with torch.no_grad():
        model.output.weight.mul_(2.0)
        model.output.weight[3] = 0.0  # texts do not end at once
    pairs = parse_language_pairs(["en-de", "en-fr"])
    return Translator(model.eval(), tokenizer, tokenizer, language_pairs=pairs)


def test_routes_select_the_target_language(tmp_path):
    save(tmp_path / "many", make_multilingual())
    local = load(tmp_path / "many", "cpu")
    text = "one two three"
    expected = {to: local(text, to=to) for to in ("de", "fr")}
    assert expected["de"] != expected["fr"]
    with run_in_thread(ModelRegistry([tmp_path / "many"], device="cpu", latency_target=30)) as server:
        languages = server.request("/languages")[1]
        assert {entry["code"]: entry["targets"] for entry in languages} == {"de": [], "en": ["de", "fr"], "fr": []}
        for to in ("de", "fr"):
            body = {"q": text, "source": "en", "target": to}
            assert server.post("/translate", body)["translatedText"] == expected[to]
            native = server.post("/api/translate", {"texts": [text], "to": to})
            assert native["translations"][0][0]["text"] == expected[to]
            assert connect(server.url).translate(text, to=to)[0].text == expected[to]
        status, content = server.request("/translate", {"q": text, "source": "en", "target": "xx"})
        assert (status, content["error"][-30:]) == (400, "Language pairs: en-de, en-fr.".rjust(30))
        status, content = server.request("/api/translate", {"texts": [text]})
        assert status == 422
        assert "into: de, fr" in str(content)
