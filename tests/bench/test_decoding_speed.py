"""Benchmark of decoding on tiny models: all implementations do the same work."""

import dataclasses
from typing import Any

import pytest
import torch

from regard.bench import DecodingShape, bench_decoding, decoding_peers, decoding_speed, measurement
from regard.bench.decoding_peers import RegardDecoder, TransformersDecoder
from regard.bench.measurement import Unsupported
from regard.data.text.special_tokens import CAUSAL_LM_TOKENS, SEQ2SEQ_TOKENS
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.models import make_model

TINY = DecodingShape("tiny", 16, 2, 1, 32, vocabulary=60, source=5, target=4, cases=((1, 1), (3, 1), (3, 2)))
TINY_GPT = dataclasses.replace(TINY, name="tiny gpt", cases=((1, 1), (2, 1)), is_decoder_only=True)
PEERS = ["transformers, generate", "CTranslate2, float32", "CTranslate2, int8"]
CPU = torch.device("cpu")


def sources(shape: DecodingShape, count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    size = (count, shape.source - 1)
    return [[*row, 3] for row in torch.randint(4, shape.vocabulary, size, generator=generator).tolist()]


def sharp_model(shape: DecodingShape) -> Any:
    """A random model with sharp distributions, so that rounding does not change the outputs."""
    torch.manual_seed(int(shape.is_decoder_only))
    model: Any = make_model(shape.config()).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() > 1:
                tensor.normal_()
        model.output.weight[3] *= 3  # so that most outputs end before the limit
        model.output.weight[[0, 2]] = 0  # <pad> and <sos>, which only peers could generate
    return model


def test_all_peers_are_measured():
    report = bench_decoding("cpu", shapes=[TINY, TINY_GPT], rounds=1, quiet=True)
    cases = [f"tiny, {case}" for case in ("greedy, 1 sentence", "greedy, 3 sentences", "beam 2, 3 sentences")]
    gpt_cases = [f"tiny gpt, greedy, {count}" for count in ("1 sentence", "2 sentences")]
    names = ["Regard, float32", "Regard, int8", *PEERS]
    expected = [(case, name) for case in cases for name in names]
    expected += [(case, name) for case in gpt_cases for name in names[:3]]
    assert [(row.case, row.implementation) for row in report.rows] == expected
    for row in report.rows:
        count = int(row.case.split()[-2])
        assert row.rate == pytest.approx(4 * count / row.seconds)
        assert (row.share is None) == ("int8" in row.implementation)
    first = report.rows[0]
    assert first.note.startswith("weights read at ")
    assert all(f"× {peer.replace(', ', ' ')}" in first.note for peer in PEERS)
    assert "workers: 1, threads per worker: 1" in report.rows[3].note or torch.get_num_threads() > 1


def test_progress_goes_to_standard_error(capsys):
    bench_decoding("cpu", shapes=[dataclasses.replace(TINY, cases=((1, 1),))], rounds=1)
    output = capsys.readouterr()
    assert output.out == ""
    assert "tiny, greedy, 1 sentence: Regard, int8: " in output.err


@pytest.mark.parametrize("shape", [TINY, TINY_GPT], ids=lambda shape: shape.name)
@pytest.mark.parametrize("compiled", [False, True])
def test_transformers_generates_the_same_at_a_given_length(shape, compiled):
    model, config = sharp_model(shape), shape.decode_config(1)
    special = CAUSAL_LM_TOKENS if shape.is_decoder_only else SEQ2SEQ_TOKENS
    ours = RegardDecoder(model, special).prepare(sources(shape, 8), config)()
    theirs = TransformersDecoder(model, special, compiled).prepare(sources(shape, 8), config)()
    assert {len(row) for row in theirs} == {shape.target}
    assert [row[:-1] for row in theirs] == ours  # the last token of Regard is <eos>
    assert len({tuple(output) for output in ours}) > 4


@pytest.mark.parametrize("shape", [TINY, TINY_GPT], ids=lambda shape: shape.name)
@pytest.mark.parametrize("beam", [1, 3])
def test_transformers_generates_the_same_until_the_end(shape, beam):
    model = sharp_model(shape)
    special = CAUSAL_LM_TOKENS if shape.is_decoder_only else SEQ2SEQ_TOKENS
    config = DecodeConfig("beam" if beam > 1 else "greedy", beam, max_len=40, max_extra=40)
    ours = RegardDecoder(model, special).prepare(sources(shape, 8), config)()
    theirs = TransformersDecoder(model, special).prepare(sources(shape, 8), config)()
    # At the length limit, the ranking differs: only Regard counts the probability of the <eos> that it appends.
    pairs = [(output, row) for output, row in zip(ours, theirs, strict=True) if len(output) < config.max_len]
    assert [row[: row.index(3)] for _, row in pairs] == [output for output, _ in pairs]
    assert len(pairs) >= 7
    assert len({len(output) for output, _ in pairs}) > 3


def test_ctranslate2_generates_the_same(tmp_path):
    model, config = sharp_model(TINY), TINY.decode_config(1)
    ours = RegardDecoder(model, SEQ2SEQ_TOKENS).prepare(sources(TINY, 8), config)()
    decoder = decoding_peers.CTranslate2Decoder(model, SEQ2SEQ_TOKENS, "float32", tmp_path)
    theirs = decoder.prepare(sources(TINY, 8), config)()
    assert [row[: config.max_len] for row in theirs] == [[decoder.token_names[i] for i in row] for row in ours]
    assert {len(row) for row in theirs} <= {config.max_len, config.max_len + 1}


def test_int8_is_used():
    model = sharp_model(TINY)
    outputs = []
    for precision in ("auto", "int8"):
        config = dataclasses.replace(TINY.decode_config(1), min_len=40, max_len=40, max_extra=40)
        outputs.append(RegardDecoder(model, SEQ2SEQ_TOKENS, precision).prepare(sources(TINY, 20), config)())
    assert all(len(row) == 40 for rows in outputs for row in rows)
    assert outputs[0] != outputs[1]


def test_missing_packages_are_reported(monkeypatch):
    monkeypatch.setattr(decoding_speed, "is_installed", lambda peer: False)
    report = bench_decoding("cpu", shapes=[TINY], rounds=1, quiet=True)
    assert report.not_installed == ("transformers", "CTranslate2")
    assert all(row.is_regard for row in report.rows)


def test_failing_peer_does_not_stop_the_report(monkeypatch):
    def fail(*arguments):
        raise ImportError("broken installation")

    monkeypatch.setattr(decoding_peers, "write_encoder_decoder", fail)
    report = bench_decoding("cpu", shapes=[TINY], rounds=1, quiet=True)
    failed = [row for row in report.rows if row.seconds is None]
    assert {row.implementation for row in failed} == {"transformers, generate"}
    assert {row.note for row in failed} == {"ImportError: broken installation"}
    assert len(report.rows) == 15


def test_compilation_stops_after_a_time_limit_and_after_a_failure(monkeypatch):
    decoder = TransformersDecoder(sharp_model(TINY), SEQ2SEQ_TOKENS, compiled=True)
    decoder.prepare(sources(TINY, 1), TINY.decode_config(1))
    monkeypatch.setattr(decoding_peers, "COMPILE_SECONDS", 0.0)
    with pytest.raises(Unsupported, match="not compiled: other batch shapes took"):
        decoder.prepare(sources(TINY, 2), TINY.decode_config(1))
    failing = TransformersDecoder(sharp_model(TINY), SEQ2SEQ_TOKENS, compiled=True)
    calls = []

    def generate(**options):
        calls.append(options)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(failing.peer, "generate", generate)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no compiler"):
            failing.prepare(sources(TINY, 1), TINY.decode_config(1))
    assert len(calls) == 1
    assert calls[0]["cache_implementation"] == "static"


def test_faster_arrangement_of_ctranslate2_is_chosen_for_one_sentence(monkeypatch, tmp_path):
    decoder = decoding_peers.CTranslate2Decoder(sharp_model(TINY), SEQ2SEQ_TOKENS, "int8", tmp_path)
    decoder.cores = 3
    seconds = iter([2.0, 1.0, 1.0, 2.0])
    monkeypatch.setattr(decoding_peers, "_best_seconds", lambda call: next(seconds))
    for note in ("workers: 1, threads per worker: 3", "workers: 1, threads per worker: 1"):
        decoder.prepare(sources(TINY, 1), TINY.decode_config(1))
        assert decoder.note == note
    decoder.prepare(sources(TINY, 4), TINY.decode_config(1))
    assert decoder.note == "workers: 3, threads per worker: 1"


def test_ctranslate2_leaves_the_threads_of_torch_alone(tmp_path):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        decoder = decoding_peers.CTranslate2Decoder(sharp_model(TINY), SEQ2SEQ_TOKENS, "float32", tmp_path)
        decoder.prepare(sources(TINY, 4), TINY.decode_config(1))()
        assert decoder.note == "workers: 2, threads per worker: 1"
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_sizes_of_the_default_shapes():
    counts = {}
    for name, shape in decoding_speed.SHAPES["cuda"].items():
        with torch.device("meta"):
            model = make_model(shape.config())
        counts[name] = round(sum(parameter.numel() for parameter in model.parameters()) / 1e6)
    assert counts == {"small": 8, "base": 61, "gpt2": 124}


def test_weights_are_read_once_per_token():
    work = decoding_speed.SHAPES["cuda"]["base"].work(1, 1, itemsize=2)
    decoder = 6 * (8 * 512**2 + 2 * 512 * 2048) + 512 * 32000
    encoder = 6 * (4 * 512**2 + 2 * 512 * 2048)
    assert work.bytes == 2 * (encoder + 30 * decoder)
    assert work.amount == 30
    ceilings = measurement.Ceilings(flops=1e15, bytes=4e12)
    assert ceilings.min_seconds(work) == work.bytes / 4e12  # limited by memory, not by operations


def test_unknown_shape():
    with pytest.raises(RegardError, match=r"No shape is called 'large'\. Choose from small, base, gpt2"):
        bench_decoding("cpu", shapes=["large"])
