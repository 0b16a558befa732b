"""`regard translate`: translate lines of text."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from regard.cli.common import (
    BLOCK_SIZE,
    ClusterOption,
    Decoding,
    Devices,
    Ensemble,
    InputShards,
    Model,
    Output,
    Overwrite,
    Quiet,
    SourceLanguage,
    TargetLanguage,
    Texts,
    Truncate,
    UnknownCharacters,
    check_shard_options,
    check_utf8,
    file_progress,
    input_shards,
    is_stream,
    note_file,
    open_models,
    open_stream,
    parse,
    print_note,
    read_blocks,
    streaming_progress,
    suggest_input,
)
from regard.cli.options import Arg
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.interop.onnx_runner import is_onnx_folder
from regard.pipelines import Translation, Translator
from regard.pipelines.input_items import InputItems, find_shards
from regard.pipelines.translation import Split, format_translations

PROMPT = "Type lines to translate"

Phrases = Annotated[tuple[str, ...], Arg("PHRASE", is_repeated=True)]


@dataclass(frozen=True)
class Options:
    """Translate lines of text: regard translate MODEL "The cat sleeps."

    Lines come from arguments, a file or standard input. Print one line per input line; an empty line stays empty. Input
    from a pipe is translated as it arrives. With --scores or --alignments, a line is text ||| score ||| alignment. With
    --n-best above 1, print one line per hypothesis, starting with the index of the input line, from 0. With --output,
    write to a file instead; if interrupted, the same command resumes.
    """

    model: Model
    text: Texts = ()
    """lines to translate"""
    input: InputShards = None
    to: TargetLanguage = None
    source_language: SourceLanguage = None
    output: Output = None
    overwrite: Overwrite = False
    ensemble: Ensemble = ()
    scores: bool = False
    """print the score of each translation: its log-probability with length and coverage penalty"""
    alignments: bool = False
    """print word alignments (source-target, from 0) from the sharpest cross-attention of the first model"""
    prefix: str = ""
    """forced beginning of every translation"""
    require: Phrases = ()
    """phrase that every translation must contain, as whole words; can be repeated"""
    forbid: Phrases = ()
    """phrase that no translation may contain, as whole words; can be repeated"""
    truncate: Truncate = False
    split: Split = "auto"
    """lines to split into sentences, which are translated separately; auto: lines beyond the trained length"""
    device: Devices = "auto"
    cluster: ClusterOption = None
    quiet: Quiet = False
    decode: Decoding = field(default_factory=dict)


def run(argv: list[str]) -> int:
    options = parse(Options, "translate", argv)
    suggest_input(options.text)
    check_shard_options(options.input, options.output, options.overwrite, options.device, options.cluster)
    if options.alignments and is_onnx_folder(options.model):
        raise RegardError(
            f"{options.model} contains ONNX graphs, whose attention cannot be recorded.",
            "Pass the model folder that they were exported from.",
        )
    split: Split = options.split
    if options.require:
        if split == "always":
            raise RegardError("--require and --split always cannot be combined.", "Leave out --split always.")
        split = "never"
    if options.alignments:
        if split == "always":
            raise RegardError("--alignments and --split always cannot be combined.", "Leave out --split always.")
        split = "never"
    check_utf8(options.prefix, "--prefix")
    for name, values in (("--require", options.require), ("--forbid", options.forbid)):
        for phrase in values:
            check_utf8(phrase, name)
    to_stream = is_stream(options.output)
    device = options.device if options.cluster is None else "cpu"
    translators = open_models(options.model, device, Translator, options.ensemble, parallel=not to_stream)
    translators = [translator.with_target(options.to, options.source_language) for translator in translators]
    config = replace(translators[0].decoding, **options.decode)
    if options.alignments:
        from regard.evaluation.teacher_forcing import require_attention

        require_attention(translators[0])
    limit = translators[0].max_output_len
    if limit is not None and options.decode.get("max_len", 0) > limit:
        print_note(
            f"--max-len {config.max_len}: the length limit of the model is {limit} tokens. "
            "For longer translations, train with a larger --model.max-len."
        )
    if to_stream:
        _translate_stream(options, config, split, translators[0])
    else:
        _translate_file(options, config, split, translators)
    return 0


def _translate_stream(options: Options, config: DecodeConfig, split: Split, translator: Translator) -> None:
    """Print translations as the lines arrive."""
    unknown = UnknownCharacters(translator.source_tokenizer, translator.special.unk)

    def check(line: str, name: str) -> None:
        sentence_split = split if config.n_best == 1 else "never"
        translator.check_line(line, name, truncate=options.truncate, split=sentence_split)
        unknown.check(line, name)

    layer, done = None, 0
    with open_stream(options.output) as stream, streaming_progress("translating") as on_progress:
        for block in read_blocks(options.text, options.input, PROMPT, check=check):
            texts = [line for _, line in block]
            inputs: dict[str, Any] = {"truncate": options.truncate, "split": split, **_phrases(options)}
            prefixes = [options.prefix] * len(texts) if options.prefix else None
            results = translator.translate(texts, config, prefixes=prefixes, **inputs, first_index=done)
            column = None
            if options.alignments:
                layer = layer or _sharpest_layer(translator, texts, results)
                column = _alignments(translator, texts, results, layer)
            for line in format_translations(results, config, done, scores=options.scores, column=column):
                print(line, file=stream)
            stream.flush()
            done += len(block)
            on_progress(done, None)


def _translate_file(options: Options, config: DecodeConfig, split: Split, translators: list[Translator]) -> None:
    """Write the translations to a file, or resume it."""
    assert options.output is not None
    first, *replicas = translators
    unknown = UnknownCharacters(first.source_tokenizer, first.special.unk)
    source = input_shards(options.text, options.input, PROMPT, unknown)
    extra: dict[str, Any] = {}
    if options.alignments:
        layer = _alignment_layer(first, source, options.output, config)
        extra["settings"] = {"alignments": layer}
        extra["add_column"] = lambda translator, lines, results: _alignments(translator, lines, results, layer)
    with file_progress("translating") as on_progress:
        summary = first.translate_file(
            source,
            options.output,
            config,
            prefix=options.prefix,
            **_phrases(options),
            truncate=options.truncate,
            split=split,
            scores=options.scores,
            replicas=replicas,
            cluster=options.cluster,
            overwrite=options.overwrite,
            progress=on_progress,
            **extra,
        )
    note_file(summary, options.output)


def _alignment_layer(translator: Translator, source: InputItems[str] | Path, output: Path, config: DecodeConfig) -> str:
    """The sharpest cross-attention on the first lines, which is the same when a file is resumed."""
    source, _ = find_shards(source, output)[0]
    if not source.is_rereadable:
        raise RegardError("--alignments with --output cannot read standard input.", "Pass --input FILE.")
    lines = list(islice(source, BLOCK_SIZE))
    results = translator.translate(lines, config, truncate=True)
    return _sharpest_layer(translator, lines, results)


def _phrases(options: Options) -> dict[str, Any]:
    return {"required": options.require, "forbidden": options.forbid}


def _pairs(lines: Sequence[str], results: Sequence[Sequence[Translation]]) -> list[tuple[str, str]]:
    return [(line, translation.text) for line, n_best in zip(lines, results) for translation in n_best]


def _sharpest_layer(translator: Translator, lines: Sequence[str], results: Sequence[Sequence[Translation]]) -> str:
    from regard.evaluation.alignment import sharpest_layer

    return sharpest_layer(translator, _pairs(lines, results), truncate=True)


def _alignments(
    translator: Translator, lines: Sequence[str], results: Sequence[Sequence[Translation]], layer: str
) -> list[str]:
    from regard.evaluation import align, format_links

    return [format_links(links) for links in align(translator, _pairs(lines, results), layer, truncate=True)]
