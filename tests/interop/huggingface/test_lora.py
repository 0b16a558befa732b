"""LoRA adapters in the folder of a model: merged into the weights, or refused."""

import json

import pytest
import torch
from safetensors.torch import save_file

from regard.errors import RegardError
from regard.interop import import_huggingface
from regard.layers.packed import pack
from tests.interop.model_comparison import ROWS, VOCAB, random_model

CONFIG = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "base_model_name_or_path": "org/base", "bias": "none"}
CASES = {
    "LlamaForCausalLM": ("model.layers.1.self_attn.k_proj", "model.layers.0.mlp.down_proj"),
    "GPT2LMHeadModel": ("transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_proj"),  # weights are transposed
}


@pytest.fixture(params=CASES)
def model_with_adapter(transformers, tmp_path, request):
    """A model, its folder, and a function that writes an adapter to the folder and adds it to the model."""
    name = request.param
    if name == "GPT2LMHeadModel":
        config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=30, n_layer=2, n_head=5, n_positions=13)
    else:
        config = transformers.LlamaConfig(
            **dict(vocab_size=VOCAB, hidden_size=24, num_hidden_layers=2, num_attention_heads=6),
            **dict(num_key_value_heads=2, intermediate_size=37),
        )
    config.bos_token_id, config.eos_token_id = 2, 3
    hf_model = random_model(getattr(transformers, name), config, tmp_path, add_special_tokens=False)

    def write(scale=1.0, **changes):
        tensors = {}
        for module_name in CASES[name]:
            module = hf_model.get_submodule(module_name)
            inputs, outputs = module.weight.shape if name == "GPT2LMHeadModel" else module.weight.shape[::-1]
            a, b = torch.randn(3, inputs), torch.randn(outputs, 3)
            tensors |= {f"base_model.model.{module_name}.lora_{key}.weight": t for key, t in (("A", a), ("B", b))}
            module.register_forward_hook(lambda _, args, out, a=a, b=b: out + scale * (args[0] @ a.T @ b.T))
        table = CONFIG | {"fan_in_fan_out": name == "GPT2LMHeadModel"} | changes
        (tmp_path / "adapter_config.json").write_text(json.dumps(table))
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        return tensors

    return hf_model, tmp_path, write


@pytest.mark.parametrize(
    ("changes", "scale"), [({}, 2.0), ({"use_rslora": True, "init_lora_weights": True}, 6 / 3**0.5)]
)
@torch.no_grad()
def test_adapter_is_merged(model_with_adapter, changes, scale):
    hf_model, folder, write = model_with_adapter
    without = import_huggingface(folder).model(pack(ROWS[:1]))
    write(scale, **changes)
    expected = hf_model(torch.tensor(ROWS[:1])).logits[0]
    assert (without - expected).abs().max() > 1  # the adapter matters
    torch.testing.assert_close(import_huggingface(folder).model(pack(ROWS[:1])), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "LOHA"),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 4}),
        ("bias", "all"),
        ("init_lora_weights", "pissa"),
    ],
)
def test_other_adapters_are_an_error_that_names_the_key(model_with_adapter, key, value):
    _, folder, write = model_with_adapter
    write(**{key: value})
    with pytest.raises(RegardError, match=rf"adapter_config.json: {key} = .* is unsupported: .*merge the adapter"):
        import_huggingface(folder)


def test_adapter_without_its_model_and_of_another_model_are_errors(model_with_adapter):
    _, folder, write = model_with_adapter
    tensors = write()
    first = next(iter(tensors))
    save_file({**tensors, first: torch.zeros(3, 11)}, folder / "adapter_model.safetensors")
    with pytest.raises(RegardError, match="Check that the adapter belongs to the model"):
        import_huggingface(folder)
    save_file({**tensors, "base_model.model.lm_head.weight": torch.zeros(2)}, folder / "adapter_model.safetensors")
    with pytest.raises(RegardError, match=r"other one: base_model.model.lm_head.weight\. Merge"):
        import_huggingface(folder)
    save_file({key.replace(".1.", ".9."): t for key, t in tensors.items()}, folder / "adapter_model.safetensors")
    with pytest.raises(RegardError, match=r"other one: .*\.9\..*\.weight"):
        import_huggingface(folder)
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
        with pytest.raises(RegardError, match=r"contains only an adapter, .* \(org/base\)\. Copy adapter_config.json"):
            import_huggingface(folder)
