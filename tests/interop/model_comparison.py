"""Random models of transformers, and comparison of their outputs and attention with imported models."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import load_file
from tokenizers import models, pre_tokenizers, processors

from regard.attention import record
from regard.attention.exact_weights import compute_weights
from regard.interop import export_huggingface, import_huggingface
from regard.layers.packed import pack

ROWS = [[5, 9, 17, 33, 8, 40, 11], [7, 21, 6]]
VOCAB = 47


def write_tokenizer(folder: Path, *, add_special_tokens: bool = True, vocab: int = VOCAB) -> None:
    """Writes a tokenizer of special tokens and the words w5, w6, …; it adds [CLS] and [SEP] on request."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = {name: i for i, name in enumerate([*names, *(f"w{i}" for i in range(5, vocab))])}
    library = tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(names)
    if add_special_tokens:
        library.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    roles = {"unk_token": "[UNK]", "mask_token": "[MASK]", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))


def write_translation_tokenizer(folder: Path, config: Any, vocab: int = 50) -> None:
    """Writes a tokenizer of the words w0, w1, …; it adds eos after each text; for BART, M2M100 a token before."""
    library = tokenizers.Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w4"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    first = {"bart": 0, "m2m_100": 47}.get(config.model_type)  # bos; the source language
    begin = "" if first is None else f"w{first} "
    ends = [config.eos_token_id, *([] if first is None else [first])]
    library.post_processor = processors.TemplateProcessing(
        single=f"{begin}$A w{config.eos_token_id}", special_tokens=[(f"w{i}", i) for i in ends]
    )
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"unk_token": "w4"}))


@torch.no_grad()
def randomize(model: Any) -> None:
    """Fills all parameters except constants (sinusoids) with random numbers; the weights of norms are around 1."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_norm = "norm" in name.lower() or "ln_" in name
            parameter.normal_(mean=float(is_norm and name.endswith("weight")), std=0.2)


def random_model(model_class: Any, config: Any, folder: Path, *, add_special_tokens: bool = True) -> Any:
    """A model of transformers in which no parameter is 0 or 1, saved to a folder with a tokenizer."""
    torch.manual_seed(3)
    model = model_class(config).eval()
    model.set_attn_implementation("eager")
    randomize(model)
    model.save_pretrained(folder)
    write_tokenizer(folder, add_special_tokens=add_special_tokens)
    return model


@torch.no_grad()
def run_hf_model(model: Any, segments: list[list[int]] | None = None, pad: int = 0) -> Any:
    """The outputs of a model of transformers for ROWS, padded."""
    longest = max(map(len, ROWS))

    def pad_rows(rows, fill):
        return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])

    inputs = {"input_ids": pad_rows(ROWS, pad), "attention_mask": pad_rows([[1] * len(row) for row in ROWS], 0)}
    if segments is not None:
        inputs["token_type_ids"] = pad_rows(segments, 0)
    return model(**inputs, output_attentions=True)


def remove_padding(padded: torch.Tensor) -> torch.Tensor:
    """The rows of all tokens except padding, concatenated."""
    return torch.cat([sequence[: len(row)] for sequence, row in zip(padded, ROWS)])


@torch.no_grad()
def assert_same_attention(model: Any, expected: Any, segments: list[list[int]] | None = None) -> torch.Tensor:
    """Runs a model on ROWS; compares its attention weights with those of transformers and returns its output."""
    inputs = [] if segments is None else [torch.tensor([segment for row in segments for segment in row])]
    with record(model) as recording:
        output = model(pack(ROWS), *inputs)
    recorded = list(recording.values())
    # A block that several layers share is called once per layer.
    count, layers = len(recorded), len(expected)
    maps = [compute_weights(recorded[i * count // layers].calls[i % (layers // count)]) for i in range(layers)]
    assert sum(len(attention.calls) for attention in recorded) == layers
    for weights, expected_weights in zip(maps, expected, strict=True):
        for b, row in enumerate(ROWS):
            size = len(row)
            torch.testing.assert_close(
                weights[b, :, :size, :size], expected_weights[b, :, :size, :size], atol=1e-4, rtol=0
            )
    return output


def assert_same_tensors(folder: Path, other: Path) -> None:
    first, second = (load_file(one / "model.safetensors") for one in (folder, other))
    assert sorted(first) == sorted(second)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def weights_of(pipeline: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in pipeline.model.named_parameters()}


def assert_same_weights(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


def edit_config(folder: Path, *removed: str, **values: Any) -> None:
    """Sets and removes keys of config.json."""
    path = folder / "config.json"
    table = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in table.items() if key not in removed}))


def round_trip(transformers: Any, folder: Path, out: Path) -> tuple[Any, Any]:
    """Imports and exports a folder, bit for bit: the imported pipeline, and the exported model in transformers."""
    pipeline = import_huggingface(folder)
    name = export_huggingface(pipeline, out)
    [original] = json.loads((folder / "config.json").read_text())["architectures"]
    assert name == original.replace("XLMRoberta", "Roberta").replace("Camembert", "Roberta")
    assert_same_tensors(folder, out)
    exported, report = getattr(transformers, name).from_pretrained(
        out, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    return pipeline, exported.eval()
