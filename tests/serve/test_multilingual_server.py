"""A server with a translator into several languages, or between any two of its languages."""

import json
import time

import torch

from regard.data import Tokenizer
from regard.data.text.languages import LanguageTokens, parse_language_pairs
from regard.data.text.special_tokens import SpecialTokens
from regard.models import make_model
from regard.models.transformer import TransformerConfig
from regard.pipelines import Translator, load, save
from regard.serve.client import connect
from regard.serve.registry import ModelRegistry
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


def make_any_to_any(count: int) -> Translator:
    """A translator between any two of its languages, with the roles of NLLB."""
    others = [f"x{chr(97 + i // 26)}{chr(97 + i % 26)}_Latn" for i in range(count - 3)]
    tags = [f"<2{code}>" for code in ("eng_Latn", "fra_Latn", "deu_Latn", *others)]
    tokenizer = Tokenizer.train(["one two three un deux trois eins zwei drei"], "word", 1000, tags=tags)
    size = tokenizer.vocab_size
    config = TransformerConfig(
        **dict(width=16, heads=2, feedforward=16, encoder_layers=1, decoder_layers=1, max_len=32, shared_vocab=True),
        **dict(tied=False, source_vocab=size, target_vocab=size),
    )
    torch.manual_seed(0)
    model = make_model(config)
    with torch.no_grad():
        model.output.weight.mul_(2.0)
        model.output.weight[3:207] = 0.0  # texts do not end at once, and consist of words
    tokens = LanguageTokens(tokenizer.language_tags, "forced", "begin", default_source="eng_Latn")
    special = SpecialTokens(end=3)
    return Translator(model.eval(), tokenizer, tokenizer, special=special, language_tokens=tokens)


def test_routes_select_both_languages(tmp_path):
    save(tmp_path / "any", make_any_to_any(202))
    local = load(tmp_path / "any", "cpu")
    text, pairs = "one two three", [("eng_Latn", "fra_Latn"), ("deu_Latn", "fra_Latn"), ("fra_Latn", "eng_Latn")]
    expected = {pair: local(text, pair[1], pair[0]) for pair in pairs}
    assert len(set(expected.values())) == 3
    with run_in_thread(ModelRegistry([tmp_path / "any"], device="cpu", latency_target=30)) as server:
        start = time.process_time()
        languages = server.request("/languages")[1]
        assert time.process_time() - start < 2
        assert len(languages) == 202
        assert all(len(entry["targets"]) == 201 and entry["code"] not in entry["targets"] for entry in languages)
        (listed,) = server.request("/v1/models")[1]["data"]
        assert (listed["language_pairs"], len(listed["languages"])) == ([], 202)
        for (source, target), output in expected.items():
            body = {"q": text, "source": source, "target": target}
            assert server.post("/translate", body)["translatedText"] == output
            native = server.post("/api/translate", {"texts": [text], "to": target, "source_language": source})
            assert native["translations"][0][0]["text"] == output
            assert connect(server.url)(text, to=target, source_language=source) == output
            pair = (text, "un deux")
            scored = server.post("/api/score", {"pairs": [pair], "to": target, "source_language": source})
            score = local.score(pair, to=target, source_language=source).logprob
            assert abs(scored["scores"][0]["logprob"] - score) < 1e-3
            body = {"text": text, "to": target, "source_language": source, "format": "arrays"}
            assert server.post("/api/attention", body)["output"] == output
        detected = server.post("/translate", {"q": text, "source": "auto", "target": "fra_Latn"})
        assert detected["translatedText"] == expected["eng_Latn", "fra_Latn"]
        assert detected["detectedLanguage"]["language"] == "eng_Latn"
        status, content = server.request("/translate", {"q": text, "source": "eng_Latn", "target": "fr"})
        assert status == 400
        assert "Nearest to 'fr' of 202 languages: fra_Latn" in content["error"]
        assert len(json.dumps(content)) < 300
        status, content = server.request("/api/translate", {"texts": [text]})
        assert status == 422
        assert "No target language is given, and the model has 202" in str(content)
