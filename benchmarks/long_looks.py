"""Time and memory of saving the look at a long text: pages with and without explanations, plots.

    python benchmarks/long_looks.py

A language model with random weights, 4 layers of width 64 with 4 heads. CPU seconds of one thread, which other
processes on the machine change little, and the peak of memory above that of the process before the call.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from measurement import format_bytes, peak_memory, processor_name

from regard.data import Tokenizer
from regard.models import GPT, GPTConfig
from regard.pipelines import TextGenerator
from regard.viewer import look
from regard.viewer.text_look import Look


def make_look(tokens: int) -> Look:
    """The look at a text of this many tokens."""
    torch.manual_seed(0)
    words = [f"w{i}" for i in range(500)]
    tokenizer = Tokenizer.train([" ".join(words)], "word")
    config = GPTConfig(
        width=64, heads=4, layers=4, feedforward=256, max_len=tokens + 1, vocab=tokenizer.vocab_size, positions="rotary"
    )
    model = TextGenerator(GPT(config).eval(), tokenizer, {})
    return look(model, " ".join(words[i * i % 500] for i in range(tokens - 1)))


def measure(call: Callable[[], None]) -> str:
    """CPU seconds and memory of a call; the first one imports modules and is not measured."""
    call()
    start = time.process_time()
    call()
    seconds = time.process_time() - start
    return f"{seconds:.2f} s | {format_bytes(peak_memory(call, torch.device('cpu')))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--page", type=int, default=2000, help="tokens of the page; default %(default)s")
    parser.add_argument("--plot", type=int, default=4000, help="tokens of the plots; default %(default)s")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{processor_name()}, torch {torch.__version__}\n\n| case | CPU time | memory |\n| --- | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        page, plot = make_look(chosen.page), make_look(chosen.plot)
        for name, explain in (("what is cheap", None), ("none", False)):
            save = partial(page.save, Path(folder) / "page.html", with_model=False, explain=explain)
            print(f"| page of {chosen.page} tokens, explanations: {name} | {measure(save)} |", flush=True)
        for suffix in ("png", "svg", "pdf"):
            save = partial(plot.save, Path(folder) / f"plot.{suffix}")
            print(f"| {suffix.upper()} of {chosen.plot} tokens, all heads | {measure(save)} |", flush=True)


if __name__ == "__main__":
    main()
