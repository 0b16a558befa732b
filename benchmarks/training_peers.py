"""Peers of the training benchmarks: models of other libraries with the same shape.

They get the same batches, padded to the longest sentence rounded up to a multiple of 8, and the same optimizer. On a
GPU they are compiled with dynamic shapes, since every batch has a different shape.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.data.batching.batch import Batch
from regard.layers.packed import Packed

Step = Callable[[Batch], object]
MAX_LEN = 256


def to_padded(side: Packed, sentences: int, fill: int) -> Tensor:
    """The sentences of a batch without its padding sequences, padded to one length."""
    ids, lengths = side.padded(fill)
    max_len = -(-int(lengths[:sentences].max()) // 8) * 8
    return nn.functional.pad(ids[:sentences], (0, max(0, max_len - ids.shape[1])), value=fill)[:, :max_len].contiguous()


def make_step(
    model: nn.Module, compute_loss: Callable[..., Tensor], make_inputs: Callable[[Batch], tuple], mode: str
) -> Step:
    """A training step; `mode` is eager, static, dynamic (compiled), graphs (compiled with CUDA graphs) or bfloat16.

    On a GPU, matrix products are bfloat16 in all modes; on a CPU only in the last, which is eager.
    """
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-4, betas=(0.9, 0.98), fused=True)
    if mode not in ("eager", "bfloat16"):
        compile_mode = "reduce-overhead" if mode == "graphs" else None
        compute_loss = torch.compile(compute_loss, dynamic=mode == "dynamic", mode=compile_mode)
    device = parameters[0].device.type
    cache: dict[int, tuple] = {}

    def step(batch: Batch) -> None:
        if id(batch) not in cache:  # padding is the task of the data pipeline, so it is not timed
            cache[id(batch)] = make_inputs(batch)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda" or mode == "bfloat16"):
            loss = compute_loss(*cache[id(batch)])
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def pair_inputs(batch: Batch) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Source, mask of its tokens (None without padding), target inputs and targets."""
    source, target = (to_padded(side, batch.sentences, 0) for side in batch.inputs)  # type: ignore[arg-type]
    targets = Packed(batch.targets, batch.inputs[1].offsets, batch.inputs[1].positions)  # type: ignore[union-attr]
    mask = source != 0
    return source, None if mask.all() else mask, target, to_padded(targets, batch.sentences, -100)


def marian(device: str, width: int, heads: int, layers: int, feedforward: int, vocab: int, mode: str) -> Step:
    from transformers import MarianConfig, MarianMTModel

    config = MarianConfig(
        vocab_size=vocab, d_model=width, encoder_layers=layers, decoder_layers=layers, dropout=0.1,
        encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_ffn_dim=feedforward,
        decoder_ffn_dim=feedforward, max_position_embeddings=MAX_LEN, pad_token_id=0, eos_token_id=3,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    model = MarianMTModel(config).to(device).train()

    def compute_loss(source: Tensor, mask: Tensor | None, target: Tensor, targets: Tensor) -> Tensor:
        mask = mask if mask is None else mask.long()
        return model(input_ids=source, attention_mask=mask, decoder_input_ids=target, labels=targets).loss

    return make_step(model, compute_loss, pair_inputs, mode)


def torch_transformer(
    device: str, width: int, heads: int, layers: int, feedforward: int, vocab: int, mode: str
) -> Step:
    model: Any = nn.Module()
    model.embedding = nn.Embedding(vocab, width)
    nn.init.normal_(model.embedding.weight, std=width**-0.5)
    model.positions = nn.Embedding(MAX_LEN, width)
    model.body = nn.Transformer(width, heads, layers, layers, feedforward, batch_first=True)
    model.to(device).train()

    def embed(ids: Tensor) -> Tensor:
        return model.embedding(ids) * width**0.5 + model.positions(torch.arange(ids.shape[1], device=device))

    def compute_loss(source: Tensor, mask: Tensor | None, target: Tensor, targets: Tensor) -> Tensor:
        is_padding = mask if mask is None else ~mask
        is_future = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=device).triu(1)
        x = model.body(
            embed(source), embed(target), tgt_mask=is_future, tgt_is_causal=True,
            src_key_padding_mask=is_padding, memory_key_padding_mask=is_padding,
        )  # fmt: skip
        logits = nn.functional.linear(x, model.embedding.weight).flatten(0, 1)
        return nn.functional.cross_entropy(logits, targets.flatten(), label_smoothing=0.1)

    return make_step(model, compute_loss, pair_inputs, mode)


def x_transformer(device: str, width: int, heads: int, layers: int, feedforward: int, vocab: int, mode: str) -> Step:
    from x_transformers import XTransformer

    options: dict[str, Any] = {}
    for side in ("enc", "dec"):
        options |= {f"{side}_num_tokens": vocab, f"{side}_depth": layers, f"{side}_heads": heads}
        options |= {f"{side}_max_seq_len": MAX_LEN, f"{side}_ff_mult": feedforward / width, f"{side}_attn_flash": True}
        options |= {f"{side}_attn_dim_head": width // heads, f"{side}_layer_dropout": 0.0}
    model = XTransformer(dim=width, tie_token_emb=True, **options).to(device).train()

    def compute_loss(source: Tensor, mask: Tensor | None, target: Tensor, targets: Tensor) -> Tensor:
        # The loss predicts each token from the ones before it, so the target needs one more token than is counted.
        return model(source, torch.cat((target, target[:, :1]), dim=1), mask=mask)

    return make_step(model, compute_loss, pair_inputs, mode)


def gpt2(device: str, width: int, heads: int, layers: int, context: int, vocab: int, mode: str) -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocab, n_embd=width, n_layer=layers, n_head=heads, n_positions=context, use_cache=False,
        resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).to(device).train()

    def compute_loss(ids: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), targets.flatten())

    def make_inputs(batch: Batch) -> tuple[Tensor, Tensor]:
        tokens = batch.inputs[0]
        assert isinstance(tokens, Packed)
        return tokens.ids.view(-1, context), batch.targets.view(-1, context)

    return make_step(model, compute_loss, make_inputs, mode)
