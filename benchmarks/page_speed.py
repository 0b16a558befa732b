"""How large a page is and how fast it answers, in Chromium: a pair of 512 tokens, and a map of 16384.

    python benchmarks/page_speed.py --out runs/page_speed

Two models with random weights: an encoder-decoder of 6 + 6 layers and 8 heads of width 64 on 512 + 512 tokens, all
heads; and one layer of a language model with 8 heads on 16384 tokens. Each page is written by `look(...).save` and
opened from its file, with the network cut, several times in a fresh context. Times are medians, with the greatest
beside them: until the first view is there, from the beginning of navigation; and from a click on another head, or on
zoom, to the frame after it. "All rows seen" is when the map of 16384 tokens, which is there at once and becomes exact,
has been computed whole, and the small maps of all heads too.
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

PAIR, LONG, OPENED, CLICKS = 512, 16384, 5, 9
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
QUIET = ".regard:not([data-busy])"
SHOWN = """() => {
  const entry = performance.getEntriesByName("regard-show")[0];
  return entry.startTime + entry.duration;
}"""
PAINTED = """(name) => new Promise((done) => {
  const button = document.querySelector(`.regard [aria-label="${name}"]`);
  const began = performance.now();
  button.click();
  requestAnimationFrame(() => setTimeout(() => done(performance.now() - began)));
})"""


def words(count: int) -> str:
    return " ".join(f"w{i % 900}" for i in range(count))


def pages(out: Path) -> tuple[Path, Path]:
    """Writes both pages."""
    torch.manual_seed(0)
    tokenizer = Tokenizer.train([words(900)], "word")
    size = tokenizer.vocab_size
    config = TransformerConfig(
        width=512, heads=8, feedforward=2048, encoder_layers=6, decoder_layers=6, max_len=PAIR + 1,
        source_vocab=size, target_vocab=size, shared_vocab=True,
    )  # fmt: skip
    translator = Translator(Transformer(config).eval(), tokenizer, tokenizer, {})
    pair = out / "pair.html"
    look(translator, words(PAIR - 1), words(PAIR - 1)).save(pair)
    config = GPTConfig(width=512, heads=8, layers=1, feedforward=512, max_len=LONG, vocab=size)
    long = out / "long.html"
    look(TextGenerator(GPT(config).eval(), tokenizer, {}), words(LONG - 1)).save(long)
    return pair, long


def opened(browser: Any, file: Path) -> Iterator[Any]:
    """The page in one fresh context after another."""
    for _ in range(OPENED):
        context = browser.new_context(viewport={"width": 1360, "height": 900})
        context.set_offline(True)
        page = context.new_page()
        page.goto(file.resolve().as_uri())
        page.wait_for_selector(".figure canvas, .figure svg", timeout=60_000)
        yield page
        context.close()


def row(what: str, times: list[float], goal: str) -> None:
    print(f"| {what} | {statistics.median(times):,.0f} ms | {max(times):,.0f} ms | {goal} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the pages go")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    options.out.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode():
        pair, long = pages(options.out)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        print(f"Chromium {browser.version}\n\n| what | median | greatest | goal |\n| --- | ---: | ---: | ---: |")
        print(f"| page of {PAIR} + {PAIR} tokens | {pair.stat().st_size / 1e6:.1f} MB | | 30 MB |")
        first, heads = [], []
        for page in opened(browser, pair):
            first.append(page.evaluate(SHOWN))
            page.wait_for_selector(QUIET, timeout=60_000)
            heads += [page.evaluate(PAINTED, "Next head") for _ in range(CLICKS)]
        row("first view", first, "1000 ms")
        row("another head", heads, "100 ms")
        print(f"| page of {LONG} tokens, one layer | {long.stat().st_size / 1e6:.1f} MB | | |")
        first, whole, zooms = [], [], []
        for page in opened(browser, long):
            first.append(page.evaluate(SHOWN))
            zooms += [page.evaluate(PAINTED, name) for name in ["Zoom in", "Zoom in", "Zoom out", "Show all"] * 2]
            page.wait_for_selector(QUIET, timeout=120_000)
            whole.append(page.evaluate("performance.now()"))
        row("first view of its map", first, "2000 ms")
        row("zoom, while it is still being computed", zooms, "100 ms")
        row("all rows seen, of the map and of the small ones", whole, "")
        browser.close()


if __name__ == "__main__":
    main()
