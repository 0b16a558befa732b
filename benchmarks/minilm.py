"""Imported weights against transformers: all-MiniLM-L6-v2, and optionally a masked language model.

    python benchmarks/minilm.py --folder all-MiniLM-L6-v2
    python benchmarks/minilm.py --folder all-MiniLM-L6-v2 --masked albert_heads_8_uspto_all_1310k

Embeds 100 sentences of the built-in phrasebook with Regard and with transformers' BertModel (mean over tokens), and
prints the smallest cosine similarity of the two vectors of a sentence. With --masked, compares the logits and attention
maps of a second folder for random ids, for which no tokenizer is needed.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import models

from regard.attention import record
from regard.attention.exact_weights import compute_weights
from regard.data import Tokenizer, read_pairs
from regard.data.text.tokenizer import FOREIGN_KIND
from regard.interop import import_huggingface
from regard.layers.packed import pack


@torch.no_grad()
def embed_with_transformers(folder: Path, texts: list[str]) -> np.ndarray:
    """Normalized mean over tokens, as specified by the authors of the model."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    vectors, mask = model(**inputs).last_hidden_state, inputs["attention_mask"][..., None]
    return torch.nn.functional.normalize((vectors * mask).sum(1) / mask.sum(1), dim=-1).numpy()


def compare_embeddings(folder: Path) -> None:
    texts = [source for source, _ in read_pairs(["phrasebook:test"])[:100]]
    start = time.monotonic()
    encoder = import_huggingface(folder)
    seconds = time.monotonic() - start
    actual, expected = encoder.embed(texts), embed_with_transformers(folder, texts)
    actual, expected = (torch.from_numpy(vectors).double() for vectors in (actual, expected))
    smallest = torch.nn.functional.cosine_similarity(actual, expected).min()
    print(f"{len(texts)} sentences: smallest cosine similarity 1 - {1 - smallest:.1e}; loaded in {seconds:.2f} s")


@torch.no_grad()
def compare_masked(folder: Path) -> None:
    peer = transformers.AutoModelForMaskedLM.from_pretrained(folder, attn_implementation="eager").eval()
    size = peer.config.vocab_size
    words = tokenizers.Tokenizer(models.WordLevel({str(i): i for i in range(size)}, unk_token="0"))
    model = import_huggingface(folder, tokenizer=Tokenizer(words, FOREIGN_KIND)).model
    torch.manual_seed(0)
    worst = [0.0, 0.0]
    for length in (5, 50, 200):
        ids = torch.randint(size, (length,))
        expected = peer(ids[None], output_attentions=True)
        with record(model) as recording:
            logits = model(pack([ids.tolist()]))
        maps = [compute_weights(call) for recorded in recording.values() for call in recorded.calls]
        worst[0] = max(worst[0], float((logits - expected.logits[0]).abs().max()))
        gaps = [float((a - b).abs().max()) for a, b in zip(maps, expected.attentions, strict=True)]
        worst[1] = max(worst[1], *gaps)
    print(f"{peer.config.model_type}: logits differ by at most {worst[0]:.1e}, {len(maps)} maps by {worst[1]:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--masked", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    compare_embeddings(options.folder)
    if options.masked is not None:
        compare_masked(options.masked)


if __name__ == "__main__":
    main()
