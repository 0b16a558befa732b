"""Fuzz targets: each reader of files, called with arbitrary content of one file, and requests to a server.

A target must end normally or with a RegardError. Anything else is a finding: another exception, a crash of the process,
a MemoryError below the limit on memory, a time-out, or a forbidden operation (`forbid_side_effects`).
"""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard.cli import main
from regard.data import read_documents, read_images, read_labeled_texts, read_pairs, read_squad
from regard.data.images.sets import _open_store
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.evaluation.alignment import read_links
from regard.interop import import_huggingface, import_llama2c
from regard.pipelines import ImageModel, TextEncoder, TextGenerator, load, pipeline_class
from regard.pipelines.resumable_file import ResumableFile
from regard.training import TASKS, read_toml, recipe_from_dict
from regard.training.checkpoint import (
    CheckpointStore,
    load_like,
    read_state,
    read_stored_recipe,
    restore_state,
    unique_parameters,
)
from regard.training.log import RunLog, plot_losses, read_metrics
from regard.training.pretrained_embeddings import read_word_vectors
from regard.training.run import add_shards_task
from regard.training.tasks import read_dataset, suggest_recipe
from regard.training.tasks.task import BatchShape
from tests.fuzz import engine_calls, http_requests, valid_files

MEMORY_LIMIT = 1 << 30
"""bytes that a target may allocate beyond what the process has when it starts"""


class Target(NamedTuple):
    """A reader: the valid folder that it reads, the file of it that is replaced, and further seeds."""

    write: Callable[[Path], None]
    file: str
    read: Callable[[Path], object]
    seeds: Sequence[bytes] = ()
    compiles: bool = False
    """whether it runs compiled kernels: compiling them takes longer than all other targets together"""


def _nothing(folder: Path) -> None:
    pass


def _data(file: str, read: Callable[[Path], object], *seeds: bytes) -> Target:
    """A reader of one file."""
    return Target(_nothing, file, lambda folder: read(folder / file), seeds)


def _images(file: str, *seeds: bytes) -> Target:
    return Target(
        valid_files.write_data, file, lambda folder: read_images([folder / file], size=8, on_bad="stop"), seeds
    )


def _use(pipeline: Any) -> None:
    """Run a model briefly."""
    if isinstance(pipeline, ImageModel):
        pipeline.model(torch.zeros(1, pipeline.model.config.channels, *pipeline.size))
    elif isinstance(pipeline, TextEncoder):
        pipeline.embed(["one two"])
    elif isinstance(pipeline, TextGenerator):
        pipeline.generate("one", DecodeConfig(max_len=3, method="greedy"))
    else:
        pipeline.translate(["one two"], DecodeConfig(max_len=3, beam=2))


def _load(folder: Path) -> None:
    _use(load(folder, "cpu"))


def _describe(folder: Path) -> None:
    """Load a model folder, and run the commands that print what is in it."""
    _load(folder)
    for arguments in (["info", str(folder), "--device", "cpu"], ["config", "show", str(folder)]):
        with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
            main(arguments)


def _import(folder: Path) -> None:
    _use(import_huggingface(folder))


def _import_llama2c(folder: Path) -> None:
    _use(import_llama2c(folder / "model.bin", folder / "tokenizer.bin"))


def _resume_checkpoint(folder: Path) -> None:
    """Read the newest intact checkpoint of a run as a resumed run does."""
    path = CheckpointStore(folder).find_intact()
    read_stored_recipe(folder)
    if path is None:
        return
    read_state(path)
    model = valid_files.make_generator().model
    checkpoint = load_like(path, unique_parameters(model), model.parameters())
    restore_state(checkpoint.tensors, model, torch.optim.Adam(model.parameters()), None, RegardError)


def _resume_changed_checkpoint(folder: Path) -> None:
    """The same, with checksums that match the changed file."""
    valid_files.update_checksums(folder)
    _resume_checkpoint(folder)


def _encode_shards(folder: Path) -> None:
    """Open token shards and read their batches as `regard train` does."""
    path = str(folder / "shards")
    recipe = recipe_from_dict(add_shards_task({"data": {"files": [path]}, "model": {"max_len": 16}}, [path]))
    dataset = read_dataset(recipe.task, recipe.data, quiet=True)
    suggest_recipe(recipe.task, dataset)
    dataset.describe()
    model = TASKS[recipe.task].complete_config(recipe.model, dataset, dataset.tokenizers)
    encoded = TASKS[recipe.task].encode(
        dataset,
        dataset.tokenizers,
        pipeline_class(recipe.model).special,
        recipe,
        model,
        BatchShape(64, 0, constant=False),
    )
    for batch, _ in zip(encoded.batches.epoch(0), range(20)):
        del batch


def _shard_file(task: str, name: str) -> Target:
    """A file of token shards, whose size and SHA-256 in dataset.json are adapted."""

    def read(folder: Path) -> None:
        valid_files.update_manifest(folder / "shards", name)
        _encode_shards(folder)

    return Target(valid_files.write_shards(task), f"shards/{name}", read)


def _read_parquet(file: Path) -> None:
    """All readers of tables; an error of one must not keep the others from reading the file."""
    results = []
    for read in (read_pairs, read_documents, read_labeled_texts):
        try:
            results.append(read([file]))
        except RegardError as error:
            results.append(error)
    if all(isinstance(result, RegardError) for result in results):
        raise results[0]


def _read_metrics(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    content = path.read_bytes()
    RunLog(path, 10, 1, is_silent=True)
    path.write_bytes(content)
    plot_losses(read_metrics(path), folder / "loss.png")


def _resume_output(folder: Path) -> None:
    (folder / "out.txt").unlink(missing_ok=True)
    (folder / "out.txt.partial").write_bytes(b"1\n2\n")
    with ResumableFile(folder / "out.txt", {}, overwrite=False) as file:
        file.append(b"3\n", 1, totals={"tokens": 1})


_TABLE = b'en,fr\none,un\n"two, 2",deux\n'
_OBJECTS = b'{"source": "one", "target": "un"}\n{"translation": {"source": "two", "target": "deux"}}\n'
_LABELED = b'{"text": "one", "label": "a"}\n{"text1": "one", "text2": "two", "label": 1}\n'
_SQUAD = (
    b'{"data": [{"paragraphs": [{"context": "one two", "qas": [{"id": "1", "question": "who", "answers": '
    b'[{"text": "two", "answer_start": 4}]}]}]}]}'
)
_STEP = "state/step-00000003"
_RECIPE = (
    b'task = "translate"\n[data]\nfiles = ["a.tsv"]\n[model]\nfamily = "transformer"\nwidth = 64\n[train]\nlr = 1e-3\n'
    b'steps = 10\ntime = "10m"\n[augment]\ncolor = 0.4\n[tokenizer]\nkind = "bpe"\n'
)

TARGETS: dict[str, Target] = {
    "pairs.tsv": _data(
        "pairs.tsv", lambda file: read_pairs([file]), b"en\tfr\none\tun\n", *valid_files.compressed(b"a\tb\n")
    ),
    "pairs.csv": _data("pairs.csv", lambda file: read_pairs([file]), _TABLE),
    "pairs.jsonl": _data("pairs.jsonl", lambda file: read_pairs([file]), _OBJECTS),
    "document.txt": _data(
        "document.txt", lambda file: read_documents([file]), b"one\r\ntwo\n", *valid_files.compressed(b"one")
    ),
    "documents.jsonl": _data("documents.jsonl", lambda file: read_documents([file]), b'{"text": "one"}\n'),
    "labeled.tsv": _data("labeled.tsv", lambda file: read_labeled_texts([file]), b"text\tlabel\none\ta\n"),
    "labeled.jsonl": _data("labeled.jsonl", lambda file: read_labeled_texts([file]), _LABELED),
    "squad.json": _data("squad.json", read_squad, _SQUAD),
    "vectors.txt": _data("vectors.txt", read_word_vectors, b"2 2\none 1 2\ntwo 0.5 -1e3\n", b"one 1\n"),
    "links.txt": _data("links.txt", read_links, b"0-0 1-2\n\n"),
    "image.png": _images("image.png", *valid_files.encoded_images()),
    "images.npz": _images("images.npz"),
    "images-idx3-ubyte": _images("images-idx3-ubyte"),
    "images.gz": _images("images.gz", *valid_files.compressed_arrays()),
    "images.csv": _images("images.csv", b"path,label,split\nvalid.png,a,train\n"),
    "recipe.toml": _data("recipe.toml", lambda file: recipe_from_dict(read_toml(file)), _RECIPE),
    "translator/config.json": Target(valid_files.write_translator, "config.json", _load),
    "translator/model.safetensors": Target(valid_files.write_translator, "model.safetensors", _load),
    "translator/tokenizer.json": Target(valid_files.write_unchecked_translator, "tokenizer.json", _load),
    "translator/training.json": Target(valid_files.write_translator, "training.json", _describe),
    "translator/shortlist.safetensors": Target(valid_files.write_translator, "shortlist.safetensors", _load),
    "int8/model.safetensors": Target(valid_files.write_int8, "model.safetensors", _load),
    "recurrent/config.json": Target(valid_files.write_model(valid_files.make_recurrent), "config.json", _load),
    "generator/config.json": Target(valid_files.write_model(valid_files.make_generator), "config.json", _load),
    "encoder/config.json": Target(valid_files.write_model(valid_files.make_encoder), "config.json", _load),
    "vision/config.json": Target(valid_files.write_model(valid_files.make_image_model), "config.json", _load),
    "run/metrics.jsonl": Target(valid_files.write_metrics, "metrics.jsonl", _read_metrics),
    "run/checksums.json": Target(valid_files.write_checkpoint, f"{_STEP}/checksums.json", _resume_checkpoint),
    "run/state.safetensors": Target(
        valid_files.write_checkpoint, f"{_STEP}/state.safetensors", _resume_changed_checkpoint
    ),
    "run/metadata.json": Target(
        valid_files.write_sharded_checkpoint, f"{_STEP}/metadata.json", _resume_changed_checkpoint
    ),
    "run/shard.safetensors": Target(
        valid_files.write_sharded_checkpoint,
        f"{_STEP}/shard-00001-model-00001-of-00001.safetensors",
        _resume_changed_checkpoint,
    ),
    "shards/dataset.json": Target(valid_files.write_shards("translate"), "shards/dataset.json", _encode_shards),
    "shards/stream.json": Target(valid_files.write_shards("language"), "shards/dataset.json", _encode_shards),
    "shards/ids": _shard_file("translate", "training-00000.source.bin"),
    "shards/starts": _shard_file("translate", "training.target.starts.bin"),
    "shards/stream": _shard_file("language", "training-00000.text.bin"),
    "shards/validation.jsonl": _shard_file("translate", "validation.jsonl"),
    "rows.parquet": _data("rows.parquet", _read_parquet, *valid_files.parquet_files()),
    "cache/facts.json": Target(valid_files.write_cache, "facts.json", lambda folder: _open_store(folder)),
    "cache/sizes.npy": Target(valid_files.write_cache, "sizes.npy", lambda folder: _open_store(folder)),
    "journal": Target(valid_files.write_journal, "out.txt.partial.json", _resume_output),
    **{
        f"{name}/{file}": Target(write, file, _import)
        for name, write, files in (
            ("gpt2", valid_files.write_exported(valid_files.make_gpt2), ("config.json", "model.safetensors")),
            ("llama", valid_files.write_exported(valid_files.make_llama), ("config.json", "tokenizer.json")),
            ("llama", valid_files.write_exported(valid_files.make_llama), ("tokenizer_config.json",)),
            ("bert", valid_files.write_exported(valid_files.make_encoder), ("config.json", "special_tokens_map.json")),
            ("bart", valid_files.write_exported(valid_files.make_bart), ("config.json", "generation_config.json")),
            ("t5", valid_files.write_exported(valid_files.make_t5), ("config.json",)),
            ("vit", valid_files.write_exported(valid_files.make_image_model), ("config.json",)),
            ("vit", valid_files.write_exported(valid_files.make_image_model), ("preprocessor_config.json",)),
            ("timm", valid_files.write_timm, ("config.json", "model.safetensors")),
            ("pickled", valid_files.write_pickled, ("pytorch_model.bin",)),
            ("sharded", valid_files.write_sharded, ("model.safetensors.index.json",)),
            ("sentencepiece", valid_files.write_sentencepiece_folder, ("tokenizer.model",)),
            ("wordpiece", valid_files.write_vocabulary, ("vocab.txt",)),
            ("byte-level", valid_files.write_byte_level, ("merges.txt", "vocab.json")),
        )
        for file in files
    },
    "llama2c/model.bin": Target(valid_files.write_llama2c, "model.bin", _import_llama2c),
    "llama2c/tokenizer.bin": Target(valid_files.write_llama2c, "tokenizer.bin", _import_llama2c),
    "engine": Target(engine_calls.compile_all, "call.json", engine_calls.decode_call, engine_calls.make_seeds(), True),
    "http": Target(http_requests.write_served, "request", http_requests.send_request, http_requests.make_seeds(), True),
}


def prepare(target: Target, folder: Path) -> list[bytes]:
    """Write the valid files of a target to a folder, run it on its seeds, and return them. All seeds are valid.

    Running it loads the libraries that are imported on first use.
    """
    if not target.compiles:
        sys.modules["numba"] = None  # type: ignore[assignment]
    folder.mkdir(parents=True, exist_ok=True)
    target.write(folder)
    valid = [(folder / target.file).read_bytes()] if (folder / target.file).exists() else []
    seeds = [*valid, *target.seeds]
    for seed in seeds:
        if error := run(target, folder, seed):
            raise AssertionError(error)
    return seeds


def run(target: Target, folder: Path, content: bytes) -> str:
    """Call a target with this content of its file; the message of the RegardError, or "" if it succeeds."""
    (folder / target.file).write_bytes(content)
    try:
        with torch.inference_mode():
            target.read(folder)
    except RegardError as error:
        return str(error)
    return ""


_FORBIDDEN = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "subprocess.Popen", "socket.connect")
_FORBIDDEN += ("pickle.find_class", "ctypes.dlopen")


class ForbiddenOperation(BaseException):
    """An operation that no reader may perform."""


def forbid_side_effects(folder: Path) -> None:
    """From now on, starting programs, opening sockets, loading pickled classes, and writing or removing files outside
    of the folder raise an exception. This cannot be undone."""

    def is_outside(path: object, directory: int = -1) -> bool:
        if not isinstance(path, str | bytes | Path):  # a file descriptor
            return False
        parent = os.readlink(f"/proc/self/fd/{directory}") if directory >= 0 else ""
        return not os.path.abspath(os.path.join(parent, os.fsdecode(path))).startswith(f"{folder}")

    def check(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool(flags & 3)
            is_forbidden = writes and is_outside(path) and path != os.devnull
        elif event == "os.remove":
            is_forbidden = is_outside(*args)
        elif event == "os.rename":
            is_forbidden = is_outside(args[1], args[3])
        else:
            is_forbidden = event in _FORBIDDEN
        if is_forbidden:
            raise ForbiddenOperation(f"{event}: {args}")

    sys.addaudithook(check)


def limit_memory(size: int = MEMORY_LIMIT) -> None:
    """Limit the address space of the process to its present size plus `size` bytes."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + size
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
