"""`regard generate`: text generation from prompts."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from regard.cli.common import (
    DeviceOption,
    Input,
    Model,
    Quiet,
    Texts,
    UnknownCharacters,
    delayed_warnings,
    open_model,
    parse,
    print_note,
    read_texts,
    streaming_progress,
    suggest_input,
)
from regard.cli.options import Arg
from regard.decode import DecodeConfig
from regard.pipelines import Continuation, TextGenerator


@dataclass(frozen=True)
class Options:
    """Generate text from a prompt: regard generate MODEL "Once upon a time"

    For one prompt, print the prompt and its continuation as it is generated. For several prompts or samples, print one
    JSON object per line: prompt, text, score.
    """

    model: Model
    text: Texts = ()
    """prompts"""
    input: Input = None
    truncate: bool = False
    """truncate prompts to the training length (model.max_len), keeping their end"""
    chat: bool = False
    """format each prompt as a message with the chat template of the model, and print the answer only"""
    special_tokens: bool = False
    """read names of special tokens in prompts, such as <|im_end|>, as these tokens instead of as text"""
    device: DeviceOption = "auto"
    quiet: Quiet = False
    decode: Annotated[dict[str, Any], Arg(section=DecodeConfig(method="sample"))] = field(default_factory=dict)


def run(argv: list[str]) -> int:
    options = parse(Options, "generate", argv)
    suggest_input(options.text)
    named = list(read_texts(options.text, options.input, "Type messages" if options.chat else "Type prompts"))
    generator = open_model(options.model, options.device, TextGenerator)
    config = replace(generator.decoding, **options.decode)
    unknown = UnknownCharacters(generator.tokenizer, generator.special.unk)
    inputs: dict[str, Any] = {
        "truncate": options.truncate,
        "special_tokens": options.special_tokens or options.chat,
    }
    prompts = []
    for name, text in named:  # before generation, and with the line number in errors
        unknown.check(text, name)
        prompts.append(generator.chat_prompt([{"role": "user", "content": text}]) if options.chat else text)
        generator.encode_prompt(prompts[-1], name=name, **inputs)
    if len(prompts) == 1 and config.n_best == 1:
        if not options.chat:
            print(prompts[0], end="", flush=True)
        streams = config.method != "beam"

        def on_text(_: int, text: str) -> None:
            print(text, end="", flush=True)

        with delayed_warnings():
            results = generator.generate(prompts, config, **inputs, on_text=on_text if streams else None)
            print("" if streams else results[0][0].text, flush=True)
        _note_length_limit(generator, prompts, results, config, inputs)
        return 0
    with streaming_progress("generating") as on_progress:
        results = generator.generate(prompts, config, **inputs, progress=on_progress)
    for (_, prompt), continuations in zip(named, results):
        for continuation in continuations:
            row = {"prompt": prompt, "text": continuation.text, "score": round(continuation.score, 6)}
            print(json.dumps(row, ensure_ascii=False))
    sys.stdout.flush()
    _note_length_limit(generator, prompts, results, config, inputs)
    return 0


def _note_length_limit(
    generator: TextGenerator,
    prompts: Sequence[str],
    results: Sequence[Sequence[Continuation]],
    config: DecodeConfig,
    inputs: dict[str, Any],
) -> None:
    """Print a note if a limit ended a text: --max-len, --max-total-len or the length limit of the model."""
    limit, max_len, max_total_len = generator.length_limit, config.max_len, config.max_total_len
    lengths = [
        (len(generator.encode_prompt(prompt, **inputs)), len(continuation.hypothesis.ids))
        for prompt, continuations in zip(prompts, results)
        for continuation in continuations
    ]
    if any(output >= max_len for _, output in lengths):
        print_note(f"Stopped at {max_len} tokens (--max-len).")
    elif max_total_len and any(sum(pair) >= max_total_len for pair in lengths):
        print_note(f"Stopped at {max_total_len} tokens including the prompt (--max-total-len).")
    elif limit is not None and any(sum(pair) >= limit for pair in lengths):
        print_note(
            f"Stopped at {limit} tokens including the prompt, the length limit of the model. "
            "For longer texts, train with a larger --model.max-len."
        )
