"""GPT-2, Llama, Qwen2 and Qwen3, beside transformers with random weights."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.data.text.special_tokens import Special
from regard.errors import RegardError
from regard.interop import import_folder
from regard.layers.packed import pack
from tests.interop.comparing import (
    ROWS,
    VOCAB,
    compare_attention,
    random_model,
    real,
    round_trip,
    run_theirs,
)

_IDS = {"vocab_size": VOCAB, "bos_token_id": 2, "eos_token_id": 3}
_GPT2 = dict(_IDS, n_embd=30, n_layer=2, n_head=5, n_positions=13)
_LLAMA = dict(
    **dict(_IDS, hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2),
    **dict(intermediate_size=37, max_position_embeddings=40),
)
_SLOW = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
_LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}}
# Of five pairs of channels some are slowed down, some not, and some partly.
_LLAMA_3 = {
    "rope_parameters": {
        **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 64,
    }
}
CASES = [
    ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    ("GPT2LMHeadModel", "GPT2Config", dict(_GPT2, n_inner=41, activation_function="relu", tie_word_embeddings=False)),
    ("GPT2LMHeadModel", "GPT2Config", dict(_GPT2, n_layer=3, n_head=1, scale_attn_weights=False)),
    ("GPT2LMHeadModel", "GPT2Config", dict(_GPT2, layer_norm_epsilon=1e-2, activation_function="relu2")),
    ("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    ("LlamaForCausalLM", "LlamaConfig", dict(_LLAMA, num_key_value_heads=6, tie_word_embeddings=True, **_SLOW)),
    ("LlamaForCausalLM", "LlamaConfig", dict(_LLAMA, head_dim=10, attention_bias=True, num_key_value_heads=1)),
    ("LlamaForCausalLM", "LlamaConfig", dict(_LLAMA, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-2)),
    ("LlamaForCausalLM", "LlamaConfig", dict(_LLAMA, mlp_bias=True, hidden_act="gelu_pytorch_tanh")),
    ("LlamaForCausalLM", "LlamaConfig", dict(_LLAMA, head_dim=10, **_LLAMA_3)),
    ("LlamaForCausalLM", "LlamaConfig", dict(_LLAMA, num_key_value_heads=3, **_LINEAR)),
    ("Qwen2ForCausalLM", "Qwen2Config", _LLAMA),
    ("Qwen2ForCausalLM", "Qwen2Config", dict(_LLAMA, num_hidden_layers=3, tie_word_embeddings=True, **_SLOW)),
    ("Qwen3ForCausalLM", "Qwen3Config", dict(_LLAMA, head_dim=10)),
    ("Qwen3ForCausalLM", "Qwen3Config", dict(_LLAMA, head_dim=4, attention_bias=True, tie_word_embeddings=True)),
    ("Qwen3ForCausalLM", "Qwen3Config", dict(_LLAMA, hidden_size=25, head_dim=6, rms_norm_eps=1e-2, **_SLOW)),
    ("Qwen3ForCausalLM", "Qwen3Config", dict(_LLAMA, head_dim=10, **_LLAMA_3)),
]


def made(transformers, name, config, sizes, folder, **changes):
    made = getattr(transformers, config)(**sizes | changes)
    return random_model(getattr(transformers, name), made, folder, framed=False)


@pytest.mark.parametrize(("name", "config", "sizes"), CASES)
def test_logits_and_attention(transformers, tmp_path, name, config, sizes):
    theirs = made(transformers, name, config, sizes, tmp_path / "in")
    wanted = run_theirs(theirs)
    bundle, again = round_trip(transformers, tmp_path / "in", tmp_path / "out")
    logits = compare_attention(bundle.model, wanted.attentions)
    torch.testing.assert_close(logits, real(wanted.logits), atol=1e-4, rtol=0)
    assert torch.equal(run_theirs(again).logits, wanted.logits)


@pytest.mark.parametrize(("name", "config", "sizes"), [CASES[0], CASES[4], CASES[9], CASES[11], CASES[13]])
def test_the_same_text_is_written(transformers, tmp_path, name, config, sizes):
    """Token by token, with the cache, as their own generation does."""
    theirs = made(transformers, name, config, sizes, tmp_path)
    bundle = import_folder(tmp_path)
    prompt = ROWS[1]
    wanted = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=9, do_sample=False, suppress_tokens=[2, 3], pad_token_id=0
    )
    state, written = bundle.model.start(pack([prompt])), list(prompt)
    for _ in range(9):
        logits, state = bundle.model.step(state, torch.tensor([written[-1:]]))
        logits[..., [2, 3]] = -torch.inf
        written.append(int(logits.argmax()))
    assert written == wanted[0].tolist()


def test_gpt2_without_its_prefix(transformers, tmp_path):
    """As GPT-2 itself was published: names without transformer., the causal mask beside the weights."""
    theirs = made(transformers, *CASES[0], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare |= {"h.0.attn.bias": torch.ones(1, 1, 13, 13).tril(), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(bare, tmp_path / "model.safetensors")
    logits = import_folder(tmp_path).model(pack(ROWS))
    torch.testing.assert_close(logits, real(run_theirs(theirs).logits), atol=1e-4, rtol=0)


def test_gpt2_without_its_output_layer(transformers, tmp_path):
    theirs = made(transformers, "GPT2Model", "GPT2Config", dict(_GPT2, tie_word_embeddings=False), tmp_path)
    bundle = import_folder(tmp_path)
    assert bundle.model.config.tied
    features = bundle.model.features(pack(ROWS))
    torch.testing.assert_close(features, real(run_theirs(theirs).last_hidden_state), atol=1e-4, rtol=0)


def edited(folder, *without, **values):
    path = folder / "config.json"
    table = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in table.items() if key not in without}))


def test_rope_theta_by_its_old_name(transformers, tmp_path):
    theirs = made(transformers, "Qwen2ForCausalLM", "Qwen2Config", dict(_LLAMA, **_SLOW), tmp_path)
    edited(tmp_path, "rope_parameters", rope_theta=500.0, rope_scaling=None)
    logits = import_folder(tmp_path).model(pack(ROWS))
    torch.testing.assert_close(logits, real(run_theirs(theirs).logits), atol=1e-4, rtol=0)


@pytest.mark.parametrize("stated", [_LINEAR, _LLAMA_3], ids=["linear", "llama3"])
def test_scaled_positions_by_their_old_names(transformers, tmp_path, stated):
    """And with them the model is another one than without."""
    theirs = made(transformers, "LlamaForCausalLM", "LlamaConfig", dict(_LLAMA, head_dim=10, **stated), tmp_path)
    table = dict(stated["rope_parameters"])
    scaling = {"type": table.pop("rope_type")} | {key: one for key, one in table.items() if key != "rope_theta"}
    edited(tmp_path, "rope_parameters", rope_theta=table["rope_theta"], rope_scaling=scaling)
    wanted = real(run_theirs(theirs).logits)
    torch.testing.assert_close(import_folder(tmp_path).model(pack(ROWS)), wanted, atol=1e-4, rtol=0)
    edited(tmp_path, "rope_scaling")
    assert (import_folder(tmp_path).model(pack(ROWS)) - wanted).abs().max() > 0.01


def test_what_the_class_has_by_default(transformers, tmp_path):
    """Configs used to be saved without it."""
    theirs = made(transformers, "LlamaForCausalLM", "LlamaConfig", dict(_LLAMA, num_key_value_heads=6), tmp_path)
    edited(tmp_path, "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "hidden_act", "mlp_bias")
    logits = import_folder(tmp_path).model(pack(ROWS))
    torch.testing.assert_close(logits, real(run_theirs(theirs).logits), atol=1e-4, rtol=0)


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
        (4, "rope_scaling", {"type": "dynamic", "factor": 2.0}),
        (4, "rope_parameters", {"rope_type": "longrope", "factor": 2.0}),
        (4, "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}),
        (4, "rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        (4, "partial_rotary_factor", 0.5),
        (4, "hidden_act", "relu"),
        (4, "tie_word_embeddings", "no"),
        (4, "hidden_size", 10**18),
        (11, "layer_types", ["full_attention", "sliding_attention"]),
        (13, "layer_types", ["full_attention"]),
    ],
)
def test_what_changes_the_computation_is_refused_by_its_key(transformers, tmp_path, case, key, value):
    made(transformers, *CASES[case], tmp_path)
    edited(tmp_path, **{key: value})
    named = {"n_layer": "model.layers must be"}.get(key, key)
    if isinstance(value, dict) and "partial_rotary_factor" in value:
        named = "partial_rotary_factor"
    if isinstance(value, dict) and "llama3" in value.values():
        changed = (one for one in ("low_freq_factor", "high_freq_factor") if value.get(one, 0) in (2.0, 8.0))
        named = next(changed, "original_max_position_embeddings")
    with pytest.raises(RegardError, match=named):
        import_folder(tmp_path)


def test_windows_count_only_where_a_layer_has_one(transformers, tmp_path):
    made(transformers, *CASES[11], tmp_path)
    edited(tmp_path, "layer_types", use_sliding_window=True, sliding_window=2, max_window_layers=2)
    import_folder(tmp_path)
    edited(tmp_path, max_window_layers=1)
    with pytest.raises(RegardError, match="use_sliding_window"):
        import_folder(tmp_path)


def test_special_ids(transformers, tmp_path):
    made(transformers, *CASES[4], tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert import_folder(tmp_path).special == Special(pad=0, unk=1, sos=2, eos=3)
    # Several tokens end a text: the tokeniser says which is its own.
    edited(tmp_path, eos_token_id=[9, 7, 8])
    assert import_folder(tmp_path).special.eos == 9
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"eos_token": "w7", "add_bos_token": True}))
    assert import_folder(tmp_path).special == Special(pad=7, unk=7, sos=2, eos=7, begin=2)
    # What is said of writing goes before what is said of the model.
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 11, "pad_token_id": None}))
    assert import_folder(tmp_path).special.eos == 11


def test_a_text_that_nothing_ends(transformers, tmp_path):
    made(transformers, *CASES[11], tmp_path, eos_token_id=None)
    with pytest.raises(RegardError, match="which token ends a text"):
        import_folder(tmp_path)


def test_special_ids_beyond_the_vocabulary(transformers, tmp_path):
    made(transformers, *CASES[0], tmp_path)
    (tmp_path / "generation_config.json").unlink()
    edited(tmp_path, eos_token_id=50256)
    with pytest.raises(RegardError, match=r"beyond the vocabulary of 47: .*eos = 50256"):
        import_folder(tmp_path)
