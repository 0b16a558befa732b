"""Agreement with transformers, CTranslate2 and ONNX Runtime: the largest error of each check, for every class.

    python benchmarks/formats.py [--changes 100] [--only Llama] [--workers 2]

For each class, all configurations of `tests/interop/huggingface/architectures.py` run with random weights: at least
five, in which each value of each option occurs. A model of transformers is imported; its outputs, all attention maps
and greedy text are compared. It is exported to Hugging Face (the tensors must be bit-equal), CTranslate2 and ONNX, and
the outputs of these programs are compared with those of transformers. Image models get the same pixels, without
preprocessing.

`--changes` tries random changes of single options, and counts those that transformers refuses, those that Regard
refuses, those that agree to 1e-4, and wrong results.
"""

import argparse
import logging
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import onnxruntime
import torch
import transformers
from torch import Tensor

from regard.errors import RegardError
from regard.interop import export_ctranslate2, export_huggingface, export_onnx, import_huggingface, load_onnx
from regard.interop.ctranslate2 import token_names
from tests.interop.huggingface.architecture_comparison import (
    Inputs,
    Outputs,
    is_same_greedy_text,
    largest_difference,
    make_inputs,
    make_model,
    run_hf_model,
    run_model,
)
from tests.interop.huggingface.architectures import ARCHITECTURES, configurations
from tests.interop.huggingface.config_changes import ChangeSearch
from tests.interop.model_comparison import assert_same_tensors

Errors = dict[str, float | None]


class CTranslate2Model:
    """An exported model in CTranslate2."""

    def __init__(self, pipeline: Any, kind: str, folder: Path) -> None:
        runners = {"decoder": "Generator", "encoder": "Encoder", "encoder_decoder": "Translator"}
        self.runner = getattr(ctranslate2, runners[kind])(str(folder), compute_type="float32", intra_threads=1)
        self.pipeline, self.kind = pipeline, kind

    def largest_error(self, inputs: Inputs, expected: Outputs) -> float:
        """Of logits (language models), hidden states and pooled ones (encoders), or log-probabilities (translators)."""
        if self.kind == "encoder_decoder":
            return self._error_of_scores(inputs, expected.tensors[0])
        ids = inputs.hf["input_ids"].tolist()
        if self.kind == "decoder":
            return largest_difference([to_tensor(self.runner.forward_batch(ids))[0]], expected.tensors)
        options = {}
        if self.pipeline.model.config.segments:
            types = inputs.hf.get("token_type_ids", torch.zeros(1, len(ids[0]), dtype=torch.long))
            options["token_type_ids"] = types.tolist()
        output = self.runner.forward_batch(ids, **options)
        found = [to_tensor(output.last_hidden_state)[0]]
        if self.pipeline.model.config.head == "mask":  # the head is left out
            return largest_difference(found, expected.encoded)
        if output.pooler_output is not None:
            found.append(to_tensor(output.pooler_output)[0])
        return largest_difference(found, expected.tensors)

    def _error_of_scores(self, inputs: Inputs, logits: Tensor) -> float:
        """CTranslate2 adds the special tokens of the source, and the start and end of the target."""
        special, config = self.pipeline.special, self.pipeline.model.config
        names = [
            token_names(tokenizer, size)
            for tokenizer, size in zip(self.pipeline.tokenizers, (config.source_vocab, config.target_vocab))
        ]
        source = inputs.hf["input_ids"][0].tolist()
        source = source[special.begin is not None : len(source) - (special.end is not None)]
        target = inputs.hf["decoder_input_ids"][0, 1:].tolist()
        (result,) = self.runner.score_batch([[names[0][i] for i in source]], [[names[1][i] for i in target]])
        labels = torch.tensor([*target, special.eos])
        expected = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
        return largest_difference([torch.tensor(result.log_probs)], [expected])


def to_tensor(view: Any) -> Tensor:
    return torch.from_numpy(np.array(view))


def compare(name: str, sizes: dict[str, Any], folder: Path, seed: int) -> Errors:
    """The errors of one configuration by check; 0 or 1 for greedy text; None where an export is refused."""
    architecture = ARCHITECTURES[name]
    hf_model = make_model(transformers, name, getattr(transformers, architecture.config)(**sizes), folder / "in", seed)
    pipeline = import_huggingface(folder / "in")
    examples = make_inputs(name, pipeline)
    references = [run_hf_model(hf_model, name, inputs) for inputs in examples]
    errors: dict[str, float | None] = {}
    found = [run_model(pipeline.model, name, inputs) for inputs in examples]
    errors["logits"] = max(largest_difference(a.tensors, b.tensors) for a, b in zip(found, references))
    errors["maps"] = max(largest_difference(a.maps, b.maps) for a, b in zip(found, references))
    if architecture.kind in ("decoder", "encoder_decoder"):
        # The first text is short enough for all tables of positions.
        errors["greedy"] = float(not is_same_greedy_text(hf_model, name, pipeline, examples[0]))
    export_huggingface(pipeline, folder / "out")
    assert_same_tensors(folder / "in", folder / "out")
    errors["CTranslate2"] = None
    try:
        export_ctranslate2(pipeline, folder / "ctranslate2")
    except RegardError:
        pass
    else:
        exported = CTranslate2Model(pipeline, architecture.kind, folder / "ctranslate2")
        errors["CTranslate2"] = max(map(exported.largest_error, examples, references))
    export_onnx(pipeline, folder / "onnx")
    runner = load_onnx(folder / "onnx").model
    outputs = [runner(*inputs.model) for inputs in examples]
    if architecture.kind == "encoder" and pipeline.model.config.head == "classify":
        outputs = [output[0] for output in outputs]
    # Without a head, the graph of an encoder gives hidden states, that of an image model the pooled ones.
    index = -1 if architecture.kind == "image" else 0
    errors["ONNX"] = largest_difference(outputs, [reference.tensors[index] for reference in references])
    return errors


def count_changes(name: str, count: int) -> Counter[str]:
    """Numbers of changes of configs by their outcome; wrong results are printed."""
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        search = ChangeSearch(transformers, name, Path(folder))
        for seed in range(count):
            outcome, description = search.outcome(seed)
            outcomes[outcome] += 1
            if outcome == "wrong":
                print(f"wrong: {description}", flush=True)
    return outcomes


def make_row(name: str, changes: int) -> str:
    """The row of a class in the table."""
    torch.set_num_threads(1)
    logging.getLogger("regard").setLevel(logging.ERROR)
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    tables = configurations(name)
    results = []
    for seed, sizes in enumerate(tables):
        with tempfile.TemporaryDirectory() as folder:
            results.append(compare(name, sizes, Path(folder), seed))
    cells = [name, str(len(tables)), worst(results, "logits"), worst(results, "maps")]
    greedy = [errors["greedy"] for errors in results if "greedy" in errors]
    cells.append(("differs" if any(greedy) else "equal") if greedy else "–")
    cells += ["bit-equal", worst(results, "CTranslate2"), worst(results, "ONNX")]
    if changes:
        outcomes = count_changes(name, changes)
        order = ("refused by transformers", "refused", "equal", "wrong")
        cells.append(", ".join(str(outcomes[outcome]) for outcome in order))
    return f"| {' | '.join(cells)} |"


def worst(results: list[Errors], check: str) -> str:
    """The largest error of a check, and the number of configurations for which the export is refused."""
    errors = [errors[check] for errors in results]
    found = [error for error in errors if error is not None]
    if not found:
        return "refused"
    refused = len(errors) - len(found)
    return f"{max(found):.0e}" + (f" ({refused} of {len(errors)} refused)" if refused else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=0, help="changes of configs per class (default: none)")
    parser.add_argument("--only", default="", help="part of the names of the classes (default: all)")
    parser.add_argument("--workers", type=int, default=2, help="number of processes (default: 2)")
    options = parser.parse_args()
    versions = {"transformers": transformers, "ctranslate2": ctranslate2, "onnxruntime": onnxruntime}
    print(", ".join(f"{name} {library.__version__}" for name, library in versions.items()), end="\n\n")
    header = ["class", "configurations", "logits", "maps", "greedy", "round trip", "CTranslate2", "ONNX"]
    header += ["changes: refused by transformers, by Regard, equal, wrong"] if options.changes else []
    print(f"| {' | '.join(header)} |\n|{' --- |' * len(header)}")
    names = [name for name in ARCHITECTURES if options.only in name]
    with ProcessPoolExecutor(options.workers) as pool:
        for row in pool.map(partial(make_row, changes=options.changes), names):
            print(row, flush=True)


if __name__ == "__main__":
    main()
