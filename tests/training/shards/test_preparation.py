"""`regard prepare` and training on its shards: the same batches and weights as training on the files."""

import errno
import gzip
import io
import json
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import regard
from regard.data import read_pairs
from regard.data.text import tokenizer
from regard.errors import RegardError
from regard.training import DataConfig, read_dataset
from regard.training.shards import dataset as shard_dataset
from regard.training.shards import encoder, preparation, row_file
from regard.training.shards.dataset import open_shards
from regard.training.shards.preparation import LOCK, check_shards, prepare
from tests.training.helpers import bit_equal, interrupt_and_resume, saved_tensors

LONG = "a very long sentence " * 30
PAIRS = read_pairs(["phrasebook"])[:240]
TINY = {
    "translate": {"width": 16, "heads": 2, "feedforward": 32, "encoder_layers": 1, "decoder_layers": 1, "max_len": 60},
    "language": {"width": 16, "heads": 2, "feedforward": 32, "layers": 1, "max_len": 32},
    "mask": {"width": 16, "heads": 2, "feedforward": 32, "layers": 1, "max_len": 32},
}
OPTIONS = dict(steps=12, batch_tokens=256, warmup=3, validate_every=6, save_every=4, log_every=2, workers=1, quiet=True)


def write_pairs(path: Path, pairs) -> Path:
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Files with duplicates, empty sides, pairs that are too long for the model, and long and short lines."""
    folder = tmp_path_factory.mktemp("corpus")
    extra = [PAIRS[3], ("A dog.", ""), (LONG, LONG), PAIRS[7]]
    write_pairs(folder / "train.tsv", [*PAIRS[:120], *extra, *PAIRS[120:200]])
    write_pairs(folder / "val.tsv", PAIRS[200:])
    text = "\n".join(f"{source} {number}" for number, (source, _) in enumerate(PAIRS * 4))
    (folder / "train.txt").write_text(text + "\n\n" + LONG, encoding="utf-8")
    (folder / "val.txt").write_text("\n".join(source for source, _ in PAIRS[200:]), encoding="utf-8")
    return folder


@pytest.fixture
def small_shards(monkeypatch):
    """Several shards and blocks, although the corpus is small."""
    monkeypatch.setattr(encoder, "SHARD_BYTES", 3000)
    monkeypatch.setattr(row_file, "BLOCK_ROWS", 16)
    monkeypatch.setattr(tokenizer, "PART_CHARS", 1000)


def prepare_task(task: str, corpus: Path, out: Path, **options):
    suffix = "tsv" if task == "translate" else "txt"
    tokenizer = {"kind": {"translate": "bpe", "mask": "bpe", "language": "char"}[task], "vocab_size": 150}
    if task != "language":  # which splits off the last tenth in both cases
        options["validation"] = corpus / f"val.{suffix}"
    return prepare(corpus / f"train.{suffix}", out, task=task, tokenizer=tokenizer, quiet=True, **options)


@pytest.mark.parametrize("task", TINY)
def test_shards_train_like_the_files(task, corpus, tmp_path, small_shards, monkeypatch):
    """Also across an interruption: the resumed run on shards has the weights of the run on files, bit for bit."""
    dataset = prepare_task(task, corpus, tmp_path / "shards")
    assert dataset.training.manifest.shards > 3
    settings = dict(model=TINY[task], **OPTIONS)
    suffix = "tsv" if task == "translate" else "txt"
    options = {} if task == "language" else {"validation": [str(corpus / f"val.{suffix}")]}
    options["tokenizer"] = {"kind": dataset.tokenizer_config.kind, "vocab_size": 150}
    on_files = regard.train(corpus / f"train.{suffix}", tmp_path / "files", task=task, **options, **settings)
    interrupt_and_resume(monkeypatch, lambda: regard.train(tmp_path / "shards", tmp_path / "model", **settings))
    assert bit_equal(saved_tensors(tmp_path / "files"), saved_tensors(tmp_path / "model"))
    on_shards = regard.load(tmp_path / "model")
    assert on_shards.tokenizers == on_files.tokenizers
    # all else was chosen from the same data
    recipes = [folder.training["recipe"] for folder in (on_files, on_shards)]
    assert all(recipe.pop("data") for recipe in recipes)
    assert recipes[0] == recipes[1]


@pytest.fixture(scope="module")
def shards(corpus, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "shards"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "SHARD_BYTES", 3000)
        prepare_task("translate", corpus, out)
    return out


def test_encoder_processes_write_the_same_shards(corpus, shards, tmp_path, small_shards, monkeypatch):
    monkeypatch.setattr(encoder, "_count_cores", lambda: 2)
    prepare_task("translate", corpus, tmp_path / "parallel")
    one, two = ((folder / "dataset.json").read_text() for folder in (shards, tmp_path / "parallel"))
    assert one == two
    check_shards(tmp_path / "parallel", quiet=True)


def test_batches_are_pickled_by_path(shards):
    """Worker processes open the files; what is sent to them does not grow with the corpus."""
    from regard.data import PairBatches

    dataset = open_shards(shards)
    source, target, too_long = dataset.pairs(60)
    assert too_long == 1  # rows are selected
    batches = PairBatches(source, target, budget=256, max_len=60, seed=1)
    whole = PairBatches(dataset.sequences(0), dataset.sequences(1), budget=256, max_len=60, seed=1)
    data = pickle.dumps(batches)
    assert len(pickle.dumps(whole)) < 3000
    for one, other in zip(pickle.loads(data).epoch(1, 2), batches.epoch(1, 2), strict=True):
        assert one.inputs[0].ids.equal(other.inputs[0].ids)
        assert one.targets.equal(other.targets)


def test_masked_batches_are_pickled_by_path(corpus, tmp_path):
    from regard.data.text.special_tokens import ENCODER_TOKENS
    from regard.training.tasks.mask import MaskedBatches

    dataset = prepare_task("mask", corpus, tmp_path / "shards")
    batches = MaskedBatches(dataset.sequences(0), vocab=150, special=ENCODER_TOKENS, budget=256, max_len=32, seed=0)
    data = pickle.dumps(batches)
    assert len(data) < 3000
    for one, other in zip(pickle.loads(data).epoch(0), batches.epoch(0), strict=True):
        assert one.inputs[0].ids.equal(other.inputs[0].ids)


# -- validation split --------------------------------------------------------------------------------------------------


def test_split_is_by_content(tmp_path):
    """Independent of the order of the input; pairs with the same source are in one split; duplicates are dropped."""
    pairs = [(f"source {i // 3}", f"target {i}") for i in range(600)]
    shuffled = [*pairs, *pairs[:50]]
    random.Random(0).shuffle(shuffled)
    one = prepare(iter(pairs), tmp_path / "one", quiet=True)
    other = prepare(iter(shuffled), tmp_path / "other", quiet=True)
    assert other.dropped == "50 duplicate"
    assert set(one.validation) == set(other.validation)
    assert 50 <= len(one.validation) <= 60
    assert len(one.training) + len(one.validation) == 600
    for source in {source for source, _ in one.validation}:
        assert sum(row[0] == source for row in one.validation) == 3
    trained = {tuple(pair) for pair in one.sample}
    assert trained == set(pairs) - set(one.validation)


@pytest.mark.parametrize("texts", [["0123456789" * 5], ["a b c " * 9, "d " * 9, "e f " * 5]])
def test_few_documents_are_split_as_in_memory(texts, tmp_path):
    for index, text in enumerate(texts):
        (tmp_path / f"{index}.txt").write_text(text)
    files = [str(tmp_path / f"{index}.txt") for index in range(len(texts))]
    dataset = prepare(files, tmp_path / "shards", task="language", quiet=True)
    expected = read_dataset("language", DataConfig(files=tuple(files)))
    assert dataset.validation == expected.validation
    [tokenizer, _] = dataset.tokenizers
    stream = dataset.stream(dataset.training.manifest.special)[:]
    assert tokenizer.decode(stream) == "".join(expected.training)
    assert (np.asarray(stream) == 3).sum() == len(expected.training)  # <eos> after each document


def test_many_documents_are_split_by_content(tmp_path):
    texts = [f"document number {i} {'word ' * (i % 7)}" for i in range(300)]
    dataset = prepare(iter([*texts, *texts[:20]]), tmp_path / "shards", task="language", quiet=True)
    held_out = set(dataset.validation)
    total = sum(map(len, texts))
    assert 0.05 * total < sum(map(len, dataset.validation)) <= 0.11 * total
    trained = dataset.tokenizers[0].decode(dataset.stream(dataset.training.manifest.special)[:])
    assert not any(text in trained for text in held_out if not any(text in other for other in set(texts) - {text}))
    assert len(dataset.training) + len(dataset.validation) == 320


def test_duplicates_are_found_across_buckets(tmp_path, monkeypatch):
    from regard.training.shards import preparation

    monkeypatch.setattr(preparation, "BUCKET_ROWS", 10)
    numbers = np.random.default_rng(0).integers(0, 60, 200).tolist()
    with row_file.RowWriter(tmp_path, sides=1) as writer:
        for number in numbers:
            writer.append([str(number)])
    found = preparation.find_duplicates(row_file.RowReader(tmp_path, sides=1))
    assert found.tolist() == [number in numbers[:index] for index, number in enumerate(numbers)]


# -- input -------------------------------------------------------------------------------------------------------------


def test_formats_give_the_same_shards(tmp_path, monkeypatch):
    pairs = PAIRS[:60]
    lines = [f"{source}\t{target}\n" for source, target in pairs]
    (tmp_path / "pairs.tsv.gz").write_bytes(gzip.compress("".join(lines).encode()))
    for side, name in enumerate(("train.en", "train.fr")):
        (tmp_path / name).write_text("".join(pair[side] + "\n" for pair in pairs), encoding="utf-8")
    rows = [json.dumps({"translation": {"en": source, "fr": target}}) + "\n" for source, target in pairs]
    (tmp_path / "pairs.jsonl").write_text("".join(rows))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("".join(lines).encode())))
    inputs = {
        "gz": (tmp_path / "pairs.tsv.gz", ()),
        "two": ([tmp_path / "train.en", tmp_path / "train.fr"], ()),
        "json": (tmp_path / "pairs.jsonl", ("en", "fr")),
        "stdin": ("-", ()),
        "rows": (({"en": source, "fr": target} for source, target in pairs), ("en", "fr")),
    }
    digests = {}
    for name, (data, columns) in inputs.items():
        dataset = prepare(data, tmp_path / name, columns=columns, tokenizer={"vocab_size": 100}, quiet=True)
        digests[name] = dataset.fingerprints
    assert len({json.dumps(digest) for digest in digests.values()}) == 1


def test_tokenizer_of_another_folder(shards, tmp_path):
    prepared = open_shards(shards)
    dataset = prepare(iter(PAIRS), tmp_path / "shards", tokenizer=shards, quiet=True)
    assert dataset.tokenizers == prepared.tokenizers
    model = regard.train(shards, tmp_path / "model", model=TINY["translate"], **OPTIONS | {"steps": 1})
    again = prepare(iter(PAIRS), tmp_path / "again", tokenizer=tmp_path / "model", quiet=True)
    tuned = regard.train(tmp_path / "again", tmp_path / "tuned", start_from=tmp_path / "model", steps=1, quiet=True)
    assert tuned.tokenizers == model.tokenizers == again.tokenizers
    prepare(iter(PAIRS), tmp_path / "other", tokenizer={"vocab_size": 99}, quiet=True)
    with pytest.raises(RegardError, match="made with other tokenizers than those of the model to fine-tune"):
        regard.train(tmp_path / "other", tmp_path / "no", start_from=tmp_path / "model", steps=1, quiet=True)


@pytest.mark.parametrize("task", ["translate", "language", "mask"])
def test_limit_reads_the_first_examples(task, tmp_path):
    texts = [f"{source} {number}" for number, (source, _) in enumerate(PAIRS)]
    rows = PAIRS if task == "translate" else texts
    prepare(iter(rows[:20]), tmp_path / "first", task=task, quiet=True)
    prepare(iter(rows), tmp_path / "limited", task=task, limit=20, quiet=True)
    for file in (tmp_path / "first").iterdir():
        assert (tmp_path / "limited" / file.name).read_bytes() == file.read_bytes(), file.name


def test_text2text_prefixes(tmp_path):
    files = [write_pairs(tmp_path / f"{name}.tsv", PAIRS[:30]) for name in ("a", "b")]
    dataset = prepare(files, tmp_path / "shards", task="text2text", prefixes=["one: ", "two: "], quiet=True)
    sources = [source for source, _ in (*dataset.sample, *dataset.validation)]
    assert sorted({source.split(" ")[0] for source in sources}) == ["one:", "two:"]
    assert len(sources) == 60


def test_tokenizer_is_trained_on_a_sample_of_a_large_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "TOKENIZER_BYTES", 2000)
    seen = []
    train = preparation.TASKS["translate"].make_tokenizers

    def spy(dataset, config):
        seen.extend(dataset.training)
        return train(dataset, config)

    monkeypatch.setattr(preparation.TASKS["translate"], "make_tokenizers", spy)
    dataset = prepare(iter(PAIRS), tmp_path / "shards", quiet=True)
    assert 1000 < sum(len(side) for pair in seen for side in pair) < 3500
    assert set(seen).isdisjoint(dataset.validation)


# -- faults ------------------------------------------------------------------------------------------------------------


def test_an_error_leaves_nothing(tmp_path):
    file = tmp_path / "pairs.tsv"
    file.write_bytes(b"A cat.\tUn chat.\nA dog.\t\xff\n")
    with pytest.raises(RegardError, match=r"pairs\.tsv, line 2: not UTF-8"):
        prepare(file, tmp_path / "shards", quiet=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pairs.tsv"]
    with pytest.raises(RegardError, match="There is no file"):
        prepare(tmp_path / "missing.tsv", tmp_path / "shards", quiet=True)
    with pytest.raises(RegardError, match=r"The task classify does not support token shards\. Choose from: translate"):
        prepare(file, tmp_path / "shards", task="classify", quiet=True)


@pytest.mark.parametrize("place", ["append", "write", "save"])
def test_full_disk(place, tmp_path, monkeypatch):
    def fail(*_args, **_options):
        raise OSError(errno.ENOSPC, "No space left on device")

    owners = {"append": row_file.RowWriter, "write": encoder._ShardWriter, "save": shard_dataset.Manifest}
    monkeypatch.setattr(owners[place], place, fail)
    with pytest.raises(RegardError, match=r"shards: no space left on the device; .* Free some space"):
        prepare(iter(PAIRS), tmp_path / "shards", quiet=True)
    assert not list(tmp_path.iterdir())


def test_killed_preparation_leaves_no_complete_folder(tmp_path):
    """The next call replaces what a killed one left; meanwhile, training on it is an error."""
    program = "import sys, regard; regard.prepare('-', sys.argv[1], quiet=True)"
    arguments = [sys.executable, "-c", program, str(tmp_path / "shards")]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE)
    part = tmp_path / "shards.part"
    try:
        process.stdin.write(b"A cat.\tUn chat.\n")
        process.stdin.flush()
        while not (part / row_file.TEXT).exists():
            assert process.poll() is None
            time.sleep(0.05)
        with pytest.raises(RegardError, match=r"shards\.part is in use by another regard prepare"):
            prepare(iter(PAIRS), tmp_path / "shards", quiet=True)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    assert (part / LOCK).exists()
    assert not (tmp_path / "shards").exists()
    with pytest.raises(RegardError, match=r"shards\.part is a folder without dataset\.json, so it is not a complete"):
        regard.train(part, tmp_path / "model", quiet=True)
    prepare(iter(PAIRS), tmp_path / "shards", quiet=True)
    assert not part.exists()
    with pytest.raises(RegardError, match=r"shards already exists\. Choose another --out"):
        prepare(iter(PAIRS), tmp_path / "shards", quiet=True)
    part.mkdir()
    (part / "letter.txt").write_text("mine")
    (tmp_path / "shards").rename(tmp_path / "elsewhere")
    with pytest.raises(RegardError, match="is not from an interrupted regard prepare"):
        prepare(iter(PAIRS), tmp_path / "shards", quiet=True)
    assert (part / "letter.txt").exists()


@pytest.fixture
def damaged(shards, tmp_path) -> Path:
    """A copy of the shards, to be damaged."""
    import shutil

    return Path(shutil.copytree(shards, tmp_path / "damaged"))


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 | 1] ^= 0x80  # the high byte of an id
    path.write_bytes(data)


def test_damage_is_an_error_before_training(damaged, tmp_path, monkeypatch):
    def message() -> str:
        with pytest.raises(RegardError) as caught:
            regard.train(damaged, tmp_path / "model", model=TINY["translate"], **OPTIONS)
        assert not (tmp_path / "model").exists()
        return str(caught.value).replace(str(damaged), "damaged")

    shard = damaged / "training-00001.source.bin"
    content = shard.read_bytes()
    flip_bit(shard)
    assert message().startswith("damaged/training-00001.source.bin: corrupt (its SHA-256 does not match). Prepare")
    shard.write_bytes(content[:-2])
    assert message().startswith(f"damaged/training-00001.source.bin: expected {len(content):,} bytes, got ")
    shard.unlink()
    assert message().startswith("damaged/training-00001.source.bin: the file is missing.")
    shard.write_bytes(content)
    manifest = json.loads((damaged / "dataset.json").read_text())
    for changes, expected in (
        ({"format": 2}, "format 2 is newer than this version of Regard supports"),
        ({"format": None}, "not written by regard prepare"),
        ({"dtype": "O"}, "the list of files is invalid"),
        ({"shards": 10**9}, "the list of files is invalid"),
        ({"files": {"../secret": [1, "a"]}}, "the list of files is invalid"),
        ({"files": [1]}, "tokenizer, special, files or dropped are invalid"),
        ({"tokens": [1, 1]}, "the number of source tokens is wrong"),
        ({"training": 7}, "the number of pairs is wrong"),
        ({"training": -1}, "training must be at least 0 (got -1)"),
        ({"files": manifest["files"] | {"a\0": [1, "a"]}}, "the list of files is invalid"),
        ({"files": manifest["files"] | {"a": [float("inf"), "a"]}}, "tokenizer, special, files or dropped are invalid"),
        ({"dropped": {"empty": float("inf")}}, "tokenizer, special, files or dropped are invalid"),
        ({"task": "no-such-task"}, "sides or is_stream do not belong to the task 'no-such-task'"),
        ({"task": "mask"}, "sides or is_stream do not belong to the task 'mask'"),
        ({"sides": ["source"], "tokens": manifest["tokens"][:1]}, "do not belong to the task 'translate'"),
        ({"is_stream": True}, "sides or is_stream do not belong to the task 'translate'"),
    ):
        (damaged / "dataset.json").write_text(json.dumps(manifest | changes))
        assert expected in message()
    (damaged / "dataset.json").write_text("{")
    assert "not JSON" in message()


def test_damage_in_a_large_folder(damaged, tmp_path, monkeypatch):
    """Only sizes are checked at the start: --check finds the file, and an id outside the vocabulary is an error."""
    monkeypatch.setattr(shard_dataset, "ALWAYS_CHECKED_BYTES", 0)
    flip_bit(damaged / "training-00001.source.bin")
    with pytest.raises(RegardError, match=r"training-00001\.source\.bin: corrupt"):
        check_shards(damaged, quiet=True)
    with pytest.raises(
        RegardError, match=r"corrupt: it has a token id outside the vocabulary .* regard prepare --check"
    ):
        regard.train(damaged, tmp_path / "model", model=TINY["translate"], **OPTIONS | {"steps": 30})
    starts = damaged / "training.target.starts.bin"
    values = np.fromfile(starts, "<i8")
    for change in (10**6, 1 << 32, 1 << 62, -(1 << 62), -1):  # some lengths are valid modulo 2³² or 2⁶⁴
        changed = values.copy()
        changed[5] += change if abs(change) > 1 else change * values[-1]
        changed.tofile(starts)
        with pytest.raises(RegardError, match="the starts do not increase"):
            open_shards(damaged).sequences(1)


@pytest.mark.parametrize("line", ["[" * 9**5, '["\\ud800", "a"]', '["a"]', "1", '"a"', "\xff"])
def test_invalid_validation_examples(line, damaged, monkeypatch):
    monkeypatch.setattr(shard_dataset, "check_sizes", lambda *_: None)
    monkeypatch.setattr(shard_dataset, "check_content", lambda *_: None)
    (damaged / "validation.jsonl").write_bytes(b'["a", "b"]\n' + line.encode("latin-1"))
    with pytest.raises(RegardError, match=r"validation\.jsonl, line 2: not a valid example"):
        open_shards(damaged)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"task": "mask"}, "was prepared for the task translate, not mask"),
        ({"tokenizer": {"vocab_size": 99}}, "prepared with tokenizer.vocab_size = 150, not 99. Leave out"),
        ({"tokenizer": {"dropout": 0.1}}, "tokenizer.dropout needs text; the data are token shards"),
        ({"limit": 10}, "data.limit has no effect on token shards"),
        ({"columns": ["1", "2"]}, "data.columns has no effect on token shards"),
        ({"validation": ["val.tsv"]}, "data.validation has no effect on token shards"),
    ],
)
def test_settings_that_contradict_the_shards(options, expected, shards, tmp_path):
    with pytest.raises(RegardError) as caught:
        regard.train(shards, tmp_path / "model", steps=1, workers=1, quiet=True, **options)
    assert expected in str(caught.value)


def test_shards_cannot_be_combined_with_files(shards, tmp_path):
    with pytest.raises(RegardError, match="cannot be combined with other data"):
        regard.train([shards, "pairs.tsv"], tmp_path / "model", quiet=True)
