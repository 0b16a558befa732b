"""Folders with small valid files, of which a fuzz target replaces one."""

import gzip
import hashlib
import io
import json
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint import save as save_distributed

from regard.config_reader import json_bytes
from regard.data import Tokenizer, read_images
from regard.data.text.special_tokens import CAUSAL_LM_TOKENS, ENCODER_TOKENS
from regard.decode import Shortlist
from regard.files import write_atomically
from regard.interop import export_huggingface, write_sentencepiece
from regard.interop.sentencepiece_files import CONTROL, UNKNOWN, Piece, PieceModel, build_tokenizer
from regard.models import BertConfig, GPTConfig, Seq2SeqConfig, TransformerConfig, ViTConfig, make_model
from regard.pipelines import ImageModel, TextEncoder, TextGenerator, Translator, save
from regard.training.checkpoint import CHECKSUMS, METADATA, Checkpoint, CheckpointStore, TrainState, gather_state
from regard.training.recipe import Recipe, recipe_to_dict
from regard.training.shards.dataset import MANIFEST, shard_name, starts_name
from regard.training.shards.preparation import prepare

TEXT = "one two three four"
TOKENIZER = Tokenizer.train([TEXT], "word")
SIZES = dict(width=8, heads=2, feedforward=8, max_len=16)
VOCAB = TOKENIZER.vocab_size


def make_translator(**changes) -> Translator:
    config = TransformerConfig(
        **SIZES
        | dict(encoder_layers=1, decoder_layers=1, source_vocab=VOCAB, target_vocab=VOCAB, shared_vocab=True)
        | changes
    )
    return Translator(make_model(config).eval(), TOKENIZER, TOKENIZER, {})


def make_generator(**changes) -> TextGenerator:
    config = GPTConfig(**SIZES | dict(layers=1, vocab=VOCAB) | changes)
    return TextGenerator(make_model(config).eval(), TOKENIZER, {}, CAUSAL_LM_TOKENS)


def make_encoder(**changes) -> TextEncoder:
    config = BertConfig(**SIZES | dict(layers=1, vocab=VOCAB, labels=("a", "b")) | changes)
    return TextEncoder(make_model(config).eval(), TOKENIZER, {}, ENCODER_TOKENS)


def make_image_model(**changes) -> ImageModel:
    sizes = dict(width=8, heads=2, feedforward=8, layers=1, patch=4, image_height=8, image_width=8)
    config = ViTConfig(**sizes | dict(labels=("a", "b")) | changes)
    return ImageModel(make_model(config).eval())


def make_recurrent() -> Translator:
    config = Seq2SeqConfig(width=8, source_vocab=VOCAB, target_vocab=VOCAB, shared_vocab=True)
    return Translator(make_model(config).eval(), TOKENIZER, TOKENIZER, {})


IMAGE = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
IDX = struct.pack(">4B3I", 0, 0, 8, 3, 2, 2, 2) + bytes(8)


def write_data(folder: Path) -> None:
    """An image and arrays of images."""
    IMAGE.save(folder / "valid.png")
    np.savez(folder / "images.npz", images=np.zeros((2, 4, 4), np.uint8), labels=np.arange(2))
    (folder / "images-idx3-ubyte").write_bytes(IDX)


def encoded_images() -> list[bytes]:
    """The image in each of the supported formats."""
    contents = []
    for kind in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM"):
        buffer = io.BytesIO()
        IMAGE.save(buffer, kind)
        contents.append(buffer.getvalue())
    return contents


def compressed_arrays() -> list[bytes]:
    return [gzip.compress(IDX, mtime=0)]


def write_cache(folder: Path) -> None:
    """A cache of decoded images."""
    write_data(folder)
    read_images([folder / "images.npz"], cache=folder / "cache")
    [store] = (folder / "cache").iterdir()
    for file in store.iterdir():
        file.rename(folder / file.name)


def write_model(make: Callable[[], Any]) -> Callable[[Path], None]:
    return lambda folder: save(folder, make())


def write_unchecked_translator(folder: Path) -> None:
    """A translator without fingerprints of its tokenizer."""
    write_translator(folder)
    config = json.loads((folder / "config.json").read_bytes())
    del config["tokenizer_sha256"]
    (folder / "config.json").write_bytes(json_bytes(config))


def write_translator(folder: Path) -> None:
    pipeline = make_translator()
    pipeline.shortlist = Shortlist(np.zeros((VOCAB, 2), np.int32), np.arange(2, dtype=np.int32), VOCAB)
    pipeline.training = {"recipe": recipe_to_dict(Recipe()), "scores": {"bleu": 1.5}}
    save(folder, pipeline)


def write_int8(folder: Path) -> None:
    save(folder, make_translator(), precision="int8")


def write_metrics(folder: Path) -> None:
    """The metrics of a training run."""
    lines = [dict(step=i, kind=kind, nll=2.5, loss=2.5) for i in range(3) for kind in ("train", "validation")]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_checkpoint() -> Checkpoint:
    """The state of a run after one step."""
    model = make_generator().model
    optimizer = torch.optim.Adam(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    state = TrainState({"recipe": recipe_to_dict(Recipe()), "data": {"training": {"pairs": 4}}}, best=(1.0, -2.0))
    return Checkpoint(gather_state(model, optimizer, None), state.to_json())


def write_checkpoint(folder: Path) -> None:
    """A run with a checkpoint of one file, with checksums."""
    CheckpointStore(folder).save(make_checkpoint(), step=3)


def write_sharded_checkpoint(folder: Path) -> None:
    """A run with a checkpoint as the ranks of a sharded run write it: metadata.json and files of tensors."""
    checkpoint = make_checkpoint()
    step = CheckpointStore(folder).start(3)
    writer = HuggingFaceStorageWriter(str(step), save_distributed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.distributed is not initialized, as intended
        save_distributed(checkpoint.tensors, storage_writer=writer, no_dist=True)
    write_atomically(step / METADATA, json.dumps(checkpoint.metadata).encode())
    update_checksums(folder)


def update_checksums(folder: Path) -> None:
    """Write the checksums of the checkpoint in a folder, as an attacker would after a change."""
    store = CheckpointStore(folder)
    files = [path for path in store.path(3).iterdir() if path.name != CHECKSUMS]
    store.finish(3, {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files})


def write_shards(task: str) -> Callable[[Path], None]:
    """Token shards of a small corpus."""

    def write(folder: Path) -> None:
        texts = [f"{a} {b}" for a in TEXT.split() for b in TEXT.split()]
        rows = [{"text": text} for text in texts] if task == "language" else [(text, text[::-1]) for text in texts]
        prepare(rows, folder / "shards", task=task, tokenizer={"kind": "word"}, quiet=True)

    return write


def update_manifest(folder: Path, name: str) -> None:
    """Write size and SHA-256 of a changed file to dataset.json, and the numbers of tokens that follow from its size."""
    content = (folder / name).read_bytes()
    manifest = json.loads((folder / MANIFEST).read_bytes())
    manifest["files"][name] = [len(content), hashlib.sha256(content).hexdigest()]
    for index, side in enumerate(manifest["sides"]):
        if name == shard_name(0, side):
            manifest["tokens"][index] = len(content) // 2
        elif name == starts_name(side):
            manifest["training"] = len(content) // 8 - 1
    (folder / MANIFEST).write_bytes(json_bytes(manifest))


def parquet_files() -> list[bytes]:
    """Parquet files: several row groups; nested columns, other types and null; no rows."""
    import pyarrow
    import pyarrow.parquet

    pairs = pyarrow.table({"source": ["one", "two", "one"], "target": ["un", "deux", "un"]})
    nested = pyarrow.table({"translation": [{"source": "one", "target": "un"}], "score": [0.5], "id": [None]})
    contents = []
    for table, options in (
        (pairs, dict(row_group_size=2, compression="none")),
        (pairs, dict(compression="zstd", use_dictionary=False, data_page_version="2.0")),
        (nested, dict(compression="gzip", write_page_index=True)),
        (pairs.slice(0, 0), {}),
    ):
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(table, buffer, **options)
        contents.append(buffer.getvalue())
    return contents


def write_exported(make: Callable[[], Any]) -> Callable[[Path], None]:
    """A folder in Hugging Face format."""

    def write(folder: Path) -> None:
        export_huggingface(make(), folder)

    return write


def write_pickled(folder: Path) -> None:
    """A folder whose weights are a pickle."""
    export_huggingface(make_gpt2(), folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def make_gpt2() -> TextGenerator:
    return make_generator(
        norm_kind="layer", norm_eps=1e-5, activation="gelu_tanh", positions="learned", bias="all", qk_norm=False
    )


def make_llama() -> TextGenerator:
    return make_generator(activation="swiglu", qk_norm=False)


def make_bart() -> Translator:
    return make_translator(
        **dict(activation="gelu", norm="post", positions="learned", position_offset=2),
        **dict(embedding_norm=True, embedding_scale=False, output_bias=True),
    )


def make_t5() -> Translator:
    return make_translator(
        **dict(norm_kind="rms", norm_eps=1e-6, positions="relative", bias=False, embedding_scale=False),
        **dict(output_scale=True, encoder_score="dot", decoder_score="dot", cross_score="dot"),
    )


def write_sharded(folder: Path) -> None:
    """A folder whose weights are in files that an index lists."""
    export_huggingface(make_gpt2(), folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "a.safetensors")
    (folder / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(tensors, "a.safetensors")}
    (folder / "model.safetensors.index.json").write_bytes(json_bytes(index))


def write_timm(folder: Path) -> None:
    """A Vision Transformer in the format of timm."""
    E, names = 64, {}
    names |= {"cls_token": (1, 1, E), "pos_embed": (1, 5, E), "patch_embed.proj.weight": (E, 3, 4, 4)}
    names |= {"patch_embed.proj.bias": (E,), "norm.weight": (E,), "norm.bias": (E,)}
    names |= {"head.weight": (2, E), "head.bias": (2,)}
    block = {"norm1": (E,), "norm2": (E,), "attn.qkv": (3 * E, E), "attn.proj": (E, E)}
    block |= {"mlp.fc1": (E, E), "mlp.fc2": (E, E)}
    for name, shape in block.items():
        names |= {f"blocks.0.{name}.weight": shape, f"blocks.0.{name}.bias": shape[:1]}
    save_file({name: torch.zeros(shape) for name, shape in names.items()}, folder / "model.safetensors")
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 2, "num_features": E}
    config["model_args"] = {"embed_dim": E, "depth": 1, "num_heads": 2, "mlp_ratio": 1, "patch_size": 4}
    config["pretrained_cfg"] = {"input_size": [3, 8, 8], "mean": [0.5] * 3, "std": [0.5] * 3}
    (folder / "config.json").write_bytes(json_bytes(config))


def write_byte_level(folder: Path) -> None:
    """A GPT-2 folder whose tokenizer is a vocabulary and a list of merges."""
    export_huggingface(make_gpt2(), folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (folder / "special_tokens_map.json").unlink()
    (folder / "vocab.json").write_text('{"o": 0, "n": 1, "e": 2, "on": 3, "one": 4, "<|endoftext|>": 5}')
    (folder / "merges.txt").write_text("#version: 0.2\no n\non e\n")


def write_sentencepiece_folder(folder: Path) -> None:
    """A Llama folder whose tokenizer is a sentencepiece file."""
    export_huggingface(make_llama(), folder)
    (folder / "tokenizer.json").unlink()
    names = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    pieces = [Piece(name, 0, kind) for name, kind in names]
    pieces += [Piece(name, -i) for i, name in enumerate(["▁", "a", "b", "▁a"])]
    path = folder / "tokenizer.model"
    write_sentencepiece(build_tokenizer(PieceModel(pieces, 2), path), path)


def write_vocabulary(folder: Path) -> None:
    """A BERT folder whose tokenizer is a list of word pieces."""
    export_huggingface(make_encoder(), folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}')
    (folder / "special_tokens_map.json").unlink()
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\none\n##s\ntwo\n")


def write_llama2c(folder: Path) -> None:
    width, feedforward, layers, heads, vocab, length = 4, 4, 1, 1, 5, 4
    count = 2 * vocab * width + layers * (2 * width + 4 * width**2 + 3 * width * feedforward) + width + 2 * length * 2
    header = struct.pack("<7i", width, feedforward, layers, heads, heads, -vocab, length)
    (folder / "model.bin").write_bytes(header + np.linspace(-1, 1, count, dtype=np.float32).tobytes())
    pieces = [b"<unk>", b"<s>", b"</s>", b" ", b"a"]
    content = b"".join(struct.pack("<fi", -i, len(piece)) + piece for i, piece in enumerate(pieces))
    (folder / "tokenizer.bin").write_bytes(struct.pack("<i", 5) + content)


def write_journal(folder: Path) -> None:
    (folder / "out.txt.partial").write_bytes(b"1\n2\n")
    table = {"complete": False, "items": 2, "bytes": 4, "totals": {"tokens": 2.0}, "input_sha256": "", "settings": {}}
    (folder / "out.txt.partial.json").write_bytes(json_bytes(table))


def compressed(data: bytes) -> list[bytes]:
    """Data in each of the supported compressions."""
    import bz2
    import lzma

    import zstandard

    return [gzip.compress(data, mtime=0), bz2.compress(data), lzma.compress(data), zstandard.compress(data)]
