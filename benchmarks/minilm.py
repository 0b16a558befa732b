"""Real weights: all-MiniLM-L6-v2 (and, if wanted, another encoder of masked tokens) beside transformers.

    python benchmarks/minilm.py --folder all-MiniLM-L6-v2
    python benchmarks/minilm.py --folder all-MiniLM-L6-v2 --masked albert_heads_8_uspto_all_1310k

100 sentences of the built-in phrasebook are embedded by Regard and by transformers' BertModel with the mean over the
tokens; printed is the smallest cosine between the two vectors of a sentence. With --masked, the logits and attention
maps of a second folder are compared for rows of ids drawn at random, for which no tokeniser is needed.
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
from regard.data import Tokenizer, phrasebook_pairs
from regard.data.text.tokenizer import FOREIGN_KIND
from regard.interop import import_huggingface
from regard.layers.packed import pack


@torch.no_grad()
def embedded(folder: Path, texts: list[str]) -> np.ndarray:
    """As the model's authors say: the mean over the tokens, of length 1."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    given = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    vectors, real = model(**given).last_hidden_state, given["attention_mask"][..., None]
    return torch.nn.functional.normalize((vectors * real).sum(1) / real.sum(1), dim=-1).numpy()


def compare_embeddings(folder: Path) -> None:
    texts = [pair.source for pair in phrasebook_pairs("test", 100)]
    began = time.monotonic()
    encoder = import_huggingface(folder)
    opened = time.monotonic() - began
    ours, theirs = (torch.from_numpy(one).double() for one in (encoder.embed(texts), embedded(folder, texts)))
    least = torch.nn.functional.cosine_similarity(ours, theirs).min()
    print(f"{len(texts)} sentences: the smallest cosine is 1 - {1 - least:.1e}; opened in {opened:.2f} s")


@torch.no_grad()
def compare_masked(folder: Path) -> None:
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(folder, attn_implementation="eager").eval()
    size = theirs.config.vocab_size
    words = tokenizers.Tokenizer(models.WordLevel({str(i): i for i in range(size)}, unk_token="0"))
    ours = import_huggingface(folder, tokenizer=Tokenizer(words, FOREIGN_KIND)).model
    torch.manual_seed(0)
    worst = [0.0, 0.0]
    for length in (5, 50, 200):
        ids = torch.randint(size, (length,))
        wanted = theirs(ids[None], output_attentions=True)
        with record(ours) as recording:
            logits = ours(pack([ids.tolist()]))
        maps = [compute_weights(call) for one in recording.values() for call in one.calls]
        worst[0] = max(worst[0], float((logits - wanted.logits[0]).abs().max()))
        gaps = [float((own - other).abs().max()) for own, other in zip(maps, wanted.attentions, strict=True)]
        worst[1] = max(worst[1], *gaps)
    print(f"{theirs.config.model_type}: logits differ by at most {worst[0]:.1e}, {len(maps)} maps by {worst[1]:.1e}")


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
