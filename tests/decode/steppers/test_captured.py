"""Decoding steps of fused kernels give the outputs of the plain search: on a GPU, or in Triton's interpreter."""

from functools import partial

import pytest
import torch

from regard.decode import DecodeConfig, Request, decode_all, engine
from regard.decode.precision import convert_model, convert_to_float8
from regard.decode.steppers import captured
from regard.kernels.triton import search_update, skinny_linear, topk_log_softmax
from regard.kernels.triton.start_step import StepTables, reference_start_step, start_step
from regard.kernels.triton.support import is_interpreted, triton_available
from tests.decode.models import assert_equal_search, decode_both, gpt, make_sources, transformer

pytestmark = pytest.mark.skipif(not triton_available(), reason="needs Triton")
DEVICE = "cpu" if is_interpreted() else "cuda"

# Small: the interpreter runs about a thousand programs per second.
VOCAB = 24
SIZES = {"feedforward": 16, "encoder_layers": 1, "decoder_layers": 1, "source_vocab": VOCAB, "target_vocab": VOCAB}
T5_OPTIONS = {"positions": "relative", "decoder_score": "dot", "norm_kind": "rms", "activation": "geglu", "bias": False}
MODELS = {
    "pre-norm": lambda: transformer(**SIZES),
    "post-norm": lambda: transformer(**SIZES, norm="post", positions="learned", position_offset=2),
    "T5": lambda: transformer(**SIZES, **T5_OPTIONS, output_scale=True),
    "rotary, grouped heads": lambda: gpt(vocab=VOCAB, heads=4, kv_heads=2, feedforward=16, layers=1),
    "embedding norm": lambda: transformer(**SIZES, embedding_norm=True, output_bias=True, tied=False),
}
CONFIGS = {
    "greedy": DecodeConfig("greedy", max_len=3),
    "beam": DecodeConfig(beam=3, n_best=2, max_len=3, min_len=2),
    "wide beam": DecodeConfig(beam=10, max_len=2),
    "samples": DecodeConfig("sample", n_best=2, max_len=3, top_k=9),
}


def few_sources(count, longest):
    return [
        [token % (VOCAB - 4) + 4 if token != 3 else 3 for token in ids] for ids in make_sources(count, longest=longest)
    ]


class EagerGraph:
    """A graph that runs its steps eagerly, where there is no GPU."""

    def __init__(self, step):
        self.replay = step


class FinishedEvent:
    def record(self):
        pass

    def synchronize(self):
        pass


@pytest.fixture
def kernels(monkeypatch):
    """Run the kernels in the interpreter as if on a GPU."""
    if not is_interpreted():
        return
    capture = lambda self, steps: EagerGraph(partial(self._device_steps, steps))  # noqa: E731
    monkeypatch.setattr(captured.GraphSlotDecoder, "_capture", capture)
    capture_load = lambda self: EagerGraph(self._device_load)  # noqa: E731
    monkeypatch.setattr(captured.CapturedLoad, "_capture", capture_load)
    monkeypatch.setattr(torch.cuda, "Event", FinishedEvent)
    monkeypatch.setattr(captured, "UNROLLED_STEPS", 2)
    monkeypatch.setattr(engine, "uses_graphs", lambda model, hypotheses: True)
    # Fewer programs, for the interpreter; tests/kernels/triton/test_skinny_linear.py has the tiles of a GPU.
    blocks = skinny_linear._blocks
    monkeypatch.setattr(skinny_linear, "_blocks", lambda *sizes: blocks(*sizes) | {"BLOCK_O": 32})
    limits = search_update.MAX_BEAM
    monkeypatch.setattr(topk_log_softmax, "supports", lambda logits, k: k <= topk_log_softmax.MAX_K)
    monkeypatch.setattr(search_update, "supports", lambda logits, beams, candidates: beams <= limits)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_equals_plain_search(kernels, name):
    model, sources = MODELS[name]().to(DEVICE), few_sources(2, longest=5)
    for config in (CONFIGS["greedy"], CONFIGS["beam"]):
        assert_equal_search(*decode_both(model, sources, config), tolerance=1e-4)


@pytest.mark.parametrize("config", ["wide beam", "samples"])
def test_options_without_a_kernel_equal_plain_search(kernels, config):
    model = MODELS["pre-norm"]().to(DEVICE)
    assert_equal_search(*decode_both(model, few_sources(2, longest=5), CONFIGS[config]), tolerance=1e-4)


def test_many_rows_use_matrix_products(kernels, monkeypatch):
    monkeypatch.setattr(skinny_linear, "is_faster", lambda rows, width: False)
    for name in ("pre-norm", "post-norm"):  # both orders of norm and residual sum
        model = MODELS[name]().to(DEVICE)
        assert_equal_search(*decode_both(model, few_sources(2, longest=5), CONFIGS["beam"]), tolerance=1e-4)


@pytest.mark.parametrize("reader", ["kernel", "kernel without float8", "matrix products"])
def test_float8_equals_plain_search(kernels, monkeypatch, reader):
    is_skinny = reader != "matrix products"
    monkeypatch.setattr(skinny_linear, "is_faster", lambda rows, width: is_skinny)
    monkeypatch.setattr(captured, "supports_float8", lambda device: reader != "kernel without float8")
    for name in ("pre-norm", "rotary, grouped heads")[: 2 if reader == "kernel" else 1]:
        model = convert_to_float8(MODELS[name](), torch.float32).to(DEVICE)
        assert_equal_search(*decode_both(model, few_sources(2, longest=5), CONFIGS["greedy"]), tolerance=1e-4)
        (decoder,) = engine._graphs[model].values()
        is_float8 = decoder.model.output_weights.weight.dtype == torch.float8_e4m3fn
        assert is_float8 == (decoder.model.output_weights.scale is not None) == (reader == "kernel")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_float8_on_a_gpu():
    model, sources = MODELS["pre-norm"]().to(DEVICE), few_sources(9, longest=5)
    config = DecodeConfig("greedy", max_len=3, precision="float8")
    fast, plain = decode_both(convert_model(model, "float8"), sources, CONFIGS["greedy"])
    assert [n_best[0].ids for n_best in decode_all(model, Request(sources, config))] == [n[0].ids for n in fast]
    assert sum(a[0].ids == b[0].ids for a, b in zip(fast, plain)) >= 6  # bfloat16 rounds differently


def test_slots_are_refilled(kernels, monkeypatch):
    monkeypatch.setattr(engine, "GPU_ROWS", 2)
    model, sources = MODELS["pre-norm"]().to(DEVICE), few_sources(5, longest=4)
    prefixes = [[5] * (i % 3) for i in range(5)]
    assert_equal_search(*decode_both(model, sources, CONFIGS["greedy"], prefixes=prefixes), tolerance=1e-4)


def test_graphs_are_reused_until_the_weights_change(kernels):
    model, sources = MODELS["pre-norm"]().to(DEVICE), few_sources(2, longest=4)
    assert_equal_search(*decode_both(model, sources, CONFIGS["greedy"]), tolerance=1e-4)
    first = list(engine._graphs[model].values())
    assert_equal_search(*decode_both(model, sources[::-1], CONFIGS["greedy"]), tolerance=1e-4)
    assert list(engine._graphs[model].values()) == first
    with torch.no_grad():
        model.output.weight.mul_(-1)
    assert_equal_search(*decode_both(model, sources, CONFIGS["greedy"]), tolerance=1e-4)
    assert len(engine._graphs[model]) == 2


@pytest.mark.parametrize("prefix_len", [0, 3])
@pytest.mark.parametrize("has_positions", [True, False])
def test_start_step_equals_its_reference(prefix_len, has_positions):
    torch.manual_seed(0)
    B, K, E = 5, 3, 24
    step, limit = torch.tensor([0, 1, 2, 7, 4], device=DEVICE), torch.tensor([9, 9, 9, 7, 9], device=DEVICE)
    prefix = torch.randint(-1, 9, (B, prefix_len), device=DEVICE)
    table = torch.randn(20, E, device=DEVICE) if has_positions else None
    tables = StepTables(torch.randn(30, E, device=DEVICE), table, 1.5, 2, 3, 2)
    inputs = (
        torch.randint(0, 30, (B, K), device=DEVICE),
        step,
        torch.tensor([False, True, False, False, False], device=DEVICE),
        torch.tensor([0, 3, 1, 0, 5], device=DEVICE),
        limit,
        prefix,
        tables,
    )
    for ours, plain in zip(start_step(*inputs), reference_start_step(*inputs)):
        torch.testing.assert_close(ours, plain)
