"""Language models compared with transformers, with random weights."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.data import Tokenizer
from regard.data.text.special_tokens import SpecialTokens
from regard.decode import DecodeConfig, explain
from regard.errors import RegardError
from regard.interop import export_huggingface, import_huggingface
from regard.layers.packed import pack
from regard.models import GPT, GPTConfig
from regard.pipelines import TextGenerator, load
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

NAMES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
_IDS = {"vocab_size": VOCAB, "bos_token_id": 2, "eos_token_id": 3}
_GPT2 = dict(_IDS, n_embd=30, n_layer=2, n_head=5, n_positions=13)
_LLAMA = dict(
    **dict(_IDS, hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2),
    **dict(intermediate_size=37, max_position_embeddings=40),
)
_ROPE_THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
_LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}}
# Of the five channel pairs, some are scaled fully, some partly and some not at all.
_LLAMA_3 = {
    "rope_parameters": {
        **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 64,
    }
}
_YARN = {
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0},
        "original_max_position_embeddings": 64,
    }
}
_WINDOW_TYPES = ["full_attention", "sliding_attention"]
_GEMMA = dict(_LLAMA, head_dim=10, pad_token_id=0)
_GEMMA2 = dict(_GEMMA, num_hidden_layers=3, sliding_window=3, query_pre_attn_scalar=24)
_NEOX = dict(
    **dict(_IDS, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=37),
    max_position_embeddings=40,
)
_OPT = dict(
    **dict(_IDS, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, ffn_dim=37, max_position_embeddings=13),
    **dict(pad_token_id=0, word_embed_proj_dim=24),
)
CASES = [
    ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    ("GPT2LMHeadModel", "GPT2Config", dict(_GPT2, n_inner=41, activation_function="relu", tie_word_embeddings=False)),
    ("GPT2LMHeadModel", "GPT2Config", dict(_GPT2, n_layer=3, n_head=1, scale_attn_weights=False)),
    ("GPT2LMHeadModel", "GPT2Config", dict(_GPT2, layer_norm_epsilon=1e-2, activation_function="relu2")),
    ("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    ("LlamaForCausalLM", "LlamaConfig", dict(_LLAMA, num_key_value_heads=6, tie_word_embeddings=True, **_ROPE_THETA)),
    ("LlamaForCausalLM", "LlamaConfig", dict(_LLAMA, head_dim=10, attention_bias=True, num_key_value_heads=1)),
    ("LlamaForCausalLM", "LlamaConfig", dict(_LLAMA, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-2)),
    ("LlamaForCausalLM", "LlamaConfig", dict(_LLAMA, mlp_bias=True, hidden_act="gelu_pytorch_tanh")),
    ("LlamaForCausalLM", "LlamaConfig", dict(_LLAMA, head_dim=10, **_LLAMA_3)),
    ("LlamaForCausalLM", "LlamaConfig", dict(_LLAMA, num_key_value_heads=3, **_LINEAR)),
    ("Qwen2ForCausalLM", "Qwen2Config", _LLAMA),
    ("Qwen2ForCausalLM", "Qwen2Config", dict(_LLAMA, num_hidden_layers=3, tie_word_embeddings=True, **_ROPE_THETA)),
    ("Qwen3ForCausalLM", "Qwen3Config", dict(_LLAMA, head_dim=10)),
    ("Qwen3ForCausalLM", "Qwen3Config", dict(_LLAMA, head_dim=4, attention_bias=True, tie_word_embeddings=True)),
    ("Qwen3ForCausalLM", "Qwen3Config", dict(_LLAMA, hidden_size=25, head_dim=6, rms_norm_eps=1e-2, **_ROPE_THETA)),
    ("Qwen3ForCausalLM", "Qwen3Config", dict(_LLAMA, head_dim=10, **_LLAMA_3)),
    ("LlamaForCausalLM", "LlamaConfig", dict(_LLAMA, head_dim=10, **_YARN)),
    (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        dict(_LLAMA, use_sliding_window=True, sliding_window=3, max_window_layers=1, **_YARN),
    ),
    (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        dict(_LLAMA, head_dim=4, use_sliding_window=True, sliding_window=2, layer_types=_WINDOW_TYPES[::-1]),
    ),
    ("MistralForCausalLM", "MistralConfig", dict(_LLAMA, sliding_window=3)),
    ("MistralForCausalLM", "MistralConfig", dict(_LLAMA, sliding_window=None, head_dim=10, **_ROPE_THETA)),
    ("SmolLM3ForCausalLM", "SmolLM3Config", dict(_LLAMA, pad_token_id=0, no_rope_layers=[1, 0], attention_bias=True)),
    (
        "SmolLM3ForCausalLM",
        "SmolLM3Config",
        dict(_LLAMA, pad_token_id=0, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=3),
    ),
    ("Phi3ForCausalLM", "Phi3Config", dict(_LLAMA, pad_token_id=0, sliding_window=4)),
    (
        "Phi3ForCausalLM",
        "Phi3Config",
        dict(
            **dict(_LLAMA, hidden_size=48, pad_token_id=0, num_key_value_heads=6, tie_word_embeddings=True),
            rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75},
        ),
    ),
    ("Olmo2ForCausalLM", "Olmo2Config", dict(_LLAMA, pad_token_id=0)),
    ("Olmo2ForCausalLM", "Olmo2Config", dict(_LLAMA, pad_token_id=0, attention_bias=True, **_YARN)),
    ("GemmaForCausalLM", "GemmaConfig", _GEMMA),
    ("GemmaForCausalLM", "GemmaConfig", dict(_GEMMA, tie_word_embeddings=False, attention_bias=True, **_ROPE_THETA)),
    ("Gemma2ForCausalLM", "Gemma2Config", dict(_GEMMA2, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)),
    (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        dict(_GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=None, hidden_activation="silu"),
    ),
    ("Gemma3ForCausalLM", "Gemma3TextConfig", _GEMMA2),
    (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        dict(
            **dict(_GEMMA2, num_hidden_layers=2, layer_types=_WINDOW_TYPES, final_logit_softcapping=2.0),
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 700.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        ),
    ),
    ("GPTNeoXForCausalLM", "GPTNeoXConfig", _NEOX),
    (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        dict(
            **dict(
                _NEOX, use_parallel_residual=False, attention_bias=False, hidden_act="relu", tie_word_embeddings=True
            ),
            rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        ),
    ),
    ("OPTForCausalLM", "OPTConfig", _OPT),
    (
        "OPTForCausalLM",
        "OPTConfig",
        dict(_OPT, enable_bias=False, activation_function="gelu", tie_word_embeddings=False),
    ),
]
_FIRST_OF_NEW = 17
_INDEX = {name: next(i for i, case in enumerate(CASES) if case[0].startswith(name)) for name, *_ in CASES}
_MISTRAL, _SMOLLM3, _PHI3 = (_INDEX[f"{name}ForCausalLM"] for name in ("Mistral", "SmolLM3", "Phi3"))
_GEMMA_1, _GEMMA_2, _GEMMA_3 = (_INDEX[f"{name}ForCausalLM"] for name in ("Gemma", "Gemma2", "Gemma3"))
_NEOX_1, _OPT_1 = _INDEX["GPTNeoXForCausalLM"], _INDEX["OPTForCausalLM"]


def make_hf_model(transformers, name, config, sizes, folder, **changes):
    config = getattr(transformers, config)(**sizes | changes)
    return random_model(getattr(transformers, name), config, folder, add_special_tokens=False)


@pytest.mark.parametrize(("name", "config", "sizes"), CASES)
def test_logits_and_attention_match_transformers(transformers, tmp_path, name, config, sizes):
    hf_model = make_hf_model(transformers, name, config, sizes, tmp_path / "in")
    expected = run_hf_model(hf_model)
    pipeline, exported = round_trip(transformers, tmp_path / "in", tmp_path / "out")
    logits = assert_same_attention(pipeline.model, expected.attentions)
    torch.testing.assert_close(logits, remove_padding(expected.logits), atol=1e-4, rtol=0)
    assert torch.equal(run_hf_model(exported).logits, expected.logits)


@pytest.mark.parametrize(
    ("name", "config", "sizes"), [CASES[0], CASES[4], CASES[9], CASES[11], CASES[13], *CASES[_FIRST_OF_NEW:]]
)
def test_greedy_generation_matches_transformers(transformers, tmp_path, name, config, sizes):
    """Token by token, with the cache."""
    hf_model = make_hf_model(transformers, name, config, sizes, tmp_path)
    pipeline = import_huggingface(tmp_path)
    prompt = ROWS[1]
    expected = hf_model.generate(
        torch.tensor([prompt]), max_new_tokens=9, do_sample=False, suppress_tokens=[2, 3], pad_token_id=0
    )
    state, generated = pipeline.model.start(pack([prompt])), list(prompt)
    for _ in range(9):
        logits, state = pipeline.model.step(state, torch.tensor([generated[-1:]]))
        logits[..., [2, 3]] = -torch.inf
        generated.append(int(logits.argmax()))
    assert generated == expected[0].tolist()
    if pipeline.model.config.positions == "learned":
        return  # GPT-2 and OPT have too few positions
    config = DecodeConfig("greedy", max_len=9, min_len=9)
    prompts = [" ".join(f"w{i}" for i in ids) for ids in (prompt, ROWS[0])]
    with explain() as choices:
        found = pipeline.generate(prompts, config)
    assert choices[0].stepper != "model"
    plain = pipeline.generate(prompts, replace(config, engine="plain"))
    assert [one[0].hypothesis.ids for one in found] == [one[0].hypothesis.ids for one in plain]


def test_gpt2_without_name_prefix_is_read(transformers, tmp_path):
    """The published files of GPT-2 have names without transformer. and contain the causal mask."""
    hf_model = make_hf_model(transformers, *CASES[0], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    unprefixed = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    unprefixed |= {"h.0.attn.bias": torch.ones(1, 1, 13, 13).tril(), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(unprefixed, tmp_path / "model.safetensors")
    logits = import_huggingface(tmp_path).model(pack(ROWS))
    torch.testing.assert_close(logits, remove_padding(run_hf_model(hf_model).logits), atol=1e-4, rtol=0)


def test_gpt2_without_output_layer_is_tied(transformers, tmp_path):
    hf_model = make_hf_model(transformers, "GPT2Model", "GPT2Config", dict(_GPT2, tie_word_embeddings=False), tmp_path)
    pipeline = import_huggingface(tmp_path)
    assert pipeline.model.config.tied
    features = pipeline.model.features(pack(ROWS))
    torch.testing.assert_close(features, remove_padding(run_hf_model(hf_model).last_hidden_state), atol=1e-4, rtol=0)


def test_old_key_of_rope_theta_is_read(transformers, tmp_path):
    hf_model = make_hf_model(transformers, "Qwen2ForCausalLM", "Qwen2Config", dict(_LLAMA, **_ROPE_THETA), tmp_path)
    edit_config(tmp_path, "rope_parameters", rope_theta=500.0, rope_scaling=None)
    logits = import_huggingface(tmp_path).model(pack(ROWS))
    torch.testing.assert_close(logits, remove_padding(run_hf_model(hf_model).logits), atol=1e-4, rtol=0)


@pytest.mark.parametrize("rope", [_LINEAR, _LLAMA_3], ids=["linear", "llama3"])
def test_old_keys_of_rope_scaling_are_read(transformers, tmp_path, rope):
    """Without the scaling, the outputs differ."""
    hf_model = make_hf_model(
        transformers, "LlamaForCausalLM", "LlamaConfig", dict(_LLAMA, head_dim=10, **rope), tmp_path
    )
    table = dict(rope["rope_parameters"])
    scaling = {"type": table.pop("rope_type")} | {key: value for key, value in table.items() if key != "rope_theta"}
    edit_config(tmp_path, "rope_parameters", rope_theta=table["rope_theta"], rope_scaling=scaling)
    expected = remove_padding(run_hf_model(hf_model).logits)
    torch.testing.assert_close(import_huggingface(tmp_path).model(pack(ROWS)), expected, atol=1e-4, rtol=0)
    edit_config(tmp_path, "rope_scaling")
    assert (import_huggingface(tmp_path).model(pack(ROWS)) - expected).abs().max() > 0.01


def test_missing_keys_have_the_defaults_of_the_class(transformers, tmp_path):
    """Older configs were saved without defaults."""
    hf_model = make_hf_model(
        transformers, "LlamaForCausalLM", "LlamaConfig", dict(_LLAMA, num_key_value_heads=6), tmp_path
    )
    edit_config(
        tmp_path, "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "hidden_act", "mlp_bias"
    )
    logits = import_huggingface(tmp_path).model(pack(ROWS))
    torch.testing.assert_close(logits, remove_padding(run_hf_model(hf_model).logits), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        (0, "scale_attn_by_inverse_layer_idx", True),
        (0, "add_cross_attention", True),
        (0, "activation_function", "mish"),
        (0, "n_layer", 10**9),
        (4, "rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        (4, "rope_scaling", _LLAMA_3["rope_parameters"] | {"low_freq_factor": 2.0}),
        (4, "rope_scaling", _LLAMA_3["rope_parameters"] | {"high_freq_factor": 8.0}),
        (4, "rope_scaling", {"type": "linear"}),
        (4, "rope_scaling", {"type": "linear", "factor": 0.5}),
        (4, "rope_parameters", {"rope_type": "longrope", "factor": 2.0}),
        (4, "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}),
        (4, "rope_parameters", _YARN["rope_parameters"] | {"beta_fast": 16}),
        (4, "rope_parameters", _YARN["rope_parameters"] | {"attention_factor": 1.5}),
        (4, "rope_parameters", _YARN["rope_parameters"] | {"mscale": 1.0}),
        (4, "rope_parameters", _YARN["rope_parameters"] | {"truncate": False}),
        (4, "rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        (4, "partial_rotary_factor", 0.5),
        (4, "hidden_act", "relu"),
        (4, "tie_word_embeddings", "no"),
        (4, "hidden_size", 10**18),
        (11, "layer_types", ["full_attention", "chunked_attention"]),
        (11, "sliding_window", None),
        (13, "layer_types", ["full_attention"]),
        (_MISTRAL, "layer_types", ["full_attention", "sliding_attention"]),
        (_MISTRAL, "hidden_act", "gelu"),
        (_MISTRAL, "sliding_window", -1),
        (_SMOLLM3, "no_rope_layers", [1]),
        (_PHI3, "rope_scaling", {"type": "longrope", "short_factor": [1.0] * 2, "long_factor": [1.0] * 2}),
        (_PHI3, "rope_parameters", {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
        (_GEMMA_1, "use_bidirectional_attention", True),
        (_GEMMA_1, "attn_logit_softcapping", 50.0),
        (_GEMMA_2, "use_bidirectional_attention", True),
        (_GEMMA_2, "attn_logit_softcapping", -50.0),
        (_GEMMA_2, "query_pre_attn_scalar", 0),
        (_GEMMA_3, "attn_logit_softcapping", 50.0),
        (
            _GEMMA_3,
            "rope_parameters",
            {"sliding_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, "full_attention": None},
        ),
        (_NEOX_1, "hidden_act", "mish"),
        (_OPT_1, "do_layer_norm_before", False),
        (_OPT_1, "word_embed_proj_dim", 12),
        (_OPT_1, "layer_norm_elementwise_affine", False),
    ],
)
def test_unsupported_settings_are_an_error_that_names_the_key(transformers, tmp_path, case, key, value):
    make_hf_model(transformers, *CASES[case], tmp_path)
    edit_config(tmp_path, **{key: value})
    match = {"n_layer": "model.layers must be"}.get(key, key)
    if isinstance(value, dict) and "partial_rotary_factor" in value:
        match = "partial_rotary_factor"
    if isinstance(value, dict) and "llama3" in value.values():
        changed = (name for name in ("low_freq_factor", "high_freq_factor") if value.get(name, 0) in (2.0, 8.0))
        match = next(changed, "original_max_position_embeddings")
    changed = value.keys() - _YARN["rope_parameters"].keys() if isinstance(value, dict) else ()
    match = next((name for name in ("beta_fast", "attention_factor", "mscale", "truncate") if name in changed), match)
    if isinstance(value, dict) and value.get("rope_type") == "yarn" and not changed:
        match = "original_max_position_embeddings"
    if key == "sliding_window" and value is None:
        edit_config(tmp_path, use_sliding_window=True, layer_types=_WINDOW_TYPES)
    with pytest.raises(RegardError, match=match):
        import_huggingface(tmp_path)


def test_sliding_windows_of_qwen_start_at_a_layer(transformers, tmp_path):
    make_hf_model(transformers, *CASES[11], tmp_path)
    edit_config(tmp_path, "layer_types", use_sliding_window=True, sliding_window=2, max_window_layers=2)
    assert import_huggingface(tmp_path).model.config.sliding_windows == ()
    edit_config(tmp_path, max_window_layers=1)
    assert import_huggingface(tmp_path).model.config.sliding_windows == (0, 2)


def test_missing_keys_of_windows_and_caps_differ_from_null(transformers, tmp_path):
    make_hf_model(transformers, *CASES[_GEMMA_2], tmp_path)
    edit_config(tmp_path, "attn_logit_softcapping", "layer_types", "sliding_window", final_logit_softcapping=None)
    config = import_huggingface(tmp_path).model.config
    assert (config.score_cap, config.logit_cap, config.sliding_windows) == (50.0, 0.0, (4096, 0))


def test_dynamic_scaling_matches_transformers(transformers, tmp_path):
    """Text by text, since transformers scales all texts of a batch by the longest."""
    rope = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0}}
    sizes = dict(_LLAMA, head_dim=10, max_position_embeddings=5, **rope)
    hf_model = make_hf_model(transformers, "LlamaForCausalLM", "LlamaConfig", sizes, tmp_path / "in")
    pipeline, exported = round_trip(transformers, tmp_path / "in", tmp_path / "out")
    for row in ROWS:
        ids = torch.tensor([row])
        for model in (hf_model, exported):
            torch.testing.assert_close(pipeline.model(pack([row])), model(ids).logits[0], atol=1e-4, rtol=0)
    prompt = torch.tensor([ROWS[1]])
    expected = hf_model.generate(prompt, max_new_tokens=9, do_sample=False, suppress_tokens=[2, 3], pad_token_id=0)
    state, generated = pipeline.model.start(pack([ROWS[1]])), list(ROWS[1])
    for _ in range(9):
        logits, state = pipeline.model.step(state, torch.tensor([generated[-1:]]))
        logits[..., [2, 3]] = -torch.inf
        generated.append(int(logits.argmax()))
    assert generated == expected[0].tolist()


def test_special_ids_are_read_from_config_and_tokenizer(transformers, tmp_path):
    make_hf_model(transformers, *CASES[4], tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert import_huggingface(tmp_path).special == SpecialTokens(pad=0, unk=1, sos=2, eos=3)
    # Several eos tokens: the one of the tokenizer is used, else the first.
    edit_config(tmp_path, eos_token_id=[9, 7, 8])
    special = import_huggingface(tmp_path).special
    assert (special.eos, special.other_eos) == (9, (7, 8))
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"eos_token": "w7", "add_bos_token": True}))  # ignored, like in transformers
    assert import_huggingface(tmp_path).special == SpecialTokens(pad=7, unk=7, sos=2, eos=7, other_eos=(9, 8))
    # generation_config.json takes precedence over config.json.
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 11, "pad_token_id": None}))
    assert import_huggingface(tmp_path).special.eos == 11


# Qwen has no token for the beginning of a text and for unknown ones, Llama 3 none for padding and unknown ones.
@pytest.mark.parametrize("roles", [{"eos": 3, "pad": 0}, {"bos": 2, "eos": 3}, {"bos": 3, "eos": 3, "unk": 3}])
def test_special_tokens_keep_their_roles_and_ids(transformers, tmp_path, roles):
    """A second round trip changes nothing; names inside a text are encoded as in the folder that was imported."""
    make_hf_model(transformers, *CASES[4], tmp_path / "in")
    (tmp_path / "in" / "generation_config.json").unlink()
    ids = {f"{role}_token_id": roles.get(role) for role in ("bos", "eos", "pad")}
    edit_config(tmp_path / "in", **ids)
    names = {f"{role}_token": NAMES[index] for role, index in roles.items()}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": None} | names
    (tmp_path / "in" / "tokenizer_config.json").write_text(json.dumps(settings))
    export_huggingface(import_huggingface(tmp_path / "in"), tmp_path / "out")
    export_huggingface(import_huggingface(tmp_path / "out"), tmp_path / "again")
    # A fine-tuned model has no record of the folder: fewer roles, none invented.
    export_huggingface(replace(import_huggingface(tmp_path / "in"), training={}), tmp_path / "tuned")
    tuned = transformers.AutoTokenizer.from_pretrained(tmp_path / "tuned").special_tokens_map
    assert {"eos_token": "[SEP]"}.items() <= tuned.items() <= names.items()
    for folder in (tmp_path / "out", tmp_path / "again"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert tokenizer.special_tokens_map == names
        assert tokenizer.padding_side == "left"
        text = f"w9 {names['eos_token']} w7"
        assert tokenizer(text).input_ids == [9, 3, 7]
        for file in ("config.json", "generation_config.json"):
            written = json.loads((folder / file).read_text())
            assert {key: written[key] for key in ids} == ids


@pytest.mark.parametrize("name", ["out", "imported"])
@torch.no_grad()
def test_batches_are_continued_like_single_texts(transformers, tmp_path, name):
    """In transformers, where padding on the right would be continued; also for a model trained with Regard."""
    torch.manual_seed(3)
    tokenizer = Tokenizer.train([" ".join(f"w{i}" for i in range(40))], "word")
    config = GPTConfig(width=24, heads=4, layers=2, feedforward=40, activation="swiglu", vocab=tokenizer.vocab_size)
    generator = TextGenerator(GPT(config).eval(), tokenizer)
    for parameter in generator.model.parameters():
        parameter.mul_(3)
    export_huggingface(generator, tmp_path / "out")
    export_huggingface(import_huggingface(tmp_path / "out"), tmp_path / "imported")
    prompts = ["w1 w2 w3 w4 w5 w6 w7", "w8"]
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
    inputs = hf_tokenizer(prompts, return_tensors="pt", padding=True)
    options = dict(max_new_tokens=8, do_sample=False, suppress_tokens=[0, 1, 2, 3])
    generated = hf_model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :]
    greedy = DecodeConfig(method="greedy", max_len=8, min_len=8)
    expected = [best.hypothesis.ids for best, *_ in generator.generate(prompts, greedy)]
    assert generated.tolist() == expected
    assert expected[0] != expected[1]


def test_each_end_token_ends_generation(transformers, tmp_path):
    """Greedy output equals that of transformers; sampling and beam search end at the same tokens."""
    hf_model = make_hf_model(transformers, *CASES[4], tmp_path / "in")
    options = dict(max_new_tokens=9, do_sample=False, suppress_tokens=[0, 2], pad_token_id=0)
    free = hf_model.generate(torch.tensor([ROWS[1]]), **options, eos_token_id=None)[0].tolist()[len(ROWS[1]) :]
    end = next(token for i, token in enumerate(free) if i >= 3 and token not in free[:i])
    (tmp_path / "in/generation_config.json").write_text(json.dumps({"eos_token_id": [3, end]}))
    pipeline = import_huggingface(tmp_path / "in")
    assert pipeline.special.ends == (3, end)
    pipeline.save(tmp_path / "saved")
    export_huggingface(pipeline, tmp_path / "out")
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / file).read_text())["eos_token_id"] == [3, end]
    prompt = " ".join(f"w{i}" for i in ROWS[1])
    for one in (pipeline, load(tmp_path / "saved", "cpu"), import_huggingface(tmp_path / "out")):
        [continuation] = one.generate(prompt, DecodeConfig(method="greedy", max_len=9))
        assert continuation.hypothesis.ids == free[: free.index(end)]
        beams = one.generate(prompt, DecodeConfig(method="beam", beam=3, n_best=3, max_len=9))
        assert not any(end in one.hypothesis.ids for one in beams)
    samples = pipeline.generate(prompt, DecodeConfig(method="sample", n_best=40, max_len=9))
    assert not any(end in sample.hypothesis.ids for sample in samples)
    assert min(len(sample.hypothesis.ids) for sample in samples) < 9
    longer = pipeline.generate(prompt, DecodeConfig(method="greedy", max_len=9, min_len=9))[0].hypothesis.ids
    assert len(longer) == 9


@pytest.mark.parametrize("rope", [_ROPE_THETA, _LINEAR, _LLAMA_3], ids=["default", "linear", "llama3"])
def test_exported_rope_can_be_read_by_earlier_versions(transformers, tmp_path, rope):
    """transformers 4 reads rope_theta and rope_scaling only."""
    hf_model = make_hf_model(
        transformers, "LlamaForCausalLM", "LlamaConfig", dict(_LLAMA, head_dim=10, **rope), tmp_path / "in"
    )
    export_huggingface(import_huggingface(tmp_path / "in"), tmp_path / "out")
    edit_config(tmp_path / "out", "rope_parameters")
    table = json.loads((tmp_path / "out/config.json").read_text())
    assert table["rope_theta"] == rope["rope_parameters"]["rope_theta"]
    assert "rope_theta" not in table.get("rope_scaling", {})  # an unknown key there
    exported = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert torch.equal(run_hf_model(exported).logits, run_hf_model(hf_model).logits)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "mistral"),
        ("model_type", "gemma"),
        ("sliding_window", 4),
        ("embedding_multiplier", 12.0),
        ("logits_scaling", 8.0),
        ("final_logit_softcapping", 30.0),
        ("query_pre_attn_scalar", 224),
    ],
)
def test_other_architectures_that_claim_to_be_llama_are_errors(transformers, tmp_path, key, value):
    make_hf_model(transformers, *CASES[4], tmp_path)
    edit_config(tmp_path, **{key: value})
    with pytest.raises(RegardError, match=key):
        import_huggingface(tmp_path)


def test_missing_eos_token_is_an_error(transformers, tmp_path):
    make_hf_model(transformers, *CASES[11], tmp_path, eos_token_id=None)
    with pytest.raises(RegardError, match="eos_token_id is missing"):
        import_huggingface(tmp_path)


def test_special_ids_outside_the_vocabulary_are_an_error(transformers, tmp_path):
    make_hf_model(transformers, *CASES[0], tmp_path)
    (tmp_path / "generation_config.json").unlink()
    edit_config(tmp_path, eos_token_id=50256)
    with pytest.raises(RegardError, match=r"outside the vocabulary of 47: .*eos = 50256"):
        import_huggingface(tmp_path)
