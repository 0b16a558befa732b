"""Loading a model folder and generating the first token: time and peak memory, against transformers.

    python benchmarks/loading.py --out runs/loading
    python benchmarks/loading.py --out runs/loading-llama --shape llama-0.5b

A model with random weights of GPT-2's shape (124 M parameters), or of a small Llama's (0.5 B), is written once in both
formats. Each measurement is a new
process, alternating, five times; results are medians: seconds from the start of the process to the first token, seconds
of loading and the first token without imports, and peak resident memory.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

PROMPT = [464, 3797, 26172, 262, 10211]

COMMON = """
import json, os, sys, time
with open("/proc/self/stat") as file:  # start time of this process, in ticks since boot
    started = int(file.read().rsplit(")")[-1].split()[19]) / os.sysconf("SC_CLK_TCK")
import torch
torch.set_num_threads(2)
folder, prompt = sys.argv[1], json.loads(sys.argv[2])
"""

REGARD = """
import regard
from regard.decode import DecodeConfig, Request, decode_all
imported = time.clock_gettime(time.CLOCK_BOOTTIME)
generator = regard.load(folder, "cpu")
with torch.inference_mode():
    request = Request([prompt], DecodeConfig(method="greedy", max_len=1, min_len=1))
    token = decode_all(generator.model, request)[0][0].ids[0]
"""

TRANSFORMERS = """
from transformers import AutoModelForCausalLM
imported = time.clock_gettime(time.CLOCK_BOOTTIME)
model = AutoModelForCausalLM.from_pretrained(folder).eval()
with torch.inference_mode():
    ids = torch.tensor([prompt])
    token = int(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)[0, -1])
"""

REPORT = """
done = time.clock_gettime(time.CLOCK_BOOTTIME)
with open("/proc/self/status") as file:
    peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024
print(json.dumps({"all": done - started, "load": done - imported, "peak": peak, "token": token}))
"""


def make_models(out: Path, shape: str) -> dict[str, tuple[str, Path]]:
    """The same model in both formats."""
    import torch
    from tokenizers import Tokenizer as Library
    from tokenizers import models

    import regard
    from regard.data import SpecialTokens, Tokenizer
    from regard.data.text.tokenizer import FOREIGN_KIND
    from regard.interop import export_huggingface
    from regard.models import GPT
    from regard.models.gpt import GPTConfig, gpt2
    from regard.pipelines import TextGenerator

    if not (out / "transformers" / "config.json").exists():
        torch.manual_seed(0)
        llama = dict(activation="swiglu", bias="none", qk_norm=False)
        sizes = dict(width=1024, heads=16, kv_heads=4, layers=28, feedforward=4096, max_len=2048)
        config = gpt2(vocab=50257) if shape == "gpt2" else GPTConfig(**sizes, **llama, vocab=50257)
        vocabulary = {f"t{i}": i for i in range(50257)}
        library = Library(models.WordLevel(vocabulary, unk_token="t0"))
        special = SpecialTokens(pad=50256, unk=50256, sos=50256, eos=50256)
        generator = TextGenerator(GPT(config).eval(), Tokenizer(library, FOREIGN_KIND), special=special)
        regard.save(out / "regard", generator)
        export_huggingface(generator, out / "transformers")
    return {"Regard": (REGARD, out / "regard"), "transformers": (TRANSFORMERS, out / "transformers")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", choices=["gpt2", "llama-0.5b"], default="gpt2")
    options = parser.parse_args()
    implementations = make_models(options.out, options.shape)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in implementations}
    for _ in range(options.rounds):
        for name, (code, folder) in implementations.items():
            command = [sys.executable, "-c", COMMON + code + REPORT, str(folder), json.dumps(PROMPT)]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            results[name].append(json.loads(output.splitlines()[-1]))
    tokens = {row["token"] for rows in results.values() for row in rows}
    print("| implementation | full process | loading and first token | peak memory |")
    print("| --- | ---: | ---: | ---: |")
    for name, rows in results.items():
        total, loading, peak = (statistics.median(row[key] for row in rows) for key in ("all", "load", "peak"))
        print(f"| {name} | {total:.2f} s | {loading:.2f} s | {peak:.0f} MiB |")
    print("The tokens are identical." if len(tokens) == 1 else f"The tokens differ: {tokens}.")


if __name__ == "__main__":
    main()
