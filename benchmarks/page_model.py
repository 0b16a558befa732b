"""Models inside pages: size of the page, and time per run in Chromium and in PyTorch.

    python benchmarks/page_model.py --model DEMO --encoder MINILM --generator STORIES --out runs/page_model

DEMO is the folder of `regard demo`, MINILM an imported all-MiniLM-L6-v2, STORIES an imported stories15M (llama2.c).
Each page is opened offline from its file. A run lasts from the request to the response of the page's worker:

    translator   translation of 12 words (beam 5) and the scene with all views
    encoder      cosine similarity of two sentences
    generator    scene of a prompt with 20 generated tokens (greedy)

PyTorch (one thread) runs the same request between the runs of the page. `change` is the effect of rounding that the
page states: on log-probabilities, for the encoder on the numbers of the embedding.
"""

import argparse
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import regard
from regard.viewer import look, outcomes
from regard.viewer.experiments import run_experiment

REPEATS = 7
GENERATED_TOKENS = 20
SENTENCES = (
    "The old woman and the little boy saw a big dog yesterday.",
    "The little girl and the old man did not eat the green apples.",
)
PAIRS = ("A man is playing a guitar on the stage.", "Someone performs music in front of an audience.")
PROMPTS = ("Once upon a time, there was a little girl named", "One day, a boy and his dog went to the park to")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
IDLE = ".regard:not([data-busy])"
# Sends a request to the worker of the page and waits for its response; the page's own worker is recorded at its start.
RECORD_WORKER = """
const Original = Worker;
window.Worker = class extends Original { constructor(...options) { super(...options); window.pageWorker = this; } };
"""
RUN = """(request) => new Promise((done, fail) => {
  const start = performance.now();
  const id = `benchmark ${start}`;
  const { onmessage } = window.pageWorker;
  window.pageWorker.onmessage = (event) => {
    if (event.data.id !== id) return onmessage(event);
    window.pageWorker.onmessage = onmessage;
    if (event.data.error) fail(new Error(event.data.error));
    else done(performance.now() - start);
  };
  window.pageWorker.postMessage({ id, request });
})"""


class Case(NamedTuple):
    """A model with the text of its page, requests, and the same runs in PyTorch."""

    name: str
    pipeline: Any
    text: str
    requests: list[dict[str, Any]]
    runs: list[Callable[[], Any]]


def make_cases(options: argparse.Namespace) -> list[Case]:
    translator = regard.load(options.model)
    cases = [
        Case(
            "demo, 12 words, beam 5",
            translator,
            SENTENCES[1],
            [{"look": {"source": text}} for text in SENTENCES],
            [lambda text=text: outcomes.compute_outcome(look(translator, text)) for text in SENTENCES],
        )
    ]
    if options.encoder:
        encoder = regard.load(options.encoder)
        pairs = [PAIRS, PAIRS[::-1]]
        cases.append(
            Case(
                "all-MiniLM-L6-v2, similarity of two sentences",
                encoder,
                PAIRS[0],
                [{"experiment": {"source": first, "instead": second}} for first, second in pairs],
                [lambda a=a, b=b: run_experiment(encoder, a, instead=b) for a, b in pairs],
            )
        )
    if options.generator:
        generator = regard.load(options.generator)
        cases.append(
            Case(
                f"stories15M, {GENERATED_TOKENS} generated tokens",
                generator,
                PROMPTS[0],
                [{"look": {"source": text}} for text in PROMPTS],
                [lambda text=text: outcomes.compute_outcome(look(generator, text)) for text in PROMPTS],
            )
        )
    return cases


def measure(page: Any, case: Case) -> tuple[list[float], list[float]]:
    """Milliseconds per run of the page and of PyTorch, alternating."""
    in_page, in_torch = [], []
    for i in range(REPEATS + 1):
        in_page.append(page.evaluate(RUN, case.requests[i % 2]))
        start = time.perf_counter()
        case.runs[i % 2]()
        in_torch.append(1e3 * (time.perf_counter() - start))
    return in_page[1:], in_torch[1:]


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--encoder", type=Path)
    parser.add_argument("--generator", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    ours = f"CONTINUATION_TOKENS] = [5, {outcomes.CONTINUATION_TOKENS}]"
    outcomes.CONTINUATION_TOKENS = GENERATED_TOKENS
    columns = ("model", "weights", "change", "page, MB", "written in, s", "first view, ms", "run in the page, ms")
    print(f"| {' | '.join(columns)} | PyTorch, ms | ratio |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for case in make_cases(options):
            file = (options.out / f"{case.name.split(',')[0]}.html").resolve()
            start = time.perf_counter()
            look(case.pipeline, case.text).save(file, with_model=True)
            written = time.perf_counter() - start
            content = file.read_text("utf-8")
            assert ours in content
            file.write_text(content.replace(ours, f"CONTINUATION_TOKENS] = [5, {GENERATED_TOKENS}]"), "utf-8")
            context = browser.new_context()
            context.set_offline(True)
            page = context.new_page()
            page.set_default_timeout(120_000)
            page.add_init_script(RECORD_WORKER)
            start = time.perf_counter()
            page.goto(file.as_uri())
            page.wait_for_selector(IDLE)
            opened = 1e3 * (time.perf_counter() - start)
            page.wait_for_function("() => window.pageWorker")
            in_page, in_torch = (statistics.median(times) for times in measure(page, case))
            header = page.evaluate("JSON.parse(document.getElementById('model').textContent)")
            change = "" if header["change"] is None else f"{header['change']:.2g}"
            print(
                f"| {case.name} | {header['precision']} | {change} | {file.stat().st_size / 1e6:.2f} | {written:.1f} "
                f"| {opened:.0f} | {in_page:.0f} | {in_torch:.0f} | {in_page / in_torch:.1f} |",
                flush=True,
            )
            context.close()
        browser.close()


if __name__ == "__main__":
    main()
