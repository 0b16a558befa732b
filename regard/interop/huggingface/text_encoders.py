"""Encoder-only classes of transformers: all of them by name, and models of these classes in both directions."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from regard.data.text.special_tokens import SpecialTokens
from regard.errors import RegardError
from regard.interop.foreign_config import ForeignConfig
from regard.interop.huggingface.bert import BERT_LIKE_CLASSES
from regard.interop.huggingface.modernbert import MODERNBERT_CLASSES
from regard.interop.huggingface.relative_encoders import RELATIVE_CLASSES
from regard.interop.huggingface.single_stack import Weights, read_single_stack, write_single_stack
from regard.models.bert import BertConfig

# Of several matching classes, the one that a model was imported from is written, or else the first.
_WRITTEN_CLASSES = {**BERT_LIKE_CLASSES, **RELATIVE_CLASSES, **MODERNBERT_CLASSES}
WRITTEN_ENCODERS = {name: one for name, one in _WRITTEN_CLASSES.items() if not name.startswith("Electra")}
ENCODER_CLASSES = dict(_WRITTEN_CLASSES)
# Their second head (next sentence or sentence order) is left out.
ENCODER_CLASSES |= {f"{name}ForPreTraining": ENCODER_CLASSES[f"{name}ForMaskedLM"] for name in ("Bert", "Albert")}
# The head that detects replaced tokens is left out.
ENCODER_CLASSES["ElectraForPreTraining"] = ENCODER_CLASSES["ElectraModel"]
# The same as RoBERTa, with other tokenizers.
ENCODER_CLASSES |= {
    name.replace("Roberta", other): foreign_class
    for other in ("XLMRoberta", "Camembert")
    for name, foreign_class in ENCODER_CLASSES.items()
    if name.startswith("Roberta")
}


def read_encoder_model(
    name: str, table: Mapping[str, Any], tokens: Mapping[str, int], tensors: Mapping[str, Tensor], origin: str
) -> tuple[BertConfig, SpecialTokens, Weights]:
    """Read a model of the class `name`: config, special ids and weights.

    `table` is config.json, `tokens` are the special ids of the tokenizer by role.
    """
    config, weights = read_single_stack(ENCODER_CLASSES[name], ForeignConfig(table, origin), tensors)
    begin, end = tokens.get("begin", tokens.get("cls")), tokens.get("end", tokens.get("sep"))
    pad = config.position_offset - 1 if config.position_offset else tokens.get("pad", 0)
    special = SpecialTokens(
        pad=pad,
        unk=tokens.get("unk", pad),
        sos=pad if begin is None else begin,
        eos=pad if end is None else end,
        mask=tokens.get("mask"),
        begin=begin,
        end=end,
        between=tokens.get("between"),
    )
    return config, special, weights


def write_encoder_model(
    config: BertConfig, special: SpecialTokens, weights: Mapping[str, Tensor], preferred: str = ""
) -> tuple[dict[str, Any], dict[str, Any], Weights]:
    """config.json, generation_config.json (empty) and the tensors of the matching class; an error if none matches.

    Classes of ELECTRA are written only if `preferred`, the class that the model was imported from, is one of them.
    """
    classes = _WRITTEN_CLASSES if preferred.startswith("Electra") else WRITTEN_ENCODERS
    name, table, tensors = write_single_stack(classes, config, weights, preferred)
    if table.setdefault("pad_token_id", special.pad) != special.pad:
        raise RegardError(
            f"{name}: position_offset = {config.position_offset} must be one more than the padding id ({special.pad}).",
            "Train with supported settings to export the model.",
        )
    ids = {"bos_token_id": special.begin, "eos_token_id": special.end}
    return {"architectures": [name]} | table | ids, {}, tensors
