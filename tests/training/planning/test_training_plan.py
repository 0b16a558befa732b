"""Plans against what was measured (benchmarks/README.md), and against the bytes that torch allocates."""

from pathlib import Path

import pytest
import torch

import regard
from regard.errors import RegardError
from regard.models import GPTConfig, Seq2SeqConfig, TransformerConfig, make_model
from regard.training.optim.optimizers import make_optimizer
from regard.training.planning import estimate_memory, estimate_step_time, model_cost

RECORD = (Path(__file__).parents[3] / "benchmarks" / "README.md").read_text(encoding="utf-8")


def transformer(width: int, heads: int) -> TransformerConfig:
    sizes = dict(width=width, heads=heads, feedforward=4 * width, encoder_layers=6, decoder_layers=6)
    return TransformerConfig(**sizes, source_vocab=32_000, target_vocab=32_000, shared_vocab=True)


BASE = transformer(512, 8)
CHARACTERS = GPTConfig(
    width=384, heads=6, layers=6, feedforward=1536, vocab=65, max_len=256, norm_kind="layer", positions="learned",
    activation="gelu", qk_norm=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("row", "config", "tokens_per_second", "milliseconds"),
    [
        ("| **Regard, compiled, captured** | **25.7** | **1,984,000** |", BASE, 1_984_000, 25.7),
        ("| width 256, 4 heads | 13.4 | 3,809,000 |", transformer(256, 4), 3_809_000, 13.4),
        ("| width 1024, 16 heads | 65.6 | 775,000 |", transformer(1024, 16), 775_000, 65.6),
        ("| 6,400 + 6,400 tokens per step (25,600 above) | 9.3 | 1,357,000 |", BASE, 1_357_000, 9.3),
        ("**Regard, GPT-2 form, compiled, captured** | **4.87** | **3,366,000**", CHARACTERS, 3_366_000, 4.87),
    ],
    ids=["base", "width 256", "width 1024", "small batch", "characters"],
)
def test_step_time_is_within_a_tenth_of_the_measured_one(row, config, tokens_per_second, milliseconds):
    """The first and the fourth row fix the constants; the others are predictions."""
    assert row in RECORD
    tokens = round(tokens_per_second * milliseconds / 1e3)
    assert 1e3 * estimate_step_time(model_cost(config), tokens).total == pytest.approx(milliseconds, rel=0.1)


@pytest.mark.parametrize(
    ("row", "width", "heads", "gigabytes"),
    [
        ("| width 256, 4 heads | 13.4 | 3,809,000 | 29.5% | 3.1 |", 256, 4, 3.1),
        ("| width 512, 8 heads | 25.8 | 1,971,000 | 48.1% | 6.0 |", 512, 8, 6.0),
        ("| width 1024, 16 heads | 65.6 | 775,000 | 65.4% | 12.5 |", 1024, 16, 12.5),
    ],
)
def test_memory_is_within_a_tenth_of_the_measured_one(row, width, heads, gigabytes):
    assert row in RECORD
    memory = estimate_memory(model_cost(transformer(width, heads)), 51_200)
    assert memory.total / 2**30 == pytest.approx(gigabytes, rel=0.1)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize(
    "config",
    [
        GPTConfig(width=16, heads=2, layers=3, feedforward=24, vocab=50),
        TransformerConfig(width=16, heads=2, feedforward=24, source_vocab=50, target_vocab=50, shared_vocab=True),
    ],
    ids=["gpt", "transformer"],
)
def test_states_are_those_of_torch(config, optimizer):
    model = make_model(config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    update = make_optimizer(optimizer, model, 1e-3, 0.98, 0.0)
    update.step()
    moments = [
        tensor for state in update.state.values() for name, tensor in state.items() if name != "step"  # a scalar
    ]  # fmt: skip
    memory = estimate_memory(model_cost(config), 0, optimizer=optimizer)
    assert memory.parameters == sum(p.nbytes for p in model.parameters())
    assert memory.gradients == sum(p.grad.nbytes for p in model.parameters())
    assert memory.optimizer == sum(tensor.nbytes for tensor in moments)
    sharded = estimate_memory(model_cost(config), 0, gpus=4, sharding="fsdp", optimizer=optimizer)
    assert sharded[:3] == tuple(size / 4 for size in memory[:3])


def test_weak_scaling():
    """More GPUs never make a step faster; a slow link between nodes dominates it."""
    cost = model_cost(BASE)
    times = [estimate_step_time(cost, 51_200, gpus).total for gpus in (1, 8, 64, 512)]
    assert times == sorted(times)
    assert times[-1] < 1.1 * times[0]
    slow = estimate_step_time(cost, 51_200, 64, link=1e9)
    # 60.5 M gradients of 4 bytes, of which each GPU of a node exchanges an eighth: 2 · 7/8 · 30 MB at 1 GB/s
    hidden = (slow.matrix_products + slow.memory_traffic) / 3
    assert slow.exchange == pytest.approx(2 * 7 / 8 * 4 * cost.parameters / 8 / 1e9 - hidden, abs=2e-3)
    assert estimate_step_time(cost, 51_200, 64, link=1e9, sharding="fsdp").exchange == pytest.approx(
        slow.exchange, abs=2e-3
    )


def test_days_and_cost():
    plan = regard.plan(BASE, tokens=86_400e6, batch_tokens=51_200, gpus=4, price=2.5)
    assert plan.days == pytest.approx(86_400e6 / plan.tokens_per_second / 86_400)
    assert plan.total_price == pytest.approx(plan.days * 24 * 4 * 2.5)
    assert plan.steps == round(86_400e6 / (4 * 51_200))
    assert plan.fits
    assert not regard.plan(BASE, batch_tokens=2_000_000).fits


def test_recipes_and_files(tmp_path):
    plan = regard.plan("wikitext2", gpus=8)
    assert (plan.batch_tokens, plan.tokens, plan.memory.average > 0) == (16384, 1500 * 16384, True)
    (tmp_path / "corpus.txt").write_text("x" * 8000)
    assert regard.plan("wikitext2", data=[tmp_path / "corpus.txt"], epochs=3).tokens == 6000
    pairs = regard.plan("multi30k-transformer")
    assert pairs.batch_tokens == 2 * regard.Recipe().override(batch_tokens=pairs.batch_tokens // 2).train.batch_tokens
    assert pairs.model.source_vocab > 0


def test_invalid_plans(tmp_path):
    with pytest.raises(RegardError, match=r"does not support the family seq2seq. Use regard train --dry-run"):
        regard.plan(Seq2SeqConfig())
    with pytest.raises(RegardError, match=r"Unknown GPU 'h20'. Did you mean h200\?"):
        regard.plan(BASE, gpu="h20")
    with pytest.raises(RegardError, match=r"gpus must be positive \(got 0\)"):
        regard.plan(BASE, gpus=0)
    with pytest.raises(RegardError, match=r"compressed: its tokens cannot be estimated. Pass --tokens"):
        regard.plan(BASE, data=["corpus.txt.gz"])
    with pytest.raises(RegardError, match=r"none.txt: No such file"):
        regard.plan(BASE, data=[tmp_path / "none.txt"])
