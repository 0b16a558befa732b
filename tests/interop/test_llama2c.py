"""Checkpoints of llama2.c compared with a reference implementation in NumPy."""

import random
import struct

import numpy as np
import pytest
import torch

from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.interop import import_llama2c
from regard.interop.llama2c import llama2c_table
from regard.interop.weight_mapping import read_weights, write_weights
from regard.layers.packed import pack
from regard.pipelines import load, save
from tests.interop.reference_llama import ReferenceLlama, encode, greedy, read_pieces

# width, feed-forward width, layers, heads, key-value heads, vocabulary (negative: untied output layer), maximum length
TIED, UNTIED = (24, 40, 2, 4, 2, 289, 50), (36, 31, 3, 3, 1, -289, 40)


def write_model(path, header, seed=0):
    rng = np.random.default_rng(seed)
    dim, hidden, layers, heads, kv_heads, vocab, steps = header
    kv_dim, size = dim // heads * kv_heads, abs(vocab)
    count = size * dim + layers * (2 * dim * dim + 2 * kv_dim * dim + 3 * hidden * dim + 2 * dim) + dim
    count += steps * dim // heads + (size * dim if vocab < 0 else 0)
    path.write_bytes(struct.pack("<7i", *header) + rng.normal(scale=0.4, size=count).astype("<f4").tobytes())


WORDS = ("  ", "th", "the", " the", "he", " t", "at", "cat", " c", " cat", "aa", "aaa")


def write_tokenizer(path, letters=False):
    """Writes special pieces, bytes, longer pieces and characters, with descending scores.

    Early files of llama2.c name a byte by the character with that code (`letters`).
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


def test_logits_and_greedy_tokens_match_the_reference(files):
    model_file, tokenizer_file, _ = files
    model, reference = import_llama2c(model_file, tokenizer_file), ReferenceLlama(model_file)
    prompt = [1, 270, 4, 265]
    expected = np.stack([reference.step(token) for token in prompt])
    with torch.no_grad():
        logits = model.model(pack([prompt]))
        np.testing.assert_allclose(logits.numpy(), expected, atol=1e-4)
        state, generated = model.model.start(pack([prompt])), list(prompt)
        for _ in range(30):
            step, state = model.model.step(state, torch.tensor([generated[-1:]]))
            generated.append(int(step.argmax()))
    assert generated == greedy(ReferenceLlama(model_file), prompt, 30)


def test_generated_text_matches_the_reference(files):
    model_file, tokenizer_file, size = files
    model = import_llama2c(model_file, tokenizer_file)
    pieces = read_pieces(tokenizer_file, size)
    ids = [1, *encode(pieces, "the cat")]
    assert model.encode_prompt("the cat") == ids
    expected = greedy(ReferenceLlama(model_file), ids, 12)[len(ids) :]
    expected = expected[: expected.index(1)] if 1 in expected else expected  # <s> starts the next text
    ((generated,),) = model.generate(["the cat"], DecodeConfig(method="greedy", max_len=12))
    assert generated.hypothesis.ids == expected


@pytest.mark.parametrize("letters", [False, True])
def test_token_ids_match_the_reference(tmp_path, letters):
    size = write_tokenizer(tmp_path / "tokenizer.bin", letters)
    write_model(tmp_path / "model.bin", (8, 8, 1, 2, 1, size, 8))
    tokenizer = import_llama2c(tmp_path / "model.bin", tmp_path / "tokenizer.bin").tokenizer
    pieces = read_pieces(tmp_path / "tokenizer.bin", size)
    rng = random.Random(0)
    texts = ["", " ", "the cat", "é ▁ 🙂\n<s>", "<0x0A>", "  the  the"]
    texts += ["".join(rng.choices(" aaacthe.é🙂", k=rng.randint(1, 30))) for _ in range(300)]
    for text in texts:
        assert tokenizer.encode(text) == encode(pieces, text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_imported_model_is_saved_and_loaded(files, tmp_path):
    model = import_llama2c(*files[:2])
    save(tmp_path / "folder", model)
    loaded = load(tmp_path / "folder", "cpu")
    assert loaded.special == model.special
    assert loaded.tokenizer == model.tokenizer
    batch = pack([[1, 262, 263]])
    assert torch.equal(loaded.model(batch), model.model(batch))


def test_mapping_table_round_trip_is_exact(files):
    model = import_llama2c(*files[:2])
    config = model.model.config
    table, counts = llama2c_table(config.width // config.heads), {"blocks": config.layers}
    weights = {name: tensor.detach() for name, tensor in model.model.named_parameters()}
    tensors = write_weights(table, counts, weights)
    assert not torch.equal(tensors["wq.0"], weights["blocks.0.attention.query.weight"])
    converted = read_weights(table, counts, tensors, "x", {name: tensor.shape for name, tensor in weights.items()})
    assert all(torch.equal(converted[name], tensor) for name, tensor in weights.items())


def test_damaged_models_are_an_error(tmp_path):
    size = write_tokenizer(tmp_path / "tokenizer.bin")
    header = (24, 40, 2, 4, 2, size, 50)
    write_model(tmp_path / "good.bin", header)
    content = (tmp_path / "good.bin").read_bytes()
    bad = tmp_path / "bad.bin"
    for damaged, message in [
        (b"short", "too short"),
        (content[:-4], "expected .* from its sizes"),
        (content + b"0000", "expected .* from its sizes"),
        (struct.pack("<7i", *header[:3], 5, *header[4:]) + content[28:], "invalid sizes"),
        (struct.pack("<7i", *header[:2], 0, *header[3:]) + content[28:], "invalid sizes"),
        (struct.pack("<7i", *[2**31 - 1] * 2, 1, 1, 1, *header[5:]) + content[28:], "invalid sizes"),
        (struct.pack("<2i", 0x616B3432, 2) + content[8:], "unsupported version 2 of the format"),
    ]:
        bad.write_bytes(damaged)
        with pytest.raises(RegardError, match=message):
            import_llama2c(bad, tmp_path / "tokenizer.bin")
    with pytest.raises(RegardError, match="the file is missing"):
        import_llama2c(tmp_path / "missing.bin", tmp_path / "tokenizer.bin")


def test_damaged_tokenizers_are_an_error(tmp_path):
    size = write_tokenizer(tmp_path / "good.bin")
    write_model(tmp_path / "model.bin", (24, 40, 2, 4, 2, size, 50))
    content = (tmp_path / "good.bin").read_bytes()
    bad = tmp_path / "bad.bin"
    for damaged, message in [
        (content[:60], "4 pieces, but the model has a vocabulary of"),
        (content[:-1], f"piece {size - 1} is truncated"),
        (content + content[-9:], "more pieces than"),
        (content.replace("é".encode(), b"\xff\xff"), "not valid UTF-8"),
        (content.replace(b"aaa", b"cat"), "duplicate piece"),
    ]:
        bad.write_bytes(damaged)
        with pytest.raises(RegardError, match=message):
            import_llama2c(tmp_path / "model.bin", bad)
