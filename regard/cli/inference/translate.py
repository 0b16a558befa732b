"""`regard translate`: translate lines of text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
    input_shards,
    is_stream,
    open_models,
    parse,
    print_note,
    print_or_write,
    suggest_input,
)
from regard.cli.options import Arg
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.pipelines import Translation, Translator
from regard.pipelines.files import FileSummary
from regard.pipelines.folder import is_onnx_folder
from regard.pipelines.input_items import InputItems, find_shards
from regard.pipelines.translation import Split, TranslationOptions, format_translations
from regard.pipelines.translation_files import Column

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
    split = _check_options(options)
    is_parallel, device = not is_stream(options.output), options.device if options.cluster is None else "cpu"
    translators = open_models(options.model, device, Translator, options.ensemble, parallel=is_parallel)
    first, *replicas = (translator.with_target(options.to, options.source_language) for translator in translators)
    config, limit = replace(first.decoding, **options.decode), first.max_output_len
    if options.alignments:
        from regard.evaluation.teacher_forcing import require_attention

        require_attention(first)
    if limit is not None and options.decode.get("max_len", 0) > limit:
        print_note(
            f"--max-len {config.max_len}: the length limit of the model is {limit} tokens. "
            "For longer translations, train with a larger --model.max-len."
        )
    rules: TranslationOptions = {"prefixes": options.prefix or None, "truncate": options.truncate, "split": split}
    rules |= {"required": options.require, "forbidden": options.forbid}
    unknown = UnknownCharacters(first.source_tokenizer, first.special.unk)
    done, layer = 0, None

    def check(line: str, name: str) -> None:
        first.prepare([line], config, **rules, names=[name])

    def lines(texts: list[str]) -> Iterator[str]:
        nonlocal done, layer
        request = first.prepare(texts, config, **rules, first_index=done)
        unknown.is_possible = any(unknown.unk in source for source in request.encoded.sources)
        results, column = request.run(), None
        if options.alignments:
            layer = layer or _sharpest_layer(first, texts, results)
            column = _alignments(first, texts, results, layer)
        rows = format_translations(results, config, done, scores=options.scores, column=column)
        done += len(texts)
        return (f"{row}\n" for row in rows)

    def write(source: InputItems[str] | Path, output: Path, **how: Any) -> FileSummary:
        column = None
        if options.alignments:
            layer = _alignment_layer(first, source, output, config)
            column = Column(partial(_alignments, layer=layer), {"alignments": layer})
        return first.translate_file(
            source,
            output,
            config,
            **rules,
            scores=options.scores,
            column=column,
            replicas=replicas,
            cluster=options.cluster,
            **how,
        )

    prompt = "Type lines to translate"
    print_or_write(options, "translating", prompt, lines, write, check=check, unknown=unknown, source=input_shards)
    return 0


def _check_options(options: Options) -> Split:
    """Check options before a model is loaded. Returns which lines to split into sentences."""
    if options.alignments and is_onnx_folder(options.model):
        raise RegardError(
            f"{options.model} contains ONNX graphs, whose attention cannot be recorded.",
            "Pass the model folder that they were exported from.",
        )
    for name in ("require", "alignments"):
        if getattr(options, name) and options.split == "always":
            raise RegardError(f"--{name} and --split always cannot be combined.", "Leave out --split always.")
    for name in ("prefix", "require", "forbid"):
        values = getattr(options, name)
        for text in [values] if isinstance(values, str) else values:
            check_utf8(text, f"--{name}")
    return "never" if options.require or options.alignments else options.split


def _alignment_layer(translator: Translator, source: InputItems[str] | Path, output: Path, config: DecodeConfig) -> str:
    """The sharpest cross-attention on the first lines, which is the same when a file is resumed."""
    source, _ = find_shards(source, output)[0]
    if not source.is_rereadable:
        raise RegardError("--alignments with --output cannot read standard input.", "Pass --input FILE.")
    lines = list(islice(source, BLOCK_SIZE))
    results = translator.translate(lines, config, truncate=True)
    return _sharpest_layer(translator, lines, results)


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
