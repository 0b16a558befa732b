"""Chat templates and special tokens in prompts."""

import json

import pytest

from regard.cli import main
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.interop import export_huggingface, import_huggingface
from regard.pipelines import load
from regard.pipelines.chat_template import render_chat
from regard.training import train
from tests.interop.conftest import transformers  # noqa: F401
from tests.interop.model_comparison import random_model

TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ raise_exception('No tools.') }}{% endif %}
    {%- if loop.index > 9 %}{% break %}{% endif %} {{ message['content'] | trim }} [SEP]
{%- endfor %}
{%- if add_generation_prompt %} w9{% endif %}"""
MESSAGES = [{"role": "system", "content": "w5 w6"}, {"role": "user", "content": " w7\n"}]


@pytest.fixture(scope="module")
def folder(transformers, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("chat")
    config = transformers.GPT2Config(
        vocab_size=47, n_positions=64, n_embd=12, n_layer=1, n_head=2, eos_token_id=4, bos_token_id=2
    )
    random_model(transformers.GPT2LMHeadModel, config, folder, add_special_tokens=False)
    path = folder / "tokenizer_config.json"
    names = {"bos_token": "[CLS]", "eos_token": "[MASK]", "tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **names}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    import_huggingface(folder).save(folder / "model")
    return folder


def test_prompts_equal_those_of_transformers(transformers, folder, tmp_path):  # noqa: F811
    generator = load(folder / "model", "cpu")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert generator.chat_prompt(MESSAGES) == expected
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert generator.encode_prompt(expected, special_tokens=True) == ids == [2, 5, 6, 3, 7, 3, 9]
    export_huggingface(generator, tmp_path / "out")
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False) == ids
    answer = generator.chat(MESSAGES, DecodeConfig(method="greedy", max_len=5))
    [expected] = generator.generate(expected, DecodeConfig(method="greedy", max_len=5), special_tokens=True)
    assert answer == expected.text


def test_fine_tuned_models_keep_template_and_decoding_options(folder, tmp_path):
    origin = load(folder / "model", "cpu")
    origin.decoding = DecodeConfig(method="sample", top_k=3, suppress_sequences=((7,),))
    (tmp_path / "text.txt").write_text("w5 w6 w7 w8\n" * 200)
    recipe = {"task": "language", "train": {"steps": 1, "batch_tokens": 64, "keep_every": 1}}
    tuned = train(tmp_path / "text.txt", out=tmp_path / "out", start_from=origin, quiet=True, **recipe)
    for generator in (tuned, load(tmp_path / "out" / "steps" / "000001", "cpu")):
        assert generator.chat_prompt(MESSAGES) == origin.chat_prompt(MESSAGES)
        assert generator.decoding == origin.decoding


def test_special_tokens_in_a_prompt_are_text_by_default(folder):
    generator = load(folder / "model", "cpu")
    assert 3 not in generator.encode_prompt("w5 [SEP] w6")
    assert generator.encode_prompt("w5 [SEP] w6", special_tokens=True) == [5, 3, 6]
    with pytest.raises(RegardError, match=r"Message 2 contains the special token \[SEP\]"):
        generator.chat_prompt([MESSAGES[0], {"role": "user", "content": "w5 [SEP] w9"}])


def test_command_prints_the_answer(folder, capsys):
    argv = ["generate", str(folder / "model"), "w7", "--chat", "--method", "greedy", "--max-len", "4"]
    assert main(argv) == 0
    answer = capsys.readouterr().out.strip()
    generator = load(folder / "model", "cpu")
    assert answer == generator.chat(MESSAGES[1:], DecodeConfig(method="greedy", max_len=4)).strip()
    assert main(["generate", str(folder / "model"), "w7 [SEP]", "--special-tokens", "--max-len", "2"]) == 0


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ raise_exception('Roles must alternate.') }}", "Roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for %}", "template of the model failed"),
        ("{% include 'secret' %}", "failed"),
        (None, "no chat template"),
        ([{"name": "tool_use", "template": ""}], "no chat template"),
    ],
)
def test_templates_run_in_a_sandbox(template, match):
    with pytest.raises(RegardError, match=match):
        render_chat(template, MESSAGES, {})


def test_named_templates_and_invalid_messages():
    assert (
        render_chat([{"name": "default", "template": "{{ messages[1].content | tojson }}"}], MESSAGES, {}) == '" w7\\n"'
    )
    with pytest.raises(RegardError, match="Message 1 has no role"):
        render_chat("", [{"content": "Hello"}], {})
