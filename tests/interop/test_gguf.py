"""GGUF files compared with the models of transformers that they were written from, with random weights."""

import contextlib
import struct

import numpy as np
import pytest
import sentencepiece
import tokenizers
import torch
from tokenizers import pre_tokenizers

from regard.cli.import_model import run as run_import
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.interop import import_gguf
from regard.interop.gguf.file import read_gguf
from regard.interop.sentencepiece_files import BPE, Piece, PieceModel, write_pieces
from regard.layers.packed import pack
from regard.pipelines import load
from tests.interop.gguf_files import (
    CONTROL,
    MERGES,
    PIECES,
    UNKNOWN,
    VOCAB,
    WORDS,
    gguf,
    pieces_tokenizer,
    write_gguf,
)

_IDS = dict(vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, pad_token_id=0)
_LLAMA = dict(
    **dict(_IDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2),
    **dict(intermediate_size=96, max_position_embeddings=40),
)
_GPT2 = dict(_IDS, n_embd=32, n_layer=2, n_head=4, n_positions=30, n_inner=64)
_THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
_LLAMA_3 = {
    **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 64,
}
_GEMMA2 = dict(_LLAMA, head_dim=32, num_hidden_layers=3, sliding_window=3, query_pre_attn_scalar=32)
CASES = [
    *[("llama", "Llama", _LLAMA, kind) for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")],
    ("llama", "Llama", _LLAMA | dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True) | _THETA, "F32"),
    ("llama", "Mistral", _LLAMA | dict(sliding_window=None, head_dim=32), "Q8_0"),
    ("qwen2", "Qwen2", _LLAMA | dict(tie_word_embeddings=True) | _THETA, "Q8_0"),
    ("qwen3", "Qwen3", _LLAMA | dict(head_dim=32), "Q5_1"),
    ("phi3", "Phi3", _LLAMA | dict(sliding_window=None), "Q8_0"),
    ("olmo2", "Olmo2", _LLAMA, "Q8_0"),
    ("gemma", "Gemma", _LLAMA | dict(head_dim=32), "Q8_0"),
    ("gemma2", "Gemma2", _GEMMA2, "Q4_0"),
    ("gemma3", "Gemma3", _GEMMA2 | dict(num_hidden_layers=7), "Q8_0"),
    ("gpt2", "GPT2", _GPT2, "Q8_0"),
]


def make_model(transformers, family, sizes):
    config_name = {"Gemma3": "Gemma3TextConfig"}.get(family, f"{family}Config")
    class_name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    torch.manual_seed(3)
    model = getattr(transformers, class_name)(getattr(transformers, config_name)(**sizes)).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = ("norm" in name or "ln_" in name) and name.endswith("weight") and not family.startswith("Gemma")
            parameter.normal_(mean=float(is_norm), std=0.2)
    return model


@torch.no_grad()
def logits_of(model, ids):
    return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize(("arch", "family", "sizes", "kind"), CASES)
def test_logits_and_greedy_text_match_the_dequantized_model(transformers, tmp_path, arch, family, sizes, kind):
    model = make_model(transformers, family, sizes)
    write_gguf(tmp_path / "model.gguf", arch, model, kind)
    pipeline = import_gguf(tmp_path / "model.gguf")
    ids = pipeline.encode_prompt("the cat hid in a tin")
    expected = logits_of(model, ids)
    with torch.no_grad():
        torch.testing.assert_close(pipeline.model(pack([ids])), expected, atol=1e-5, rtol=0)
    generated = model.generate(torch.tensor([ids]), max_new_tokens=6, min_new_tokens=6, do_sample=False)
    [[found]] = pipeline.generate(
        ["the cat hid in a tin"], DecodeConfig("greedy", max_len=6, min_len=6, engine="plain")
    )
    assert [one for one in found.hypothesis.ids if one != 2] == generated[0, len(ids) :].tolist()


def test_scaling_of_llama_3_is_found_in_its_factors(transformers, tmp_path):
    plain = make_model(transformers, "Llama", _LLAMA | _THETA)
    scaled = make_model(transformers, "Llama", _LLAMA | dict(rope_parameters=_LLAMA_3))
    divisors = (plain.model.rotary_emb.inv_freq / scaled.model.rotary_emb.inv_freq).numpy()
    assert len(set(divisors.round(3))) > 2  # unscaled, partly and fully
    write_gguf(tmp_path / "model.gguf", "llama", scaled, rope_freqs=divisors)
    pipeline = import_gguf(tmp_path / "model.gguf")
    assert pipeline.model.config.rotary_factor == 8.0
    ids = list(range(VOCAB - 20, VOCAB))
    with torch.no_grad():
        torch.testing.assert_close(pipeline.model(pack([ids])), logits_of(scaled, ids), atol=1e-5, rtol=0)
    write_gguf(tmp_path / "other.gguf", "llama", scaled, rope_freqs=divisors[::-1].copy())
    with pytest.raises(RegardError, match=r"rope_freqs\.weight is not a scaling of Llama 3"):
        import_gguf(tmp_path / "other.gguf")


@pytest.fixture(scope="module")
def llama(transformers):
    return make_model(transformers, "Llama", _LLAMA)


@pytest.fixture
def file(llama, tmp_path):
    write_gguf(tmp_path / "model.gguf", "llama", llama)
    return tmp_path / "model.gguf"


def test_command_writes_a_model_folder(file, tmp_path):
    run_import([str(file), "--out", str(tmp_path / "out")])
    assert load(tmp_path / "out").encode_prompt("the cat") == import_gguf(file).encode_prompt("the cat")


def test_all_types_of_blocks_are_read(llama, tmp_path):
    """Types that the package cannot write get random blocks; the numbers are those of the package."""
    rng = np.random.default_rng(0)
    for kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"):
        qtype = gguf.GGMLQuantizationType[kind]
        _, size = gguf.GGML_QUANT_SIZES[qtype]
        blocks = rng.integers(0, 120, (5, 2 * size), dtype=np.uint8)
        writer = gguf.GGUFWriter(tmp_path / f"{kind}.gguf", "llama")
        writer.add_tensor("x", blocks, raw_dtype=qtype)
        for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            write()
        writer.close()
        found = read_gguf(tmp_path / f"{kind}.gguf").read_tensor("x")
        assert found.shape == (5, 512)
        assert np.array_equal(found.numpy(), gguf.dequantize(blocks, qtype))


def test_ids_of_pieces_match_sentencepiece(file, tmp_path):
    table = pieces_tokenizer()
    pieces = [Piece(*row) for row in zip(PIECES, *(table[f"tokenizer.ggml.{key}"] for key in ("scores", "token_type")))]
    write_pieces(PieceModel(pieces, BPE, remove_extra_whitespaces=False), tmp_path / "pieces.model")
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "pieces.model"))
    pipeline = import_gguf(file)
    for text in ("the cat", " the  cat", "thé\ncats", "<s>a</s>", ""):
        assert pipeline.encode_prompt(text) == [1, *reference.encode(text)]
    assert pipeline.tokenizer.decode(pipeline.encode_prompt("the cat")) == "the cat"


def test_only_one_token_is_unknown(llama, tmp_path):
    """Converted files of Phi-3: the unknown token is a control token, and padding of the vocabulary has its type."""
    table = pieces_tokenizer()
    names, kinds = ([*table[f"tokenizer.ggml.{key}"]] for key in ("tokens", "token_type"))
    padding = [i for i, name in enumerate(names) if name in ("i", "n", "s")]
    for i in padding:
        names[i], kinds[i] = f"[PAD{i}]", UNKNOWN
    kinds[0] = CONTROL
    changes = {"tokens": names, "token_type": kinds, "unknown_token_id": 0}
    path = tmp_path / "padded.gguf"
    write_gguf(path, "llama", llama, changes={f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    pipeline = import_gguf(path)
    assert pipeline.special.unk == 0
    assert pipeline.encode_prompt("the cat") == [1, names.index("▁the"), names.index("▁cat")]
    assert not set(padding) & set(pipeline.encode_prompt(f"i {names[padding[0]]}"))


def test_ids_of_byte_level_tokenizers_match_the_tokenizer_file(llama, tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special, turn_end = "<|end|>", "<|turn|>"
    names = [special, turn_end, *alphabet, *(word for word in WORDS if word not in alphabet)]
    reference = tokenizers.Tokenizer(
        tokenizers.models.BPE({n: i for i, n in enumerate(names)}, [tuple(m.split()) for m in MERGES])
    )
    digits = pre_tokenizers.Digits(individual_digits=True)
    reference.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    changes = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(names) - 2)],
        "tokenizer.ggml.scores": None,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": 1,
        "tokenizer.ggml.unknown_token_id": None,
    }
    write_gguf(tmp_path / "model.gguf", "llama", llama, changes=changes)
    pipeline = import_gguf(tmp_path / "model.gguf")
    for text in ("the cat in 123 hats", "thé\ncat", "it's  the"):
        assert pipeline.encode_prompt(text) == reference.encode(text).ids
        assert pipeline.tokenizer.decode(pipeline.encode_prompt(text)) == text
    assert 0 not in pipeline.encode_prompt(special)
    assert (pipeline.special.begin, pipeline.special.ends) == (None, (0, 1))
    for name in ("llama-bpe", "qwen2", "gpt-2"):
        write_gguf(tmp_path / "model.gguf", "llama", llama, changes=changes | {"tokenizer.ggml.pre": name})
        pipeline = import_gguf(tmp_path / "model.gguf")
        assert pipeline.tokenizer.decode(pipeline.encode_prompt("It's 12345 cats")) == "It's 12345 cats"
        assert pipeline.special.begin == (0 if name == "llama-bpe" else None)
    write_gguf(tmp_path / "model.gguf", "llama", llama, changes=changes | {"tokenizer.ggml.pre": "viking"})
    with pytest.raises(RegardError, match="pre = 'viking' is unsupported"):
        import_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, "unsupported architecture 'mamba'"),
        ({"llama.block_count": None}, "block_count"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ({"llama.block_count": 3}, "missing: .*model.layers.2"),
        ({"llama.expert_count": 8}, "expert_count = 8 is unsupported"),
        ({"llama.attention.sliding_window": 7}, "sliding_window = 7 is unsupported"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count = 8 is unsupported"),
        ({"llama.rope.scaling.type": "longrope"}, "scaling.type = 'longrope' is unsupported"),
        ({"llama.residual_scale": 0.5}, "residual_scale = 0.5 is unsupported"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"tokenizer.ggml.model": "bert"}, "model = 'bert' is unsupported"),
        ({"tokenizer.ggml.scores": [0.0]}, "scores: 1 values"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos = 9999"),
        ({"tokenizer.ggml.eos_token_id": None}, "eos_token_id is missing"),
    ],
)
def test_unsupported_metadata_is_an_error_that_names_the_key(llama, tmp_path, changes, message):
    write_gguf(tmp_path / "model.gguf", "llama", llama, changes=changes)
    with pytest.raises(RegardError, match=message):
        import_gguf(tmp_path / "model.gguf")


def test_damaged_files_are_errors(file, tmp_path):
    content = file.read_bytes()
    damaged = tmp_path / "damaged.gguf"
    start = content.index(b"general.architecture") - 8
    cases = [content[:size] for size in (0, 3, 20, 100, len(content) // 2, len(content) - 40)]
    cases += [b"GGML" + content[4:], content[:4] + struct.pack(">I", 3) + content[8:]]
    for offset in (8, 16, start):  # a huge number of tensors, of metadata entries, of characters
        cases.append(content[:offset] + struct.pack("<Q", 2**62) + content[offset + 8 :])
    tokens = content.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    cases.append(content[:tokens] + struct.pack("<Q", 2**62) + content[tokens + 8 :])
    for case in cases:
        damaged.write_bytes(case)
        with pytest.raises(RegardError, match="damaged"):
            import_gguf(damaged)
    rng = np.random.default_rng(1)
    header = content.index(b"blk.0.attn_k.weight") + 200
    for _ in range(60):  # never another kind of error
        changed = np.frombuffer(content, np.uint8).copy()
        changed[rng.integers(0, header, 3)] = rng.integers(0, 256, 3)
        damaged.write_bytes(changed.tobytes())
        with contextlib.suppress(RegardError):
            import_gguf(damaged)
