"""Checkpoints of llama2.c, beside a plain implementation in NumPy."""

import random
import struct

import numpy as np
import pytest
import torch

from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.folder import load, save
from regard.interop import import_llama2c
from regard.interop.llama2c import llama2c_table
from regard.interop.mapping import read_weights, write_weights
from regard.layers.packed import pack
from tests.interop.reference_llama import ReferenceLlama, encode, greedy, read_pieces

# width, feed-forward, layers, heads, heads of keys and values, vocabulary (below 0: an output layer of its own), steps
TIED, UNTIED = (24, 40, 2, 4, 2, 289, 50), (36, 31, 3, 3, 1, -289, 40)


def write_model(path, header, seed=0):
    draw = np.random.default_rng(seed)
    dim, hidden, layers, heads, kv_heads, vocab, steps = header
    kv_dim, size = dim // heads * kv_heads, abs(vocab)
    count = size * dim + layers * (2 * dim * dim + 2 * kv_dim * dim + 3 * hidden * dim + 2 * dim) + dim
    count += steps * dim // heads + (size * dim if vocab < 0 else 0)
    path.write_bytes(struct.pack("<7i", *header) + draw.normal(scale=0.4, size=count).astype("<f4").tobytes())


WORDS = ("  ", "th", "the", " the", "he", " t", "at", "cat", " c", " cat", "aa", "aaa")


def write_tokenizer(path, letters=False):
    """The special pieces, the bytes, some characters, and pieces of several: the later, the lower the score.

    In the first files of llama2.c a byte is named after the letter that has its number.
    """
    pieces = ["<unk>", "\n<s>\n", "\n</s>\n"]
    pieces += [chr(byte) if letters else f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [*WORDS, *" abcdehinstu.é,xyz"]
    content = struct.pack("<i", max(map(len, pieces)))
    for index, piece in enumerate(pieces):
        encoded = piece.encode()
        content += struct.pack("<fi", -float(max(0, index - 258)), len(encoded)) + encoded
    path.write_bytes(content)
    return len(pieces)


@pytest.fixture(params=[TIED, UNTIED], ids=["tied", "untied"])
def files(request, tmp_path):
    model, tokenizer = tmp_path / "model.bin", tmp_path / "tokenizer.bin"
    size = write_tokenizer(tokenizer)
    write_model(model, request.param)
    return model, tokenizer, size


def test_logits_and_greedy_tokens(files):
    model_file, tokenizer_file, _ = files
    writer, plain = import_llama2c(model_file, tokenizer_file), ReferenceLlama(model_file)
    prompt = [1, 270, 4, 265]
    wanted = np.stack([plain.step(token) for token in prompt])
    with torch.no_grad():
        logits = writer.model(pack([prompt]))
        np.testing.assert_allclose(logits.numpy(), wanted, atol=1e-4)
        state, written = writer.model.start(pack([prompt])), list(prompt)
        for _ in range(30):
            step, state = writer.model.step(state, torch.tensor([written[-1:]]))
            written.append(int(step.argmax()))
    assert written == greedy(ReferenceLlama(model_file), prompt, 30)


def test_text_in_and_text_out(files):
    model_file, tokenizer_file, size = files
    writer = import_llama2c(model_file, tokenizer_file)
    pieces = read_pieces(tokenizer_file, size)
    ids = [1, *encode(pieces, "the cat")]
    assert writer.prompt_ids("the cat") == ids
    wanted = greedy(ReferenceLlama(model_file), ids, 12)[len(ids) :]
    wanted = wanted[: wanted.index(1)] if 1 in wanted else wanted  # <s> begins the next story
    ((found,),) = writer.generate(["the cat"], DecodeConfig(method="greedy", max_len=12))
    assert found.hypothesis.ids == wanted


@pytest.mark.parametrize("letters", [False, True])
def test_ids_are_those_of_the_greedy_merge(tmp_path, letters):
    size = write_tokenizer(tmp_path / "tokenizer.bin", letters)
    write_model(tmp_path / "model.bin", (8, 8, 1, 2, 1, size, 8))
    tokenizer = import_llama2c(tmp_path / "model.bin", tmp_path / "tokenizer.bin").tokenizer
    pieces = read_pieces(tmp_path / "tokenizer.bin", size)
    draw = random.Random(0)
    texts = ["", " ", "the cat", "é ▁ 🙂\n<s>", "<0x0A>", "  the  the"]
    texts += ["".join(draw.choices(" aaacthe.é🙂", k=draw.randint(1, 30))) for _ in range(300)]
    for text in texts:
        assert tokenizer.encode(text) == encode(pieces, text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_saved_as_a_folder(files, tmp_path):
    writer = import_llama2c(*files[:2])
    save(tmp_path / "folder", writer)
    again = load(tmp_path / "folder", "cpu")
    assert again.special == writer.special
    assert again.tokenizer == writer.tokenizer
    batch = pack([[1, 262, 263]])
    assert torch.equal(again.model(batch), writer.model(batch))


def test_the_table_in_both_directions(files):
    writer = import_llama2c(*files[:2])
    config = writer.model.config
    table, counts = llama2c_table(config.width // config.heads), {"blocks": config.layers}
    ours = {name: tensor.detach() for name, tensor in writer.model.named_parameters()}
    theirs = write_weights(table, counts, ours)
    assert not torch.equal(theirs["wq.0"], ours["blocks.0.attention.query.weight"])
    again = read_weights(table, counts, theirs, "x", {name: tensor.shape for name, tensor in ours.items()})
    assert all(torch.equal(again[name], tensor) for name, tensor in ours.items())


def test_damaged_models(tmp_path):
    size = write_tokenizer(tmp_path / "tokenizer.bin")
    header = (24, 40, 2, 4, 2, size, 50)
    write_model(tmp_path / "good.bin", header)
    content = (tmp_path / "good.bin").read_bytes()
    bad = tmp_path / "bad.bin"
    for given, said in [
        (b"short", "too short"),
        (content[:-4], "where its sizes ask for"),
        (content + b"0000", "where its sizes ask for"),
        (struct.pack("<7i", *header[:3], 5, *header[4:]) + content[28:], "no model has such sizes"),
        (struct.pack("<7i", *header[:2], 0, *header[3:]) + content[28:], "no model has such sizes"),
        (struct.pack("<7i", *[2**31 - 1] * 2, 1, 1, 1, *header[5:]) + content[28:], "no model has such sizes"),
        (struct.pack("<2i", 0x616B3432, 2) + content[8:], "version 2 of the format"),
    ]:
        bad.write_bytes(given)
        with pytest.raises(RegardError, match=said):
            import_llama2c(bad, tmp_path / "tokenizer.bin")
    with pytest.raises(RegardError, match="the file is missing"):
        import_llama2c(tmp_path / "nowhere.bin", tmp_path / "tokenizer.bin")


def test_damaged_tokenizers(tmp_path):
    size = write_tokenizer(tmp_path / "good.bin")
    write_model(tmp_path / "model.bin", (24, 40, 2, 4, 2, size, 50))
    content = (tmp_path / "good.bin").read_bytes()
    bad = tmp_path / "bad.bin"
    for given, said in [
        (content[:60], "4 pieces, where the model knows"),
        (content[:-1], f"piece {size - 1} is cut off"),
        (content + content[-9:], "more pieces than"),
        (content.replace("é".encode(), b"\xff\xff"), "no text"),
        (content.replace(b"aaa", b"cat"), "there twice"),
    ]:
        bad.write_bytes(given)
        with pytest.raises(RegardError, match=said):
            import_llama2c(tmp_path / "model.bin", bad)
