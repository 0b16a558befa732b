"""BART, Marian, T5, mT5 and similar models compared with transformers, with random weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.attention import record
from regard.data import Tokenizer
from regard.data.text.languages import LanguagePair
from regard.data.text.special_tokens import SpecialTokens
from regard.decode import DecodeConfig, Request, decode_all
from regard.errors import RegardError
from regard.interop import export_huggingface, import_huggingface
from regard.layers.packed import pack
from regard.layers.positions import Sinusoidal
from regard.models.transformer import Transformer, TransformerConfig, t5_small
from regard.pipelines import Translator
from tests.interop.model_comparison import assert_same_tensors, write_translation_tokenizer

VOCAB = 50
BART: dict[str, Any] = dict(
    **dict(vocab_size=VOCAB, d_model=24, encoder_layers=2, decoder_layers=3, max_position_embeddings=40, init_std=0.4),
    **dict(encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=37, decoder_ffn_dim=37),
)
THREE_HEADS = dict(d_model=33, encoder_attention_heads=3, decoder_attention_heads=3)
MARIAN = BART | dict(pad_token_id=49, eos_token_id=0, decoder_start_token_id=49, forced_eos_token_id=0)
SEPARATE = dict(share_encoder_decoder_embeddings=False)
T5: dict[str, Any] = dict(
    vocab_size=VOCAB, d_model=24, d_kv=5, d_ff=37, num_layers=2, num_decoder_layers=3, num_heads=3
)
CASES = {
    "bart": ("Bart", BART),
    "bart forced": ("Bart", BART | THREE_HEADS | dict(scale_embedding=True)),
    "bart untied": ("Bart", BART | dict(tie_word_embeddings=False, activation_function="relu")),
    "marian": ("Marian", MARIAN | dict(scale_embedding=True, activation_function="swish")),
    "marian odd": ("Marian", MARIAN | THREE_HEADS),
    "marian untied": ("Marian", MARIAN | dict(tie_word_embeddings=False, scale_embedding=True)),
    "marian two": ("Marian", MARIAN | SEPARATE | dict(decoder_vocab_size=57)),
    "marian two untied": ("Marian", MARIAN | SEPARATE | dict(decoder_vocab_size=53, tie_word_embeddings=False)),
    "t5": ("T5", T5),
    "t5 wide": (
        "T5",
        T5 | dict(d_kv=16, d_model=41, relative_attention_num_buckets=8, relative_attention_max_distance=9),
    ),
    "t5 1.1": ("T5", T5 | dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
    "t5 silu": ("T5", T5 | dict(feed_forward_proj="gated-silu", layer_norm_epsilon=1e-3)),
    "mt5": ("MT5", T5),
    "mt5 untied": ("MT5", T5 | dict(feed_forward_proj="gated-silu", relative_attention_num_buckets=8)),
    "pegasus": ("Pegasus", BART | dict(scale_embedding=True)),
    "blenderbot": ("Blenderbot", BART | dict(encoder_no_repeat_ngram_size=0)),
    "m2m100": ("M2M100", BART),
    "m2m100 odd": ("M2M100", BART | THREE_HEADS | dict(scale_embedding=False, activation_function="gelu")),
    "mbart": ("MBart", BART | dict(decoder_start_token_id=3)),
}
SOURCES = [[0, 7, 9, 11, 30, 8, 21, 5, 2], [0, 40, 17, 2]]


def class_of(family: str) -> str:
    return "MarianMTModel" if family == "Marian" else f"{family}ForConditionalGeneration"


def make_hf_model(transformers: Any, case: str, folder: Path, **changes) -> Any:
    """A model of transformers in which no parameter is 0 or 1, saved to a folder with a tokenizer."""
    family, sizes = CASES[case]
    torch.manual_seed(len(case))
    model = getattr(transformers, class_of(family))(getattr(transformers, f"{family}Config")(**sizes | changes))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("bias", "norm.weight")) or "layernorm" in name:
                tensor.add_(0.3 * torch.randn_like(tensor))
        if family in ("T5", "MT5"):
            if case in ("t5 1.1", "mt5 untied"):
                model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
            model.lm_head.weight[model.config.eos_token_id] *= 9  # so that texts end
        elif family == "M2M100":
            direction = torch.nn.functional.normalize(model.lm_head.weight[model.config.eos_token_id], dim=0)
            model.model.decoder.layer_norm.bias += 4 * direction  # so that texts end
        else:
            model.final_logits_bias.normal_()
            model.final_logits_bias[0, model.config.eos_token_id] += 8
        if case in ("bart untied", "marian untied"):  # older versions tie these regardless of the config
            for side in (model.model.encoder, model.model.decoder):
                side.embed_tokens.weight.copy_(model.model.shared.weight)
    if case == "bart forced":
        model.generation_config.forced_bos_token_id = 0
    if family == "M2M100":  # the target language
        model.generation_config.forced_bos_token_id = 48
    model.save_pretrained(folder)
    write_translation_tokenizer(folder, model.config)
    model.set_attn_implementation("eager")
    return model.eval()


def pad_rows(rows: list[list[int]], fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return ids, mask


@torch.no_grad()
def assert_same_logits_and_attention(model: Transformer, special: SpecialTokens, hf_model: Any) -> None:
    """Compares logits and all attention weights for two pairs of different lengths."""
    targets = [[special.sos, 5, 6, 31, 9, 12], [special.sos, 44, 13]]
    ids, mask = pad_rows(SOURCES, special.pad)
    target_ids, target_mask = pad_rows(targets, special.pad)
    inputs = dict(input_ids=ids, attention_mask=mask)
    inputs |= dict(decoder_input_ids=target_ids, decoder_attention_mask=target_mask)
    expected = hf_model(**inputs, output_attentions=True)
    with record(model) as recording:
        logits = model(pack(SOURCES), pack(targets))
    torch.testing.assert_close(logits, expected.logits[target_mask.bool()], atol=1e-4, rtol=1e-5)
    maps = {
        f"encoder.{i}.attention": (SOURCES, SOURCES, weights) for i, weights in enumerate(expected.encoder_attentions)
    }
    maps |= {
        f"decoder.{i}.attention": (targets, targets, weights) for i, weights in enumerate(expected.decoder_attentions)
    }
    maps |= {f"decoder.{i}.cross": (targets, SOURCES, weights) for i, weights in enumerate(expected.cross_attentions)}
    assert maps.keys() == recording.keys()
    for name, (queries, keys, expected_weights) in maps.items():
        weights = recording[name].weights()
        for b, (T, S) in enumerate(zip(map(len, queries), map(len, keys))):
            torch.testing.assert_close(weights[b, :, :T, :S], expected_weights[b, :, :T, :S], atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_logits_attention_and_round_trip_match_transformers(transformers, case, tmp_path):
    hf_model = make_hf_model(transformers, case, tmp_path / "in")
    pipeline = import_huggingface(tmp_path / "in")
    assert_same_logits_and_attention(pipeline.model, pipeline.special, hf_model)
    exported = export_and_load(transformers, pipeline, tmp_path / "out")
    assert type(exported) is type(hf_model)
    assert_same_tensors(tmp_path / "in", tmp_path / "out")
    assert_same_logits_and_attention(pipeline.model, pipeline.special, exported)


def export_and_load(transformers: Any, pipeline: Translator, folder: Path) -> Any:
    """Exports a model and loads it in transformers, without missing or unexpected tensors."""
    name = export_huggingface(pipeline, folder)
    model, report = getattr(transformers, name).from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    return model.eval()


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_generation_matches_transformers(transformers, case, tmp_path):
    hf_model = make_hf_model(transformers, case, tmp_path)
    pipeline = import_huggingface(tmp_path)
    special = pipeline.special
    sources = [torch.randint(4, 49, (1 + i % 9,)).tolist() for i in range(12)]
    ids, mask = pad_rows(sources, special.pad)
    excluded = [[token] for token in {special.pad, special.sos} - {special.eos}] or None  # as in Regard
    common = dict(input_ids=ids, attention_mask=mask, min_new_tokens=4, max_new_tokens=20, bad_words_ids=excluded)
    common |= dict(decoder_start_token_id=special.sos, forced_eos_token_id=None)
    common |= dict(use_cache="t5" not in case)  # transformers fails if the stacks differ in depth
    prefixes = None if special.forced is None else [[special.forced]] * len(sources)
    # Regard scores forced tokens, transformers does not: without length penalty the ranking is the same.
    penalty = 1.0 if special.forced is None else 0.0
    for method, options in (
        ("greedy", dict(num_beams=1)),
        ("beam", dict(num_beams=4, early_stopping=True, length_penalty=penalty)),
    ):
        expected = hf_model.generate(**common, **options)[:, 1:].tolist()
        config = DecodeConfig(method, beam=4, min_len=4, max_len=20, length_penalty=penalty)
        decoded = decode_all(pipeline.model, Request(sources, config, special=special, prefixes=prefixes))
        compared = set()
        for row, (best, *_) in zip(expected, decoded):
            if special.eos in row:  # ended before the maximum length
                assert best.ids == row[: row.index(special.eos)]
                compared.add(tuple(best.ids))
        assert len(compared) > 1


def test_special_ids_are_read(transformers, tmp_path):
    make_hf_model(transformers, "bart forced", tmp_path / "bart")
    bart = import_huggingface(tmp_path / "bart")
    assert bart.special == SpecialTokens(pad=1, unk=4, sos=2, eos=2, begin=0, end=2, forced=0)
    assert bart.encode_source("w5 w6") == [0, 5, 6, 2]
    assert bart.teacher_forced([([5], [7])])[1].ids.tolist() == [2, 0, 7]
    assert bart.translate(["w5 w6"])[0][0].hypothesis.ids[0] == 0
    make_hf_model(transformers, "bart", tmp_path / "first")
    assert import_huggingface(tmp_path / "first").special.forced is None
    edit_config(tmp_path / "first", force_bos_token_to_be_generated=True)
    assert import_huggingface(tmp_path / "first").special.forced == 0
    make_hf_model(transformers, "marian", tmp_path / "marian")
    assert import_huggingface(tmp_path / "marian").special == SpecialTokens(pad=49, unk=4, sos=49, eos=0, end=0)
    make_hf_model(transformers, "t5", tmp_path / "t5")  # its config has no decoder_start_token_id
    assert import_huggingface(tmp_path / "t5").special == SpecialTokens(pad=0, unk=4, sos=0, eos=1, end=1)


def test_languages_of_m2m100_are_special_tokens(transformers, tmp_path):
    make_hf_model(transformers, "m2m100", tmp_path / "in")
    pipeline = import_huggingface(tmp_path / "in")
    assert pipeline.special == SpecialTokens(pad=1, unk=4, sos=2, eos=2, begin=47, end=2, forced=48)
    export_huggingface(pipeline, tmp_path / "out")
    assert import_huggingface(tmp_path / "out").special == pipeline.special
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("w5 w6")["input_ids"] == [47, 5, 6, 2]
    path = tmp_path / "in" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"forced_bos_token_id": None}))
    with pytest.raises(RegardError, match="forced_bos_token_id is missing"):
        import_huggingface(tmp_path / "in")


def test_m2m100_with_trained_positions_is_exported_as_blenderbot(transformers, tmp_path):
    make_hf_model(transformers, "m2m100", tmp_path / "in")
    pipeline = import_huggingface(tmp_path / "in")
    with torch.no_grad():
        pipeline.model.source_embedding.positions.weight[3] += 1
    exported = export_and_load(transformers, pipeline, tmp_path / "out")
    assert type(exported).__name__ == "BlenderbotForConditionalGeneration"
    assert_same_logits_and_attention(pipeline.model, pipeline.special, exported)


def test_bart_without_output_layer_is_read(transformers, tmp_path):
    """Early files of BART: another class, shorter names, no bias, copies of the embedding."""
    hf_model = make_hf_model(transformers, "bart", tmp_path)
    tensors = {
        name.removeprefix("model."): tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    del tensors["final_logits_bias"]
    tensors |= {f"{side}.embed_tokens.weight": tensors["shared.weight"].clone() for side in ("encoder", "decoder")}
    save_file(tensors, tmp_path / "model.safetensors")
    edit_config(tmp_path, architectures=["BartModel"])
    pipeline = import_huggingface(tmp_path)
    hf_model.final_logits_bias.zero_()
    assert_same_logits_and_attention(pipeline.model, pipeline.special, hf_model)


def test_early_t5_files_are_read(transformers, tmp_path):
    """Without the newer keys, with copies of the embedding and an unused bias."""
    hf_model = make_hf_model(transformers, "t5", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for copy in ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head"):
        tensors[f"{copy}.weight"] = tensors["shared.weight"].clone()
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.ones(32, 3)
    save_file(tensors, tmp_path / "model.safetensors")
    newer_keys = ("dense_act_fn", "is_gated_act", "relative_attention_max_distance", "scale_decoder_outputs")
    edit_config(tmp_path, **dict.fromkeys((*newer_keys, "tie_word_embeddings"), None))
    pipeline = import_huggingface(tmp_path)
    assert pipeline.model.config.tied
    assert_same_logits_and_attention(pipeline.model, pipeline.special, hf_model)


def edit_config(folder: Path, **values) -> None:
    path = folder / "config.json"
    table = {key: value for key, value in (json.loads(path.read_text()) | values).items() if value is not None}
    path.write_text(json.dumps(table))


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("bart", "activation_function", "mish"),
        ("bart", "decoder_attention_heads", 2),
        ("bart", "decoder_attention_heads", None),  # the default of the class
        ("bart", "tie_word_embeddings", False),  # without lm_head
        ("t5", "tie_word_embeddings", False),
        ("bart", "decoder_ffn_dim", 36),
        ("bart", "normalize_before", True),
        ("bart", "is_decoder", True),
        ("mt5", "is_encoder_decoder", False),
        ("bart", "tie_encoder_decoder", True),
        ("bart", "d_model", "wide"),
        ("marian", "normalize_embedding", True),
        ("marian", "pruned_heads", {"0": [1]}),
        ("t5", "feed_forward_proj", "gated-relu"),
        ("t5", "feed_forward_proj", "sparse-gelu"),
        ("t5 1.1", "dense_act_fn", "gelu"),
        ("m2m100", "decoder_ffn_dim", 36),
        ("mt5", "feed_forward_proj", "gated-relu"),
        ("mt5", "tie_word_embeddings", False),  # without lm_head
    ],
)
def test_unsupported_settings_are_an_error_that_names_the_key(transformers, tmp_path, case, key, value):
    make_hf_model(transformers, case, tmp_path)
    if key == "feed_forward_proj":
        edit_config(tmp_path, dense_act_fn=None)
    edit_config(tmp_path, **{key: value})
    with pytest.raises(RegardError, match=f"config.json: {key} (=|must be)"):
        import_huggingface(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sinusoids_in_half_precision_are_read(transformers, tmp_path, dtype):
    """Pegasus stores its positions."""
    make_hf_model(transformers, "pegasus", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    table = Sinusoidal(tensors["model.shared.weight"].shape[1], 40, split_halves=True).table
    name = "model.encoder.embed_positions.weight"
    save_file({**tensors, name: table.to(dtype)}, path)
    import_huggingface(tmp_path)
    save_file({**tensors, name: table.roll(1, 0).to(dtype).contiguous()}, path)
    with pytest.raises(RegardError, match="does not hold sinusoids"):
        import_huggingface(tmp_path)


def test_wrong_tensors_are_named(transformers, tmp_path):
    make_hf_model(transformers, "marian", tmp_path)
    path = tmp_path / "model.safetensors"
    original = load_file(path)
    for tensors, message in (
        (original | {"model.encoder.layer_norm.weight": torch.ones(24)}, "unknown: model.encoder.layer_norm.weight"),
        (original | {"model.encoder.embed_positions.weight": torch.ones(40, 24)}, "does not hold sinusoids"),
        (original | {"model.encoder.embed_tokens.weight": torch.ones(50, 24)}, "tie_word_embeddings"),
        (original | {"model.shared.weight": torch.ones(50, 23)}, r"wrong shape: model.shared.weight \(50, 23\)"),
        ({key: original[key] for key in original if "decoder.layers.2.fc1.bias" not in key}, "missing: .*2.fc1.bias"),
    ):
        save_file(tensors, path)
        with pytest.raises(RegardError, match=message):
            import_huggingface(tmp_path)


# -- export of models of Regard ---------------------------------------------------------------------------------------

SIZES: dict[str, Any] = dict(
    **dict(width=24, heads=4, feedforward=37, encoder_layers=2, decoder_layers=3, dropout=0.0, max_len=20),
    **dict(source_vocab=VOCAB, target_vocab=VOCAB, shared_vocab=True),
)
SUPPORTED = [
    ("MarianMTModel", dict(norm="post")),
    ("MarianMTModel", dict(norm="post", width=33, heads=3, activation="gelu", bias=False, tied=False)),
    ("MarianMTModel", dict(norm="post", shared_vocab=False, target_vocab=57, embedding_scale=False)),
    ("MarianMTModel", dict(norm="post", shared_vocab=False, tied=False, positions="sinusoidal_halves")),
    ("PegasusForConditionalGeneration", dict()),
    ("PegasusForConditionalGeneration", dict(width=33, heads=3, activation="gelu_tanh", tied=False)),
    ("PegasusForConditionalGeneration", dict(activation="silu", output_bias=True, bias=False, kv_heads=4)),
    ("BlenderbotForConditionalGeneration", dict(positions="learned")),
    ("BlenderbotForConditionalGeneration", dict(positions="learned", position_offset=3, activation="relu2")),
    ("MBartForConditionalGeneration", dict(embedding_norm=True)),
    ("MBartForConditionalGeneration", dict(embedding_norm=True, positions="learned")),
    ("BartForConditionalGeneration", dict(norm="post", embedding_norm=True, positions="sinusoidal_halves")),
    ("BartForConditionalGeneration", dict(norm="post", embedding_norm=True, positions="learned", tied=False)),
    ("T5ForConditionalGeneration", vars(t5_small(**SIZES, head_width=5))),
    ("T5ForConditionalGeneration", vars(t5_small(**SIZES, tied=True, output_scale=True, activation="relu"))),
    ("T5ForConditionalGeneration", vars(t5_small(**SIZES, activation="swiglu", relative_buckets=7))),
]


def make_translator(**choices) -> Translator:
    torch.manual_seed(5)
    model = Transformer(TransformerConfig(**(SIZES | choices))).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                tensor.add_(0.3 * torch.randn_like(tensor))
    tokenizer = Tokenizer.train([" ".join(f"w{i}" for i in range(46))], "word")
    return Translator(model, tokenizer, tokenizer)


@pytest.mark.parametrize(("name", "choices"), SUPPORTED)
def test_exported_model_gives_the_same_output_in_transformers(transformers, tmp_path, name, choices):
    pipeline = make_translator(**choices)
    hf_model = export_and_load(transformers, pipeline, tmp_path)
    assert type(hf_model).__name__ == name
    assert_same_logits_and_attention(pipeline.model, pipeline.special, hf_model)
    back = import_huggingface(tmp_path)
    assert back.special == pipeline.special
    logits = [each.model(pack(SOURCES), pack(SOURCES)) for each in (pipeline, back)]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)


def test_languages_are_exported_and_imported(transformers, tmp_path):
    pipeline = make_translator(**SUPPORTED[0][1])
    pipeline.language_pairs = (LanguagePair("en", "fr"),)
    export_huggingface(pipeline, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (settings["source_lang"], settings["target_lang"]) == ("en", "fr")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("w1 w2")["input_ids"]
    assert import_huggingface(tmp_path).languages == ("en", "fr")


def test_language_tags_are_exported_and_imported(transformers, tmp_path):
    pipeline = make_translator(**SUPPORTED[0][1])
    tokenizer = Tokenizer.train([" ".join(f"w{i}" for i in range(44))], "word", tags=["<2de>", "<2fr>"])
    pairs = (LanguagePair("en", "de"), LanguagePair("en", "fr"))
    pipeline = Translator(pipeline.model, tokenizer, tokenizer, language_pairs=pairs)
    export_huggingface(pipeline, tmp_path)
    written = transformers.AutoTokenizer.from_pretrained(tmp_path)("<2fr> w1 w2")["input_ids"]
    back = import_huggingface(tmp_path)
    assert back.language_pairs == pairs
    for one in (pipeline, back):
        assert one.with_target("fr").encode_source("w1 w2") == written


@pytest.mark.parametrize(
    ("choices", "field"),
    [
        (dict(positions="rotary"), "positions = 'rotary'"),
        (dict(positions="none"), "positions = 'none'"),
        (dict(qk_norm=True), "qk_norm = True"),
        (dict(kv_heads=2), "kv_heads = 2"),
        (dict(head_width=5), "head_width = 5"),
        (dict(norm_kind="rms"), "norm_kind = 'rms'"),
        (dict(norm_eps=1e-6), "norm_eps = 1e-06"),
        (dict(activation="swiglu"), "activation = 'swiglu'"),
        (dict(cross_score="cosine"), "cross_score = 'cosine'"),
        (dict(output_scale=True), "output_scale = True"),
        (dict(shared_vocab=False), "shared_vocab = False"),
        (dict(norm="post", positions="learned"), "positions = 'learned'|embedding_norm = False"),
        (vars(t5_small(**SIZES, output_bias=True)), "output_bias = True"),
        (vars(t5_small(**SIZES, encoder_score="scaled_dot")), "encoder_score = 'scaled_dot'"),
    ],
)
def test_unsupported_fields_are_named_and_nothing_is_written(tmp_path, choices, field):
    with pytest.raises(RegardError, match=field):
        export_huggingface(make_translator(**choices), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_trained_model_translates_identically_in_transformers(transformers, transformer, tmp_path):
    hf_model = export_and_load(transformers, transformer, tmp_path)
    lines = ["one two three", "nine four", "ten six five eight", "seven"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    inputs = tokenizer(lines, return_tensors="pt", padding=True)
    assert inputs["input_ids"][3].tolist()[:2] == transformer.encode_source("seven")
    generated = hf_model.generate(**inputs, max_length=16, forced_eos_token_id=None)
    expected = [best.text for best, *_ in transformer.translate(lines)]
    assert tokenizer.batch_decode(generated, skip_special_tokens=True) == expected
    assert len(set(expected)) == 4
