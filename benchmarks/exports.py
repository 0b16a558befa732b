"""Export fidelity: the number of identical translations in CTranslate2, ONNX Runtime and transformers.

    python benchmarks/exports.py demo                       # on the phrasebook's test split
    python benchmarks/exports.py MODEL --data multi30k/tok/test2016.en.gz multi30k/tok/test2016.de.gz

All with a beam of 5, in float32, on the CPU. Where two translations differ, Regard scores both: if their mean log
probabilities per token are within 1e-5, it is a tie, decided by rounding.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from regard import DecodeConfig, RegardError, Translator, load
from regard.data import phrasebook_pairs, read_lines
from regard.evaluation import text_scores
from regard.interop import export_ctranslate2, export_huggingface, export_onnx, load_onnx

BATCH = 32
TIE = 1e-5
# The other programs have one limit on the length of the output for all sources.
CONFIG = DecodeConfig(beam=5, max_len=120, max_extra=120)


def by_ctranslate2(translator: Translator, folder: Path) -> Callable[[list[str]], list[str]]:
    import ctranslate2

    export_ctranslate2(translator, folder)
    runner = ctranslate2.Translator(str(folder), compute_type="float32", intra_threads=torch.get_num_threads())
    source, target = (one.backend_tokenizer for one in translator.tokenizers)
    never = [[target.id_to_token(i)] for i in sorted({translator.special.pad, translator.special.sos})]
    lengths = dict(min_decoding_length=0, max_decoding_length=CONFIG.max_len)

    def translate(lines: list[str]) -> list[str]:
        pieces = [source.encode(line, add_special_tokens=False).tokens for line in lines]
        found = runner.translate_batch(
            pieces, max_batch_size=BATCH, beam_size=CONFIG.beam, suppress_sequences=never, **lengths
        )
        ids = [[target.token_to_id(piece) for piece in one.hypotheses[0]] for one in found]
        return translator.target_tokenizer.decode_batch(ids)

    return translate


def by_onnx(translator: Translator, folder: Path) -> Callable[[list[str]], list[str]]:
    export_onnx(translator, folder)
    opened = load_onnx(folder)
    return lambda lines: [best.text for best, *_ in opened.translate(lines, CONFIG)]


def by_transformers(translator: Translator, folder: Path) -> Callable[[list[str]], list[str]]:
    import transformers

    name = export_huggingface(translator, folder)
    model = getattr(transformers, name).from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def translate(lines: list[str]) -> list[str]:
        order = sorted(range(len(lines)), key=lambda i: len(lines[i]))
        texts = [""] * len(lines)
        for start in range(0, len(lines), BATCH):
            batch = order[start : start + BATCH]
            given = tokenizer([lines[i] for i in batch], return_tensors="pt", padding=True)
            # num_beams, early_stopping, length_penalty and the excluded tokens are in the folder.
            written = model.generate(**given, max_length=CONFIG.max_len + 2)
            for i, text in zip(batch, tokenizer.batch_decode(written, skip_special_tokens=True)):
                texts[i] = text
        return texts

    return translate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", nargs=2, help="sources and references, one per line; default: the phrasebook's test")
    options = parser.parse_args()
    translator = load(options.model, "cpu", expect=Translator)
    if options.data:
        sources, references = map(read_lines, options.data)
    else:
        pairs = phrasebook_pairs("test", 1000)
        sources, references = [one.source for one in pairs], [one.target for one in pairs]
    began = time.monotonic()
    wanted = [best.text for best, *_ in translator.translate(sources, CONFIG)]
    seconds, bleu = time.monotonic() - began, text_scores(wanted, references).bleu
    print("| program | identical | of those that differ, ties | BLEU | seconds |")
    print("| --- | ---: | ---: | ---: | ---: |")
    print(f"| regard | {len(wanted)} | | {bleu:.2f} | {seconds:.1f} |", flush=True)
    programs = {"CTranslate2": by_ctranslate2, "ONNX Runtime": by_onnx, "transformers": by_transformers}
    for name, prepare in programs.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                translate = prepare(translator, Path(folder) / "model")
            except RegardError as error:
                print(f"| {name} | {error} | | | |")
                continue
            began = time.monotonic()
            found = translate(sources)
            seconds, bleu = time.monotonic() - began, text_scores(found, references).bleu
        differing = [i for i, text in enumerate(found) if text != wanted[i]]
        prices = [
            [one.mean for one in translator.score([(sources[i], texts[i]) for i in differing])]
            for texts in (wanted, found)
        ]
        ties = sum(abs(own - other) < TIE for own, other in zip(*prices))
        print(f"| {name} | {len(found) - len(differing)} | {ties} of {len(differing)} | {bleu:.2f} | {seconds:.1f} |")
        for i in differing[:3]:
            print(f"<!-- {wanted[i][:200]} | {found[i][:200]} -->", flush=True)


if __name__ == "__main__":
    main()
