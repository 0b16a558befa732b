"""Tokenizers of GGUF files compared with llama.cpp: the ids of difficult texts.

    pip download --no-deps --no-binary :all: llama-cpp-python && tar xf llama_cpp_python-*.tar.gz
    python benchmarks/gguf_vocabularies.py llama_cpp_python-*/vendor/llama.cpp/models

The folder of llama.cpp has files with vocabularies of published models and without weights (ggml-vocab-….gguf), texts
(….gguf.inp) and the ids that llama.cpp gives for them (….gguf.out).
"""

import argparse
from pathlib import Path

from regard.errors import RegardError
from regard.interop.gguf import read_gguf, read_gguf_tokenizer

SEPARATOR = "\n__ggml_vocab_test__\n"


def compare(path: Path) -> str:
    """The number of texts with the same ids, or why the tokenizer is refused."""
    texts, ids = (path.with_name(path.name + suffix) for suffix in (".inp", ".out"))
    if not texts.exists():
        return "no texts"
    try:
        library, _ = read_gguf_tokenizer(read_gguf(path))
    except RegardError as error:
        return f"refused: {error.message.removeprefix(f'{path}: ')[:60]}…"
    expected = [[int(number) for number in line.split()] for line in ids.read_text().splitlines()]
    inputs = texts.read_bytes().decode().removesuffix(SEPARATOR).split(SEPARATOR)
    same = [library.encode(text, add_special_tokens=False).ids == row for text, row in zip(inputs, expected)]
    return f"{sum(same)} of {len(same)} texts equal"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for path in sorted(parser.parse_args().folder.glob("ggml-vocab-*.gguf")):
        name = path.stem.removeprefix("ggml-vocab-")
        print(f"| {name} | {compare(path)} |", flush=True)


if __name__ == "__main__":
    main()
