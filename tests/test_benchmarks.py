"""Scripts in benchmarks/, on tiny models: they run, and compare implementations that compute the same."""

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.attention import attend
from regard.data.text.special_tokens import CAUSAL_LM_TOKENS, SEQ2SEQ_TOKENS
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.kernels.triton.support import triton_available
from regard.models import make_model
from regard.pipelines import load
from tests.conftest import number_pairs

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_on_the_path(monkeypatch):
    """Scripts import each other; timings are short."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    measurement = importlib.import_module("measurement")
    monkeypatch.setattr(measurement, "MIN_TIMED_SECONDS", 1e-4)
    monkeypatch.setitem(measurement.MATRIX_SIZE, "cpu", 64)


def run(monkeypatch, name: str, *arguments: Any) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    importlib.import_module(name).main()


@pytest.fixture
def test_set(tmp_path) -> list[Path]:
    sides = zip(*number_pairs(30, seed=9))
    files = [tmp_path / name for name in ("source.txt", "reference.txt")]
    for file, side in zip(files, sides):
        file.write_text("".join(f"{line}\n" for line in side))
    return files


@pytest.mark.parametrize("beam", [1, 3])
def test_quality_table(monkeypatch, capsys, transformer_folder, test_set, beam):
    source, reference = test_set
    options = ["--input", source, "--reference", reference, "--beam", beam, "--device", "cpu"]
    run(monkeypatch, "decoding_quality", transformer_folder, *options)
    output = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows[2:]] == ["plain, float32", "engine, float32", "engine, int8"]
    plain, engine, int8 = rows[2:]
    assert float(plain[1]) > 1
    assert (plain[2:5], engine[1:5]) == (["+0.00", "0", ""], [plain[1], "+0.00", "0", ""])
    assert (int8[3] == "0") == (int8[4] == "")


def test_unsupported_precision_is_a_row(monkeypatch, transformer_folder):
    module = importlib.import_module("decoding_quality")
    translator = load(transformer_folder, "cpu")
    translate = translator.translate

    def refuse_int8(lines, config=None, **options):
        if config.precision == "int8":
            raise RegardError("precision int8 is for CPUs.", "Use float16.")
        return translate(lines, config, **options)

    monkeypatch.setattr(translator, "translate", refuse_int8)
    lines, references = zip(*number_pairs(4, seed=9))
    table = module.compare_searches(translator, lines, references, "greedy", 1)
    assert "| engine, int8 | precision int8 is for CPUs" in table.splitlines()[-1]


def test_gap_of_competing_hypotheses(transformer_folder):
    """The other hypotheses of the n best are worse by the difference of scores; a pruned one by that when pruned."""
    competing_gap = importlib.import_module("decoding_quality").competing_gap
    translator = load(transformer_folder, "cpu")
    config = DecodeConfig(beam=3, n_best=3)
    line = number_pairs(1, seed=9)[0][0]
    found = translator.translate([line], config, history=True)[0]
    history = found[0].history
    for translation in found:
        gap = competing_gap(history, translation.hypothesis.ids, found[0].score)
        assert gap == pytest.approx(found[0].score - translation.score, abs=1e-6)
    step = history.steps[0]
    pruned = step.reasons.index("beam")
    live = [logprob for logprob, status in zip(step.logprobs, step.statuses) if status == "live"]
    gap = competing_gap(history, [step.tokens[pruned], 5], found[0].score)
    assert gap == pytest.approx(min(live) - step.logprobs[pruned])
    assert gap >= 0
    not_searched = next(token for token in range(4, 20) if token not in step.tokens)
    assert competing_gap(history, [not_searched], found[0].score) == min(live) - step.logprobs[-1]
    short = dataclasses.replace(history, steps=history.steps[:1])
    kept = step.tokens[step.statuses.index("live")]
    assert competing_gap(short, [kept, 5, 6], found[0].score) is None


def test_quality_with_files_of_different_lengths(monkeypatch, capsys, transformer_folder, test_set):
    source, reference = test_set
    reference.write_text("un\n")
    with pytest.raises(SystemExit):
        run(monkeypatch, "decoding_quality", transformer_folder, "--input", source, "--reference", reference)
    assert "source.txt has 30 lines" in capsys.readouterr().err


def test_large_file(monkeypatch, capsys, transformer_folder, test_set):
    options = ["--corpus", test_set[0], "--lines", 100, "--device", "cpu", "--method", "greedy"]
    run(monkeypatch, "decoding_million", transformer_folder, *options)
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [row[1].strip() for row in rows[2:]] == ["10", "100"]
    assert all(float(row[2].replace(",", "")) > 0 for row in rows[2:])


@pytest.mark.skipif(not triton_available(), reason="needs Triton")
def test_float8_tables(monkeypatch, capsys):
    run(monkeypatch, "decoding_float8", "--tiny", "--rounds", 1)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows if row][-2:] == ["base", "gpt2"]
    errors = [float(row[5]) for row in rows if len(row) == 6 and row[1].isdigit()]
    assert len(errors) == 4
    assert 0 < max(errors) < 1e-2


def test_shuffled_lines_are_repeated(tmp_path):
    module = importlib.import_module("decoding_million")
    module.write_shuffled(tmp_path / "lines", ["a", "b", "c"], 7)
    lines = (tmp_path / "lines").read_text().split()
    assert sorted(lines[:3]) == sorted(lines[3:6]) == ["a", "b", "c"]
    assert len(lines) == 7


# -- attention --------------------------------------------------------------------------------------------------------


def test_attention_table(monkeypatch, capsys):
    options = "--device cpu --lengths 8 --scores dot concat --masks none --tokens 16 --heads 1 --rounds 1 --no-compiled"
    run(monkeypatch, "attention", *options.split())
    output = capsys.readouterr().out
    assert "roofline: matrix product" in output
    for name in ("**Regard**", "formula, eager", "SDPA"):
        assert f"| dot, forward+backward | 8 | {name} |" in output
    assert "| concat, forward | 8 | SDPA" not in output
    assert "| overhead: one query, 16 keys |" in output


def test_growth_stops_before_it_allocates(monkeypatch, capsys, tmp_path):
    options = "--growth --device cpu --lengths 4 8 16 --scores dot --rounds 1 --no-compiled --plot"
    monkeypatch.setattr(importlib.import_module("attention"), "check_growth", lambda *_: None)
    run(monkeypatch, "attention", *options.split(), tmp_path / "a.svg")
    assert "| dot | 16 | formula, eager |" in capsys.readouterr().out
    assert (tmp_path / "a.svg").read_bytes().startswith(b"<?xml")
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    attention, measurement = (importlib.import_module(name) for name in ("attention", "measurement"))
    attention.check_growth(None, 128, 1 << 30)
    short = measurement.Measurement("concat", "formula", length=64, seconds=0.001, memory=300 << 20)
    with pytest.raises(measurement.Unsupported, match=r"out of memory: would need 1\.2 GiB"):
        attention.check_growth(short, 128, 1 << 30)
    with pytest.raises(measurement.Unsupported, match=r"would take 4\.000 s"):
        attention.check_growth(dataclasses.replace(short, seconds=1.0), 128, 1 << 40)


@pytest.mark.parametrize("mask", ["none", "causal", "padding", "causal+padding"])
def test_peers_of_attention_compute_the_same(mask):
    module = importlib.import_module("attention")
    shape = module.AttentionShape(tokens=14, heads=2, width=8)
    case = module.AttentionCase("scaled_dot", mask, 7, False, shape, torch.device("cpu"), torch.float32)
    (q, k, v), score, expression = case.inputs(), case.make_score(), case.make_mask()
    expected = attend(q, k, v, score=score, mask=expression)
    for name, make in module.peer_attentions(case, score, q, k, compiled=False):
        assert torch.allclose(make()(q, k, v), expected, atol=1e-5), name
    p = torch.arange(7)
    allowed = torch.ones(7, 7, dtype=torch.bool) if expression is None else expression.block(p, p)
    assert case.pairs() == allowed.expand(case.batch, 1, 7, 7).sum()


# -- decoding ---------------------------------------------------------------------------------------------------------


def tiny_shape(**changes: Any) -> Any:
    shape = importlib.import_module("decoding").DecodingShape("tiny", 16, 2, 1, 32, 60, 5, 4, ((1, 1), (3, 2)))
    return dataclasses.replace(shape, **changes)


def sharp_model(shape: Any) -> Any:
    """A random model with sharp distributions, so that rounding does not change the outputs."""
    torch.manual_seed(int(shape.is_decoder_only))
    model: Any = make_model(shape.config()).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() > 1:
                tensor.normal_()
        model.output.weight[[0, 2]] = 0  # <pad> and <sos>, which only peers could generate
    return model


def test_decoding_table(monkeypatch, capsys):
    module = importlib.import_module("decoding")
    monkeypatch.setitem(module.SHAPES["cpu"], "small", tiny_shape())
    run(monkeypatch, "decoding", "--device", "cpu", "--shapes", "small", "--rounds", 1)
    output = capsys.readouterr()
    rows = [line.split("|") for line in output.out.splitlines() if line.startswith("| tiny")]
    names = ["**Regard, float32**", "**Regard, int8**", "transformers, generate", "CTranslate2, float32"]
    assert [row[3].strip() for row in rows if "beam 2, 3 sentences" in row[1]][:4] == names
    assert "weights read at " in rows[0][-2]
    assert "tiny, greedy, 1 sentence: Regard, int8: " in output.err


@pytest.mark.parametrize("is_gpt", [False, True])
def test_peers_of_decoding_generate_the_same(tmp_path, is_gpt):
    module, shape = importlib.import_module("decoding"), tiny_shape(is_decoder_only=is_gpt)
    model, config = sharp_model(shape), shape.decode_config(beam=1)
    special = CAUSAL_LM_TOKENS if is_gpt else SEQ2SEQ_TOKENS
    generator = torch.Generator().manual_seed(1)
    sources = [[*row, 3] for row in torch.randint(4, 60, (8, 4), generator=generator).tolist()]
    ours = module.RegardDecoder(model, special).prepare(sources, config)()
    theirs = module.TransformersDecoder(model, special).prepare(sources, config)()
    assert [row[:-1] for row in theirs] == ours  # the last token of Regard is <eos>
    if not is_gpt:
        decoder = module.CTranslate2Decoder(model, special, "float32", tmp_path)
        theirs = decoder.prepare(sources, config)()
        assert [row[: config.max_len] for row in theirs] == [[decoder.token_names[i] for i in row] for row in ours]


# -- recording and training -------------------------------------------------------------------------------------------


def test_recording_table(monkeypatch, capsys):
    sizes = dict(width=16, heads=2, layers=2, feedforward=16, vocab=50)
    monkeypatch.setitem(importlib.import_module("recording").SIZES, "cpu", sizes)
    run(monkeypatch, "recording", "--device", "cpu", "--length", 8)
    output = capsys.readouterr().out
    assert "| Regard, all heads recorded, all weights computed |" in output
    assert "| transformers, eager, output_attentions |" in output
    assert float(output.split()[-1]) < 1e-6


def test_training_of_regard_and_of_peers(monkeypatch):
    module = importlib.import_module("training_cpu")
    sizes = dict(WIDTH=16, HEADS=2, LAYERS=1, FEEDFORWARD=32, VOCABULARY=50, LENGTH=8, TOKENS=64)
    for name, value in sizes.items():
        monkeypatch.setattr(module, name, value)
    assert module.train_regard(steps=1) > 0
    for model in ("transformers' Marian", "nn.Transformer"):
        assert module.train_peer(module.Run(model, "float32"), steps=1) > 0
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="the process ended without a message"):
        module.run_processes(module.Run("nn.Transformer", "float32"), steps=1)


def test_small_data_compares_settings_by_pairs(monkeypatch, capsys, tmp_path):
    """A run is appended to the results once; a comparison pools tasks, and a setting equals itself."""
    results = tmp_path / "results.jsonl"
    options = ["--data", tmp_path, "--results", results]
    small = importlib.import_module("small_data")
    monkeypatch.setitem(small.SUITES, "two-cores", {"numbers/en/300": (1,), "dates/en/300": (1,)})
    split = small.read_task(tmp_path, "numbers/en/300", "dev")
    assert (len(split.training), len(split.judged)) == (300, 1000)
    assert not {source for source, _ in split.training} & {source for source, _ in split.judged}
    for setting, errors in (("first", 500), ("second", 300)):
        for task in small.SUITES["two-cores"]:
            judged = small.read_task(tmp_path, task, "dev").judged
            outputs = ["?"] * errors + [target for _, target in judged[errors:]]
            one = small.Run(setting, task, 1, "dev", {})
            line = one._asdict() | {"outputs": outputs, "cpu_seconds": 1.0, "seconds": 1.0, "step": 1}
            with results.open("a") as file:
                file.write(small.json.dumps(line) + "\n")
    written = results.read_text()
    run(monkeypatch, "small_data", *options, "run", "first")
    assert results.read_text() == written  # nothing was missing
    with pytest.raises(SystemExit, match="other overrides"):
        run(monkeypatch, "small_data", *options, "run", "first", "--set", "train.steps=9")
    run(monkeypatch, "small_data", *options, "compare", "first", "second")
    rows = capsys.readouterr().out.splitlines()
    assert [row.split(" |")[1:4] for row in rows[2:4]] == [[" 50.0", " 70.0", " +20.0"]] * 2


def test_long_looks(monkeypatch, capsys):
    run(monkeypatch, "long_looks", "--page", 20, "--plot", 30)
    rows = capsys.readouterr().out.splitlines()[4:]
    assert [row.split(",")[0] for row in rows[:2]] == ["| page of 20 tokens"] * 2
    assert [row[:5] for row in rows[2:]] == ["| PNG", "| SVG", "| PDF"]
