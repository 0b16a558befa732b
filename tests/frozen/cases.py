"""The frozen values: what every later commit must still compute. Written by `python -m tests.frozen`.

Models are built from their configs and the weights of `models.py`; everything else goes through public calls.
"""

import base64
import dataclasses
import functools
import json
import math
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.numpy import load_file

import regard
from regard import DecodeConfig
from regard.cli.demo import demo_recipe
from regard.data import Question, SpecialTokens, Tokenizer, read_pairs
from regard.data.text.languages import LanguagePair
from regard.interop import export_argos, export_ctranslate2, export_huggingface, export_onnx
from regard.models import BertConfig, GPTConfig, TransformerConfig, ViTConfig
from regard.pipelines import ImageModel, TextEncoder, TextGenerator, Translator
from tests.frozen.models import (
    ENCODERS,
    GENERATORS,
    IMAGE_MODELS,
    IMPORTED,
    TRANSLATORS,
    WORDS,
    current_name,
    frozen_model,
    frozen_shapes,
    import_model,
    make_pipeline,
)
from tests.training.toy_images import write
from tests.training.toy_tasks import ANIMALS, sentences, write_squad, write_text

# A case computes its values from an empty folder; cases of one group are in one file.
Case = Callable[[Path], Any]


def make_lines(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 8))) for _ in range(count)]


LINES, OTHER_LINES, MANY_LINES = make_lines(5, 1), make_lines(5, 2), make_lines(24, 3)
IMAGES = list(np.random.RandomState(0).randint(0, 256, (3, 12, 16, 3), dtype=np.uint8))


def fingerprint(x: np.ndarray) -> list:
    """The shape of an array and two norms; the second depends on the order and the signs of its numbers."""
    flat = np.asarray(x, np.float64).ravel()
    return [list(np.shape(x)), np.linalg.norm(flat), np.linalg.norm(flat + np.cos(np.arange(flat.size)))]


# -- decoding ---------------------------------------------------------------------------------------------------------

SUPPRESSED = (*((token,) for token in range(5, 46, 4)), *((token, token) for token in range(46)))
BEAM = {"beam": 4, "n_best": 3, "max_len": 12}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"method": "greedy", "max_len": 12},
    "beam": BEAM,
    "length penalty": BEAM | {"length_penalty": 0.4},
    "no length penalty": BEAM | {"length_penalty": 0.0},
    "no early stopping": BEAM | {"early_stopping": False},
    "patience": BEAM | {"patience": 2.0},
    "coverage": BEAM | {"coverage_penalty": 0.3},
    "lengths": BEAM | {"min_len": 4, "max_len": 6},
    "lengths, greedy": {"method": "greedy", "min_len": 5, "max_len": 14, "max_ratio": 1.0, "max_extra": 2},
    "repetition penalty": BEAM | {"repetition_penalty": 1.5},
    "no repeated bigram": BEAM | {"no_repeat_ngram_size": 2},
    "suppressed": BEAM | {"suppress_sequences": SUPPRESSED, "begin_suppress_tokens": tuple(range(4, 46, 2))},
    "no unknown": BEAM | {"unknown": False},
    "plain": BEAM | {"engine": "plain"},
    "sample": {"method": "sample", "n_best": 3, "max_len": 12, "seed": 5},
    "top-k sample": {"method": "sample", "max_len": 12, "top_k": 5, "temperature": 0.7},
    "top-p sample": {"method": "sample", "n_best": 2, "max_len": 12, "top_p": 0.8, "repetition_penalty": 1.2},
}
RECORDED = ("greedy", "beam", "lengths", "suppressed", "top-k sample", "top-p sample")
REQUIRED = {"required": [WORDS[3], f"{WORDS[5]} {WORDS[8]}"]}
FORBIDDEN = {"forbidden": [WORDS[i] for i in range(2, 43, 4)]}


def decode(pipeline: Any, lines: list[str], options: dict[str, Any], **others: Any) -> list:
    """The hypotheses of every line: text, ids, score and log-probabilities of the tokens; and the histories, if any."""
    run = pipeline.translate if isinstance(pipeline, Translator) else pipeline.generate
    results = run(lines, DecodeConfig(**options), **others)
    hypotheses = [
        [[one.text, one.hypothesis.ids, one.score, one.hypothesis.token_logprobs] for one in n] for n in results
    ]
    return [hypotheses, [history(n_best[0].history) for n_best in results]] if "history" in others else hypotheses


def history(recorded: Any) -> list:
    """A search history as nested lists."""
    steps = [
        [
            step.parents,
            step.tokens,
            step.logprobs,
            step.scores,
            step.statuses,
            step.reasons,
            [list(x) for x in step.refused],
        ]
        for step in recorded.steps
    ]
    return [recorded.stopped, steps]


def decode_with_ends(name: str) -> list:
    """With several end tokens."""
    special = SpecialTokens(**({"end": 3} if name in TRANSLATORS else {"begin": 2}), other_eos=(9, 17, 25, 40))
    pipeline = make_pipeline(name, special=special)
    return [decode(pipeline, LINES, OPTIONS["greedy"]), decode(pipeline, LINES, BEAM)]


def decode_ensemble(folder: Path) -> list:
    for name in ("transformer", "seq2seq, general"):
        make_pipeline(name).save(folder / name)
    ensemble = regard.load([folder / "transformer", folder / "seq2seq, general"], "cpu")
    return [decode(ensemble, LINES, OPTIONS["greedy"]), decode(ensemble, LINES, BEAM)]


def decode_with_shortlist(name: str) -> list:
    translator = dataclasses.replace(make_pipeline(name))
    pairs = [*zip(MANY_LINES, make_lines(24, 4))]
    translator.learn_shortlist(pairs, per_token=4, frequent=8)
    return [decode(translator, LINES, options | {"shortlist": True}) for options in (OPTIONS["greedy"], BEAM)]


def searches() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name in ("transformer", "seq2seq, general", "gpt"):
        is_translator = name in TRANSLATORS
        for option, values in OPTIONS.items():
            if option != "coverage" or is_translator:
                cases[f"{name}: {option}"] = lambda _, name=name, values=values: decode(
                    make_pipeline(name), LINES, values
                )
        variants: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "required": (BEAM | {"beam": 8}, REQUIRED),
            "forbidden": (BEAM, FORBIDDEN),
            "forbidden, greedy": (OPTIONS["greedy"], FORBIDDEN),
            "required and forbidden": (BEAM | {"beam": 8}, REQUIRED | FORBIDDEN),
            **{f"history, {option}": (OPTIONS[option], {"history": True}) for option in RECORDED},
            "history, required": (BEAM, REQUIRED | {"history": True}),
        }
        if is_translator:
            prefixes = ["", *OTHER_LINES[1:]]
            variants["prefixes"] = BEAM, {"prefixes": prefixes}
            variants["prefixes, sample"] = OPTIONS["sample"], {"prefixes": prefixes}
            cases[f"{name}: shortlist"] = lambda _, name=name: decode_with_shortlist(name)
        for variant, (options, others) in variants.items():
            lines = LINES[:2] if "history" in others else LINES
            cases[f"{name}: {variant}"] = lambda _, name=name, lines=lines, options=options, others=others: decode(
                make_pipeline(name), lines, options, **others
            )
        cases[f"{name}: several end tokens"] = lambda _, name=name: decode_with_ends(name)
        for option in ("greedy", "beam", "sample"):  # enough for the compiled engine
            cases[f"{name}: many lines, {option}"] = lambda _, name=name, option=option: decode(
                make_pipeline(name), MANY_LINES, OPTIONS[option] | {"n_best": 1}
            )
    return cases | {"ensemble": decode_ensemble}


def run_text_model(pipeline: Any) -> list:
    """Scores of given texts, and outputs of greedy and beam search."""
    if isinstance(pipeline, Translator):
        scores = pipeline.score([*zip(LINES, OTHER_LINES)])
    else:
        scores = pipeline.score(LINES)
    searched = [decode(pipeline, LINES[:3], OPTIONS[method]) for method in ("greedy", "beam")]
    return [[one.logprob for one in scores], *searched]


def run_encoder(pipeline: TextEncoder, words: list[str] = WORDS) -> list:
    """Embeddings, and the output of the head."""
    lines = [" ".join(words[WORDS.index(word)] for word in line.split()) for line in LINES]
    results = [fingerprint(pipeline.embed(lines))]
    match pipeline.model.config.head:
        case "mask":
            results.append(pipeline.fill([f"{words[4]} <mask> {words[9]}"]))
        case "classify":
            results.append([[one.label, one.probabilities] for one in pipeline.classify(lines)])
        case "tag":
            results.append([[[one.text, one.tag, one.probability] for one in line] for line in pipeline.tag(lines)])
        case "answer":
            results.append(pipeline.answer([Question("1", LINES[0], line) for line in OTHER_LINES]))
    return results


def run_image_model(pipeline: ImageModel) -> list:
    if pipeline.model.config.head == "segment":
        return [mask.tolist() for mask in pipeline.segment(IMAGES)]
    return [[one.label, one.probabilities] for one in pipeline.classify(IMAGES)]


def run_imported(name: str, folder: Path) -> list:
    pipeline = import_model(name, folder / name)
    if isinstance(pipeline, TextEncoder):
        return run_encoder(pipeline, [f"w{i}" for i in range(5, 48)])
    return run_text_model(pipeline)


def models() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for names, run in (
        ([*TRANSLATORS, *GENERATORS], run_text_model),
        (ENCODERS, run_encoder),
        (IMAGE_MODELS, run_image_model),
    ):
        cases |= {name: lambda _, name=name, run=run: run(make_pipeline(name)) for name in names}
    return cases | {name: functools.partial(run_imported, name) for name in IMPORTED}


# -- training ---------------------------------------------------------------------------------------------------------

TRAIN = dict(steps=6, batch_tokens=256, batch_images=16, warmup=2, validate_every=3, log_every=1, workers=1)
TEXT = dict(width=16, heads=2, feedforward=24, dropout=0.0, max_len=40)


def text_folder(kind: Any, config: type, key: str, texts: list[str], folder: Path, **fields: Any) -> Path:
    """A model folder with frozen weights and a tokenizer of these texts, from which training starts."""
    tokenizer = Tokenizer.train(texts, "word", mask=kind is TextEncoder)
    size = tokenizer.vocab_size
    vocab = dict(source_vocab=size, target_vocab=size, shared_vocab=True) if kind is Translator else dict(vocab=size)
    layers = dict(encoder_layers=1, decoder_layers=1) if kind is Translator else dict(layers=1)
    model = frozen_model(f"training, {key}", config(**TEXT, **layers, **vocab, **fields), scale=0.2)
    kind(model, *[tokenizer] * (2 if kind is Translator else 1)).save(folder)
    return folder


def image_folder(key: str, folder: Path, **fields: Any) -> Path:
    sizes = dict(width=16, heads=2, layers=1, feedforward=24, patch=4, image_height=12, image_width=12, pooling="mean")
    ImageModel(frozen_model(f"training, {key}", ViTConfig(**(sizes | fields)), scale=0.2)).save(folder)
    return folder


def run_training(task: str, folder: Path, files: Any, **sections: Any) -> list:
    """The losses of a short run, and the validation scores after it. `folder/start` has the model to train."""
    recipe = regard.Recipe().override(task=task, train=TRAIN | {"device": "cpu"}, data={"cache": str(folder / "cache")})
    recipe = recipe.override(**sections)
    pipeline = regard.train(files, folder / "out", recipe=recipe, start_from=folder / "start", quiet=True)
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if line["kind"] == "train"]
    return [losses, pipeline.training["validation"]]


def train_text(task: str, folder: Path) -> list:
    texts = sentences(100)
    if task == "translate":
        texts = [side for pair in read_pairs(["phrasebook"])[:200] for side in pair]
        text_folder(Translator, TransformerConfig, task, texts, folder / "start")
        return run_training(task, folder, "phrasebook", data={"limit": 200})
    if task == "text2text":
        upper = [f"{text}\t{text.upper()}" for text in texts]
        files = [
            write_text(folder / "same.tsv", [f"{text}\t{text}" for text in texts]),
            write_text(folder / "u.tsv", upper),
        ]
        texts = [*texts, *(text.upper() for text in texts), "same: loud: "]
        text_folder(Translator, TransformerConfig, task, texts, folder / "start")
        return run_training(task, folder, files, data={"prefixes": ("same: ", "loud: ")})
    if task == "language":
        text_folder(TextGenerator, GPTConfig, task, texts, folder / "start")
        return run_training(task, folder, write_text(folder / "text.txt", texts))
    fields: dict[str, Any] = {}
    if task == "mask":
        file = write_text(folder / "lines.txt", texts)
    elif task == "classify":
        lines = [f"{text}\t{'birds' if 'hen' in text or 'owl' in text else 'others'}" for text in texts]
        file = write_text(folder / "labeled.tsv", lines)
        fields = {"labels": ("birds", "others"), "pooler": "tanh"}
    elif task == "answer":
        file = write_squad(folder / "squad.json", [("who", text, text.split()[-1]) for text in texts])
        texts = ["who", *texts]
    else:
        rows = [[f"{word}\t{'B-ANIMAL' if word in ANIMALS else 'O'}" for word in text.split()] for text in texts]
        file = write_text(folder / "tagged.tsv", [line for row in rows for line in (*row, "")])
        fields = {"labels": ("B-ANIMAL", "O")}
    text_folder(TextEncoder, BertConfig, task, texts, folder / "start", head=task, **fields)
    return run_training(task, folder, file)


def train_images(task: str, folder: Path) -> list:
    head = {"classify-images": "classify", "segment": "segment", "mask-images": "pixels"}[task]
    labels = {} if head == "pixels" else {"labels": ("first", "second", "third")[: 3 - (head == "segment")]}
    image_folder(task, folder / "start", head=head, decoder_width=32, decoder_layers=1, **labels)
    return run_training(task, folder, write(folder / "train.npz", 60))


def train_demo(folder: Path) -> list:
    """The recipe of the demo, shortened: its losses, and its weights by the names at the time of freezing."""
    tokenizers = [Tokenizer.train(side, "word") for side in zip(*read_pairs(["phrasebook"])[:2000])]
    recipe = demo_recipe()
    sizes = zip(("source_vocab", "target_vocab"), tokenizers)
    config = recipe.override().model
    config = type(config)(**(vars(config) | {name: tokenizer.vocab_size for name, tokenizer in sizes}))
    Translator(frozen_model("demo", config, scale=0.1), *tokenizers).save(folder / "start")
    short = {"steps": 8, "validate_every": 8, "log_every": 1, "warmup": 4, "workers": 1, "keep_every": 0}
    recipe = recipe.override(data={"limit": 2000}, train=short)
    trained = regard.train(None, folder / "out", recipe=recipe, start_from=folder / "start", quiet=True)
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if line["kind"] == "train"]
    weights = dict(trained.model.named_parameters())
    # Softmax cancels the biases of keys: their gradients are rounding errors, which Adam scales up.
    names = [old for old in frozen_shapes()["demo"] if not old.endswith("key_value.bias")]
    return [losses, {old: fingerprint(weights[current_name(old)].detach().numpy()) for old in names}]


TEXT_TASKS = ("translate", "text2text", "language", "mask", "classify", "answer", "tag")
IMAGE_TASKS = ("classify-images", "segment", "mask-images")


def trainings() -> dict[str, Case]:
    return {
        **{task: functools.partial(train_text, task) for task in TEXT_TASKS},
        **{task: functools.partial(train_images, task) for task in IMAGE_TASKS},
        "demo": train_demo,
    }


# -- files ------------------------------------------------------------------------------------------------------------


def read_exported(folder: Path) -> dict[str, Any]:
    """The values in the files of an export; tokenizers and vocabularies by their sizes."""
    values: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            values[name] = {key: fingerprint(x) for key, x in sorted(load_file(path).items())}
        elif path.name == "model.bin":
            values[name] = {key: fingerprint(x) for key, x in sorted(read_ctranslate2(path).items())}
        elif path.suffix == ".onnx":
            values[name] = read_onnx(path)
        elif path.suffix == ".json":
            table = json.loads(path.read_text(encoding="utf-8"))
            if "family" in table:  # a config of Regard, whose fields may be renamed
                values[name] = table["family"]
            else:
                is_config = isinstance(table, dict) and "tokenizer" not in name
                values[name] = {k: v for k, v in table.items() if "version" not in k} if is_config else len(table)
        elif path.suffix == ".argosmodel":
            with zipfile.ZipFile(path) as archive:
                archive.extractall(folder / "argos")
            values[name] = read_exported(folder / "argos")
    return values


def read_ctranslate2(path: Path) -> dict[str, np.ndarray]:
    """The variables of a model.bin of CTranslate2, format version 6."""
    data, at = path.read_bytes(), 0

    def take(form: str) -> Any:
        nonlocal at
        values = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(f"<{form}")
        return values[0] if len(values) == 1 else values

    def text() -> str:
        return take(f"{take('H')}s").rstrip(b"\0").decode()

    _, _, _, count = take("I"), text(), take("I"), take("I")
    variables = {}
    for _ in range(count):
        name, rank = text(), take("B")
        shape = [take("I") for _ in range(rank)]
        kind, size = take("B"), take("I")
        dtype = {0: "<f4", 1: "i1", 2: "<i2", 3: "<i4", 4: "<f2"}[kind]
        variables[name] = np.frombuffer(take(f"{size}s"), dtype).reshape(shape)
    return variables


def read_onnx(path: Path) -> dict[str, Any]:
    """Inputs and outputs of a graph, and its constant tensors of more than one dimension, by size."""
    import onnx

    graph = onnx.load(path).graph
    tensors = [onnx.numpy_helper.to_array(x) for x in graph.initializer]
    found = [fingerprint(x) for x in tensors if x.ndim > 1 and x.dtype == np.float32]
    found.sort(key=str)
    return {"inputs": [x.name for x in graph.input], "outputs": [x.name for x in graph.output], "tensors": found}


def export(write_files: Callable[[Any, Path], Any], name: str, folder: Path) -> dict[str, Any]:
    write_files(make_pipeline(name), folder / "out")
    return read_exported(folder / "out")


def export_for_argos(folder: Path) -> dict[str, Any]:
    translator = make_pipeline("transformer", language_pairs=(LanguagePair("en", "fr"),))
    (folder / "out").mkdir()
    export_argos(translator, folder / "out" / "model.argosmodel")
    return read_exported(folder / "out")


EXPORTS: dict[str, tuple[Callable[[Any, Path], Any], tuple[str, ...]]] = {
    "Hugging Face": (
        export_huggingface,
        (
            "transformer, BART",
            "transformer, T5",
            "gpt, Llama",
            "gpt, GPT-2",
            "bert, mask",
            "bert, classify",
            "vit, classify",
        ),
    ),
    "CTranslate2": (export_ctranslate2, ("transformer", "transformer, T5", "gpt, Llama", "gpt, GPT-2", "bert, none")),
    "ONNX": (export_onnx, ("transformer", "seq2seq, general", "gpt", "bert, classify", "vit, classify")),
}


def exports() -> dict[str, Case]:
    cases: dict[str, Case] = {"Argos": export_for_argos}
    for form, (write_files, names) in EXPORTS.items():
        cases |= {f"{form}: {name}": functools.partial(export, write_files, name) for name in names}
    return cases


# -- pages ------------------------------------------------------------------------------------------------------------


def look_at(name: str, folder: Path) -> dict[str, Any]:
    """The attention maps of a look, and the arrays in its page: q, k, output, the model."""
    inputs: list[Any] = [LINES[0]]
    if name in IMAGE_MODELS:
        inputs = [Image.fromarray(IMAGES[0])]
    elif name in TRANSLATORS:
        inputs.append(OTHER_LINES[0])
    looked = regard.look(make_pipeline(name), *inputs)
    looked.save(folder / "page.html")
    maps = {key: fingerprint(one.weights) for key, one in looked.maps.items()}
    return {"maps": maps} | read_page((folder / "page.html").read_text(encoding="utf-8"))


def read_page(page: str) -> dict[str, Any]:
    scripts = dict(re.findall(r'<script type="[^"]*" id="([\w-]+)">(.*?)</script>', page, re.S))
    scene = json.loads(scripts["scene"])

    def resolve(header: Any) -> Any:
        """The header with the arrays in the places that refer to them."""
        if isinstance(header, dict) and header.keys() == {"at", "shape", "type"}:
            raw = base64.b64decode(scripts[f"blob-{header['at']}"])
            return fingerprint(np.frombuffer(raw, header["type"]).reshape(header["shape"]))
        if isinstance(header, dict):
            return {key: resolve(value) for key, value in header.items()}
        return [resolve(value) for value in header] if isinstance(header, list) else header

    values = {key: resolve(scene[key]) for key in ("attentions", "output", "image") if scene[key] is not None}
    if "model-header" in scripts:
        header = json.loads(zlib.decompress(base64.b64decode(scripts["model-header"])))
        weights = base64.b64decode(scripts["model-weights"])
        tensors = (np.frombuffer(weights, one["type"], math.prod(one["shape"]), one["at"]) for one in header["tensors"])
        found = [fingerprint(x) for x in tensors if x.size > 16]
        values["model"] = sorted(found, key=str)
    return values


LOOKS = ("transformer", "seq2seq, general", "gpt", "bert, classify", "vit, classify")
CASES: dict[str, dict[str, Case]] = {
    "search": searches(),
    "models": models(),
    "training": trainings(),
    "exports": exports(),
    "pages": {name: functools.partial(look_at, name) for name in LOOKS},
}


def compute(group: str, name: str, folder: Path) -> Any:
    """The values of a case as JSON, numbers rounded to seven digits; on one thread, as sums depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return rounded(CASES[group][name](folder))
    finally:
        torch.set_num_threads(threads)


def rounded(values: Any) -> Any:
    if isinstance(values, dict):
        return {str(key): rounded(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [rounded(value) for value in values]
    return float(f"{values:.7g}") if isinstance(values, float) else values
