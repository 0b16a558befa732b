"""Models of transformers with random weights, beside what is read of them."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import load_file
from tokenizers import models, pre_tokenizers, processors

from regard.attention import record
from regard.attention.exact_weights import compute_weights
from regard.data.special import Special
from regard.interop import export_folder, import_folder
from regard.layers.packed import pack

ROWS = [[5, 9, 17, 33, 8, 40, 11], [7, 21, 6]]
VOCAB = 47


def write_tokenizer(folder: Path, *, framed: bool = True, vocab: int = VOCAB) -> None:
    """Words w5, w6, … and special tokens before them; `framed` texts stand between [CLS] and [SEP]."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = {name: i for i, name in enumerate([*names, *(f"w{i}" for i in range(5, vocab))])}
    library = tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(names)
    if framed:
        library.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    named = {"unk_token": "[UNK]", "mask_token": "[MASK]", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def random_model(kind: Any, config: Any, folder: Path, *, framed: bool = True) -> Any:
    """A model of theirs in which no parameter is 0 or 1, and its folder with a tokeniser."""
    torch.manual_seed(3)
    model = kind(config).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = "norm" in name.lower() or "ln_" in name
            parameter.normal_(mean=float(norm and name.endswith("weight")), std=0.2)
    model.save_pretrained(folder)
    write_tokenizer(folder, framed=framed)
    return model


@torch.no_grad()
def run_theirs(model: Any, segments: list[list[int]] | None = None, pad: int = 0) -> Any:
    """Their outputs for ROWS, filled up to a rectangle."""
    longest = max(map(len, ROWS))

    def rectangle(rows, fill):
        return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])

    given = {"input_ids": rectangle(ROWS, pad), "attention_mask": rectangle([[1] * len(row) for row in ROWS], 0)}
    if segments is not None:
        given["token_type_ids"] = rectangle(segments, 0)
    return model(**given, output_attentions=True)


def real(padded: torch.Tensor) -> torch.Tensor:
    """The rows of real tokens, one after another."""
    return torch.cat([one[: len(row)] for one, row in zip(padded, ROWS)])


@torch.no_grad()
def compare_attention(ours: Any, theirs: Any, segments: list[list[int]] | None = None) -> torch.Tensor:
    """What our model says of ROWS; each of its attention maps must be theirs."""
    given = [] if segments is None else [torch.tensor([one for row in segments for one in row])]
    with record(ours) as recording:
        output = ours(pack(ROWS), *given)
    recorded = list(recording.values())
    # A block that several layers share is called once for each of them.
    count, layers = len(recorded), len(theirs)
    maps = [compute_weights(recorded[i * count // layers].calls[i % (layers // count)]) for i in range(layers)]
    assert sum(len(one.calls) for one in recorded) == layers
    for own, other in zip(maps, theirs, strict=True):
        for b, row in enumerate(ROWS):
            size = len(row)
            torch.testing.assert_close(own[b, :, :size, :size], other[b, :, :size, :size], atol=1e-4, rtol=0)
    return output


def same_tensors(one: Path, other: Path) -> None:
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert sorted(first) == sorted(second)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def round_trip(transformers: Any, folder: Path, out: Path) -> tuple[Any, Special, Any]:
    """A folder in and out again, bit for bit: our bundle, and what transformers opens the folder that we wrote as."""
    bundle = import_folder(folder)
    name = export_folder(bundle, out)
    [other] = json.loads((folder / "config.json").read_text())["architectures"]
    assert name == other.replace("XLMRoberta", "Roberta").replace("Camembert", "Roberta")
    same_tensors(folder, out)
    again, report = getattr(transformers, name).from_pretrained(
        out, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    return bundle, again.eval()
