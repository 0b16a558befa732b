"""`regard info`: description of a model folder."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import torch

from regard.attention import explain
from regard.cli.common import DeviceOption, Model, parse
from regard.data.text.special_tokens import EOS
from regard.evaluation import attention_names
from regard.models import family_name
from regard.pipelines import ImageModel, Pipeline, Translator, load


@dataclass(frozen=True)
class Options:
    """Describe a model folder: sizes, tokenizers, training, and the kernel of each attention on this device."""

    model: Model
    device: DeviceOption = "auto"


def run(argv: list[str]) -> int:
    options = parse(Options, "info", argv)
    pipeline = load(options.model, options.device)
    for title, facts in _sections(pipeline):
        print(title)
        width = max((len(name) for name, _ in facts), default=0)
        for name, value in facts:
            print(f"  {name:<{width}}  {value}")
    return 0


Facts = list[tuple[str, Any]]


def _sections(pipeline: Pipeline) -> Iterator[tuple[str, Facts]]:
    config = pipeline.model.config
    parameters = sum(parameter.numel() for parameter in pipeline.model.parameters())
    facts: Facts = [("family", family_name(config)), ("parameters", f"{parameters:,}")]
    yield "model", facts + list(dataclasses.asdict(config).items())
    if languages := _languages(pipeline):
        yield "languages", languages
    if pipeline.tokenizers:
        yield _tokenizers(pipeline)
    if pipeline.training:
        # The model section of the recipe is already shown under model.
        yield "training", [fact for fact in _flat(pipeline.training) if not fact[0].startswith("recipe.model.")]
    if attention_names(pipeline):
        yield f"attention on {pipeline.device}", _attentions(pipeline)


@singledispatch
def _languages(pipeline: Any) -> Facts:
    return []


@_languages.register
def _translator_languages(translator: Translator) -> Facts:
    tokens = translator.language_tokens
    if tokens is None:
        pairs = translator.language_pairs
        if len(pairs) == 1:
            return list(zip(("source", "target"), translator.languages))
        return [("pairs", " ".join(map(str, pairs)))] if pairs else []
    defaults = (("default source", tokens.default_source), ("default target", tokens.default_target))
    return [("codes", " ".join(tokens.ids)), *((name, code) for name, code in defaults if code is not None)]


def _tokenizers(pipeline: Pipeline) -> tuple[str, Facts]:
    source, target = pipeline.tokenizers
    if source is target:
        side = "both sides" if pipeline.tokenizer_count > 1 else "all text"
        return "tokenizer", [(side, f"{source.kind}, {source.vocab_size:,} entries")]
    sides = (("source", source), ("target", target))
    return "tokenizers", [(side, f"{tokenizer.kind}, {tokenizer.vocab_size:,} entries") for side, tokenizer in sides]


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables with dotted names; empty values are left out."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif value not in (None, "", []):
            yield f"{prefix}{name}", f"{value:.4g}" if isinstance(value, float) else value


@torch.inference_mode()
def _attentions(pipeline: Pipeline) -> Facts:
    """The kind, score and kernel of each attention, for an input of 20 tokens or one image."""
    kernels: Facts = []
    with explain() as choices:
        hooks = []
        for name in attention_names(pipeline):
            module = pipeline.model.get_submodule(name)

            def record_kernel(module: torch.nn.Module, *_: Any, name: str = name) -> None:
                kernel = choices[-1].backend
                kernels.append((name, f"{module.kind:<6}  {type(module.score).__name__:<9}  kernel {kernel}"))

            hooks.append(module.register_forward_hook(record_kernel))
        try:
            pipeline.model(*_example_inputs(pipeline))
        finally:
            for hook in hooks:
                hook.remove()
    return list(dict(kernels).items())  # Bahdanau attention is called at every step


@singledispatch
def _example_inputs(pipeline: Any) -> tuple[Any, ...]:
    """Arguments of the model's forward: a text per tokenizer."""
    ids = [EOS] * min(20, pipeline.model.config.max_len)
    return (pipeline.pack([ids]),) * pipeline.tokenizer_count


@_example_inputs.register
def _example_image(model: ImageModel) -> tuple[Any, ...]:
    return (torch.zeros(1, model.model.config.channels, *model.size, device=model.device),)
