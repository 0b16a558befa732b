"""Plan a training run on a cluster: memory per GPU, time of a step, days and cost, computed as docs/planning.md says.

python tools/plan.py wikitext2 --gpus 64 --tokens 10e9 --price 3
"""

import argparse
import dataclasses
from typing import Any

from regard.config_reader import read_toml
from regard.models import GPTConfig, TransformerConfig, family_name
from regard.models.parameters import count_parameters
from regard.recipes import find_recipe
from regard.training import recipe_from_dict

# FLOP/s of a large bf16 matrix product, memory bandwidth, memory, and bandwidth inside a node, in bytes.
GPUS = {
    "h200": (750e12, 4.3e12, 141e9, 450e9),
    "h100": (750e12, 3.0e12, 80e9, 450e9),
    "a100": (237e12, 1.8e12, 80e9, 300e9),
}
OPTIMIZER_STATES = {"adam": 2, "adamw": 2, "muon": 2, "sgd": 1}


def estimate(
    config: Any, tokens: int, gpus=1, gpu="h200", gpus_per_node=8, link=50e9, fsdp=False, optimizer="adam", ema=False
) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes of memory and seconds of a step of one GPU with `tokens` tokens, by part."""

    def layer(name: str) -> int:  # parameters of one more layer
        two, one = (count_parameters(dataclasses.replace(config, **{name: n})).elements for n in (2, 1))
        return two - one

    parameters, width = count_parameters(config).elements, config.width
    if isinstance(config, TransformerConfig):
        sizes, table = (layer("encoder_layers"), layer("decoder_layers")), width * config.target_vocab
        sublayers = 2 * config.encoder_layers + 3 * config.decoder_layers
        passed = sublayers / 2  # by a token of the source or of the target
        flops = 3.0 * (config.encoder_layers * sizes[0] + config.decoder_layers * sizes[1] + table)
    elif isinstance(config, GPTConfig):
        sizes, table = (layer("layers"),), width * config.vocab
        sublayers = passed = 2 * config.layers
        flops = 6.0 * (config.layers * (sizes[0] + width * config.max_len) + table)
    else:
        raise SystemExit(f"No plan for the family {family_name(config)}: measure it with regard train --dry-run.")
    peak, bandwidth, _, node_link = GPUS[gpu]
    own = parameters / (gpus if fsdp else 1)
    memory = {"parameters": 4 * own, "gradients": 4 * own, "optimizer": 4 * own * OPTIMIZER_STATES[optimizer]}
    memory |= {"moving average": 4 * own * ema, "gathered": 4.0 * max(*sizes, table) if fsdp and gpus > 1 else 0.0}
    memory["activations"] = 14 * tokens * passed * width
    seconds = {"matrix products": tokens * flops / peak, "memory traffic": 105 * tokens * passed * width / bandwidth}
    backward = 2 / 3 * sum(seconds.values())
    seconds |= {"launches": 0.116e-3 * sublayers, "optimizer": 30 * own / bandwidth}
    seconds["exchange"] = exposed_exchange(parameters, backward, gpus, node_link, gpus_per_node, link, fsdp)
    return memory, seconds


def exposed_exchange(parameters, backward, gpus, node_link=450e9, gpus_per_node=8, link=50e9, fsdp=False) -> float:
    """Seconds of communication that are not hidden behind half of a backward pass of `backward` seconds."""
    local, nodes = min(gpus, gpus_per_node), -(-gpus // gpus_per_node)

    def gather(size: float) -> float:  # an all-gather or a reduce-scatter; an all-reduce is both
        between_nodes = (nodes - 1) / nodes * size / local / link + (nodes - 1).bit_length() * 10e-6
        return (local - 1) * (size / local / node_link + 10e-6) + between_nodes

    gradients, weights = 4.0 * parameters, 2.0 * parameters
    exchange = 2 * gather(weights) + gather(gradients) if fsdp else 2 * gather(gradients)
    return max(exchange - backward / 2, 2 * gather(min(gradients, 25 << 20))) if gpus > 1 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="recipe of a Transformer or GPT, or the name of a packaged one")
    parser.add_argument("--tokens", type=float, help="training tokens in total (default: of the recipe)")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--gpu", choices=GPUS, default="h200")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--link", type=float, default=50.0, help="bandwidth between nodes, GB/s per GPU")
    parser.add_argument("--price", type=float, default=3.0, help="per GPU and hour")
    options = parser.parse_args()
    recipe = recipe_from_dict(read_toml(find_recipe(options.recipe)), origin=options.recipe)
    train, pairs = recipe.train, isinstance(recipe.model, TransformerConfig)
    vocab: Any = recipe.tokenizer.vocab_size
    sizes = dict(source_vocab=vocab, target_vocab=vocab, shared_vocab=True) if pairs else dict(vocab=vocab)
    config = dataclasses.replace(recipe.model, **sizes)
    batch, gpus = (1 + pairs) * train.batch_tokens * train.accumulate, options.gpus
    where = (gpus, options.gpu, options.gpus_per_node, 1e9 * options.link, train.sharding == "fsdp")
    memory, seconds = estimate(config, batch, *where, train.optimizer, train.ema > 0)
    tokens, step = options.tokens or batch * train.steps, sum(seconds.values())
    hours = tokens * step / (gpus * batch) / 3600
    print(f"memory  {sum(memory.values()) / 1e9:.1f} of {GPUS[options.gpu][2] / 1e9:.0f} GB per GPU:", end=" ")
    print(", ".join(f"{name} {size / 1e9:.2f}" for name, size in memory.items() if size))
    print(f"step    {1e3 * step:.1f} ms for {gpus * batch:,} tokens:", end=" ")
    print(", ".join(f"{name} {1e3 * part:.1f}" for name, part in seconds.items() if part))
    print(f"time    {hours / 24:.3g} days for {tokens:,.0f} tokens at {gpus * batch / step:,.0f} tokens/s")
    print(f"cost    {hours * gpus * options.price:,.2f}")


if __name__ == "__main__":
    main()
