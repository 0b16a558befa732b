"""`regard info`: what a model folder holds."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from regard.attention import explain
from regard.cli.common import Model, parse
from regard.data.text.special_tokens import EOS
from regard.layers.packed import pack
from regard.models import family_of
from regard.pipelines import Bundle, Device, ImageModel, LanguageModel, TextEncoder, Translator, load
from regard.viewer import attentions


@dataclass(frozen=True)
class Options:
    """Describe a model folder: sizes, training, and the kernel of each attention on this machine."""

    model: Model
    device: Device = "auto"


def run(argv: list[str]) -> int:
    options = parse(Options, "info", argv)
    translator = load(options.model, options.device)
    for title, facts in _sections(translator):
        print(title)
        width = max((len(name) for name, _ in facts), default=0)
        for name, value in facts:
            print(f"  {name:<{width}}  {value}")
    return 0


Facts = list[tuple[str, Any]]


def _sections(translator: Bundle) -> Iterator[tuple[str, Facts]]:
    config = translator.model.config
    parameters = sum(one.numel() for one in translator.model.parameters())
    facts: Facts = [("family", family_of(config)), ("parameters", f"{parameters:,}")]
    yield "model", facts + list(dataclasses.asdict(config).items())
    if isinstance(translator, Translator) and translator.languages:
        yield "languages", list(zip(("source", "target"), translator.languages))
    if not isinstance(translator, ImageModel):
        yield _tokenizers(translator)
    if translator.training:
        # The recipe's model is told above, as it became.
        yield "training", [fact for fact in _flat(translator.training) if not fact[0].startswith("recipe.model.")]
    if attentions(translator):
        yield f"attention on {translator.device}", _attentions(translator)


def _tokenizers(translator: Translator | LanguageModel | TextEncoder) -> tuple[str, Facts]:
    source, target = translator.tokenizers
    if source is target:
        side = "both sides" if isinstance(translator, Translator) else "all text"
        return "tokeniser", [(side, f"{source.kind}, {source.vocab_size:,} entries")]
    sides = (("source", source), ("target", target))
    return "tokenisers", [(side, f"{one.kind}, {one.vocab_size:,} entries") for side, one in sides]


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as dotted names; what is empty is not told."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif value not in (None, "", []):
            yield f"{prefix}{name}", f"{value:.4g}" if isinstance(value, float) else value


@torch.inference_mode()
def _attentions(translator: Bundle) -> Facts:
    """Each attention's kind and score, and the kernel that takes it when the model runs on 20 tokens or a picture."""
    ids = [EOS] * min(20, translator.model.config.max_len)
    taken: Facts = []
    with explain() as choices:
        hooks = []
        for name in attentions(translator):
            module = translator.model.get_submodule(name)

            def note(module: torch.nn.Module, *_: Any, name: str = name) -> None:
                kernel = choices[-1].kernel
                taken.append((name, f"{module.kind:<6}  {type(module.score).__name__:<9}  kernel {kernel}"))

            hooks.append(module.register_forward_hook(note))
        try:
            if isinstance(translator, Translator):
                translator.model(*translator.teacher_forced([(ids, ids)]))
            elif isinstance(translator, ImageModel):
                channels = translator.model.config.channels
                translator.model(torch.zeros(1, channels, *translator.size, device=translator.device))
            else:
                translator.model(pack([ids]).to(translator.device))
        finally:
            for hook in hooks:
                hook.remove()
    return list(dict(taken).items())  # Bahdanau's attention is called at every step
