"""Models of every supported class with random weights: their outputs in transformers and in Regard."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.attention import record
from regard.attention.exact_weights import compute_weights
from regard.layers.packed import pack
from tests.interop.huggingface.architectures import ARCHITECTURES, TRANSLATION_VOCAB
from tests.interop.model_comparison import ROWS, randomize, write_tokenizer, write_translation_tokenizer

# The token of the target language of M2M100.
_FORCED = TRANSLATION_VOCAB - 2
_TEXTS = sorted(ROWS, key=len)
_TARGETS = [[44, 13], [5, 6, 31, 9, 12]]
NEW_TOKENS = 9


class Inputs(NamedTuple):
    """A text, a pair of texts, or images. `model` are the arguments in Regard, `hf` those in transformers."""

    model: tuple[Any, ...]
    hf: dict[str, Tensor]


class Outputs(NamedTuple):
    """Logits or features, attention weights of all layers, and the hidden states of the last layer (encoders)."""

    tensors: list[Tensor]
    maps: list[Tensor]
    encoded: list[Tensor]


def make_model(transformers: Any, name: str, config: Any, folder: Path, seed: int = 3) -> Any:
    """A model of transformers in which no parameter is 0 or 1, saved to a folder with a tokenizer."""
    kind = ARCHITECTURES[name].kind
    torch.manual_seed(seed)
    model = getattr(transformers, name)(config).eval()
    model.set_attn_implementation("eager")
    randomize(model)
    with torch.no_grad():
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
        for key, parameter in model.named_parameters():
            if key.endswith("mask_token"):  # read in pre-training only; exported as zeros
                parameter.zero_()
        if kind == "encoder_decoder":
            _untie_output(model)
    if name.startswith("M2M100"):
        model.generation_config.forced_bos_token_id = _FORCED
    model.save_pretrained(folder)
    if kind == "image":
        (folder / "preprocessor_config.json").write_text(json.dumps({"do_normalize": False}))
    elif kind == "encoder_decoder":
        write_translation_tokenizer(folder, model.config)
    else:
        write_tokenizer(folder, add_special_tokens=kind == "encoder")
    return model


def _untie_output(model: Any) -> None:
    """Give a model that is not tied embeddings and an output layer as in published files."""
    config = model.config
    if config.model_type == "mt5" or not getattr(config, "scale_decoder_outputs", True):
        # T5 1.1 and mT5, whose config says that they are tied.
        model.lm_head.weight = torch.nn.Parameter(0.2 * torch.randn_like(model.lm_head.weight))
    elif not config.tie_word_embeddings and getattr(config, "share_encoder_decoder_embeddings", True):
        # Earlier versions of transformers tie encoder and decoder even if the output layer is not tied.
        for side in (model.model.encoder, model.model.decoder):
            side.embed_tokens.weight.copy_(model.model.shared.weight)


def make_inputs(name: str, pipeline: Any) -> list[Inputs]:
    """The inputs of a class: two texts or pairs of texts, each alone, or a batch of images.

    The shorter text comes first: with dynamic RoPE scaling, transformers keeps the frequencies of a longer text.
    """
    kind, config = ARCHITECTURES[name].kind, pipeline.model.config
    if kind == "image":
        torch.manual_seed(5)
        pixels = torch.rand(2, config.channels, config.image_height, config.image_width)
        return [Inputs((pixels,), {"pixel_values": pixels})]
    if kind == "encoder_decoder":
        special = pipeline.special
        pairs = [(special.add_special_tokens(row), [special.sos, *target]) for row, target in zip(_TEXTS, _TARGETS)]
        return [
            Inputs(
                (pack([source]), pack([target])),
                {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([target])},
            )
            for source, target in pairs
        ]
    found = []
    for row in _TEXTS:
        inputs = Inputs((pack([row]),), {"input_ids": torch.tensor([row])})
        segments = getattr(config, "segments", 0)
        if segments > 1:
            types = torch.tensor([i * segments // len(row) for i in range(len(row))])
            inputs = Inputs((*inputs.model, types), {**inputs.hf, "token_type_ids": types[None]})
        found.append(inputs)
    return found


@torch.no_grad()
def run_hf_model(hf_model: Any, name: str, inputs: Inputs, needs_maps: bool = True) -> Outputs:
    """The outputs in transformers, without the axis of the batch (except images)."""
    kind = ARCHITECTURES[name].kind
    options = {"output_attentions": True, "output_hidden_states": kind == "encoder"} if needs_maps else {}
    output = hf_model(**inputs.hf, **options)
    maps: list[Tensor] = []
    encoded: list[Tensor] = []
    if needs_maps:
        names = ("encoder_attentions", "decoder_attentions", "cross_attentions")
        keys = names if kind == "encoder_decoder" else ("attentions",)
        maps = [weights for key in keys for weights in output[key]]
        encoded = [output.hidden_states[-1][0]] if kind == "encoder" else []
    if "start_logits" in output:
        tensors = [torch.stack([output.start_logits[0], output.end_logits[0]], dim=1)]
    elif "logits" in output:
        tensors = [output.logits]
    else:
        pooled = output.get("pooler_output")
        if name.startswith("SiglipVision") and pooled is None:
            pooled = output.last_hidden_state.mean(1)
        tensors = [output.last_hidden_state, *([] if pooled is None else [pooled])]
    if kind in ("decoder", "encoder_decoder", "encoder") and "start_logits" not in output:
        tensors = [tensor[0] for tensor in tensors]
    return Outputs(tensors, maps, encoded)


@torch.no_grad()
def run_model(model: Any, name: str, inputs: Inputs, needs_maps: bool = True) -> Outputs:
    """The outputs in Regard, in the same shapes as those in transformers."""
    kind = ARCHITECTURES[name].kind
    if kind == "image":
        with record(model) as recording:
            encoded = model.encode(*inputs.model)
        output = model(*inputs.model)
        tensors = [encoded, output] if name.endswith("Model") else [output]
    else:
        with record(model) as recording:
            output = model(*inputs.model)
        is_classifier = kind == "encoder" and model.config.head == "classify"
        tensors = [output[0] if is_classifier else output]
        if kind == "encoder" and model.config.head == "none" and model.config.pooler != "none":
            tensors.append(model.pool(output, inputs.model[0])[0])
    maps: list[Tensor] = []
    if needs_maps:
        modules = list(recording)
        if kind == "encoder_decoder":  # in the order of transformers
            suffixes = [("encoder", "attention"), ("decoder", "attention"), ("decoder", "cross")]
            modules = [
                one for stack, part in suffixes for one in modules if one.startswith(stack) and one.endswith(part)
            ]
        maps = [compute_weights(call) for module in modules for call in recording[module].calls]
    return Outputs(tensors, maps, [])


def largest_difference(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest absolute difference; NaN counts as infinite, different shapes are an error."""
    worst = 0.0
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape, (one.shape, other.shape)
        difference = (one - other).abs().max().item() if one.numel() else 0.0
        worst = max(worst, difference if difference == difference else torch.inf)
    return worst


@torch.no_grad()
def is_same_greedy_text(hf_model: Any, name: str, pipeline: Any, inputs: Inputs) -> bool:
    """Whether both generate the same tokens, with their caches, if special tokens are excluded."""
    special = pipeline.special
    excluded = sorted({special.pad, special.sos, special.eos, special.unk})
    is_decoder = ARCHITECTURES[name].kind == "decoder"
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    options |= {"num_beams": 1, "suppress_tokens": excluded, "pad_token_id": special.pad}
    source = inputs.model[0]
    ids = source.ids.tolist() if is_decoder else [special.sos]
    if not is_decoder:
        options |= {"decoder_start_token_id": special.sos, "forced_bos_token_id": None, "forced_eos_token_id": None}
        options["use_cache"] = "T5" not in name  # transformers fails if the stacks differ in depth
    expected = hf_model.generate(inputs.hf["input_ids"], **options)[0].tolist()
    state = pipeline.model.start(source)
    for _ in range(NEW_TOKENS):
        logits, state = pipeline.model.step(state, torch.tensor([ids[-1:]]))
        logits[..., excluded] = -torch.inf
        ids.append(int(logits.argmax()))
    return ids == expected
