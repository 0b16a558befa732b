"""Recording: exact weights and gradients after a fused forward pass, without changing the model."""

import threading

import jaxtyping
import pytest
import torch
from torch import nn

from regard.attention import Concat, Offsets, attend, causal, dispatch, padding, record, weights
from regard.attention.reference import reference
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.kernels.masked_softmax import masked_softmax
from regard.layers.packed import pack
from regard.models import GPT, GPTConfig
from tests.attention.helpers import Slope, random


class Attention(nn.Module):
    def __init__(self, kind, heads=2, score=None, mask=None, bias=None):
        super().__init__()
        self.kind, self.heads, self.score, self.mask, self.bias = kind, heads, score, mask, bias

    def forward(self, x, memory=None):
        memory = x if memory is None else memory
        q, k = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (x, memory))
        out = attend(q, k, k, score=self.score, mask=self.mask, bias=self.bias)
        return out.transpose(1, 2).flatten(-2)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.masked = Attention("masked", mask=causal())
        self.cross = Attention("cross", score=Concat(4, 4, hidden=3, heads=2))

    def forward(self, x, memory):
        return self.cross(self.masked(x), memory)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Attention("self", bias=Slope(2))
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, source, target):
        memory = self.encoder(source)
        for layer in self.layers:
            target = layer(target, memory)
        return target


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


SOURCE, TARGET = random(2, 6, 8, dtype=torch.float32), random(2, 5, 8, seed=1, dtype=torch.float32)


def test_recording_has_names_and_kinds_in_order(model):
    with record(model) as recording:
        model(SOURCE, TARGET)
    assert {name: one.kind for name, one in recording.items()} == {
        "encoder": "self",
        "layers.0.masked": "masked",
        "layers.0.cross": "cross",
        "layers.1.masked": "masked",
        "layers.1.cross": "cross",
    }
    assert all(len(one.calls) == 1 for one in recording.values())


def test_weights_reproduce_the_outputs(model):
    with record(model) as recording:
        out = model(SOURCE, TARGET)
    for one in recording.values():
        call = one.calls[0]
        expected = reference(call.q, call.k, call.v, call.score, call.mask_parts.mask, call.bias)
        torch.testing.assert_close(one.weights() @ call.v, expected)
    last = recording["layers.1.cross"]
    torch.testing.assert_close((last.weights() @ last.calls[0].v).transpose(1, 2).flatten(-2), out)


def test_selected_layers_heads_and_queries(model):
    with record(model, layers="layers.*.cross", queries=[0, 3]) as recording:
        model(SOURCE, TARGET)
    assert list(recording) == ["layers.0.cross", "layers.1.cross"]
    recorded = recording["layers.0.cross"]
    full = recorded.weights(queries=slice(None))
    assert full.shape == (2, 2, 5, 6)
    torch.testing.assert_close(recorded.weights(), full[:, :, [0, 3]])
    torch.testing.assert_close(recorded.weights(heads=[1, 0], queries=-1), full[:, [1, 0], -1:])


@pytest.mark.parametrize("gradients", [False, True])
def test_only_the_selected_heads_are_stored(model, gradients):
    target = TARGET.clone().requires_grad_()
    with torch.set_grad_enabled(gradients):
        with record(model) as recording:
            out = model(SOURCE, target)
        with record(model, heads=[1]) as subset:
            second_out = model(SOURCE, target)
    assert subset["encoder"].calls[0].k.untyped_storage().nbytes() == SOURCE.numel() * 4 // 2
    for name, recorded in subset.items():
        torch.testing.assert_close(recorded.weights(), recording[name].weights(heads=1))
        torch.testing.assert_close(recorded.weights(heads=-1, queries=[2]), recording[name].weights(heads=1, queries=2))
        with pytest.raises(RegardError, match=f"Head 0 of {name} was not recorded"):
            recorded.weights(heads=slice(None))
    if gradients:
        full = recording.gradients(out[0].sum())
        for name, grad in subset.gradients(second_out[0].sum()).items():
            torch.testing.assert_close(grad, full[name][:, [1]])


def test_selected_heads_of_packed_and_grouped_calls():
    class PackedAttention(nn.Module):
        kind = "self"

        def forward(self, q, k, offsets):
            return attend(q, k, k, mask=causal(), bias=Slope(4), q_offsets=offsets, k_offsets=offsets)

    model, q, k = PackedAttention(), random(7, 4, 3), random(7, 2, 3, seed=1)
    offsets = Offsets(torch.tensor([0, 2, 7]), total=7, max_len=5)
    with record(model) as full:
        model(q, k, offsets)
    with record(model, heads=[3, 0]) as subset:
        model(q, k, offsets)
    torch.testing.assert_close(subset[""].weights(), full[""].weights(heads=[3, 0]))


def test_calls_outside_of_the_model_are_not_recorded_and_hooks_are_removed(model):
    with record(model) as recording:
        attend(TARGET, TARGET, TARGET)
    assert not any(one.calls for one in recording.values())
    with pytest.raises(RegardError, match="encoder was not called"):
        recording["encoder"].weights()
    assert dispatch._thread.state == dispatch.DispatchState()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_exception_removes_hooks_and_state(model):
    with pytest.raises(RegardError, match="Incompatible shapes"), record(model) as recording:
        model(SOURCE, TARGET[:1])
    assert dispatch._thread.state == dispatch.DispatchState()
    with record(model) as recording:
        model(SOURCE, TARGET)
    assert len(recording["encoder"].calls) == 1


def test_two_threads_record_the_same_model_concurrently(model):
    both_inside, lengths = threading.Barrier(2), {}

    def run(length):
        with record(model) as recording:
            both_inside.wait()
            for _ in range(5):
                model(SOURCE, TARGET[:, :length])
            both_inside.wait()
        lengths[length] = [call.q.shape[2] for call in recording["layers.1.masked"].calls]

    threads = [threading.Thread(target=run, args=(length,)) for length in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lengths == {length: [length] * 5 for length in (3, 5)}


def test_overlapping_recordings_restore_compilation():
    """Whichever thread ends first: torch's stance is global to the process."""
    attention, started, overlapped, ended = Attention("self"), *(threading.Event() for _ in range(3))

    def first():
        with record(attention):
            started.set()
            overlapped.wait(60)
        ended.set()

    def second():
        started.wait(60)
        with record(attention):
            overlapped.set()
            ended.wait(60)

    threads = [threading.Thread(target=run) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_q_and_k_are_not_copied(model):
    with record(model) as recording:
        model.encoder(SOURCE)
    assert recording["encoder"].calls[0].q.data_ptr() == SOURCE.data_ptr()


def test_decoding_steps_are_joined_to_one_matrix():
    attention = Attention("masked", mask=causal())
    with record(attention) as steps:
        for n in range(1, 6):
            attention(TARGET[:, n - 1 : n], TARGET[:, :n])
    with record(attention) as one_call:
        attention(TARGET)
    assert len(steps[""].calls) == 5
    torch.testing.assert_close(steps[""].weights(), one_call[""].weights())
    torch.testing.assert_close(steps[""].weights(heads=1, queries=[4]), one_call[""].weights(heads=1, queries=[4]))


def test_two_forward_passes_are_two_recordings(model):
    """Also with one layer selected, with equal inputs, and if the second pass is shorter."""
    for layers, second in ((None, TARGET[:, :3]), ("*.cross", TARGET), ("*.masked", TARGET)):
        with record(model, layers) as recording:
            out = [model(SOURCE, target.clone().requires_grad_()) for target in (TARGET, second)]
        assert len(recording.passes) == 2
        for target, one in zip((TARGET, second), recording.passes):
            with record(model, layers) as alone:
                model(SOURCE, target)
            for name in alone:
                torch.testing.assert_close(one[name].weights(), alone[name].weights())
        name = list(recording)[-1]
        message = rf"{name} ran on 2 inputs while recording.*recording.passes\[0\]\[\"{name}\"\]"
        with pytest.raises(RegardError, match=message):
            recording[name].weights()
        with pytest.raises(RegardError, match="ran on 2 inputs"):
            recording.gradients(out[0].sum())
        assert recording.passes[1].gradients(out[1].sum())[name].shape == recording.passes[1][name].weights().shape


@pytest.mark.parametrize("again", ["one two three", "four"])
def test_two_translations_are_two_recordings(transformer, again):
    greedy = DecodeConfig(method="greedy")
    with record(transformer) as recording:  # a pipeline
        outputs = [transformer.translate(line, greedy)[0] for line in ("one two three", again)]
    assert [len(one["decoder.0.cross"].weights()[0, 0]) for one in recording.passes] == [
        len(output.hypothesis.token_logprobs) for output in outputs
    ]
    encoder = [one["encoder.0.attention"].weights().shape[-1] for one in recording.passes]
    assert encoder == [len(transformer.encode_source(line)) for line in ("one two three", again)]


def test_steps_of_a_beam_search_have_no_common_matrix(transformer):
    """Hypotheses change places between the steps: a row of the matrix would not be one output."""
    with record(transformer) as recording:
        transformer.translate("one two three", DecodeConfig(beam=3))
        transformer.translate("one two three", DecodeConfig(method="greedy"))
    search, greedy = recording.passes
    for name in ("decoder.0.attention", "decoder.1.cross"):
        with pytest.raises(RegardError, match=rf"{name} ran on several hypotheses .*method=\"greedy\""):
            search[name].weights()
        assert greedy[name].weights().shape[-2] > 1
    assert search["encoder.0.attention"].weights().shape == greedy["encoder.0.attention"].weights().shape


def test_steps_of_language_models_are_one_recording():
    gpt = GPT(GPTConfig(width=8, heads=2, layers=2, feedforward=8, vocab=9, max_len=8)).eval()
    with torch.no_grad(), record(gpt) as recording:
        for prompt in ([5, 6, 7], [5], [5]):
            state = gpt.start(pack([prompt]))
            for token in prompt[-1:] * 3:
                _, state = gpt.step(state, torch.tensor([[token]]))
    assert [one["blocks.1.attention"].weights().shape[-1] for one in recording.passes] == [5, 3, 3]


def test_record_needs_a_model():
    with (
        pytest.raises(RegardError, match=r"record needs a model \(got 'model'\). Pass a torch module or a pipeline."),
        record("model"),
    ):
        pass


def test_weights_of_packed_calls_are_padded():
    class PackedAttention(nn.Module):
        kind = "self"

        def forward(self, x, offsets):
            return attend(x, x, x, mask=causal(), q_offsets=offsets, k_offsets=offsets)

    model, x = PackedAttention(), random(5, 2, 4)
    offsets = Offsets(torch.tensor([0, 2, 2, 5]), total=5, max_len=4)
    with record(model) as recording:
        model(x, offsets)
    matrices = recording[""].weights()
    assert matrices.shape == (3, 2, 4, 4)
    expected = torch.zeros(3, 2, 4, 4, dtype=x.dtype)
    for b, (start, end) in enumerate([(0, 2), (2, 2), (2, 5)]):
        sequence = x[start:end].transpose(0, 1)[None]
        expected[b, :, : end - start, : end - start] = weights(sequence, sequence, mask=causal())[0]
    torch.testing.assert_close(matrices, expected)


class PlainAttention(nn.Module):
    """Plain attention that retains the gradients of its weights."""

    def __init__(self, mask=None):
        super().__init__()
        self.mask, self.weights = mask, []

    def attend(self, q, k, v, **_):
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], dim=1) for y in (k, v))
        positions = [torch.arange(y.shape[2]) for y in (q, k)]
        allowed = None if self.mask is None else self.mask.block(*positions)
        self.weights.append(masked_softmax(q @ k.mT / q.shape[-1] ** 0.5, allowed))
        self.weights[-1].retain_grad()
        return self.weights[-1] @ v


class GroupedQueryModel(nn.Module):
    """Two layers with 4 heads of queries and 2 of keys and values, and values of another width."""

    kind = "self"

    def __init__(self):
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(8, width, bias=False).double() for width in (12, 6, 10, 8))
        self.output = nn.Linear(20, 8, bias=False).double()

    def forward(self, x, attend=attend, **options):
        for _ in range(2):
            q, k, v = (
                y(x).unflatten(-1, (heads, -1)).transpose(-3, -2) if x.dim() == 3 else y(x).unflatten(-1, (heads, -1))
                for y, heads in zip(self.projections, (4, 2, 2))
            )
            out = attend(q, k, v, **options)
            x = x + self.output((out.transpose(-3, -2) if x.dim() == 3 else out).flatten(-2)).tanh()
        return x


def test_weight_gradients_equal_autograd_of_plain_attention():
    torch.manual_seed(0)
    model, x, mask = GroupedQueryModel(), random(2, 5, 8), causal()
    with record(model) as recording:
        scalar = model(x, mask=mask)[:, -1, 3].square().sum()
    grads = recording.gradients(scalar)[""]
    plain = PlainAttention(mask)
    model(x, plain.attend)[:, -1, 3].square().sum().backward()
    expected = torch.cat([one.grad for one in plain.weights], dim=2)
    allowed = mask.block(torch.arange(5), torch.arange(5)).repeat(2, 1)  # masked weights are constant
    torch.testing.assert_close(grads * allowed, expected * allowed)
    assert (
        grads.abs().amax(dim=(0, 1, 3)).tolist()[5:9] == [0.0] * 4
    )  # in the last layer only the last query has influence
    torch.testing.assert_close(recording.gradients(2 * scalar)[""], 2 * grads)


def test_weight_gradients_of_packed_sequences_are_padded():
    torch.manual_seed(0)
    model, x, offsets = GroupedQueryModel(), random(5, 8), torch.tensor([0, 2, 5])
    with record(model) as recording:
        scalar = model(x, q_offsets=offsets, k_offsets=offsets).square().sum()
    grads = recording.gradients(scalar)[""]
    assert grads.shape == (2, 4, 6, 3)
    for b, (start, end) in enumerate([(0, 2), (2, 5)]):
        plain = PlainAttention()
        model(x[None, start:end], plain.attend).square().sum().backward()
        for layer, one in enumerate(plain.weights):
            padded = nn.functional.pad(one.grad[0], (0, 3 - end + start, 0, 3 - end + start))
            torch.testing.assert_close(grads[b, :, 3 * layer : 3 * layer + 3], padded)


def test_frozen_models_have_weight_gradients(model):
    model.requires_grad_(False)
    with record(model) as recording:
        out = model(SOURCE.clone().requires_grad_(), TARGET.clone().requires_grad_())
    grads = recording.gradients(out.sum())
    assert [name for name, one in grads.items() if one.abs().sum() > 0] == list(recording)


def test_outputs_are_not_stored_without_gradients(model):
    with torch.no_grad(), record(model) as recording:
        out = model(SOURCE, TARGET)
    assert all(one.outputs == [None] for one in recording.values())
    with pytest.raises(RegardError, match="gradients disabled"):
        recording.gradients(out.sum())
    with record(model) as recording:
        pass
    with pytest.raises(RegardError, match="gradients disabled"):
        recording.gradients(SOURCE.sum())


def test_compiled_models_are_recorded(model):
    compiled = torch.compile(model, backend="eager")
    with record(model) as recording:
        compiled(SOURCE, TARGET)
    assert all(len(one.calls) == 1 for one in recording.values())


def test_recording_does_not_recompile(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shape checker cannot be compiled
    torch._dynamo.reset()
    graphs = []
    backend = lambda graph, inputs: graphs.append(graph) or graph.forward  # noqa: E731
    attention = Attention("masked", mask=causal())
    compiled = torch.compile(attention, backend=backend, fullgraph=True)
    expected = compiled(TARGET)
    with record(attention) as recording:
        torch.testing.assert_close(compiled(TARGET), expected)
    assert len(recording[""].calls) == 1
    assert torch.equal(compiled(TARGET), expected)
    assert len(graphs) == 1


def test_unknown_modules_and_heads(model):
    with (
        pytest.raises(
            RegardError, match=r"No attention module of the model matches decoder.*encoder, layers\.0\.masked"
        ),
        record(model, layers="decoder"),
    ):
        pass
    with pytest.raises(RegardError, match="no attention modules"), record(nn.Linear(1, 1)):
        pass
    with record(model) as recording, pytest.raises(RegardError, match="Recorded: encoder"):
        recording["enc"]
    with record(model) as recording:
        model(SOURCE, TARGET)
    with pytest.raises(RegardError, match="no head 2"):
        recording["encoder"].weights(heads=2)


def test_weights_of_one_head_over_16384_tokens():
    """float32 weights at T = S = 16384 equal the reference to 1e-5, for rows from the entire range."""
    T, H, D = 16384, 2, 16
    x = random(1, T, H * D, dtype=torch.float32)
    model = Attention("masked", heads=H, mask=causal() & padding(torch.tensor([16000])))
    with torch.no_grad(), record(model, heads=1) as recording:
        model(x)
    rows = [0, 1, 777, *range(8000, 8300), 15999, 16000, 16383]
    actual = recording[""].weights(queries=rows)
    q = x.double().unflatten(-1, (H, D)).transpose(1, 2)[:, 1:]
    expected = masked_softmax(q[:, :, rows] @ q.mT / D**0.5, model.mask.block(torch.tensor(rows), torch.arange(T)))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-5)
