"""Interventions equal edits of the model in PyTorch, and leave the model unchanged after the with block."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from regard.attention import SCORES, Dot, record
from regard.attention.recording import KINDS
from regard.data import Tokenizer
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.layers.attention import MultiHeadAttention
from regard.layers.packed import pack
from regard.models import BertConfig, GPTConfig, Seq2SeqConfig, TransformerConfig, make_model
from regard.models.transformer import t5_small
from regard.pipelines import ImageModel, TextEncoder, TextGenerator, Translator
from regard.viewer import (
    AblateHead,
    AblateLayer,
    RemoveMask,
    RemovePositions,
    RemoveScale,
    SetAttentionRow,
    apply_interventions,
    look,
    outcomes,
    run_experiment,
)
from regard.viewer.experiments import handle_experiment
from regard.viewer.outcomes import TEMPERATURES, compute_outcome
from regard.viewer.page.requests import TextRequestHandler
from regard.viewer.text_look import look_at_output
from tests.viewer.image_helpers import images, model_of, photo

SIZES = dict(width=16, heads=4, feedforward=32)
VOCABS = dict(source_vocab=20, target_vocab=20)
PAIR = pack([[4, 5, 6, 3], [7, 3]]), pack([[2, 8, 9], [2, 9, 8, 4, 5]])
TEXTS = (pack([[4, 5, 6, 7], [8, 9]]),)


def transformer(**changes):
    return TransformerConfig(**(SIZES | VOCABS | dict(encoder_layers=2, decoder_layers=2) | changes))


def with_score(name):
    return transformer(encoder_score=name, decoder_score=name, cross_score=name)


MODELS = {
    **{name: (with_score(name), PAIR) for name in SCORES},
    "grouped": (transformer(kv_heads=2), PAIR),
    "post-norm": (transformer(norm="post"), PAIR),
    "rotary": (transformer(positions="rotary"), PAIR),
    "t5": (t5_small(**SIZES, **VOCABS, head_width=4, encoder_layers=1, decoder_layers=2), PAIR),
    "gpt": (GPTConfig(**SIZES, layers=2, vocab=20, kv_heads=2), TEXTS),
    "gpt-learned": (GPTConfig(**SIZES, layers=2, vocab=20, positions="learned"), TEXTS),
    "bert": (BertConfig(**SIZES, layers=2, vocab=20, head="classify", pooler="tanh", labels=("a", "b", "c")), TEXTS),
    "shared": (BertConfig(**SIZES, layers=4, groups=2, vocab=20), TEXTS),
    **{f"luong-{name}": (Seq2SeqConfig(width=16, score=name, **VOCABS), PAIR) for name in ("dot", "concat")},
    "bahdanau": (Seq2SeqConfig(width=16, attention="bahdanau", **VOCABS), PAIR),
    "vit": (None, (images(1),)),
}


def make(name):
    config, inputs = MODELS[name]
    if config is None:
        return model_of("class"), inputs
    torch.manual_seed(0)
    model = make_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 8 if isinstance(config, BertConfig) else 3
    return model.eval(), inputs


def attention_modules(model):
    return {name: one for name, one in model.named_modules() if getattr(one, "kind", None) in KINDS}


@torch.no_grad()
def run_with(model, inputs, *changes):
    """Outputs without and with interventions; checks that the model is bit-identical afterwards."""
    before, parts = model(*inputs), dict(model.named_modules())
    with apply_interventions(model, changes):
        after = model(*inputs)
    assert torch.equal(model(*inputs), before)
    assert dict(model.named_modules()) == parts
    assert all(not one._forward_hooks and not one._forward_pre_hooks for one in parts.values())
    return before, after


@torch.no_grad()
def run_edited(model, inputs, edit, name=""):
    """The output of an edited copy of the model."""
    edited = copy.deepcopy(model)
    edit(edited.get_submodule(name))
    return edited(*inputs)


@pytest.mark.parametrize("name", MODELS)
def test_ablated_head_equals_zeroed_columns_of_the_output_projection(name):
    model, inputs = make(name)
    for called, one in attention_modules(model).items():
        for head in range(getattr(one, "heads", 1)):

            def zeroed(part, head=head):
                if hasattr(part, "out"):
                    part.out.weight[:, head * part.head_width :][:, : part.head_width] = 0
                    return
                part.combine.weight[:, : part.combine.in_features // 2] = 0  # the context half of [context; state]
                if hasattr(part, "context"):
                    part.context.weight.zero_()

            owner = called if hasattr(one, "out") else called.rpartition(".")[0]
            before, after = run_with(model, inputs, AblateHead(called, head))
            torch.testing.assert_close(after, run_edited(model, inputs, zeroed, owner), rtol=0, atol=1e-6)
            assert not torch.allclose(before, after, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_ablated_layer_equals_a_zero_output_projection(name):
    model, inputs = make(name)
    for called, one in model.named_modules():
        last = next((getattr(one, part) for part in ("out", "fc2") if hasattr(one, part)), None)
        if last is None:
            continue

        def emptied(part):
            part = part.out if hasattr(part, "out") else part.fc2
            part.weight.zero_()
            if part.bias is not None:
                part.bias.zero_()

        before, after = run_with(model, inputs, AblateLayer(called))
        torch.testing.assert_close(after, run_edited(model, inputs, emptied, called), rtol=0, atol=1e-6)
        assert not torch.allclose(before, after, atol=1e-4)


def test_ablated_block_equals_a_shorter_stack():
    model, inputs = make("scaled_dot")
    _, after = run_with(model, inputs, AblateLayer("decoder.1"))
    edited = copy.deepcopy(model)
    edited.decoder = edited.decoder[:1]
    torch.testing.assert_close(after, edited(*inputs))


@pytest.mark.parametrize("name", ["scaled_dot", "grouped", "rotary", "t5", "gpt"])
def test_removed_mask_equals_a_model_without_mask(name):
    model, inputs = make(name)

    def unmasked(part):
        for one in part.modules():
            if getattr(one, "kind", None) == "masked":
                one.mask = None

    before, after = run_with(model, inputs, RemoveMask())
    torch.testing.assert_close(after, run_edited(model, inputs, unmasked), rtol=0, atol=1e-6)
    assert not torch.allclose(before, after, atol=1e-4)


def test_removed_mask_keeps_padding_masked():
    model, _ = make("gpt")
    state = model.start(TEXTS[0])  # of different lengths
    before = [model.step(state, None)[0], model.step(model.step(state, None)[1], torch.tensor([[4], [5]]))[0]][1]
    state = model.start(TEXTS[0])
    with apply_interventions(model, [RemoveMask("blocks.1.*")]):
        after = model.step(model.step(state, None)[1], torch.tensor([[4], [5]]))[0]
    torch.testing.assert_close(before, after)


@pytest.mark.parametrize("name", ["scaled_dot", "grouped", "gpt", "bert", "vit"])
def test_removed_scale_equals_the_dot_product_score(name):
    model, inputs = make(name)

    def unscaled(part):
        for one in attention_modules(part).values():
            one.score = Dot()

    before, after = run_with(model, inputs, RemoveScale())
    torch.testing.assert_close(after, run_edited(model, inputs, unscaled), rtol=0, atol=1e-6)
    assert not torch.allclose(before, after, atol=1e-4)


def test_scale_and_mask_are_removed_in_selected_attentions():
    model, inputs = make("gpt")
    with (
        torch.no_grad(),
        apply_interventions(model, [RemoveScale("blocks.1.*"), RemoveMask("blocks.0.*")]),
        record(model) as recording,
    ):
        model(*inputs)
    first, second = recording.values()
    assert first.weights()[0].triu(1).any()
    assert not second.weights()[0].triu(1).any()
    assert isinstance(second.calls[0].score, Dot)
    assert not isinstance(first.calls[0].score, Dot)


@pytest.mark.parametrize("name", ["scaled_dot", "rotary", "t5", "gpt", "gpt-learned", "bert"])
def test_removed_positions_make_the_model_permutation_invariant(name):
    model, inputs = make(name)
    first = inputs[0]
    turned = pack([[6, 5, 4, 3], [7, 3]]) if len(inputs) == 2 else pack([[4, 6, 5, 7], [8, 9]])
    rest = inputs[1:]
    with (
        torch.no_grad(),
        apply_interventions(model, [RemovePositions(), *([RemoveMask()] if name.startswith("gpt") else [])]),
    ):
        one, other = model(first, *rest), model(turned, *rest)
    if name.startswith("gpt"):
        torch.testing.assert_close(one[[0, 2, 1, 3]], other[:4], rtol=1e-4, atol=1e-5)
    else:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(first, *rest), model(turned, *rest), atol=1e-3)


@pytest.mark.parametrize("kind", ["class", "distilled", "mean", "rotary"])
def test_removed_positions_make_an_image_a_set_of_patches(kind):
    model, image = model_of(kind), images(1)
    permuted = torch.cat((image[..., 4:], image[..., :4]), dim=-1)
    with torch.no_grad(), apply_interventions(model, [RemovePositions()]):
        torch.testing.assert_close(model(image), model(permuted), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(image), model(permuted), atol=1e-4)


@pytest.mark.parametrize("name", ["scaled_dot", "concat", "grouped", "gpt", "vit", "luong-dot", "bahdanau"])
@torch.no_grad()
def test_set_row_attends_with_the_given_weights(name):
    model, inputs = make(name)
    called = list(attention_modules(model))[-1]
    with record(model) as recording:
        model(*inputs)
    recorded = recording[called]
    if name == "vit":
        row, second = 0, None  # the class token is the only query of the last block
    else:
        row, second = 2, 1
    keys = recorded.weights().shape[-1]
    if second is not None and name not in ("gpt",):
        inputs = tuple(pack([list(one.ids[: int(one.offsets.starts[1])])]) for one in inputs)
    row_weights = np.arange(1, keys + 1) / np.arange(1, keys + 1).sum()
    if name == "gpt":
        row_weights = np.array([0.0, 0.75, 0.25, 0.0])
    head = getattr(attention_modules(model)[called], "heads", 1) - 1
    change = SetAttentionRow(called, head, row, tuple(row_weights))
    with record(model) as plain:
        before = model(*inputs)
    with apply_interventions(model, [change]), record(model) as seen:
        after = model(*inputs)
    assert not torch.allclose(before, after, atol=1e-5)
    # Reference: the weighted sum of the values of that head in the first sequence; all other outputs are unchanged.
    calls = seen[called].calls
    call = calls[row] if len(calls) > 1 else calls[0]
    v = call.v if call.q_offsets is None else call.v[: int(call.k_offsets.starts[1])].transpose(0, 1)[None]
    v = v[0, head * v.shape[1] // call.q.shape[1]]
    expected = torch.tensor(row_weights, dtype=torch.float32) @ v
    outputs = _outputs(model, inputs, called, [change]), _outputs(model, inputs, called, [])
    at = (row, 0, head) if name == "bahdanau" else (0, row, head)
    torch.testing.assert_close(outputs[0][at], expected, rtol=0, atol=1e-6)
    outputs[1][at] = outputs[0][at]
    if name != "bahdanau":  # whose next states depend on this one
        assert torch.equal(*outputs)
    assert len(plain[called].calls) == len(calls)


def _outputs(model, inputs, called, changes):
    """Outputs of `attend`, (B, T, H, D)."""
    from regard.attention import dispatch

    kept, inside = [], []
    module = model.get_submodule(called)
    hooks = [module.register_forward_pre_hook(lambda *_: inside.append(1)) or None]
    end = module.register_forward_hook(lambda *_: inside.clear())
    with (
        apply_interventions(model, changes),
        dispatch.observe(lambda call, out: kept.append((call, out)) if inside else None),
    ):
        model(*inputs)
    end.remove()
    for hook in hooks:
        hook.remove()
    outs = [out[None] if call.q_offsets is not None else out.transpose(1, 2) for call, out in kept]
    return torch.cat(outs).clone()


def test_interventions_combine_and_nest():
    model, inputs = make("scaled_dot")
    one, other = AblateHead("decoder.0.cross", 1), AblateLayer("encoder.0.feedforward")
    _, both = run_with(model, inputs, one, other)
    before = model(*inputs)
    with apply_interventions(model, [one]):
        alone = model(*inputs)
        with apply_interventions(model, [other, RemovePositions()]):
            pass
        with apply_interventions(model, [other]):
            assert torch.equal(model(*inputs), both)
        assert torch.equal(model(*inputs), alone)
    assert torch.equal(model(*inputs), before)


def test_errors_leave_the_model_unchanged():
    model, inputs = make("scaled_dot")
    before, parts = model(*inputs), dict(model.named_modules())
    with (
        pytest.raises(ZeroDivisionError),
        apply_interventions(model, [AblateHead("decoder.0.cross", 1), RemovePositions(), RemoveScale()]),
    ):
        raise ZeroDivisionError
    with pytest.raises(RegardError), apply_interventions(model, [RemovePositions(), AblateHead("decoder.0.cross", 9)]):
        raise AssertionError
    with pytest.raises(IndexError), apply_interventions(model, [AblateLayer("decoder.0.cross")]):
        model(pack([[4, 99, 3]]), inputs[1])
    assert torch.equal(model(*inputs), before)
    assert dict(model.named_modules()) == parts


def test_gradients_flow_through_interventions():
    model, inputs = make("scaled_dot")
    with apply_interventions(
        model, [AblateHead("decoder.1.cross", 1), SetAttentionRow("decoder.1.attention", 0, 0, (1, 0, 0))]
    ):
        model(inputs[0], pack([[2, 8, 9], [2, 9, 8]])).sum().backward()
    width = model.decoder[1].cross.head_width
    joined = model.decoder[1].cross.out.weight.grad
    assert not joined[:, width : 2 * width].any()
    assert joined[:, :width].any()


def test_compiled_models_run_eagerly_under_interventions():
    torch.manual_seed(0)
    model, x = nn.Sequential(MultiHeadAttention(8, heads=2)).eval(), torch.randn(1, 3, 8)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        before = compiled(x)  # compiles the model
        with apply_interventions(model, [AblateHead("0", 0)]):
            after = compiled(x)
            assert torch.equal(after, model(x))
        assert not torch.allclose(before, after, atol=1e-4)
        torch.testing.assert_close(compiled(x), before)


# Errors


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        (AblateHead("decoder.0.cros", 0), "no attention 'decoder.0.cros'", "Did you mean 'decoder.0.cross'"),
        (AblateHead("decoder.0.cross", 4), "decoder.0.cross has no head 4", "from 0 to 3"),
        (
            AblateLayer("encoder.1.feedfoward"),
            "no layer 'encoder.1.feedfoward'",
            "Did you mean 'encoder.1.feedforward'",
        ),
        (RemoveMask("decoder.7"), "no attention 'decoder.7'", "Did you mean 'decoder."),
        (
            RemoveMask("encoder.*"),
            "There is no causal mask in encoder.0.attention, encoder.1.attention",
            "other attentions",
        ),
        (
            SetAttentionRow("encoder.0.atention", 0, 0, (1,)),
            "no attention 'encoder.0.atention'",
            "'encoder.0.attention'",
        ),
    ],
)
def test_unknown_names_raise_errors_with_suggestions(change, message, hint):
    model, _ = make("scaled_dot")
    with pytest.raises(RegardError) as refused, apply_interventions(model, [change]):
        raise AssertionError
    assert message in str(refused.value)
    assert hint in refused.value.hint


def test_missing_scale_positions_or_mask_raise_errors():
    for name, change in (("dot", RemoveScale()), ("luong-dot", RemovePositions()), ("bert", RemoveMask())):
        model, _ = make(name)
        with pytest.raises(RegardError, match="no"), apply_interventions(model, [change]):
            raise AssertionError


@pytest.mark.parametrize("weights", [(0.5, 0.4), (1.5, -0.5), (float("nan"), 1)])
def test_weights_that_do_not_sum_to_one_raise_an_error(weights):
    with pytest.raises(RegardError, match="sum to"):
        SetAttentionRow("decoder.0.cross", 0, 0, weights)


def test_set_row_raises_an_error_in_stepwise_decoding(transformer):
    row = SetAttentionRow("decoder.0.cross", 0, 0, (1, 0, 0))
    with pytest.raises(RegardError, match="step by step"), apply_interventions(transformer.model, [row]):
        transformer("one two")
    assert transformer("one two")


# Before and after


def test_a_translation_before_and_after(seq2seq):
    both = run_experiment(seq2seq, "one two three", [AblateHead("decoder.attention", 0)])
    assert both.before.text == seq2seq("one two three") == "trois deux un"
    assert both.after.text != both.before.text
    assert both.before.logprob == pytest.approx(
        seq2seq.score([("one two three", both.before.text)])[0].logprob, abs=1e-5
    )
    assert both.after.logprob < both.before.logprob
    assert [step.token for step in both.before.steps] == ["trois", "deux", "un", "<eos>"]
    first = both.before.steps[0]
    assert first.likeliest["trois"] == first.probability == max(first.likeliest.values())
    assert len(first.likeliest) == 5
    assert both.before.look.maps["decoder.attention"].weights.shape == (1, 4, 4)
    assert seq2seq("one two three") == both.before.text


@torch.no_grad()
def test_tokens_with_the_same_text_have_their_own_probabilities(monkeypatch):
    """A vocabulary contains a text at the start of a word and inside a word."""
    tokenizer = Tokenizer.train(["aa bab aa aab baa ba aba"], "bpe", vocab_size=24)
    assert len(set(tokenizer.vocabulary)) < tokenizer.vocab_size
    torch.manual_seed(0)
    vocabs = dict.fromkeys(("source_vocab", "target_vocab"), tokenizer.vocab_size)
    model = make_model(TransformerConfig(width=16, heads=2, feedforward=16, **vocabs))
    translator = Translator(model.eval(), tokenizer, tokenizer)
    monkeypatch.setattr(outcomes, "TOP_K", tokenizer.vocab_size)
    seen = look(translator, "aa bab", target="aab ba")
    source, target = seen.ids
    expected = translator.model(*translator.teacher_forced([(source, target[1:])])).softmax(-1)
    steps = compute_outcome(seen).steps
    for step, row, token in zip(steps, expected, [*target[1:], translator.special.eos]):
        assert list(step.likeliest.values()) == pytest.approx(row.sort(descending=True).values.tolist())
        assert step.probability == step.likeliest[step.name] == pytest.approx(float(row[token]))
        assert step.token == tokenizer.label(token)
    lens = seen.logit_lens()
    assert len(set(lens.names.values())) == len(lens.names)


@pytest.mark.parametrize("kind", ["luong", "bahdanau"])
def test_set_row_changes_the_translated_word(kind, request):
    if kind == "luong":
        translator = request.getfixturevalue("seq2seq")
    else:
        from tests.conftest import train_numbers

        translator = train_numbers(Seq2SeqConfig(width=32, attention="bahdanau"))
    source = "one two three four"
    both = run_experiment(translator, source, [SetAttentionRow("decoder.attention", 0, 1, (1, 0, 0, 0, 0))])
    assert both.before.text == "quatre trois deux un"
    assert both.after.text.split()[:2] == ["quatre", "un"]
    assert both.after.look.maps["decoder.attention"].weights[0, 1].tolist() == [1, 0, 0, 0, 0]
    assert both.after.look.maps["decoder.attention"].weights[0, 0].max() > 0.9
    assert both.before.look.maps["decoder.attention"].weights[0, 1, 0] < 0.1


def test_given_target_is_scored_in_both_runs(transformer):
    both = run_experiment(transformer, "one two", [AblateLayer("decoder.1")], "deux un")
    assert both.before.text == both.after.text == "deux un"
    assert both.before.logprob == pytest.approx(transformer.score([("one two", "deux un")])[0].logprob, abs=1e-5)
    with apply_interventions(transformer.model, [AblateLayer("decoder.1")]):
        expected = transformer.score([("one two", "deux un")])[0].logprob
    assert both.after.logprob == pytest.approx(expected, abs=1e-5)


def test_uncached_decoding_equals_cached_decoding(transformer, seq2seq):
    for translator, name in ((transformer, "decoder.0.cross"), (seq2seq, "decoder.attention")):
        row = look(translator, "one two three").maps[name].weights[0, 0]
        same = tuple((row / row.sum()).tolist())  # the weights of the model itself
        both = run_experiment(translator, "one two three", [SetAttentionRow(name, 0, 0, same)])
        assert both.after.text == both.before.text
        assert both.after.logprob == pytest.approx(both.before.logprob, abs=1e-4)


def test_set_row_and_removed_mask_in_the_decoder(transformer):
    length = look(transformer, "one two three").maps["decoder.0.attention"].weights.shape[1]
    last = SetAttentionRow("decoder.0.attention", 0, 1, (*[0] * (length - 1), 1))
    both = run_experiment(transformer, "one two three", [RemoveMask(), last])
    assert both.after.look.maps["decoder.1.attention"].weights[0, 0, 1:].any()
    assert not both.before.look.maps["decoder.1.attention"].weights[0, 0, 1:].any()


def test_prefix_and_replaced_input(seq2seq):
    both = run_experiment(seq2seq, "one two three", prefix="dix")
    assert both.before.text == "trois deux un"
    assert both.after.text.startswith("dix")
    both = run_experiment(seq2seq, "one two three", instead="one two four")
    assert both.after.text == "quatre deux un"
    assert both.after.look.source == "one two four"


def test_invalid_rows_and_prefixes_raise_errors(seq2seq):
    with pytest.raises(RegardError, match="no row 9"):
        run_experiment(seq2seq, "one two", [SetAttentionRow("decoder.attention", 0, 9, (1, 0, 0))])
    with pytest.raises(RegardError, match="3 keys, but 2 weights"):
        run_experiment(seq2seq, "one two", [SetAttentionRow("decoder.attention", 0, 0, (1, 0))])
    with pytest.raises(RegardError, match="prefix"):
        run_experiment(seq2seq, "one two", target="deux un", prefix="deux")


WORDS = [f"w{i}" for i in range(12)]


def make_text_model(config):
    tokenizer = Tokenizer.train([" ".join(WORDS)], "word")
    torch.manual_seed(0)
    model = make_model(config(tokenizer.vocab_size))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 4 if parameter.dim() == 2 else 1
    return model.eval(), tokenizer


def test_continuation_before_and_after():
    model, tokenizer = make_text_model(lambda n: GPTConfig(**SIZES, layers=2, vocab=n))
    language_model = TextGenerator(model, tokenizer)
    both = run_experiment(language_model, "w1 w2 w3", [RemovePositions()], prefix=" w4")
    # The log-probability is that of the continuation, not of the prompt.
    continuation = language_model.generate(["w1 w2 w3"], DecodeConfig(method="greedy", max_len=12))[0][0]
    assert both.before.text == continuation.text
    chosen = continuation.hypothesis.token_logprobs[: len(continuation.hypothesis.ids)]
    assert both.before.logprob == pytest.approx(sum(chosen), abs=0.5)  # without <unk>
    assert both.before.logprob == pytest.approx(sum(np.log(one.probability) for one in both.before.steps))
    assert [one.token for one in both.before.input_steps] == ["w1", "w2", "w3"]
    assert len(both.after.input_steps) == 4
    # At every temperature, the probabilities of the vocabulary sum to 1.
    following = both.before.next_token
    logits = model(language_model.pack([language_model.encode_prompt("w1 w2 w3")]))[-1].double()
    for temperature, normalizer in zip(TEMPERATURES, following.log_normalizers):
        expected = (logits / temperature).softmax(-1).sort(descending=True)[0][: len(following.logprobs)]
        found = np.exp(np.array(following.logprobs) / temperature - normalizer)
        assert found == pytest.approx(expected.tolist(), abs=1e-5)
    assert following.texts[0] == continuation.text[: len(following.texts[0])]
    assert both.after.look.source == "w1 w2 w3 w4"
    unmasked = run_experiment(language_model, "w1 w2 w3", [RemoveMask()]).after
    assert unmasked.look.maps["blocks.0.attention"].weights[0, 0, 1:].any()
    assert unmasked.steps[0].likeliest != both.before.steps[0].likeliest


def test_probabilities_are_those_of_the_chosen_ids():
    # The ids "a b" decode to a text that the tokenizer encodes as one piece.
    tokenizer = Tokenizer.train(["ab ab ab c d", "a b"], "bpe", vocab_size=40)
    pieces = [tokenizer.backend_tokenizer.token_to_id(one) for one in ("▁a", "b")]
    text = tokenizer.decode(pieces)
    assert tokenizer.encode(text) != pieces
    torch.manual_seed(0)
    sizes = dict(width=16, heads=2, feedforward=16, encoder_layers=1, decoder_layers=1)
    size = tokenizer.vocab_size
    translator = Translator(
        make_model(TransformerConfig(**sizes, source_vocab=size, target_vocab=size)), tokenizer, tokenizer
    )
    hypothesis = replace(translator.translate(["c d"])[0][0].hypothesis, ids=pieces)
    seen = look_at_output(
        translator, "c d", replace(translator.translate(["c d"])[0][0], text=text, hypothesis=hypothesis)
    )
    outcome = compute_outcome(seen)
    source = translator.encode_source("c d")
    logprobs = translator.model(*translator.teacher_forced([(source, pieces)])).log_softmax(-1)
    expected = sum(float(logprobs[i, token]) for i, token in enumerate([*pieces, translator.special.eos]))
    assert outcome.logprob == pytest.approx(expected, abs=1e-5)
    assert [one.token for one in outcome.steps] == ["a", "b", "<eos>"]


def test_every_token_of_a_text_is_masked_in_turn():
    tokenizer = Tokenizer.train([" ".join(WORDS)], "word", mask=True)
    torch.manual_seed(0)
    encoder = TextEncoder(
        make_model(BertConfig(**SIZES, layers=1, vocab=tokenizer.vocab_size, head="mask")).eval(), tokenizer
    )
    outcome = compute_outcome(look(encoder, "w1 w2 w3"))
    (expected,) = encoder.fill("w1 <mask> w3")
    assert list(outcome.steps[2].likeliest.values()) == pytest.approx([share for _, share in expected], abs=1e-5)
    masked = look(encoder, "w1 <mask> w3")
    assert masked.maps["blocks.0.attention"].rows == ["<sos>", "w1", "<mask>", "w3", "<eos>"]
    assert list(compute_outcome(masked).steps[2].likeliest) == list(outcome.steps[2].likeliest)


def test_labels_before_and_after(tmp_path):
    model, tokenizer = make_text_model(
        lambda n: BertConfig(**SIZES, layers=2, vocab=n, head="classify", pooler="tanh", labels=("x", "y"))
    )
    encoder = TextEncoder(model, tokenizer)
    both = run_experiment(encoder, "w1 w2", [AblateLayer("blocks.1")])
    assert both.before.text == encoder.classify(["w1 w2"])[0].label
    assert both.before.steps[0].likeliest == encoder.classify(["w1 w2"])[0].probabilities
    assert both.after.steps[0].likeliest != both.before.steps[0].likeliest
    both = run_experiment(
        ImageModel(model_of("class")), photo(tmp_path / "a.png"), [AblateHead("blocks.0.attention", 1)]
    )
    assert sum(both.before.steps[0].likeliest.values()) == pytest.approx(1)
    assert both.after.steps[0].likeliest != both.before.steps[0].likeliest


def test_masked_language_model_and_encoder_without_a_head():
    model, tokenizer = make_text_model(lambda n: BertConfig(**SIZES, layers=2, vocab=n, head="mask"))
    both = run_experiment(TextEncoder(model, tokenizer), "w1 w2", [RemoveScale()])
    assert [one.token for one in both.before.steps][1:3] == ["w1", "w2"]
    model, tokenizer = make_text_model(lambda n: BertConfig(**SIZES, layers=2, vocab=n, head="none"))
    both = run_experiment(TextEncoder(model, tokenizer), "w1 w2", [RemoveScale()])
    assert both.before.steps == []
    request = {"source": "w1 w2", "changes": [{"change": "head", "attention": "blocks.0.attention", "head": 0}]}
    assert 0 < handle_experiment(TextEncoder(model, tokenizer), request)["similarity"] < 1
    assert len(both.before.look.maps) == 2
    with pytest.raises(RegardError, match="prefix"):
        run_experiment(TextEncoder(model, tokenizer), "w1 w2", prefix="w3")


# Requests


def test_experiment_request_and_response(seq2seq):
    request = {
        "source": "one two three",
        "changes": [{"change": "row", "attention": "decoder.attention", "head": 0, "row": 0, "weights": [1, 0, 0, 0]}],
        "shown": {"attention": "decoder.attention", "head": 0},
    }
    response = handle_experiment(seq2seq, request)
    assert response["before"]["text"] == "trois deux un"
    assert response["after"]["text"].startswith("un")
    assert response["after"]["map"]["weights"][0] == [1, 0, 0, 0]
    assert response["after"]["map"]["columns"] == ["one", "two", "three", "<eos>"]
    assert response["before"]["steps"][0]["likeliest"][0][0] == "trois"
    assert handle_experiment(seq2seq, {"source": "one two three"})["after"]["map"] is None
    from_handler = TextRequestHandler(seq2seq).handle({"experiment": request})
    assert from_handler == (response, [])
    with pytest.raises(RegardError, match="Invalid request for an experiment"):
        TextRequestHandler(seq2seq).handle({"experiment": "one two"})


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"source": 7}, "no valid `source`"),
        ({"prefix": ["a"]}, "no valid `prefix`"),
        ({"instead": "half \ud83d"}, "unpaired surrogate"),
        ({"changes": {"change": "mask"}}, "must be a list"),
        ({"changes": ["mask"]}, "must be a list"),
        ({"shown": "decoder.attention"}, "`shown` must be an object"),
        ({"changes": [{"change": "heads"}]}, "Unknown intervention 'heads'"),
        ({"changes": [{"change": "head", "attention": "decoder.attention"}]}, "Missing fields"),
        ({"changes": [{"change": "head", "attention": "decoder.attention", "head": "0"}]}, "Invalid fields"),
        ({"changes": [{"change": "mask", "color": "red"}]}, "Invalid fields"),
        ({"changes": [{"change": "row", "attention": "a", "head": 0, "row": 0, "weights": ["x"]}]}, "must be numbers"),
    ],
)
def test_invalid_requests_raise_errors(seq2seq, part, message):
    with pytest.raises(RegardError, match=message):
        handle_experiment(seq2seq, {"source": "one two"} | part)


def test_interventions_on_a_custom_module():
    from regard.attention import attend

    class Self(nn.Module):
        kind = "self"

        def forward(self, x):
            return attend(x, x, x)

    model, x = nn.Sequential(Self()), torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))
    with apply_interventions(model, [SetAttentionRow("0", 0, 1, (0, 0, 1))]):
        assert torch.equal(model(x)[0, 1], x[0, 2])
    with apply_interventions(model, [AblateHead("0", 0)]):
        assert not model(x).any()
