"""Optimizers, weight decay, gradient scaling and schedules."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from regard.attention import SCORES
from regard.errors import RegardError
from regard.models import BertConfig, GPTConfig, Seq2SeqConfig, TransformerConfig, ViTConfig, make_model
from regard.training.checkpoint import gather_state, restore_state
from regard.training.optimizers import (
    decayed_parameters,
    make_optimizer,
    scale_gradients,
    set_learning_rate,
    step_on_device,
    step_optimizer,
)
from regard.training.schedules import Schedule


@pytest.mark.parametrize(
    ("name", "step", "expected"),
    [
        ("cosine", 0, 0.2),  # the first of five warm-up updates
        ("cosine", 4, 1.0),
        ("cosine", 5, 1.0),
        ("cosine", 10, 0.5 * (1 + math.cos(math.pi / 4))),
        ("cosine", 15, 0.5),
        ("cosine", 25, 0.0),
        ("cosine", 99, 0.0),
        ("linear", 2, 0.6),
        ("linear", 5, 1.0),
        ("linear", 15, 0.5),
        ("linear", 24, 0.05),
        ("linear", 25, 0.0),
        ("inverse_root", 4, 1.0),
        ("inverse_root", 9, math.sqrt(5 / 10)),
        ("inverse_root", 19, 0.5),
        ("constant", 0, 0.2),
        ("constant", 20, 1.0),
    ],
)
def test_learning_rates_of_schedules(name, step, expected):
    assert Schedule(name, 1.0, warmup=5, steps=25).rate(step) == pytest.approx(expected, abs=1e-12)


def test_inverse_root_is_the_schedule_of_vaswani_et_al():
    width, warmup = 512, 4000
    rate = Schedule("inverse_root", (width * warmup) ** -0.5, warmup, 100_000).rate
    for step in (1, 100, 4000, 4001, 50_000):  # the paper counts steps from 1
        published = width**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert rate(step - 1) == pytest.approx(published, rel=1e-9)


@pytest.mark.parametrize("name", ["cosine", "linear", "inverse_root", "constant"])
def test_schedule_without_warm_up_starts_at_the_peak(name):
    assert Schedule(name, 0.5, warmup=0, steps=10).rate(0) == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_weight_decay_only_applies_to_matrices(name):
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    optimizer = make_optimizer(name, model, 0.1, 0.98, weight_decay=0.5)
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(model[0].weight)}
    before = {key: p.clone() for key, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for key, p in model.named_parameters():
        assert torch.equal(p, before[key]) == (key != "0.weight")
    # decoupled weight decay, the first step of momentum, and the first step of Adam, which has the size of the rate
    shrunk = {"adamw": before["0.weight"] * 0.95, "sgd": before["0.weight"] * 0.95}
    expected = shrunk.get(name, before["0.weight"] - 0.1 * before["0.weight"].sign())
    torch.testing.assert_close(model[0].weight.detach(), expected)


SMALL = {"width": 8, "heads": 2, "feedforward": 8}
TEXT = {"source_vocab": 9, "target_vocab": 9}
IMAGE = {**SMALL, "layers": 1, "image_height": 8, "image_width": 8, "patch": 4, "labels": ("a", "b")}
# Each model with its parameters of two or more dimensions that have no weight decay.
MODELS = {
    "transformer": (TransformerConfig(**SMALL, **TEXT, encoder_layers=1, decoder_layers=1, qk_norm=True), set()),
    "transformer-untied": (TransformerConfig(**SMALL, **TEXT, tied=False, positions="learned"), set()),
    "transformer-relative": (
        TransformerConfig(**SMALL, **TEXT, positions="relative"),
        {"encoder_bias.table.weight", "decoder_bias.table.weight"},
    ),
    "gpt": (GPTConfig(**SMALL, layers=1, vocab=9, positions="learned"), set()),
    "bert": (BertConfig(**SMALL, layers=1, vocab=9), set()),
    "seq2seq": (Seq2SeqConfig(width=8, **TEXT), set()),
    "seq2seq-lstm": (Seq2SeqConfig(width=8, **TEXT, cell="lstm", attention="bahdanau", score="concat"), set()),
    "vit": (ViTConfig(**IMAGE, registers=2, layer_scale=0.1), {"embedding.prefix"}),
    "vit-stem": (ViTConfig(**IMAGE, patches="stem", pooling="mean"), set()),
    "vit-query": (ViTConfig(**IMAGE, patches="convolution", pooling="query"), {"pooler.question"}),
    "vit-segment": (
        ViTConfig(**IMAGE, head="segment", segmenter="queries", pooling="mean"),
        {"segmenter.queries"},
    ),
    "vit-paint": (ViTConfig(**IMAGE, head="pixels", decoder_width=64), {"embedding.prefix", "mae_decoder.hidden"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_decayed_parameters_of_every_family(name):
    """Weights of linear layers, convolutions, recurrent cells, scores and embeddings; nothing else."""
    config, not_decayed = MODELS[name]
    model = make_model(config)
    named = dict(model.named_parameters())
    decayed = decayed_parameters(model)
    assert {key for key, p in named.items() if p.dim() >= 2} - decayed.keys() == not_decayed
    assert all(named[key].dim() >= 2 for key in decayed)
    assert all(key.rpartition(".")[2].startswith("weight") for key in decayed)
    for optimizer in ("adamw", "muon"):
        groups = make_optimizer(optimizer, model, 0.1, 0.98, weight_decay=0.5).param_groups
        decayed_ids = [id(p) for group in groups if group["weight_decay"] for p in group["params"]]
        assert sorted(decayed_ids) == sorted(id(p) for p in decayed.values())  # tied weights appear once
        assert sum(len(group["params"]) for group in groups) == len(named)


@pytest.mark.parametrize("family", ["gpt", "seq2seq", "vit"])
@pytest.mark.parametrize("score", SCORES)
def test_score_matrices_decay_and_learned_scales_do_not(family, score):
    config, _ = MODELS[family]
    model = make_model(dataclasses.replace(config, score=score))
    score_names = {name for name, _ in model.named_parameters() if ".score." in name}
    decayed = score_names & decayed_parameters(model).keys()
    assert decayed == ({name for name in score_names if not name.endswith("log_scale")})
    assert bool(score_names) == (score not in ("dot", "scaled_dot"))
    assert bool(decayed) == (score in ("general", "concat", "concat_joint", "location"))


def test_learned_scale_without_gradient_is_constant():
    model = make_model(GPTConfig(**SMALL, layers=1, vocab=9, score="cosine"))
    scale = next(p for name, p in model.named_parameters() if name.endswith("log_scale"))
    before = scale.detach().clone()
    optimizer = make_optimizer("adamw", model, 0.1, 0.98, weight_decay=0.5)
    for _ in range(5):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert torch.equal(scale, before)


def test_optimizer_state_of_other_groups_is_an_error():
    """A version that groups parameters differently cannot resume the run."""
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 4))
    optimizer = make_optimizer("adam", model, 0.1, 0.98, 0.0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    tensors = gather_state(model, optimizer, None)
    restore_state(tensors, model, optimizer, None, RegardError)
    swapped = {name.replace("optimizer.0.", "optimizer.9."): tensor for name, tensor in tensors.items()}
    with pytest.raises(RegardError, match="optimizer state 9"):
        restore_state(swapped, model, optimizer, None, RegardError)
    tensors["optimizer.0.exp_avg"] = tensors["optimizer.1.exp_avg"]
    with pytest.raises(RegardError, match=r"optimizer state 0.exp_avg does not match"):
        restore_state(tensors, model, optimizer, None, RegardError)


@pytest.mark.parametrize("name", ["adam", "adamw", "muon", "sgd"])
def test_set_learning_rate_changes_all_groups(name):
    model = nn.ModuleList([nn.Linear(1, 1)])
    optimizer = make_optimizer(name, model, 0.1, 0.98, 0.0)
    set_learning_rate(optimizer, 0.0)
    before = model[0].weight.clone()
    model[0](torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24)])
def test_muon_orthogonalizes_the_updates_of_layer_matrices(shape):
    """The first update is U Vᵀ of the SVD of the gradient, scaled to the size of AdamW; embeddings use AdamW itself."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(5, 8), "layers": nn.ModuleList([nn.Linear(*shape), nn.Linear(*shape)])}
    )
    optimizer = make_optimizer("muon", model, 0.1, 0.98, weight_decay=0.5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    grads = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for name in ("layers.0.weight", "layers.1.weight"):
        u, _, v = torch.linalg.svd(grads[name], full_matrices=False)
        grads[name] = u @ torch.diag(torch.linspace(1, 3, 8)) @ v
    for name, p in model.named_parameters():
        p.grad = grads[name]
    optimizer.step()
    for name, p in model.named_parameters():
        change = (p.detach() - before[name] * (0.95 if p.dim() > 1 else 1.0)) / -0.1
        if not name.endswith("weight") or name.startswith("embedding"):
            torch.testing.assert_close(change, grads[name].sign(), atol=1e-4, rtol=0)
            continue
        u, _, v = torch.linalg.svd(grads[name], full_matrices=False)
        direction = change / (0.2 * max(p.shape) ** 0.5)
        values = (u.mT @ direction @ v.mT).diagonal()
        assert values.min() > 0.65
        assert values.max() < 1.25
        torch.testing.assert_close(u @ torch.diag(values) @ v, direction, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("clip", "count"), [(0.0, 7), (1.0, 7), (1e6, 7), (1.0, 0)])
def test_scaled_gradients_match_torch_clip_grad_norm(clip, count):
    torch.manual_seed(0)
    sums = [torch.randn(3, 5), torch.randn(4)]
    parameters = [nn.Parameter(torch.zeros_like(x)) for x in sums]
    for p, x in zip(parameters, sums):
        p.grad = x / max(count, 1)
    if clip:
        nn.utils.clip_grad_norm_(parameters, clip)
    scale_gradients(sums, torch.tensor(float(count)), clip)
    for p, x in zip(parameters, sums):
        torch.testing.assert_close(x, p.grad)


def step_twice(name, step):
    """A model after two updates with different gradients, of which `step(optimizer, is_accepted)` applies the first."""
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 3)])  # Muon orthogonalizes their weights
    model.norm = nn.LayerNorm(3)
    optimizer = make_optimizer(name, model, 0.1, 0.98, 0.01)
    for scale, is_accepted in ((torch.nan, False), (1.0, True), (torch.inf, False), (-2.0, True)):
        for parameter in model.parameters():
            parameter.grad = torch.linspace(-1, 1, parameter.numel()).view_as(parameter) * scale
        step(optimizer, torch.tensor(is_accepted))
    return gather_state(model, optimizer, None)


@pytest.mark.parametrize("name", ["adam", "adamw", "muon", "sgd"])
def test_update_skipped_on_the_device_changes_nothing(name):
    """As on a GPU, where the host does not know which updates are skipped; also the very first one is."""
    on_host, on_device = step_twice(name, step_optimizer), step_twice(name, step_on_device)
    assert on_host.keys() == on_device.keys()
    for key, expected in on_host.items():
        # On a GPU, Muon computes with the learning rate as a tensor, in float32.
        torch.testing.assert_close(on_device[key], expected, rtol=1e-6 if name == "muon" else 0, atol=1e-7, msg=key)
        assert expected.isfinite().all()


def test_first_update_of_sgd_is_that_of_torch():
    """Momentum buffers exist from the start, which must not change the first update."""
    weights = []
    for is_prepared in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        ours = make_optimizer("sgd", model, 0.1, 0.98, 0.0)
        optimizer = ours if is_prepared else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
        weights.append(model.weight.detach())
    torch.testing.assert_close(*weights, rtol=0, atol=1e-7)


def test_sgd_without_momentum_is_gradient_descent():
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    optimizer = make_optimizer("sgd", model, 0.1, 0.98, 0.0, momentum=0.0)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()  # the gradient is 1 everywhere
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(model.weight, before - 2 * 0.1)
    assert not optimizer.state_dict()["state"]


def test_norm_is_returned_without_clipping():
    grads = [torch.tensor([3.0, 4.0])]
    assert float(scale_gradients(grads, torch.tensor(1.0), clip=0.0)) == 5.0
    assert grads[0].tolist() == [3.0, 4.0]
