"""Size and response time of pages in Chromium: a pair of 512 tokens, and an attention map of 16384.

    python benchmarks/page_speed.py --out runs/page_speed

Two models with random weights: an encoder-decoder of 6 + 6 layers and 8 heads of width 64 on 512 + 512 tokens, all
heads; and one layer of a language model with 8 heads on 16384 tokens. Each page is written by `look(...).save` and
opened offline from its file, several times in a new context. Times are medians and maxima: from navigation to the first
view, and from a click on another head or on zoom to the next frame. "All rows computed" is when the map of 16384
tokens, which is first approximate, and the small maps of all heads are exact.
"""

import argparse
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from regard.data import Tokenizer
from regard.models import GPT, GPTConfig, Transformer, TransformerConfig
from regard.pipelines import TextGenerator, Translator
from regard.viewer import look

PAIR, LONG, REPEATS, CLICKS = 512, 16384, 5, 9
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
IDLE = ".regard:not([data-busy])"
FIRST_VIEW = """() => {
  const entry = performance.getEntriesByName("regard-show")[0];
  return entry.startTime + entry.duration;
}"""
CLICK_TO_FRAME = """(name) => new Promise((done) => {
  const button = document.querySelector(`.regard [aria-label="${name}"]`);
  const start = performance.now();
  button.click();
  requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)));
})"""


def make_text(count: int) -> str:
    return " ".join(f"w{i % 900}" for i in range(count))


def write_pages(out: Path) -> tuple[Path, Path]:
    """Write both pages."""
    torch.manual_seed(0)
    tokenizer = Tokenizer.train([make_text(900)], "word")
    size = tokenizer.vocab_size
    config = TransformerConfig(
        width=512, heads=8, feedforward=2048, encoder_layers=6, decoder_layers=6, max_len=PAIR + 1,
        source_vocab=size, target_vocab=size, shared_vocab=True,
    )  # fmt: skip
    translator = Translator(Transformer(config).eval(), tokenizer, tokenizer, {})
    pair = out / "pair.html"
    look(translator, make_text(PAIR - 1), make_text(PAIR - 1)).save(pair)
    config = GPTConfig(width=512, heads=8, layers=1, feedforward=512, max_len=LONG, vocab=size)
    long = out / "long.html"
    look(TextGenerator(GPT(config).eval(), tokenizer, {}), make_text(LONG - 1)).save(long)
    return pair, long


def open_page(browser: Any, file: Path) -> Iterator[Any]:
    """The page in a sequence of new contexts."""
    for _ in range(REPEATS):
        context = browser.new_context(viewport={"width": 1360, "height": 900})
        context.set_offline(True)
        page = context.new_page()
        page.goto(file.resolve().as_uri())
        page.wait_for_selector(".figure canvas, .figure svg", timeout=60_000)
        yield page
        context.close()


def print_row(label: str, times: list[float], target: str) -> None:
    print(f"| {label} | {statistics.median(times):,.0f} ms | {max(times):,.0f} ms | {target} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the pages")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    options.out.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode():
        pair, long = write_pages(options.out)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        print(f"Chromium {browser.version}\n\n| | median | slowest | target |\n| --- | ---: | ---: | ---: |")
        print(f"| page of {PAIR} + {PAIR} tokens | {pair.stat().st_size / 1e6:.1f} MB | | 30 MB |")
        first, heads = [], []
        for page in open_page(browser, pair):
            first.append(page.evaluate(FIRST_VIEW))
            page.wait_for_selector(IDLE, timeout=60_000)
            heads += [page.evaluate(CLICK_TO_FRAME, "Next head") for _ in range(CLICKS)]
        print_row("first view", first, "1000 ms")
        print_row("switch to another head", heads, "100 ms")
        print(f"| page of {LONG} tokens, one layer | {long.stat().st_size / 1e6:.1f} MB | | |")
        first, complete, zooms = [], [], []
        for page in open_page(browser, long):
            first.append(page.evaluate(FIRST_VIEW))
            zooms += [
                page.evaluate(CLICK_TO_FRAME, name) for name in ["Zoom in", "Zoom in", "Zoom out", "Show all"] * 2
            ]
            page.wait_for_selector(IDLE, timeout=120_000)
            complete.append(page.evaluate("performance.now()"))
        print_row("first view of its attention map", first, "2000 ms")
        print_row("zoom while the map is being computed", zooms, "100 ms")
        print_row("all rows computed, of the map and of the small maps", complete, "")
        browser.close()


if __name__ == "__main__":
    main()
