"""Estimates of memory and step time from arithmetic alone: nothing is measured here.

The constants of the step time are fitted to two steps of Transformer-base that were measured on one H200
(benchmarks/README.md, 25,600 and 6,400 tokens per side); a test checks them against the other measured models.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from regard.errors import RegardError
from regard.models import BertConfig, GPTConfig, ModelConfig, TransformerConfig, family_name
from regard.models.parameters import count_parameters
from regard.training.optim.optimizers import OptimizerName

Sharding = Literal["ddp", "fsdp"]
"""what each rank stores: a copy of everything (DDP), or a part of parameters, gradients and optimizer state (FSDP)"""

# Bytes of activations that a sublayer (attention or feed-forward) keeps for the backward pass, per token and unit of
# width: from the measured memory of Transformers of width 256, 512 and 1024 (15.3, 14.0 and 12.9).
ACTIVATION_BYTES = 14.0
# Bytes of memory traffic outside of matrix products (norms, residual sums, attention, forward and backward), per token,
# sublayer and unit of width.
TRAFFIC_BYTES = 105.0
# Bytes that Adam reads and writes per parameter: weight, gradient, two moments in float32, and their results.
OPTIMIZER_TRAFFIC = 30.0
# Float32 numbers of optimizer state per parameter; Muon has one for matrices of layers, and two like AdamW elsewhere.
OPTIMIZER_STATES: dict[OptimizerName, int] = {"adam": 2, "adamw": 2, "muon": 2, "sgd": 1}
# Share of the backward pass behind which the exchange of gradients is hidden. Not measured; 0 is the pessimistic bound.
OVERLAP = 0.5
# Seconds per message of a collective operation.
LATENCY = 10e-6
# Bytes of gradients that DDP exchanges at once.
BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class GPU:
    """Speed and memory of a GPU."""

    flops: float
    """FLOP/s of a large bf16 matrix product"""
    bandwidth: float
    """memory bandwidth, bytes/s"""
    memory: float
    """bytes"""
    node_link: float
    """bandwidth between GPUs of a node, bytes/s in each direction"""
    sublayer_seconds: float = 0.116e-3
    """time per sublayer and step that does not depend on the batch: launches and small kernels"""


# H200: the matrix product was measured (714 to 804 TFLOP/s, 76% of the 989 in the data sheet). The others were not
# measured; they have the same share of their data sheets.
GPUS = {
    "h200": GPU(flops=750e12, bandwidth=4.3e12, memory=141e9, node_link=450e9),
    "h100": GPU(flops=750e12, bandwidth=3.0e12, memory=80e9, node_link=450e9),
    "a100": GPU(flops=237e12, bandwidth=1.8e12, memory=80e9, node_link=300e9),
}


class ModelCost(NamedTuple):
    """What a training step of a model costs per token and per step."""

    parameters: int
    flops_per_token: float
    """FLOPs of forward and backward pass per token; of an encoder-decoder, the mean of source and target tokens"""
    sublayers: int
    """attention and feed-forward sublayers of all layers"""
    sublayers_per_token: float
    """sublayers that a token passes"""
    width: int
    largest_layer: int
    """parameters of the largest layer, or of the embedding, which FSDP gathers at once"""


class RankMemory(NamedTuple):
    """Memory of a rank in bytes."""

    parameters: float
    gradients: float
    optimizer: float
    average: float
    """exponential moving average of the weights, if used"""
    gathered: float
    """parameters that FSDP has gathered for the layers in progress"""
    activations: float

    @property
    def total(self) -> float:
        return sum(self)


class StepTime(NamedTuple):
    """Seconds of a training step, by part."""

    matrix_products: float
    memory_traffic: float
    launches: float
    optimizer: float
    exchange: float
    """communication that is not hidden behind the backward pass"""

    @property
    def total(self) -> float:
        return sum(self)


def model_cost(config: ModelConfig) -> ModelCost:
    """The cost of a model: 6 FLOPs per token and weight of a matrix product, 2 forward and 4 backward.

    6·N·D is the count of Kaplan et al. 2020 (Scaling Laws for Neural Language Models, section 2.1). N contains the
    output layer but no embedding, which is a lookup. The products of queries, keys and values add 12·E per pair of
    positions and layer, half of them with a causal mask; for sentence pairs they are neglected. An encoder-decoder is
    counted with equal numbers of source and target tokens: each passes about half of the weights.

    >>> model_cost(GPTConfig(width=512, heads=8, layers=8, feedforward=2048, vocab=8000)).parameters
    29271552
    """
    if not isinstance(config, TransformerConfig | GPTConfig | BertConfig):
        raise RegardError(
            f"regard plan does not support the family {family_name(config)}.",
            "Use regard train --dry-run, which measures a few steps on this machine.",
        )
    plain: Any = config
    parameters = count_parameters(config).elements
    if isinstance(config, TransformerConfig):
        encoder, decoder = (
            count_parameters(dataclasses.replace(plain, **{name: 2})).elements
            - count_parameters(dataclasses.replace(plain, **{name: 1})).elements
            for name in ("encoder_layers", "decoder_layers")
        )
        table = config.width * config.target_vocab
        weights = (config.encoder_layers * encoder + config.decoder_layers * decoder + table) / 2
        sublayers = 2 * config.encoder_layers + 3 * config.decoder_layers
        return ModelCost(
            parameters, 6.0 * weights, sublayers, sublayers / 2, config.width, max(encoder, decoder, table)
        )
    layer = (
        count_parameters(dataclasses.replace(plain, layers=2)).elements
        - count_parameters(dataclasses.replace(plain, layers=1)).elements
    )
    table = config.width * config.vocab
    has_output = isinstance(config, GPTConfig) or config.head == "mask"
    is_causal = isinstance(config, GPTConfig)
    attention = (6.0 if is_causal else 12.0) * config.width * config.max_len * config.layers
    flops = 6.0 * (config.layers * layer + has_output * table) + attention
    return ModelCost(parameters, flops, 2 * config.layers, 2 * config.layers, config.width, max(layer, table))


def estimate_memory(
    cost: ModelCost,
    batch_tokens: int,
    gpus: int = 1,
    sharding: Sharding = "ddp",
    optimizer: OptimizerName = "adam",
    *,
    average: bool = False,
) -> RankMemory:
    """Memory of a rank: 4 bytes (float32) per parameter, gradient and optimizer moment, and the activations.

    With DDP each rank stores all of them; its buckets share the memory of the gradients. With FSDP (ZeRO stage 3,
    Rajbhandari et al. 2020) each rank stores 1/n, and gathers the weights of two layers at a time in bf16. Activations
    are 14 bytes per token, sublayer and unit of width: Regard stores no attention matrices and no logits.

    >>> cost = model_cost(GPTConfig(width=512, heads=8, layers=8, feedforward=2048, vocab=8000))
    >>> round(estimate_memory(cost, 16384).total / 1e9, 2)
    2.35
    """
    part = 4.0 * cost.parameters / (gpus if sharding == "fsdp" else 1)
    return RankMemory(
        parameters=part,
        gradients=part,
        optimizer=OPTIMIZER_STATES[optimizer] * part,
        average=part if average else 0.0,
        gathered=2 * 2.0 * cost.largest_layer if sharding == "fsdp" and gpus > 1 else 0.0,
        activations=ACTIVATION_BYTES * batch_tokens * cost.sublayers_per_token * cost.width,
    )


def estimate_step_time(
    cost: ModelCost,
    batch_tokens: int,
    gpus: int = 1,
    gpu: str = "h200",
    gpus_per_node: int = 8,
    link: float = 50e9,
    sharding: Sharding = "ddp",
) -> StepTime:
    """Seconds of a step with `batch_tokens` per GPU; `link` is the bandwidth between nodes in bytes/s per GPU.

    A step is the sum of four parts on one GPU (a roofline, Williams et al. 2009, whose parts do not overlap) and of the
    communication that is not hidden:

        matrix products   6·N·tokens / FLOP/s of a large matrix product
        memory traffic    105 bytes · tokens · sublayers · width / bandwidth
        launches          0.116 ms · sublayers
        optimizer         30 bytes · parameters / bandwidth, 1/n of it with FSDP
        exchange          max(communication − half of the backward pass, last bucket)

    The backward pass is two thirds of the first two parts. DDP sums the float32 gradients of all ranks. FSDP gathers
    the bf16 weights twice, for the forward and the backward pass, and scatters the sums of the float32 gradients.

    >>> base = TransformerConfig(width=512, heads=8, feedforward=2048, encoder_layers=6, decoder_layers=6,
    ...     source_vocab=32_000, target_vocab=32_000, shared_vocab=True)
    >>> [round(1e3 * estimate_step_time(model_cost(base), 50_990, gpus).total, 1) for gpus in (1, 8, 64, 512)]
    [25.8, 26.1, 26.2, 26.3]
    """
    device = GPUS[gpu]
    products = batch_tokens * cost.flops_per_token / device.flops
    traffic = TRAFFIC_BYTES * batch_tokens * cost.sublayers_per_token * cost.width / device.bandwidth

    backward = 2 / 3 * (products + traffic)
    updated = cost.parameters / (gpus if sharding == "fsdp" else 1)
    return StepTime(
        matrix_products=products,
        memory_traffic=traffic,
        launches=device.sublayer_seconds * cost.sublayers,
        optimizer=OPTIMIZER_TRAFFIC * updated / device.bandwidth,
        exchange=exposed_exchange(cost.parameters, backward, gpus, device.node_link, gpus_per_node, link, sharding),
    )


def exposed_exchange(
    parameters: int,
    backward: float,
    gpus: int,
    node_link: float = 450e9,
    gpus_per_node: int = 8,
    link: float = 50e9,
    sharding: Sharding = "ddp",
) -> float:
    """Seconds of communication that are not hidden behind a backward pass of `backward` seconds.

    With a measured time it gives the weak scaling: of a step of 0.2 s, about 2/3 are the backward pass.

    >>> exposed = exposed_exchange(124_000_000, 2 / 3 * 0.2, gpus=64)
    >>> round(0.2 / (0.2 + exposed), 3)
    0.998
    """
    if gpus == 1:
        return 0.0

    def seconds(size: float) -> float:
        return gather_seconds(size, gpus, node_link, gpus_per_node, link)

    gradients, gathered = 4.0 * parameters, 2.0 * parameters
    exchange = 2 * seconds(gradients) if sharding == "ddp" else 2 * seconds(gathered) + seconds(gradients)
    return max(exchange - OVERLAP * backward, 2 * seconds(min(gradients, BUCKET_BYTES)))


def gather_seconds(size: float, gpus: int, node_link: float, gpus_per_node: int = 8, link: float = 50e9) -> float:
    """Seconds of an all-gather or a reduce-scatter of `size` bytes; an all-reduce is both, one after the other.

    In a ring of n ranks, each sends (n−1)/n · size bytes (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
    algorithms"), so 2·(n−1)/n for an all-reduce. With several nodes, the GPUs of a node exchange all of it over the
    links of the node, and each GPU its part with the same GPU of the other nodes. Each message of the ring inside a
    node costs `LATENCY`, and each level of a tree between nodes.

    >>> round(1e3 * 2 * gather_seconds(1e9, gpus=8, node_link=450e9), 2)
    4.03
    """
    local, nodes = min(gpus, gpus_per_node), -(-gpus // gpus_per_node)
    seconds = (local - 1) / local * size / node_link + (local - 1) * LATENCY
    if nodes > 1:
        seconds += (nodes - 1) / nodes * size / local / link + (nodes - 1).bit_length() * LATENCY
    return seconds
