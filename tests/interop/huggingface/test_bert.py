"""Encoder-only models (BERT and its successors) compared with transformers, with random weights."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.attention import record
from regard.attention.exact_weights import compute_weights
from regard.errors import RegardError
from regard.interop import import_huggingface
from regard.layers.packed import pack
from tests.interop.model_comparison import (
    ROWS,
    VOCAB,
    assert_same_attention,
    edit_config,
    random_model,
    remove_padding,
    round_trip,
    run_hf_model,
)

SEGMENTS = [[0, 0, 0, 1, 1, 1, 1], [0, 1, 1]]

_DEBERTA = {"relative_attention": True, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
_DEBERTA |= {"pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "type_vocab_size": 0}
_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 70.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
}
_SIZES = {"vocab_size": VOCAB, "hidden_size": 30, "num_attention_heads": 5, "num_hidden_layers": 2}
CONFIGS = {
    "Bert": [
        dict(_SIZES, intermediate_size=37, max_position_embeddings=13),
        dict(
            **dict(_SIZES, hidden_size=24, num_attention_heads=1, num_hidden_layers=3, hidden_act="gelu_new"),
            **dict(intermediate_size=50, max_position_embeddings=20, layer_norm_eps=1e-3, type_vocab_size=3),
        ),
    ],
    "Roberta": [
        dict(_SIZES, intermediate_size=37, max_position_embeddings=13, type_vocab_size=2, pad_token_id=1),
        dict(
            **dict(_SIZES, hidden_size=24, num_attention_heads=3, num_hidden_layers=3, intermediate_size=41),
            **dict(max_position_embeddings=20, layer_norm_eps=1e-5, type_vocab_size=2, pad_token_id=4),
        ),
    ],
    "XLMRoberta": [
        dict(_SIZES, intermediate_size=37, max_position_embeddings=13, type_vocab_size=1, layer_norm_eps=1e-5),
    ],
    "Camembert": [
        dict(_SIZES, hidden_size=25, intermediate_size=41, max_position_embeddings=20, type_vocab_size=1),
    ],
    "DistilBert": [
        dict(vocab_size=VOCAB, dim=30, n_heads=5, n_layers=2, hidden_dim=37, max_position_embeddings=13),
        dict(
            **dict(vocab_size=VOCAB, dim=24, n_heads=3, n_layers=3, hidden_dim=50, max_position_embeddings=20),
            **dict(activation="relu", sinusoidal_pos_embds=True),
        ),
    ],
    "Albert": [
        dict(_SIZES, intermediate_size=37, max_position_embeddings=13, embedding_size=11),
        dict(
            **dict(_SIZES, num_hidden_layers=4, num_hidden_groups=2, hidden_act="gelu", intermediate_size=50),
            **dict(max_position_embeddings=20, embedding_size=30, layer_norm_eps=1e-5),
        ),
    ],
    "Electra": [
        dict(_SIZES, intermediate_size=37, max_position_embeddings=13, embedding_size=11),
        dict(
            **dict(_SIZES, hidden_size=24, num_attention_heads=3, num_hidden_layers=3, intermediate_size=50),
            **dict(max_position_embeddings=20, embedding_size=24, layer_norm_eps=1e-5, type_vocab_size=3),
        ),
    ],
    "MPNet": [
        dict(_SIZES, intermediate_size=37, max_position_embeddings=13, pad_token_id=1),
        dict(
            **dict(_SIZES, hidden_size=24, num_attention_heads=3, num_hidden_layers=3, intermediate_size=50),
            **dict(max_position_embeddings=20, layer_norm_eps=1e-5),
        ),
    ],
    "DebertaV2": [
        dict(_SIZES, intermediate_size=37, max_position_embeddings=13, position_buckets=4, **_DEBERTA),
        dict(
            **dict(_SIZES, hidden_size=24, num_attention_heads=3, num_hidden_layers=3, intermediate_size=50),
            **(_DEBERTA | dict(max_relative_positions=3, type_vocab_size=2, position_biased_input=True)),
            **dict(pooler_hidden_act="tanh", layer_norm_eps=1e-5, hidden_act="gelu_new", max_position_embeddings=13),
        ),
        dict(
            **dict(_SIZES, intermediate_size=37, max_position_embeddings=40, position_buckets=8, hidden_act="relu"),
            **(_DEBERTA | dict(max_relative_positions=6, pos_att_type="c2p|p2c")),
        ),
    ],
    "ModernBert": [
        dict(_SIZES, intermediate_size=37, hidden_size=30, num_hidden_layers=4, local_attention=4, pad_token_id=0),
        dict(
            **dict(_SIZES, hidden_size=24, num_attention_heads=3, num_hidden_layers=3, intermediate_size=50),
            **dict(local_attention=3, layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
            **dict(norm_bias=True, attention_bias=True, mlp_bias=True, classifier_bias=True, norm_eps=1e-3),
            **dict(classifier_pooling="mean", rope_parameters=_ROPE, pad_token_id=0),
        ),
        dict(
            **dict(_SIZES, intermediate_size=41, mlp_bias=True, hidden_activation="silu", classifier_activation="silu"),
            **dict(layer_types=["full_attention"] * 2, pad_token_id=0),
        ),
    ],
}
CASES = [(family, i) for family, configs in CONFIGS.items() for i in range(len(configs))]


def make_hf_model(transformers, family, index, head, folder, **changes):
    config = getattr(transformers, f"{family}Config")(**CONFIGS[family][index] | changes)
    return random_model(getattr(transformers, f"{family}{head}"), config, folder)


def segments_of(family):
    has_none = family in ("XLMRoberta", "Camembert", "DistilBert", "MPNet", "ModernBert", "DebertaV2")
    return None if has_none else SEGMENTS


def hf_output(family, model):
    return run_hf_model(model, segments_of(family), pad=model.config.pad_token_id)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("family", "index"), CASES)
def test_encoder_matches_transformers(transformers, tmp_path, family, index):
    hf_model = make_hf_model(transformers, family, index, "Model", tmp_path / "in")
    expected = hf_output(family, hf_model)
    pipeline, exported = round_trip(transformers, tmp_path / "in", tmp_path / "out")
    encoded = assert_same_attention(pipeline.model, expected.attentions, segments_of(family))
    assert_close(encoded, remove_padding(expected.last_hidden_state))
    if family not in ("DistilBert", "Electra", "DebertaV2", "ModernBert"):  # they have no pooler
        assert_close(pipeline.model.pool(encoded, pack(ROWS)), expected.pooler_output)
    assert torch.equal(hf_output(family, exported).last_hidden_state, expected.last_hidden_state)


@pytest.mark.parametrize("family", CONFIGS)
def test_tagger_matches_transformers(transformers, tmp_path, family):
    names = {"id2label": {0: "O", 1: "B-PER", 2: "I-PER"}, "label2id": {"O": 0, "B-PER": 1, "I-PER": 2}}
    hf_model = make_hf_model(transformers, family, -1, "ForTokenClassification", tmp_path / "in", **names)
    expected = hf_output(family, hf_model)
    pipeline, exported = round_trip(transformers, tmp_path / "in", tmp_path / "out")
    logits = assert_same_attention(pipeline.model, expected.attentions, segments_of(family))
    assert_close(logits, remove_padding(expected.logits))
    assert torch.equal(hf_output(family, exported).logits, expected.logits)
    assert exported.config.id2label == names["id2label"]
    ids = torch.tensor([pipeline.special.add_special_tokens(ROWS[0])])
    with torch.no_grad():
        best = hf_model(input_ids=ids).logits[0, 1:-1].softmax(-1).max(-1)
    words = pipeline.tag(" ".join(f"w{i}" for i in ROWS[0]))
    assert [word.tag for word in words] == [names["id2label"][i] for i in best.indices.tolist()]
    assert [word.probability for word in words] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("family", ["Bert", "Roberta", "Albert"])
def test_encoder_without_pooler_matches_transformers(transformers, tmp_path, family):
    hf_model = make_hf_model(transformers, family, 0, "Model", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if "pooler" not in name}, tmp_path / "model.safetensors"
    )
    pipeline = import_huggingface(tmp_path)
    assert pipeline.model.config.pooler == "none"
    expected = hf_output(family, hf_model)
    assert_close(
        assert_same_attention(pipeline.model, expected.attentions, SEGMENTS), remove_padding(expected.last_hidden_state)
    )


@pytest.mark.parametrize(("family", "index"), CASES)
def test_masked_language_model_matches_transformers(transformers, tmp_path, family, index):
    hf_model = make_hf_model(transformers, family, index, "ForMaskedLM", tmp_path / "in")
    expected = hf_output(family, hf_model)
    pipeline, exported = round_trip(transformers, tmp_path / "in", tmp_path / "out")
    assert_close(
        assert_same_attention(pipeline.model, expected.attentions, segments_of(family)), remove_padding(expected.logits)
    )
    assert torch.equal(hf_output(family, exported).logits, expected.logits)


@pytest.mark.parametrize(("family", "index"), CASES)
def test_classifier_matches_transformers(transformers, tmp_path, family, index):
    names = {0: "bad", 1: "so so", 2: "good"}
    hf_model = make_hf_model(transformers, family, index, "ForSequenceClassification", tmp_path / "in", id2label=names)
    expected = hf_output(family, hf_model)
    pipeline, exported = round_trip(transformers, tmp_path / "in", tmp_path / "out")
    assert pipeline.model.config.labels == ("bad", "so so", "good")
    assert_close(assert_same_attention(pipeline.model, expected.attentions, segments_of(family)), expected.logits)
    assert torch.equal(hf_output(family, exported).logits, expected.logits)
    assert exported.config.id2label == names


@pytest.mark.parametrize(("family", "index"), CASES)
def test_question_answering_matches_transformers(transformers, tmp_path, family, index):
    hf_model = make_hf_model(transformers, family, index, "ForQuestionAnswering", tmp_path / "in")
    expected = hf_output(family, hf_model)
    pipeline, exported = round_trip(transformers, tmp_path / "in", tmp_path / "out")
    logits = assert_same_attention(pipeline.model, expected.attentions, segments_of(family))
    assert_close(
        logits, torch.stack([remove_padding(expected.start_logits), remove_padding(expected.end_logits)], dim=1)
    )
    assert torch.equal(hf_output(family, exported).end_logits, expected.end_logits)


@pytest.mark.parametrize("family", ["Bert", "Albert"])
def test_pretraining_class_is_imported_as_masked_language_model(transformers, tmp_path, caplog, family):
    hf_model = make_hf_model(transformers, family, 0, "ForPreTraining", tmp_path)
    with caplog.at_level(logging.WARNING, "regard"):
        pipeline = import_huggingface(tmp_path)
    assert "pooler" in caplog.text  # a warning lists the tensors that are left out
    segments = torch.tensor([segment for row in SEGMENTS for segment in row])
    assert_close(pipeline.model(pack(ROWS), segments), remove_padding(hf_output(family, hf_model).prediction_logits))


def test_discriminator_of_electra_is_imported_without_head(transformers, tmp_path, caplog):
    hf_model = make_hf_model(transformers, "Electra", 0, "ForPreTraining", tmp_path)
    with caplog.at_level(logging.WARNING, "regard"):
        pipeline = import_huggingface(tmp_path)
    assert "discriminator_predictions" in caplog.text
    expected = hf_output("Electra", hf_model.electra).last_hidden_state
    segments = torch.tensor([segment for row in SEGMENTS for segment in row])
    assert_close(pipeline.model(pack(ROWS), segments), remove_padding(expected))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("MPNet", {"max_position_embeddings": 322}),
        ("DebertaV2", {"position_buckets": 32, "max_position_embeddings": 128}),
        ("DebertaV2", {"position_buckets": -1, "max_position_embeddings": 128}),
        ("ModernBert", {"local_attention": 32}),
    ],
)
def test_relative_positions_and_windows_match_transformers_in_long_texts(transformers, tmp_path, family, changes):
    hf_model = make_hf_model(transformers, family, 0, "Model", tmp_path, **changes)
    pipeline = import_huggingface(tmp_path)
    ids = torch.randint(5, VOCAB, (320,), generator=torch.manual_seed(0)).tolist()
    with torch.no_grad(), record(pipeline.model) as recording:
        expected = hf_model(input_ids=torch.tensor([ids]), output_attentions=True)
        assert_close(pipeline.model(pack([ids])), expected.last_hidden_state[0])
    for (recorded,), weights in zip((one.calls for one in recording.values()), expected.attentions, strict=True):
        assert_close(compute_weights(recorded), weights)


def test_folder_without_class_is_imported_without_head(transformers, tmp_path, caplog):
    """As the published DeBERTa-v3, whose file has two heads of pre-training."""
    hf_model = make_hf_model(transformers, "DebertaV2", 0, "ForMaskedLM", tmp_path)
    edit_config(tmp_path, "architectures")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"mask_predictions.dense.weight": torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING, "regard"):
        pipeline = import_huggingface(tmp_path)
    assert "no class is named" in caplog.text
    assert "mask_predictions.dense.weight" in caplog.text
    assert_close(pipeline.model(pack(ROWS)), remove_padding(run_hf_model(hf_model.deberta).last_hidden_state))
    edit_config(tmp_path, model_type="unknown")
    with pytest.raises(RegardError, match="architectures = None"):
        import_huggingface(tmp_path)


def test_segments_of_deberta_match_transformers(transformers, tmp_path):
    hf_model = make_hf_model(transformers, "DebertaV2", 1, "Model", tmp_path)
    segments = torch.tensor([segment for row in SEGMENTS for segment in row])
    expected = remove_padding(run_hf_model(hf_model, SEGMENTS).last_hidden_state)
    assert_close(import_huggingface(tmp_path).model(pack(ROWS), segments), expected)


def test_labels_without_names_get_default_names(transformers, tmp_path):
    make_hf_model(transformers, "Bert", 0, "ForSequenceClassification", tmp_path)
    assert import_huggingface(tmp_path).model.config.labels == ("LABEL_0", "LABEL_1")


def rename_tensors(folder, rename):
    tensors = load_file(folder / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return tensors


def test_tensor_names_of_early_files_are_read(transformers, tmp_path):
    """gamma and beta, a copy of the embedding as decoder, and position indices."""
    hf_model = make_hf_model(transformers, "Bert", 0, "ForMaskedLM", tmp_path)
    tensors = rename_tensors(
        tmp_path, lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("Norm.bias", "Norm.beta")
    )
    early = load_file(tmp_path / "model.safetensors") | {
        "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"].clone(),
        "cls.predictions.decoder.bias": tensors["cls.predictions.bias"].clone(),
        "bert.embeddings.position_ids": torch.arange(13)[None],
    }
    assert "bert.embeddings.LayerNorm.gamma" in early
    save_file(early, tmp_path / "model.safetensors")
    assert_close(import_huggingface(tmp_path).model(pack(ROWS)), remove_padding(run_hf_model(hf_model).logits))


def test_untied_decoder_is_an_error(transformers, tmp_path):
    make_hf_model(transformers, "Bert", 0, "ForMaskedLM", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RegardError, match=r"copy of: cls.predictions.decoder.weight"):
        import_huggingface(tmp_path)


@pytest.mark.parametrize("head", ["Model", "ForQuestionAnswering"])
def test_name_prefix_is_optional(transformers, tmp_path, head):
    make_hf_model(transformers, "Bert", 0, head, tmp_path)
    before = dict(import_huggingface(tmp_path).model.named_parameters())
    rename_tensors(tmp_path, lambda name: name.removeprefix("bert.") if head != "Model" else f"bert.{name}")
    after = dict(import_huggingface(tmp_path).model.named_parameters())
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("Bert", "position_embedding_type", "relative_key"),
        ("Bert", "is_decoder", True),
        ("Bert", "add_cross_attention", True),
        ("Bert", "tie_word_embeddings", False),
        ("Bert", "hidden_act", "gelu_10"),
        ("Bert", "pruned_heads", {"0": [1]}),
        ("Bert", "hidden_size", "30"),
        ("Bert", "num_attention_heads", 0),
        ("Bert", "quantization_config", {"bits": 4}),
        ("Bert", "auto_map", {"AutoModel": "own.Model"}),
        ("Roberta", "hidden_act", "relu"),
        ("Roberta", "max_position_embeddings", 2),
        ("DistilBert", "activation", "tanh"),
        ("Albert", "inner_group_num", 2),
        ("Electra", "hidden_act", "relu"),
        ("Electra", "is_decoder", True),
        ("MPNet", "hidden_act", "relu"),
        ("MPNet", "relative_attention_num_buckets", 64),
        ("MPNet", "pad_token_id", 0),
        ("MPNet", "max_position_embeddings", 2),
        ("DebertaV2", "relative_attention", False),
        ("DebertaV2", "share_att_key", False),
        ("DebertaV2", "norm_rel_ebd", "none"),
        ("DebertaV2", "pos_att_type", ["c2p"]),
        ("DebertaV2", "conv_kernel_size", 3),
        ("DebertaV2", "embedding_size", 24),
        ("DebertaV2", "attention_head_size", 5),
        ("DebertaV2", "position_buckets", 2),
        ("DebertaV2", "legacy", False),
        ("ModernBert", "hidden_activation", "relu"),
        ("ModernBert", "classifier_activation", "relu"),
        ("ModernBert", "decoder_bias", False),
        ("ModernBert", "tie_word_embeddings", False),
        ("ModernBert", "layer_types", ["full_attention"]),
        ("ModernBert", "rope_scaling", {"rope_type": "linear", "factor": 2.0}),
    ],
)
def test_unsupported_settings_are_an_error_that_names_the_key(transformers, tmp_path, family, key, value):
    make_hf_model(transformers, family, 0, "ForMaskedLM", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(RegardError, match=key):
        import_huggingface(tmp_path)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("id2label", {"id2label": {"1": "a", "2": "b"}}),
        ("problem_type", {"problem_type": "ranking"}),
        ("problem_type", {"problem_type": "single_label_classification", "id2label": {"0": "a"}}),
    ],
)
def test_unnumbered_labels_and_unknown_problems_are_errors(transformers, tmp_path, key, changes):
    make_hf_model(transformers, "Bert", 0, "ForSequenceClassification", tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(RegardError, match=key):
        import_huggingface(tmp_path)


_IDENTITY = "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("labels", "settings", "expected_type"),
    [
        (1, {}, "multi_label"),
        (1, {"problem_type": "regression"}, "regression"),
        (3, {"problem_type": "regression"}, "regression"),
        (3, {"problem_type": "multi_label_classification"}, "multi_label"),
        (3, {}, "single_label"),
    ],
)
def test_each_kind_of_classifier_matches_transformers(transformers, tmp_path, labels, settings, expected_type):
    hf_model = make_hf_model(
        transformers, "DistilBert", 0, "ForSequenceClassification", tmp_path / "in", num_labels=labels, **settings
    )
    pipeline, exported = round_trip(transformers, tmp_path / "in", tmp_path / "out")
    assert pipeline.model.config.problem_type == expected_type
    assert import_huggingface(tmp_path / "out").model.config.problem_type == expected_type
    texts = ["w5 w9 w17", "w21 w6 w30 w31"]
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    results = pipeline.classify(texts)
    for model in (hf_model, exported):
        reference = transformers.TextClassificationPipeline(model=model, tokenizer=tokenizer, device="cpu")
        for result, scores in zip(results, reference(texts, top_k=None), strict=True):
            assert result.probabilities == pytest.approx({row["label"]: row["score"] for row in scores}, abs=1e-5)
            assert result.label == max(scores, key=lambda row: row["score"])["label"]
    assert results[0].probability != pytest.approx(results[1].probability, abs=1e-4)


@pytest.mark.parametrize(
    "settings",
    [{"sentence_transformers": {"activation_fn": _IDENTITY}}, {"sbert_ce_default_activation_function": _IDENTITY}],
)
def test_cross_encoders_without_activation_give_scores(transformers, tmp_path, settings):
    hf_model = make_hf_model(transformers, "Bert", 0, "ForSequenceClassification", tmp_path, num_labels=1)
    edit_config(tmp_path, **settings)
    pipeline = import_huggingface(tmp_path)
    with torch.no_grad():
        expected = hf_model(
            torch.tensor([[2, 5, 9, 3, 7, 3]]), token_type_ids=torch.tensor([[0, 0, 0, 0, 1, 1]])
        ).logits
    assert pipeline.classify([("w5 w9", "w7")])[0].probability == pytest.approx(expected.item(), abs=1e-5)
