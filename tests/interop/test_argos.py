"""Packages for Argos Translate."""

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest
import torch

from regard.cli import main
from regard.data import SpecialTokens, Tokenizer
from regard.data.text.languages import LanguagePair
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.interop import export_argos
from regard.models.transformer import Transformer, TransformerConfig
from regard.pipelines import Translator, load
from regard.training import DataConfig, read_dataset
from tests.interop.sentencepiece_models import TEXTS, load_sentencepiece

# The sentence splitters of Argos Translate download models: one sentence per call, without them.
SCRIPT = """
import json, sys
import argostranslate.package, argostranslate.translate
from argostranslate.sbd import MiniSBDSentencizer
MiniSBDSentencizer.__init__ = lambda self, package: None
MiniSBDSentencizer.split_sentences = lambda self, text: [text]
argostranslate.package.install_from_path(sys.argv[1])
lines = json.loads(sys.argv[2])
print(json.dumps([argostranslate.translate.translate(line, "en", "de") for line in lines]))
"""


@pytest.fixture(scope="module")
def translator() -> Translator:
    """Random weights, with an output bias that makes outputs end."""
    tokenizer = Tokenizer.train(TEXTS, "sentencepiece", 400)
    torch.manual_seed(1)
    size = tokenizer.vocab_size
    config = TransformerConfig(
        **dict(width=32, heads=2, feedforward=32, encoder_layers=1, decoder_layers=1, source_vocab=size),
        **dict(target_vocab=size, shared_vocab=True, output_bias=True, tied=False),
    )
    model = Transformer(config).eval()
    with torch.no_grad():
        model.output.weight.mul_(6)
        model.output.bias[:3] = -100.0  # Regard never generates <pad> and <sos>
        model.output.bias[3] += 8.0
    return Translator(model, tokenizer, tokenizer, language_pairs=(LanguagePair("en", "de"),))


def test_package_has_metadata_model_and_tokenizer(translator, tmp_path):
    translator.save(tmp_path / "model")
    path = tmp_path / "en_de.argosmodel"
    assert main(["export", str(tmp_path / "model"), "--to", "argos", "--out", str(path)]) == 0
    with zipfile.ZipFile(path) as archive:
        names = {name.partition("/")[2] for name in archive.namelist()}
        assert {"metadata.json", "sentencepiece.model", "model/model.bin", "model/config.json"} <= names
        assert {name.partition("/")[0] for name in archive.namelist()} == {"translate-en_de-1_0"}
        metadata = json.loads(archive.read("translate-en_de-1_0/metadata.json"))
        pieces = load_sentencepiece(archive.read("translate-en_de-1_0/sentencepiece.model"))
    assert (metadata["from_code"], metadata["from_name"]) == ("en", "English")
    assert (metadata["to_code"], metadata["to_name"]) == ("de", "German")
    assert all(pieces.encode(text) == translator.source_tokenizer.encode(text) for text in TEXTS[:50])
    with pytest.raises(RegardError, match="already exists"):
        export_argos(load(tmp_path / "model", "cpu"), path)


@pytest.mark.skipif(importlib.util.find_spec("argostranslate") is None, reason="argostranslate is not installed")
def test_argos_translate_gives_the_same_translations(translator, tmp_path):
    path = tmp_path / "en_de.argosmodel"
    export_argos(translator, path)
    lines = TEXTS[:8]
    names = ("ARGOS_PACKAGES_DIR", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "HOME")
    folders = {name: str(tmp_path / name) for name in names}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), json.dumps(lines)],
        env={**os.environ, **folders, "ARGOS_COMPUTE_TYPE": "float32"},
        **dict(capture_output=True, text=True),
    )
    assert run.returncode == 0, run.stderr
    expected = translator.translate(lines, DecodeConfig(beam=4, length_penalty=0.2, min_len=1, max_extra=256))
    translations = json.loads(run.stdout.splitlines()[-1])
    assert translations == [n_best[0].text for n_best in expected]
    assert len(set(translations)) > 3


def test_word_tokenizers_become_one_sentencepiece_vocabulary(tmp_path):
    """The demo has such tokenizers."""
    sides = list(zip(*read_dataset("translate", DataConfig(limit=200)).training))
    tokenizers = [Tokenizer.train(texts, "word") for texts in sides]
    sizes = dict(source_vocab=tokenizers[0].vocab_size, target_vocab=tokenizers[1].vocab_size)
    model = Transformer(TransformerConfig(width=8, heads=2, encoder_layers=1, decoder_layers=1, **sizes))
    export_argos(Translator(model, *tokenizers, language_pairs=(LanguagePair("en", "fr"),)), tmp_path / "x.argosmodel")
    with zipfile.ZipFile(tmp_path / "x.argosmodel") as archive:
        pieces = load_sentencepiece(archive.read("translate-en_fr-1_0/sentencepiece.model"))
    for tokenizer, texts in zip(tokenizers, sides):
        tokens = [[tokenizer.backend_tokenizer.id_to_token(i) for i in tokenizer.encode(text)] for text in texts]
        assert [pieces.encode(text, out_type=str) for text in texts] == tokens
        assert [pieces.decode(line) for line in tokens] == list(texts)


def test_models_that_argos_cannot_express_are_errors(translator, transformer, tmp_path):
    path = tmp_path / "x.argosmodel"
    with pytest.raises(RegardError, match="this model names 0"):
        export_argos(transformer, path)
    lowercase = Tokenizer.train(["the cat"], "word", lowercase=True)
    named = replace(transformer, language_pairs=(LanguagePair("en", "fr"),), source_tokenizer=lowercase)
    with pytest.raises(RegardError, match="needs one sentencepiece tokenizer"):
        export_argos(named, path)
    with pytest.raises(RegardError, match="does not add start tokens"):
        export_argos(replace(translator, special=SpecialTokens(end=3, begin=2)), path)
    assert not path.exists()
