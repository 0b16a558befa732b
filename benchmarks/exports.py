"""Export fidelity: the number of identical translations in CTranslate2, ONNX Runtime and transformers.

    python benchmarks/exports.py demo                       # on the phrasebook's test split
    python benchmarks/exports.py MODEL --data multi30k/tok/test2016.en.gz multi30k/tok/test2016.de.gz

All engines use a beam of 5 and float32 on the CPU. Where two translations differ, Regard scores both: if their mean log
probabilities per token are within 1e-5, it is a tie, decided by rounding.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from regard import DecodeConfig, RegardError, Translator, load
from regard.data import read_lines, read_pairs
from regard.evaluation import text_scores
from regard.interop import export_ctranslate2, export_huggingface, export_onnx, load_onnx

BATCH = 32
TIE = 1e-5
# The other engines have one limit on the output length for all sources.
CONFIG = DecodeConfig(beam=5, max_len=120, max_extra=120)


def make_ctranslate2(translator: Translator, folder: Path) -> Callable[[list[str]], list[str]]:
    import ctranslate2

    export_ctranslate2(translator, folder)
    runner = ctranslate2.Translator(str(folder), compute_type="float32", intra_threads=torch.get_num_threads())
    source, target = (tokenizer.backend_tokenizer for tokenizer in translator.tokenizers)
    excluded = [[target.id_to_token(i)] for i in sorted({translator.special.pad, translator.special.sos})]
    lengths = dict(min_decoding_length=0, max_decoding_length=CONFIG.max_len)

    def translate(lines: list[str]) -> list[str]:
        pieces = [source.encode(line, add_special_tokens=False).tokens for line in lines]
        results = runner.translate_batch(
            pieces, max_batch_size=BATCH, beam_size=CONFIG.beam, suppress_sequences=excluded, **lengths
        )
        ids = [[target.token_to_id(piece) for piece in result.hypotheses[0]] for result in results]
        return translator.target_tokenizer.decode_batch(ids)

    return translate


def make_onnx(translator: Translator, folder: Path) -> Callable[[list[str]], list[str]]:
    export_onnx(translator, folder)
    onnx_translator = load_onnx(folder)
    return lambda lines: [best.text for best, *_ in onnx_translator.translate(lines, CONFIG)]


def make_transformers(translator: Translator, folder: Path) -> Callable[[list[str]], list[str]]:
    import transformers

    name = export_huggingface(translator, folder)
    model = getattr(transformers, name).from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def translate(lines: list[str]) -> list[str]:
        order = sorted(range(len(lines)), key=lambda i: len(lines[i]))
        texts = [""] * len(lines)
        for start in range(0, len(lines), BATCH):
            batch = order[start : start + BATCH]
            inputs = tokenizer([lines[i] for i in batch], return_tensors="pt", padding=True)
            # num_beams, early_stopping, length_penalty and the excluded tokens are part of the exported config.
            outputs = model.generate(**inputs, max_length=CONFIG.max_len + 2)
            for i, text in zip(batch, tokenizer.batch_decode(outputs, skip_special_tokens=True)):
                texts[i] = text
        return texts

    return translate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--data", nargs=2, help="files of sources and references (default: test split of the phrasebook)"
    )
    options = parser.parse_args()
    translator = load(options.model, "cpu", expect=Translator)
    if options.data:
        sources, references = map(read_lines, options.data)
    else:
        sources, references = map(list, zip(*read_pairs(["phrasebook:test"])))
    start = time.monotonic()
    expected = [best.text for best, *_ in translator.translate(sources, CONFIG)]
    seconds, bleu = time.monotonic() - start, text_scores(expected, references).bleu
    print("| engine | identical | ties among the differing | BLEU | seconds |")
    print("| --- | ---: | ---: | ---: | ---: |")
    print(f"| regard | {len(expected)} | | {bleu:.2f} | {seconds:.1f} |", flush=True)
    engines = {"CTranslate2": make_ctranslate2, "ONNX Runtime": make_onnx, "transformers": make_transformers}
    for name, prepare in engines.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                translate = prepare(translator, Path(folder) / "model")
            except RegardError as error:
                print(f"| {name} | {error} | | | |")
                continue
            start = time.monotonic()
            actual = translate(sources)
            seconds, bleu = time.monotonic() - start, text_scores(actual, references).bleu
        differing = [i for i, text in enumerate(actual) if text != expected[i]]
        logprobs = [
            [scored.mean for scored in translator.score([(sources[i], texts[i]) for i in differing])]
            for texts in (expected, actual)
        ]
        ties = sum(abs(a - b) < TIE for a, b in zip(*logprobs))
        print(f"| {name} | {len(actual) - len(differing)} | {ties} of {len(differing)} | {bleu:.2f} | {seconds:.1f} |")
        for i in differing[:3]:
            print(f"<!-- {expected[i][:200]} | {actual[i][:200]} -->", flush=True)


if __name__ == "__main__":
    main()
