"""Models and comparisons for the tests of the decoding engine."""

from dataclasses import replace

import torch

from regard.data.text.special_tokens import CAUSAL_LM_TOKENS, SEQ2SEQ_TOKENS
from regard.decode import DecodeConfig, LexicalConstraints, Request, TokenTexts, decode_all
from regard.models.gpt import GPT, GPTConfig
from regard.models.seq2seq import Seq2Seq, Seq2SeqConfig
from regard.models.transformer import Transformer, TransformerConfig

VOCAB = 600  # more than twice the groups of `top_logits`
CONFIGS = {
    "greedy": DecodeConfig("greedy", max_len=14),
    "beam": DecodeConfig(beam=4, n_best=3, max_len=14),
    "beam with limits": DecodeConfig(
        beam=3, max_len=12, min_len=5, unknown=False, length_penalty=0.6, patience=2.0, max_ratio=1.0, max_extra=3
    ),
    "beam wider than the vocabulary": DecodeConfig(beam=200, n_best=2, max_len=3),
    "samples": DecodeConfig("sample", n_best=2, max_len=10),
    "top-k sample": DecodeConfig("sample", max_len=10, top_k=5, temperature=0.7),
}
# Options of the search, each of which works whatever computes the steps.
OPTIONS = {
    "coverage": {"coverage_penalty": 0.3},
    "repetition": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "greedy, repetition": {"method": "greedy", "n_best": 1, "repetition_penalty": 1.3},
    "sequences": {"method": "greedy", "n_best": 1, "begin_suppress_tokens": (7, 9), "suppress_sequences": ((5, 6),)},
    "samples": {"method": "sample", "top_p": 0.9},
    "samples, repetition": {"method": "sample", "no_repeat_ngram_size": 1},
    "phrases": {},
    "greedy, forbidden phrases": {"method": "greedy", "n_best": 1},
    "several end tokens": {},
    "greedy, several end tokens": {"method": "greedy", "n_best": 1},
    "history": {},
    "greedy, history": {"method": "greedy", "n_best": 1},
}


def with_option(option, model, count, vocab=VOCAB, **settings):
    """A config with an option of the search, and the other options of `Request` that belong to it."""
    config = DecodeConfig(**({"beam": 3, "n_best": 2, "max_len": 9} | OPTIONS[option] | settings))
    special, request = special_options(model)["special"], {}
    if "phrases" in option:
        texts, first = TokenTexts([f" {i}".encode() for i in range(vocab)]), vocab // 2
        required = [[str(first + i)] * (config.method == "beam" and i % 2) for i in range(count)]
        request["lexical"] = [LexicalConstraints(texts, one, ["7", str(8 + i)]) for i, one in enumerate(required)]
    if "several end tokens" in option:
        special = replace(special, other_eos=tuple(range(vocab // 30, vocab // 2)))
    return config, request | {"special": special, "history": "history" in option}


def assert_equal_histories(ours, theirs):
    for a, b in zip(ours, theirs):
        assert (a.history is None) == (b.history is None)
        if a.history is not None:
            kept_tokens = [
                [
                    sorted(i for i, status in zip(step.tokens, step.statuses) if status != "pruned")
                    for step in history.steps
                ]
                for history in (a.history, b.history)
            ]
            assert kept_tokens[0] == kept_tokens[1]


def transformer(seed=0, **options) -> Transformer:
    sizes = {"width": 16, "heads": 2, "feedforward": 32, "source_vocab": VOCAB, "target_vocab": VOCAB, "max_len": 64}
    return diversify(Transformer(TransformerConfig(**(sizes | options))), seed)


def gpt(seed=0, **options) -> GPT:
    sizes = {"width": 16, "heads": 2, "layers": 2, "feedforward": 32, "vocab": VOCAB, "max_len": 64}
    return diversify(GPT(GPTConfig(**(sizes | options))), seed)


def seq2seq(seed=0, **options) -> Seq2Seq:
    sizes = {"width": 16, "source_vocab": VOCAB, "target_vocab": VOCAB, "max_len": 64}
    return diversify(Seq2Seq(Seq2SeqConfig(**(sizes | options))), seed)


def diversify(model, seed):
    """Weights so large that outputs depend on every part of the model, and end at different steps."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.6, generator=generator)
        model.output.weight[3] += 0.4 * model.output.weight.mean(0)
    return model.eval()


def make_sources(count=9, seed=0, longest=9):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [[*torch.randint(4, VOCAB, (n,), generator=generator).tolist(), 3] for n in lengths]


def special_options(model):
    """The options of `decode_all` that belong to the family of a model."""
    if isinstance(model, GPT):
        return {"special": CAUSAL_LM_TOKENS, "max_total_len": 40}
    return {"special": SEQ2SEQ_TOKENS}


def decode_both(model, sources, config, **options):
    """The results of the engine and of the plain search."""
    options = special_options(model) | options
    engine = decode_all(model, Request(sources, config, **options))
    return engine, decode_all(model, Request(sources, replace(config, engine="plain"), **options))


def assert_equal_search(engine, plain, tolerance=1e-5):
    """The same hypotheses, except where the scores of competing ones differ by less than the tolerance."""
    assert len(engine) == len(plain)
    for ours, theirs in zip(engine, plain):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs):
            assert abs(a.score - b.score) < 1e-4 * max(1.0, abs(b.score)) + tolerance
            if a.ids != b.ids:
                close = [h for h in (*ours, *theirs) if abs(h.score - b.score) < 2 * tolerance]
                assert len(close) > 1, (a, b)
                continue
            assert abs(a.logprob - b.logprob) < 1e-3 + tolerance * len(b.token_logprobs)
            assert len(a.token_logprobs) == len(b.token_logprobs)
            torch.testing.assert_close(
                torch.tensor(a.token_logprobs), torch.tensor(b.token_logprobs), atol=1e-3, rtol=0
            )
