"""How many translations are the same elsewhere: in CTranslate2, ONNX Runtime and, where a class fits, transformers.

    python benchmarks/exports.py MODEL --data multi30k/tok/test2016.en.gz multi30k/tok/test2016.de.gz

All with a beam of 5, in float32, on the CPU. Where two translations differ, the model prices both: if the prices are
equal to a thousandth, it was a tie, which rounding has decided.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from regard import DecodeConfig, RegardError, Translator, load
from regard.data import read_lines
from regard.interop import export_ctranslate2, export_folder, export_onnx, open_onnx
from regard.train import text_scores

BATCH = 32
# Elsewhere the longest output is one number, whatever the source.
CONFIG = DecodeConfig(beam=5, max_len=120, max_extra=120)


def by_ctranslate2(translator: Translator, folder: Path) -> Callable[[list[str]], list[str]]:
    import ctranslate2

    export_ctranslate2(translator, folder)
    runner = ctranslate2.Translator(str(folder), compute_type="float32", intra_threads=torch.get_num_threads())
    source, target = (one.library for one in translator.tokenizers)
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
    opened = open_onnx(folder)
    return lambda lines: [best.text for best, *_ in opened.translate(lines, CONFIG)]


def by_transformers(translator: Translator, folder: Path) -> Callable[[list[str]], list[str]]:
    import transformers

    name = export_folder(translator, folder)
    model = getattr(transformers, name).from_pretrained(folder).eval()
    special = translator.special

    def translate(lines: list[str]) -> list[str]:
        rows = [translator.source_ids(line) for line in lines]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        texts = [""] * len(rows)
        for start in range(0, len(rows), BATCH):
            batch = order[start : start + BATCH]
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(rows[i]) for i in batch], True, special.pad)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(rows[i])) for i in batch], True)
            # num_beams, early_stopping, length_penalty and what is never written are in the folder.
            written = model.generate(input_ids=ids, attention_mask=mask, max_length=CONFIG.max_len + 2)[:, 1:].tolist()
            for i, text in zip(batch, translator.target_tokenizer.decode_batch(written)):
                texts[i] = text
        return texts

    return translate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", nargs=2, required=True, help="the sources and the references, a line each")
    options = parser.parse_args()
    translator = load(options.model, "cpu", expect=Translator)
    sources, references = map(read_lines, options.data)
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
        ties = sum(abs(own - other) < 1e-3 for own, other in zip(*prices))
        print(f"| {name} | {len(found) - len(differing)} | {ties} of {len(differing)} | {bleu:.2f} | {seconds:.1f} |")
        for i in differing[:3]:
            print(f"<!-- {wanted[i][:200]} | {found[i][:200]} -->", flush=True)


if __name__ == "__main__":
    main()
