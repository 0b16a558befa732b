"""Stories of llama2.c: the text that Regard writes, beside a plain implementation in NumPy.

    python benchmarks/stories.py --folder stories260K

The folder holds the checkpoint and the tokeniser (of two .bin files the larger and the smaller one). Each of the
prompts is gone on with for 200 tokens, always the most probable one; the tokens must be those of the implementation
that the tests hold. So must the ids of the sentences of the built-in phrasebook.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from regard.data import phrasebook_pairs
from regard.interop import import_llama2c
from regard.layers.packed import pack
from tests.interop.reference_llama import ReferenceLlama, encode, greedy, read_pieces

PROMPTS = ["", "Once upon a time", "Lily's dog", "The little boat"]


@torch.no_grad()
def written(model, prompt: list[int], count: int) -> list[int]:
    state, tokens = model.start(pack([prompt])), list(prompt)
    for _ in range(count):
        logits, state = model.step(state, torch.tensor([tokens[-1:]]))
        tokens.append(int(logits.argmax()))
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    tokenizer_file, model_file = sorted(options.folder.glob("*.bin"), key=lambda path: path.stat().st_size)
    writer = import_llama2c(model_file, tokenizer_file)
    pieces = read_pieces(tokenizer_file, writer.model.config.vocab)
    texts = [text for pair in phrasebook_pairs("test", 500) for text in (pair.source, pair.target)]
    alike = sum(writer.tokenizer.encode(text) == encode(pieces, text) for text in texts)
    print(f"{alike} of {len(texts)} texts have the same ids")
    for prompt in PROMPTS:
        ids = writer.encode_prompt(prompt)
        began = time.monotonic()
        ours = written(writer.model, ids, options.tokens)
        seconds = time.monotonic() - began
        plain = greedy(ReferenceLlama(model_file), ids, options.tokens)
        same = sum(one == other for one, other in zip(ours[len(ids) :], plain[len(ids) :]))
        print(f"{same} of {options.tokens} tokens are the same ({options.tokens / seconds:.0f} tokens a second):")
        print(f"    {writer.tokenizer.decode(ours)[:100]!r} …", flush=True)


if __name__ == "__main__":
    main()
