"""Runs the commands of the documentation, with stand-ins for the files and models that they name.

The commands of a page share one folder, and a shell's redirections are left away. Training takes two steps.
"""

import csv
import glob
import gzip
import io
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from regard.cli import main
from regard.data import Tokenizer, read_pairs
from regard.models import TransformerConfig, make_model
from regard.pipelines import Translator, save
from tests.frozen.models import import_model, make_pipeline
from tests.interop.huggingface.test_timm import timm_folder, timm_tensors
from tests.interop.test_llama2c import TIED, write_model
from tests.interop.test_llama2c import write_tokenizer as write_llama2c_tokenizer
from tests.test_docs import PAGES, ROOT, blocks, commands
from tests.training import toy_images
from tests.training.toy_tasks import ANIMALS, sentences, write_squad, write_text

# Parts of commands that are not run.
LEFT_OUT = {
    "serve ": "a server runs until it is stopped",
    "--live": "a server runs until it is stopped",
    "--cluster ray": "starts a Ray cluster",
    "--device cuda:0,cuda:1": "needs two GPUs",
    "hf:wmt/wmt14": "downloads a dataset",
    "qwen2.5-0.5b": "needs a GGUF file of Qwen",
    "nllb": "needs a checkpoint of NLLB",
    "chat-model": "needs a model with a chat template",
}
# Options that are appended to the commands that start with these words.
SHORTER = {
    "train": ["--steps", "2"],
    "train cifar10": ["--model.layers", "1", "--train.batch-images", "8", "--train.compile", "false"],
    "evaluate model --data phrasebook": ["--method", "greedy", "--max-len", "4"],
    "scores": ["--steps", "2", "--data", "pairs.tsv"],
}


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files and models that the commands need and do not make."""
    folder = tmp_path_factory.mktemp("stand_ins")
    write_texts(folder)
    write_images(folder)
    write_models(folder)
    return folder


def write_texts(folder: Path) -> None:
    pairs = read_pairs(["phrasebook:test"])[:40]
    rows = [f"{source}\t{target}" for source, target in pairs]
    names = ("pairs", "test", "train", "medical", "words", "en-de", "en-fr", "test.en-de", "test.en-fr")
    for name in (*names, "english-french", "misspelt-correct"):
        write_text(folder / f"{name}.tsv", rows)
    sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
    for part in ("train", "val", "test"):
        for language in ("en", "fr", "de"):
            write_text(folder / f"{part}.{language}", sources if language == "en" else targets)
    for name in ("lines", "article", "books", "other", "text", "texts"):
        write_text(folder / f"{name}.txt", sources)
    (folder / "parts").mkdir()
    packed = {f"{name}.tsv.gz": rows for name in ("corpus", "corpus-1", "corpus-2")}
    for name in ("corpus.en.gz", "parts/part-1.en.gz", "lines.txt.gz"):
        packed[name] = sources[:20]
    for name, lines in packed.items():
        (folder / name).write_bytes(gzip.compress("\n".join([*lines, ""]).encode()))
    write_text(folder / "parts" / "part-1.txt", sources[:20])
    write_text(folder / "gold.txt", ["0-0"] * len(pairs))
    for name, header, lines in (
        ("corpus.csv", ("english", "french"), pairs),
        ("reviews.csv", ("review", "stars"), [(text, 1 + i % 3) for i, text in enumerate(sources)]),
    ):
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([header, *lines])
    shutil.copy(folder / "reviews.csv", folder / "test.csv")
    write_text(folder / "reviews.tsv", [f"{text}\t{'good' if i % 2 else 'bad'}" for i, text in enumerate(sources)])
    toys = sentences(40)
    words = [[f"{word}\t{'B-ANIMAL' if word in ANIMALS else 'O'}" for word in text.split()] for text in toys]
    write_text(folder / "train.conll", [line for text in words for line in (*text, "")])
    for name in ("train", "test", "squad2"):
        write_squad(folder / f"{name}.json", [("who", text, text.split()[-1]) for text in toys])


def write_images(folder: Path) -> None:
    pixels, labels, masks = toy_images.draw(24, side=32)
    rows = ["path,split,breed"]
    for index, (image, label, mask) in enumerate(zip(pixels, labels, masks)):
        name = f"{('cat', 'dog', 'cow')[label]}/{index}.png"
        for root in ("photos", "test-photos", "scans/images", "scans/masks"):
            (folder / root / name).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(mask if root == "scans/masks" else image).save(folder / root / name)
        rows.append(f"photos/{name},{'test' if index % 4 == 0 else 'train'},{name.partition('/')[0]}")
    write_text(folder / "index.csv", rows)
    for name in ("photo.jpg", "another.jpg", "another.png"):
        Image.fromarray(pixels[0]).save(folder / name)
    parts = dict(train_images=pixels, train_labels=labels, test_images=pixels, test_labels=labels)
    np.savez(folder / "cifar10.npz", **parts)


def write_models(folder: Path) -> None:
    tokenizer = Tokenizer.train([side for pair in read_pairs(["phrasebook:test"]) for side in pair], "char")
    sizes = {"source_vocab": tokenizer.vocab_size, "target_vocab": tokenizer.vocab_size, "shared_vocab": True}
    model = make_model(
        TransformerConfig(width=16, heads=2, feedforward=32, encoder_layers=1, decoder_layers=1, **sizes)
    )
    for name in ("model", "model1", "model2", "model3", "other-model"):
        save(folder / name, Translator(model, tokenizer, tokenizer))
    save(folder / "encoder", make_pipeline("bert, mask"))
    import_model("BertForMaskedLM", folder / "all-MiniLM-L6-v2")
    timm_folder(folder / "deit-tiny-distilled", timm_tensors(distilled=True))
    tensors = timm_tensors(qk_norm=True) | {"pos_embed": torch.randn(1, 10, 30)}  # of 3×3 patches
    shutil.copy(timm_folder(folder / "timm", tensors) / "model.safetensors", folder / "vit_tiny.safetensors")
    write_llama2c_tokenizer(folder / "tokenizer.bin")
    write_model(folder / "stories15M.bin", TIED)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_run(
    page: Path, stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(stand_ins, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("regard.training.distributed._suggest_workers", lambda recipe: 1)
    for block in blocks(page, "console", "sh", "toml"):
        if block.kind == "toml":
            Path("recipe.toml").write_text(block.text, encoding="utf-8")
            continue
        for words in commands(block.text):
            command = " ".join(words)
            if any(part in command for part in LEFT_OUT):
                continue
            if words[0] == "train" and "--out" in words:  # in place of a stand-in
                shutil.rmtree(words[words.index("--out") + 1], ignore_errors=True)
            shorter = [option for start, options in SHORTER.items() if command.startswith(start) for option in options]
            if words[0] == "prepare":  # the shell expands its patterns
                words = [name for word in words for name in sorted(glob.glob(word)) or [word]]
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path("pairs.tsv").read_bytes())))
            code = main([*words, *shorter])
            assert code == 0, f"{page}, line {block.line}: {command}: {capsys.readouterr().err}"


def test_what_is_left_out_or_shortened_exists() -> None:
    shown = [
        " ".join(words) for page in PAGES for block in blocks(page, "console", "sh") for words in commands(block.text)
    ]
    assert [part for part in LEFT_OUT if not any(part in command for command in shown)] == []
    assert [start for start in SHORTER if not any(command.startswith(start) for command in shown)] == []
