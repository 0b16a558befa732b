"""Agreement of imported models with transformers: a table of architectures, with the largest error of each check.

    python benchmarks/formats.py [--changes 40]

For each class, the configurations of the tests run with random weights, in several seeds until there are at least five:
logits, all attention maps, greedy text, the round trip (bit-equal tensors) and, for the last configuration of each
class, the ONNX graphs. `--changes` tries random changes of single config keys and counts those that Regard or
transformers refuses, those that agree, and wrong results.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from regard.attention import record
from regard.attention.exact_weights import compute_weights
from regard.interop import export_huggingface, export_onnx, import_huggingface, load_onnx
from regard.layers.packed import pack
from tests.interop.huggingface.test_bert_models import CONFIGS
from tests.interop.huggingface.test_config_changes import base_models, change_config, largest_error
from tests.interop.huggingface.test_gpt_models import CASES
from tests.interop.model_comparison import ROWS, assert_same_tensors, random_model

MIN_CONFIGURATIONS = 5
NEW_TOKENS = 9


def configurations() -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Config class and sizes of each configuration, by the name of the class."""
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for name, config, sizes in CASES:
        found.setdefault(name, []).append((config, sizes))
    for family, variants in CONFIGS.items():
        for head in ("Model", "ForTokenClassification"):
            found[f"{family}{head}"] = [(f"{family}Config", sizes) for sizes in variants]
    return found


@torch.no_grad()
def compare(
    name: str, config: str, sizes: dict[str, Any], folder: Path, seed: int, with_onnx: bool
) -> dict[str, float]:
    """Largest errors of logits, maps and ONNX outputs; 0 or 1 for greedy text and the round trip."""
    is_decoder = "CausalLM" in name or "LMHead" in name
    model_class = getattr(transformers, name)
    hf_model = random_model(
        model_class, getattr(transformers, config)(**sizes), folder / "in", add_special_tokens=not is_decoder
    )
    torch.manual_seed(seed)
    for parameter in hf_model.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    hf_model.save_pretrained(folder / "in")
    pipeline = import_huggingface(folder / "in")
    errors = {"logits": 0.0, "maps": 0.0, "onnx": 0.0}
    runner = None
    if with_onnx:
        export_onnx(pipeline, folder / "onnx")
        runner = load_onnx(folder / "onnx")
    for row in ROWS:
        expected = hf_model(input_ids=torch.tensor([row]), output_attentions=True)
        with record(pipeline.model) as recording:
            output = pipeline.model(pack([row]))
        calls = [call for one in recording.values() for call in one.calls]
        maps = [compute_weights(call)[0] for call in calls]
        for found, reference in zip(maps, expected.attentions, strict=True):
            errors["maps"] = max(errors["maps"], float((found - reference[0]).abs().max()))
        reference = expected.logits[0] if "logits" in expected else expected.last_hidden_state[0]
        errors["logits"] = max(errors["logits"], float((output - reference).abs().max()))
        if runner is not None:
            errors["onnx"] = max(errors["onnx"], float((runner.model(pack([row])) - output).abs().max()))
    export_huggingface(pipeline, folder / "out")
    assert_same_tensors(folder / "in", folder / "out")
    if is_decoder:
        errors["greedy"] = float(not is_same_greedy_text(hf_model, pipeline, ROWS[1]))
    return errors


def is_same_greedy_text(hf_model: Any, pipeline: Any, prompt: list[int]) -> bool:
    """Whether both continue a prompt with the same tokens."""
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    expected = hf_model.generate(torch.tensor([prompt]), suppress_tokens=[2, 3], **options)[0].tolist()
    state, ids = pipeline.model.start(pack([prompt])), list(prompt)
    for _ in range(NEW_TOKENS):
        logits, state = pipeline.model.step(state, torch.tensor([ids[-1:]]))
        logits[..., [2, 3]] = -torch.inf
        ids.append(int(logits.argmax()))
    return ids == expected


def count_changes(name: str, count: int, folder: Path) -> tuple[int, int, int]:
    """Numbers of config changes that were refused (by either side), that agreed, and that were wrong."""
    config, sizes = base_models()[name]
    random_model(getattr(transformers, name), getattr(transformers, config)(**sizes), folder)
    table = json.loads((folder / "config.json").read_text())
    counts = [0, 0, 0]
    for seed in range(count):
        key, value, changed = change_config(table, random.Random(f"{name} {seed}"))
        (folder / "config.json").write_text(json.dumps(changed))
        error = largest_error(transformers, folder, name)
        counts[0 if error is None else 1 if error < 1e-4 else 2] += 1
        if error is not None and error >= 1e-4:
            print(f"wrong: {name}, {key} = {value!r}: {error:.2g}")
    return counts[0], counts[1], counts[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=0)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    header = ["class", "configurations × seeds", "logits", "maps", "greedy", "round trip", "ONNX"]
    print(f"| {' | '.join([*header, 'changes: refused, equal, wrong'])} |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, variants in configurations().items():
        runs = [(i, seed) for seed in range(-(-MIN_CONFIGURATIONS // len(variants))) for i in range(len(variants))]
        worst: dict[str, float] = {}
        for i, seed in runs:
            with tempfile.TemporaryDirectory() as folder:
                for check, error in compare(
                    name, *variants[i], Path(folder), seed, with_onnx=(i, seed) == runs[-1]
                ).items():
                    worst[check] = max(worst.get(check, 0.0), error)
        changes = "–"
        if options.changes and name in base_models():
            with tempfile.TemporaryDirectory() as folder:
                changes = ", ".join(map(str, count_changes(name, options.changes, Path(folder))))
        greedy = "–" if "greedy" not in worst else "differs" if worst["greedy"] else "equal"
        cells = [
            name,
            f"{len(variants)} × {len(runs) // len(variants)}",
            *(f"{worst[check]:.0e}" for check in ("logits", "maps")),
        ]
        row = [*cells, greedy, "bit-equal", f"{worst['onnx']:.0e}", changes]
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
