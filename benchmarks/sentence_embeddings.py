"""Sentence embeddings of an imported folder against the sentence-transformers library.

    pip install sentence-transformers
    python benchmarks/sentence_embeddings.py --folder all-MiniLM-L6-v2

The folder is copied with each kind of pooling, with and without Normalize, with Dense layers and with short and long
limits, and embeds texts of up to 400 words. The export of each imported copy is loaded into the library as well. Prints
the largest difference of an element. Embeddings of length 1 have elements of about 0.05.
"""

import argparse
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import sentence_transformers
import torch
import transformers
from safetensors.torch import save_file

from regard.data import read_pairs
from regard.interop import export_huggingface, import_huggingface

POOLING = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
VARIANTS: list[dict[str, Any]] = [
    *({"pooling": (mode,), "layers": layers} for mode in POOLING for layers in ((), ("Normalize",))),
    {"pooling": ("cls", "mean", "max"), "layers": ("Normalize",)},
    {"pooling": ("mean",), "layers": ("Dense", "Normalize")},
    {"pooling": ("lasttoken", "mean"), "layers": ("Dense", "Dense")},
    {"pooling": ("mean",), "layers": ("Normalize",), "max_len": 16},
    {"pooling": ("lasttoken",), "layers": ("Normalize",), "max_len": 512},
]


def write_variant(
    folder: Path, out: Path, pooling: tuple[str, ...], layers: tuple[str, ...], max_len: int = 256
) -> None:
    """A copy of a folder with other modules after its Transformer."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*_Pooling", "*_Normalize", "*_Dense"))
    width = json.loads((out / "config.json").read_text())["hidden_size"]
    size = width * len(pooling)
    names = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens", "lasttoken": "lasttoken"}
    names |= {"mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "weightedmean": "weightedmean_tokens"}
    table = {"word_embedding_dimension": width}
    table |= {f"pooling_mode_{name}": mode in pooling for mode, name in names.items()}
    contents: list[tuple[str, dict[str, Any]]] = [("Transformer", {}), ("Pooling", table)]
    for i, layer in enumerate(layers, 2):
        config: dict[str, Any] = {}
        if layer == "Dense":
            config = {"in_features": size, "out_features": 64, "bias": True}
            config |= {"activation_function": "torch.nn.modules.activation.Tanh"}
            (out / f"{i}_Dense").mkdir()
            weights = {"linear.weight": torch.randn(64, size) / size**0.5, "linear.bias": torch.randn(64)}
            save_file(weights, out / f"{i}_Dense/model.safetensors")
            size = 64
        contents.append((layer, config))
    modules = []
    for i, (name, config) in enumerate(contents):
        path = f"{i}_{name}" if i else ""
        (out / path).mkdir(exist_ok=True)
        if i and config:
            (out / path / "config.json").write_text(json.dumps(config))
        modules.append({"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"})
    (out / "modules.json").write_text(json.dumps(modules))
    (out / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_len, "do_lower_case": False}))


def make_texts() -> list[str]:
    """Sentences, and texts of several sentences with up to 400 words."""
    sentences = [source for source, _ in read_pairs(["phrasebook:test"])[:200]]
    rng = random.Random(0)
    long = [" ".join(" ".join(rng.choices(sentences, k=80)).split()[:words]) for words in (40, 120, 250, 254, 400)]
    return [*sentences[:30], *long, "A", "été, naïve — 日本語 🙂"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    texts = make_texts()
    print(f"sentence-transformers {sentence_transformers.__version__}, transformers {transformers.__version__}\n")
    print("| pooling | layers after it | max_seq_length | largest difference | of the export |")
    print("| --- | --- | --- | --- | --- |")
    for variant in VARIANTS:
        with tempfile.TemporaryDirectory() as temporary:
            folder, exported = Path(temporary) / "variant", Path(temporary) / "exported"
            write_variant(options.folder, folder, **variant)
            encoder = import_huggingface(folder)
            found = encoder.embed(texts, truncate=True)
            export_huggingface(encoder, exported)
            errors = [
                np.abs(sentence_transformers.SentenceTransformer(str(path), device="cpu").encode(texts) - found).max()
                for path in (folder, exported)
            ]
        layers = ", ".join(variant["layers"]) or "–"
        cells = [", ".join(variant["pooling"]), layers, str(variant.get("max_len", 256)), *(f"{e:.1e}" for e in errors)]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
