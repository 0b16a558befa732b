"""Sentences of the page about a model, recomputed here from its weights."""

import html
import re

import numpy as np
import pytest
import torch

from regard.data import Tokenizer
from regard.models import BertConfig, GPTConfig, make_model
from regard.pipelines import TextEncoder, TextGenerator
from regard.viewer import look
from regard.viewer.page.text_scene import build_scene

SENTENCE = "one two three"
SHARE = re.compile(r"(\d+)%(?: of [\w’ ]+ goes)? to “(.+?)”|“(.+?)” \((\d+)%\)")

CHOOSE = "hash => { document.querySelector('.headline').textContent = ''; location.hash = hash; }"


def text_models():
    """A language model and an encoder whose first layer attends sharply, its second almost evenly."""
    tokenizer = Tokenizer.train([SENTENCE], "word", mask=True)
    sizes = dict(width=16, heads=2, layers=2, feedforward=16, vocab=tokenizer.vocab_size)
    torch.manual_seed(0)
    encoder = TextEncoder(make_model(BertConfig(**sizes)).eval(), tokenizer)
    generator = TextGenerator(make_model(GPTConfig(**sizes)).eval(), Tokenizer.train([SENTENCE], "word"))
    for pipeline in (encoder, generator):
        with torch.no_grad():
            pipeline.model.blocks[0].attention.query.weight *= 40
    return {"encoder": look(encoder, "one two . three"), "mask": look(encoder, "one <mask> . three")} | {
        "language model": look(generator, SENTENCE)
    }


@pytest.fixture(scope="module")
def looks(transformer):
    return text_models() | {"translator": look(transformer, SENTENCE)}


def evenness(rows):
    """Entropy as a fraction of that of uniform attention over the keys that each row attends to."""
    logs = np.log2(rows, where=rows > 0, out=np.zeros_like(rows))
    return -(rows * logs).sum() / np.log2((rows > 0).sum(1)).sum()


@pytest.mark.parametrize("kind", ["encoder", "mask", "language model", "translator"])
def test_the_first_sentence_covers_all_tokens_of_the_head_on_display(opened, looks, kind):
    seen = looks[kind]
    *_, last = seen.maps.values()
    page = opened(build_scene(seen, last.name, last.heads - 1))  # every choice below is another head
    said = set()
    for name, one in seen.maps.items():
        for head in range(one.heads):
            page.evaluate(CHOOSE, f"at={name}:{head}&words={head}")
            page.wait_for_function("() => document.querySelector('.headline').textContent !== ''")
            markup = page.locator(".headline").inner_html().replace("<q>", "“").replace("</q>", "”")
            text = html.unescape(re.sub("<.*?>", "", markup))
            clause = text.partition("; ")[2]
            weights = one.head_weights(head)
            row = {"mask": one.rows.index("<mask>") if kind == "mask" else 0, "language model": len(weights) - 1}
            rows = weights[[row[kind]]] if kind in row else weights
            shares = dict(zip(one.columns, rows.mean(0)))
            if "uniform" in clause:
                said.add("uniform")
                stated = int(re.search(r"(\d+)% of the maximum", clause)[1])
                assert 85 <= stated <= 100 * evenness(rows) < stated + 1
                continue
            assert evenness(rows) < 0.85
            if "attends most to" in clause:
                pairs = re.findall(r"“([^“”]+)” (?:attends most )?to “([^“”]+)”", clause)
                assert pairs
                for query, key in pairs:
                    assert one.columns[weights[one.rows.index(query)].argmax()] == key
                said.add("pairs")
                continue
            found = [(a or d, b or c) for a, b, c, d in SHARE.findall(clause)]
            found = {token: int(share) for share, token in found}
            assert found, clause
            best = max(shares, key=shares.get)
            assert best == next(iter(found))
            for token, share in found.items():
                assert abs(share - 100 * shares[token]) <= 0.51
            assert ("a resting place" in clause) == (best.startswith("<"))
            said.add("shares")
    assert said
