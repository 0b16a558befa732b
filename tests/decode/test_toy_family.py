"""A family of one file and one entry decodes with every option, in calls, streams, files and servers."""

import random
from dataclasses import replace

import pytest
import torch

from regard import load, save
from regard.data import Tokenizer
from regard.decode import DecodeConfig, engine, explain
from regard.models import FAMILIES, make_model
from regard.pipelines import Translator
from regard.serve.scheduler import Scheduler
from tests.decode import toy_family

WORDS = [f"w{i}" for i in range(40)]
LINES = [" ".join(random.Random(i).choices(WORDS, k=2 + i % 7)) for i in range(12)]
LIMIT = {"max_len": 8}
CALLS = {
    "greedy": (DecodeConfig("greedy", **LIMIT), {}),
    "beam": (DecodeConfig(beam=3, n_best=2, **LIMIT), {}),
    "samples": (DecodeConfig("sample", n_best=2, **LIMIT), {}),
    "repetition": (DecodeConfig(beam=3, no_repeat_ngram_size=1, **LIMIT), {}),
    "phrases": (DecodeConfig(beam=6, **LIMIT), {"required": ["w7"], "forbidden": ["w9"]}),
    "prefix, history": (DecodeConfig(beam=3, **LIMIT), {"prefixes": "w5 w6", "history": True}),
}
STEPPERS = {"toy": "model", "toy_stack": "compiled"}


@pytest.fixture(params=STEPPERS)
def translator(request, tmp_path, monkeypatch):
    """A model of a registered family, from its folder."""
    families = dict(FAMILIES)
    toy_family.register()
    monkeypatch.setattr(engine, "COMPILED_SENTENCES", 0)
    torch.manual_seed(0)
    tokenizer = Tokenizer.train([" ".join(WORDS)], "word")
    sizes = {"source_vocab": tokenizer.vocab_size, "target_vocab": tokenizer.vocab_size}
    model = make_model(FAMILIES[request.param].config(**sizes))
    with torch.no_grad():
        model.output.weight.mul_(4)
    save(tmp_path / "model", Translator(model, tokenizer, tokenizer))
    yield load(tmp_path / "model", "cpu")
    for name in FAMILIES.keys() - families.keys():
        del FAMILIES[name]


@pytest.mark.parametrize("name", CALLS)
def test_every_call_equals_the_model_itself(translator, name, tmp_path):
    config, options = CALLS[name]
    family = next(family for family, entry in FAMILIES.items() if entry.model is type(translator.model))
    with explain() as choices:
        together = translator.translate(LINES, config, **options)
    assert [choice.stepper for choice in choices] == [STEPPERS[family]]
    texts = [[one.text for one in n_best] for n_best in together]
    plain = translator.translate(LINES, replace(config, engine="plain"), **options)
    assert texts == [[one.text for one in n_best] for n_best in plain]
    assert [n_best[0].score for n_best in together] == pytest.approx([n_best[0].score for n_best in plain], abs=1e-4)
    streamed = list(translator.translate_stream(LINES, config, block_size=5, **options))
    assert texts == [[one.text for one in n_best] for n_best in streamed]
    scheduler = Scheduler(latency_target=60)
    requests = [translator.prepare([line], config, first_index=i, **options) for i, line in enumerate(LINES)]
    futures = [scheduler.submit(request) for request in requests]
    served = [request.finish(future.result())[0] for request, future in zip(requests, futures)]
    assert scheduler.close()
    assert texts == [[one.text for one in n_best] for n_best in served]
    if name == "phrases":
        assert all("w7" in text.split() and "w9" not in text.split() for (text,) in texts)
    if name == "prefix, history":
        assert all(text.startswith("w5 w6") for (text,) in texts)
        assert all(n_best[0].history.steps for n_best in together)


def test_files(translator, tmp_path):
    (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in LINES))
    translator.translate_file(tmp_path / "in.txt", tmp_path / "out.txt", CALLS["greedy"][0])
    texts = (tmp_path / "out.txt").read_text().splitlines()
    assert texts == [one[0].text for one in translator.translate(LINES, CALLS["greedy"][0])]
