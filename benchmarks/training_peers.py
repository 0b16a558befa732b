"""Peers of the training benchmarks on a GPU: Hugging Face's and torch's own models of the same shape.

They get the sentences of our batches as rectangles, as long as the longest of the batch rounded up to 8, and the same
optimiser. What varies is compiled as symbolic sizes, for every batch has a shape of its own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.data import Batch
from regard.layers.packed import Packed

Step = Callable[[Batch], object]
LONGEST = 256


def rectangle(side: Packed, sentences: int, fill: int) -> Tensor:
    """The real sentences alone."""
    ids, lengths = side.padded(fill)
    longest = -(-int(lengths[:sentences].max()) // 8) * 8
    return nn.functional.pad(ids[:sentences], (0, max(0, longest - ids.shape[1])), value=fill)[:, :longest].contiguous()


def stepping(model: nn.Module, loss_of: Callable[..., Tensor], inputs_of: Callable[[Batch], tuple], how: str) -> Step:
    """One update of the weights, the forward pass compiled where `how` says so."""
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-4, betas=(0.9, 0.98), fused=True)
    if how != "eager":
        loss_of = torch.compile(loss_of, dynamic=how == "dynamic", mode="reduce-overhead" if how == "graphs" else None)
    device = parameters[0].device.type
    kept: dict[int, tuple] = {}

    def step(batch: Batch) -> None:
        if id(batch) not in kept:  # made once: rectangles are for the data pipeline to make, not for the step
            kept[id(batch)] = inputs_of(batch)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = loss_of(*kept[id(batch)])
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def pair_inputs(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    source, target = (rectangle(side, batch.sentences, 0) for side in batch.inputs)  # type: ignore[arg-type]
    wanted = Packed(batch.targets, batch.inputs[1].offsets, batch.inputs[1].positions)  # type: ignore[union-attr]
    return source, target, rectangle(wanted, batch.sentences, -100)


def marian(device: str, width: int, heads: int, layers: int, feedforward: int, vocab: int, how: str) -> Step:
    from transformers import MarianConfig, MarianMTModel

    config = MarianConfig(
        vocab_size=vocab, d_model=width, encoder_layers=layers, decoder_layers=layers, dropout=0.1,
        encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_ffn_dim=feedforward,
        decoder_ffn_dim=feedforward, max_position_embeddings=LONGEST, pad_token_id=0, eos_token_id=3,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    model = MarianMTModel(config).to(device).train()

    def loss_of(source: Tensor, target: Tensor, wanted: Tensor) -> Tensor:
        mask = (source != 0).long()
        return model(input_ids=source, attention_mask=mask, decoder_input_ids=target, labels=wanted).loss

    return stepping(model, loss_of, pair_inputs, how)


def torch_transformer(device: str, width: int, heads: int, layers: int, feedforward: int, vocab: int, how: str) -> Step:
    model: Any = nn.Module()
    model.embedding = nn.Embedding(vocab, width)
    nn.init.normal_(model.embedding.weight, std=width**-0.5)
    model.positions = nn.Embedding(LONGEST, width)
    model.body = nn.Transformer(width, heads, layers, layers, feedforward, batch_first=True)
    model.to(device).train()

    def embedded(ids: Tensor) -> Tensor:
        return model.embedding(ids) * width**0.5 + model.positions(torch.arange(ids.shape[1], device=device))

    def loss_of(source: Tensor, target: Tensor, wanted: Tensor) -> Tensor:
        ahead = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=device).triu(1)
        x = model.body(
            embedded(source), embedded(target), tgt_mask=ahead, tgt_is_causal=True,
            src_key_padding_mask=source == 0, memory_key_padding_mask=source == 0,
        )  # fmt: skip
        logits = nn.functional.linear(x, model.embedding.weight).flatten(0, 1)
        return nn.functional.cross_entropy(logits, wanted.flatten(), label_smoothing=0.1)

    return stepping(model, loss_of, pair_inputs, how)


def gpt2(device: str, width: int, heads: int, layers: int, context: int, vocab: int, how: str) -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocab, n_embd=width, n_layer=layers, n_head=heads, n_positions=context, use_cache=False,
        resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).to(device).train()

    def loss_of(ids: Tensor, wanted: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), wanted.flatten())

    def inputs_of(batch: Batch) -> tuple[Tensor, Tensor]:
        tokens = batch.inputs[0]
        assert isinstance(tokens, Packed)
        return tokens.ids.view(-1, context), batch.targets.view(-1, context)

    return stepping(model, loss_of, inputs_of, how)
