"""Models inside pages: size of the page, and time per run in Chromium and in PyTorch.

    python benchmarks/page_model.py --model DEMO --out runs/page_model

DEMO is the folder of `regard demo`. The other models have random weights and the sizes of MiniLM (text encoder of 6
layers of width 384, 30,522 tokens) and stories15M (language model of 6 layers of width 288, 32,000 tokens). Each page
is opened offline from its file. A run lasts from the click on *Run* to the title of the new scene: tokenizing, search
(beam 5) or one forward pass, and attention maps. PyTorch runs the same request between the runs of the page.
"""

import argparse
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import regard
from regard.data import Tokenizer
from regard.models import GPT, Bert, BertConfig, GPTConfig
from regard.pipelines import TextEncoder, TextGenerator
from regard.viewer import look

REPEATS = 7
SENTENCES = (
    "The old woman and the little boy saw a big dog yesterday.",
    "The little girl and the old man did not eat the green apples.",
)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
IDLE = ".regard:not([data-busy])"
RUN = """(text) => new Promise((done) => {
  const form = document.querySelector(".request-form");
  form.elements.source.value = text;
  if (form.elements.target) form.elements.target.value = "";
  const before = document.title;
  const start = performance.now();
  new MutationObserver((_, observer) => {
    if (document.title === before) return;
    observer.disconnect();
    done(performance.now() - start);
  }).observe(document.querySelector("title"), { childList: true });
  form.requestSubmit();
})"""


def make_models(demo: Path) -> dict[str, tuple[Any, tuple[str, str]]]:
    """Pipelines with two inputs each."""
    torch.manual_seed(0)
    words = [f"w{i}" for i in range(31990)]
    texts = (" ".join(words[:62]), " ".join(words[100:162]))
    encoder_tokens = Tokenizer.train([" ".join(words[:30500])], "word", 30522, mask=True)
    bert = BertConfig(width=384, heads=12, feedforward=1536, layers=6, head="none", vocab=encoder_tokens.vocab_size)
    tokens = Tokenizer.train([" ".join(words)], "word", 32000)
    sizes: dict[str, Any] = dict(width=288, heads=6, layers=6, feedforward=768, activation="swiglu", qk_norm=False)
    gpt = GPTConfig(**sizes, vocab=tokens.vocab_size)
    return {
        "demo, 12 words, beam 5": (regard.load(demo), SENTENCES),
        "size of MiniLM, 64 tokens": (TextEncoder(Bert(bert).eval(), encoder_tokens), texts),
        "size of stories15M, 63 tokens": (TextGenerator(GPT(gpt).eval(), tokens), texts),
    }


def measure(page: Any, run: Callable[[str], Any], texts: tuple[str, str]) -> tuple[list[float], list[float]]:
    """Milliseconds per run of the page and of PyTorch, alternating."""
    in_page, in_torch = [], []
    for i in range(REPEATS + 1):
        text = texts[i % 2]
        page.wait_for_selector(IDLE)
        in_page.append(page.evaluate(RUN, text))
        start = time.perf_counter()
        run(text)
        in_torch.append(1e3 * (time.perf_counter() - start))
    return in_page[1:], in_torch[1:]


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print("| model | weights | page, MB | first view, ms | run in the page, ms | PyTorch, ms | ratio |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for name, (pipeline, texts) in make_models(options.model).items():
            file = (options.out / f"{len(name)}.html").resolve()
            look(pipeline, texts[1]).save(file, with_model=True)
            context = browser.new_context()
            context.set_offline(True)
            page = context.new_page()
            page.set_default_timeout(120_000)
            start = time.perf_counter()
            page.goto(file.as_uri())
            page.wait_for_selector(IDLE)
            opened = 1e3 * (time.perf_counter() - start)
            run = partial(look, pipeline)
            in_page, in_torch = (statistics.median(one) for one in measure(page, run, texts))
            weights = page.evaluate("JSON.parse(document.getElementById('model').textContent).precision")
            size = file.stat().st_size / 1e6
            print(
                f"| {name} | {weights} | {size:.2f} | {opened:.0f} | {in_page:.0f} | {in_torch:.0f} "
                f"| {in_page / in_torch:.1f} |",
                flush=True,
            )
            context.close()
        browser.close()


if __name__ == "__main__":
    main()
