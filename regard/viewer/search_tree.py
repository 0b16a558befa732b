"""The search for an output as a tree: what each step considered, kept, pruned and was refused, and where it looked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float

from regard.attention import record
from regard.decode import BeamHistory, BeamStep, DecodeConfig, Hypothesis
from regard.errors import RegardError
from regard.evaluation.teacher_forcing import attentions, force, information
from regard.layers.packed import pack
from regard.pipelines import LanguageModel, Translator

State = Literal["best", "finished", "kept", "pruned", "refused"]

# A tree has so many candidates a step, fewer if it is long, and so many refused ones besides.
WIDEST, MOST, REFUSED = 12, 1500, 3
# Tokens of one forward that shows where the steps looked.
BATCH_TOKENS = 8192


@dataclass(frozen=True)
class BeamNode:
    """One candidate: the output of its parent and one token more."""

    step: int
    parent: int | None
    """the number of the node that it continues; None at the first step"""
    id: int
    token: str
    text: str
    """the whole output so far"""
    logprob: float
    """of the token, after what came before"""
    total: float
    """of all tokens so far"""
    score: float
    """what it would be ranked by if it ended here; a refused one has none (NaN)"""
    state: State
    ends: bool
    """whether it is one of the outputs that were finished"""
    reason: str
    """why it was pruned (see `BeamStep.reasons`) or refused (see `Refused`)"""
    row: int | None
    """the row of `looked` that says where the model looked when it proposed this token"""


@dataclass(frozen=True)
class BeamResult:
    """One output of the n-best list, and the node that it ends with."""

    text: str
    score: float
    logprob: float
    node: int | None


@dataclass(frozen=True, eq=False)
class BeamTree:
    """A search for an output. `nodes` go step by step, in each step the best first."""

    source: list[str]
    nodes: list[BeamNode]
    results: list[BeamResult]
    """the n best outputs, best first"""
    config: DecodeConfig
    limit: int
    """so many tokens the output could have at most"""
    prefix: list[str]
    """the tokens that the output had to begin with"""
    stopped: str
    """why the search was over: see `BeamHistory`"""
    left_out: list[int]
    """how many candidates of each step the tree does not show"""
    attention: str | None
    """the attention that `looked` is of: between source and output the clearest one, averaged over its heads"""
    looked: Float[np.ndarray, "R S"]
    """a row for each output that was continued: where in the source the model looked to continue it. A language model
    looks at the prompt and at what it has written so far, which follows there."""

    @property
    def steps(self) -> int:
        return len(self.left_out)

    def path(self, node: int) -> list[int]:
        """The nodes from the first step to this one."""
        path = [node]
        while (parent := self.nodes[path[-1]].parent) is not None:
            path.append(parent)
        return path[::-1]

    def children(self, node: int | None) -> list[int]:
        """The nodes that continue this one; None: those of the first step."""
        return [number for number, one in enumerate(self.nodes) if one.parent == node]

    def __repr__(self) -> str:
        best = f"{self.results[0].text!r} at {self.results[0].score:.3f}" if self.results else "nothing"
        return f"BeamTree({self.config.method}: {best}, {self.steps} steps, {len(self.nodes)} candidates)"


def watch_decoding(
    bundle: Translator | LanguageModel, text: str, config: DecodeConfig | None = None, *, prefix: str = ""
) -> BeamTree:
    """Translates a sentence, or goes on with a text, and gives the search for it as a tree.

    `prefix` is what a translation must begin with. Watching changes nothing: the outputs are those of
    `bundle.translate` or `bundle.generate`.

    >>> tree = watch_decoding(translator, "The cat sleeps.", DecodeConfig(beam=3))  # doctest: +SKIP
    >>> [(node.token, node.state) for node in tree.nodes if node.step == 0]  # doctest: +SKIP
    [('Le', 'best'), ('La', 'kept'), ('Un', 'kept'), ('Ce', 'pruned'), ('Mon', 'pruned')]
    """
    if not text.strip():
        raise RegardError("The text is empty: there is nothing to decode.", "Give a sentence.")
    if isinstance(bundle, Translator):
        config = config or DecodeConfig()
        outputs = bundle.translate([text], config, prefixes=[prefix] if prefix else None, history=True)[0]
        found, history = [one.hypothesis for one in outputs], outputs[0].history
        ids = bundle.source_ids(text)
    elif isinstance(bundle, LanguageModel):
        if prefix:
            raise RegardError("Only a translation can have a forced beginning.", "Add it to the text.")
        config = config or DecodeConfig(method="sample")
        written = bundle.generate([text], config, history=True)[0]
        found, history = [one.hypothesis for one in written], written[0].history
        ids = bundle.prompt_ids(text)
    else:
        raise RegardError("This model writes nothing: there is no search to watch.", "Use look.")
    assert history is not None
    return tree_of(bundle, ids, found, history, config, prefix=prefix)


def tree_of(
    bundle: Translator | LanguageModel,
    source: list[int],
    found: Sequence[Hypothesis],
    history: BeamHistory,
    config: DecodeConfig,
    *,
    prefix: str = "",
    attention: str | None = None,
) -> BeamTree:
    """The tree of a search that was watched, `source` being what the model read. See `watch_decoding`."""
    names, read = _labels(bundle, source)
    paths = [history.path(one) for one in found]
    nodes, places, left_out = _grow(history, paths)
    ids = _ids(nodes)
    texts = _texts(bundle, source, ids)
    nodes = [replace(node, token=names[node.id], text=text) for node, text in zip(nodes, texts)]
    last = [places[len(path) - 1, path[-1]] if path else None for path in paths]
    outputs = zip(found, _texts(bundle, source, [one.ids for one in found]), last)
    results = [BeamResult(text, one.score, one.logprob, node) for one, text, node in outputs]
    nodes, shown, looked = _look(bundle, source, nodes, ids, found[0].ids, attention)
    begun: list[int] = []
    if isinstance(bundle, Translator):
        begun = [*bundle.special.begun([])[1:], *bundle.target_ids(prefix)]
        longest = bundle.longest_output
        limit = config.limit(len(source))
        limit = max(limit if longest is None else min(limit, longest), len(begun))
    else:
        longest = bundle.length_limit
        limit = config.max_len if longest is None else min(config.max_len, longest - len(source))
    return BeamTree(
        source=read,
        nodes=nodes,
        results=results,
        config=config,
        limit=limit,
        prefix=[names[i] for i in begun],
        stopped=history.stopped,
        left_out=left_out,
        attention=shown,
        looked=looked,
    )


def _grow(
    history: BeamHistory, paths: Sequence[Sequence[int]]
) -> tuple[list[BeamNode], dict[tuple[int, int], int], list[int]]:
    """The nodes, without words and rows; which node each candidate (step, number) is; how many each step leaves out.

    Whatever leads to an output that was found is there, then what was kept or finished, then the best of the others.
    """
    width = max(2, min(WIDEST, MOST // max(1, len(history.steps))))
    nodes: list[BeamNode] = []
    places: dict[tuple[int, int], int] = {}
    left_out = []
    beam: list[int | None] = [None]  # the node of each live candidate; -1 for one that is left out
    for t, step in enumerate(history.steps):
        needed = {path[t] for path in paths if t < len(path)}
        there = [i for i, parent in enumerate(step.parents) if beam[parent] != -1]
        by_worth = sorted(there, key=lambda i: (i not in needed, step.fates[i] == "pruned", i))
        chosen = sorted(by_worth[: max(width, len(needed))])
        best = paths[0][t] if t < len(paths[0]) else None
        for i in chosen:
            places[t, i] = len(nodes)
            nodes.append(_node(t, step, i, beam[step.parents[i]], nodes, best=i == best))
        refused = [one for one in step.refused if beam[one.parent] != -1]
        for one in refused[:REFUSED]:
            parent = beam[one.parent]
            price = one.logprob - (0.0 if parent is None else nodes[parent].total)
            nodes.append(
                BeamNode(
                    t, parent, one.token, "", "", price, one.logprob, float("nan"), "refused", False, one.why, None
                )
            )
        left_out.append(len(step.tokens) - len(chosen) + len(step.refused) - len(refused[:REFUSED]))
        beam = [places.get((t, i), -1) for i, fate in enumerate(step.fates) if fate == "live"]
    return nodes, places, left_out


def _node(t: int, step: BeamStep, i: int, parent: int | None, nodes: list[BeamNode], *, best: bool) -> BeamNode:
    total, fate = step.logprobs[i], step.fates[i]
    price = total - (0.0 if parent is None else nodes[parent].total)
    state: State = "best" if best else "kept" if fate == "live" else fate
    return BeamNode(
        t,
        parent,
        step.tokens[i],
        "",
        "",
        price,
        total,
        step.scores[i],
        state,
        fate == "finished",
        step.reasons[i],
        None,
    )


def _ids(nodes: Sequence[BeamNode]) -> list[list[int]]:
    """All tokens of each node."""
    ids: list[list[int]] = []
    for node in nodes:
        ids.append([*([] if node.parent is None else ids[node.parent]), node.id])
    return ids


def _labels(bundle: Translator | LanguageModel, source: list[int]) -> tuple[list[str], list[str]]:
    """What each id of the output is called, and the tokens that were read."""
    reader, writer = bundle.tokenizers
    pieces = [piece for piece, _ in reader.pieces_of(source)]
    return writer.vocabulary, [piece or reader.vocabulary[i] for piece, i in zip(pieces, source)]


def _texts(bundle: Translator | LanguageModel, source: list[int], ids: Sequence[list[int]]) -> list[str]:
    """Outputs as texts; what follows a prompt joins it as it should."""
    before = source[-8:] if isinstance(bundle, LanguageModel) else []
    writer = bundle.tokenizers[1]
    start = len(writer.decode(before))
    return [text[start:] for text in writer.decode_batch([before + one for one in ids])]


def _look(
    bundle: Translator | LanguageModel,
    source: list[int],
    nodes: list[BeamNode],
    ids: list[list[int]],
    best: list[int],
    attention: str | None,
) -> tuple[list[BeamNode], str | None, Float[np.ndarray, "R S"]]:
    """The nodes with their rows, the attention that the rows are of, and the rows.

    The model is given the outputs again, so that nothing has to be recorded during the search: a row depends on what
    came before it alone.
    """
    kind = "cross" if isinstance(bundle, Translator) else "masked"
    names = attentions(bundle, kind)
    if not names:
        return nodes, None, np.zeros((0, len(source)), np.float32)
    if attention is None:
        rows = _rows(bundle, source, [best], names)
        attention = max(names, key=lambda name: information(rows[name][0]))
    parents = {node.parent: ids[node.parent] if node.parent is not None else [] for node in nodes}
    # What is the beginning of another needs no forward of its own.
    longest = sorted((tuple(one) for one in parents.values()), key=len, reverse=True)
    owner: dict[tuple[int, ...], int] = {}
    forwards: list[list[int]] = []
    for one in longest:
        if one not in owner:
            owner |= {one[:n]: len(forwards) for n in range(len(one) + 1) if one[:n] not in owner}
            forwards.append(list(one))
    weights = _rows(bundle, source, forwards, [attention])[attention]
    number = {parent: i for i, parent in enumerate(parents)}
    widest = max(len(row) for one in weights for row in one)
    looked = np.zeros((len(number), widest), np.float32)
    for parent, i in number.items():
        row = weights[owner[tuple(parents[parent])]][len(parents[parent])]
        looked[i, : len(row)] = row
    return [replace(node, row=number[node.parent]) for node in nodes], attention, looked


def _rows(
    bundle: Translator | LanguageModel, source: list[int], outputs: Sequence[list[int]], names: Sequence[str]
) -> dict[str, list[Float[np.ndarray, "t S"]]]:
    """Where each attention looked, averaged over heads, to predict each token of each output and what follows it."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in names}
    many = max(1, BATCH_TOKENS // (len(source) + max(map(len, outputs)) + 1))
    for start in range(0, len(outputs), many):
        batch = outputs[start : start + many]
        if isinstance(bundle, Translator):
            forced = len(bundle.special.begun([])) - 1
            recording = force(bundle, [(source, one[forced:]) for one in batch], list(names))
        else:
            bundle.model.eval()
            with torch.inference_mode(), record(bundle.model, list(names)) as recording:
                bundle.model(pack([[*source, *one] for one in batch]).to(bundle.device))
        first = 0 if isinstance(bundle, Translator) else len(source) - 1
        for name in names:
            weights = recording[name].weights().float().mean(1).cpu().numpy()
            found[name] += [own[first : first + len(one) + 1] for own, one in zip(weights, batch)]
    return found


def header_of(tree: BeamTree, blob: dict[str, Any] | None) -> dict[str, Any]:
    """A tree as JSON, for a page. `blob` says where its rows are."""
    nodes = []
    for node in tree.nodes:
        before = "" if node.parent is None else tree.nodes[node.parent].text
        follows = node.text.startswith(before)
        nodes.append(
            {
                "step": node.step,
                "parent": node.parent,
                "token": node.token,
                "piece": node.text[len(before) :] if follows else node.text,
                "whole": not follows,  # the piece is the whole text: it changes what came before
                "logprob": round(node.logprob, 5),
                "total": round(node.total, 5),
                "score": None if node.state == "refused" else round(node.score, 5),
                "state": node.state,
                "ends": node.ends,
                "reason": node.reason,
                "row": node.row,
            }
        )
    config = tree.config
    return {
        "method": config.method,
        "beam": config.beam if config.method == "beam" else config.n_best,
        "length_penalty": config.length_penalty,
        "coverage_penalty": config.coverage_penalty,
        "min_len": config.min_len,
        "limit": tree.limit,
        "prefix": tree.prefix,
        "stopped": tree.stopped,
        "source": tree.source,
        "attention": tree.attention,
        "looked": blob,
        "left_out": tree.left_out,
        "nodes": nodes,
        "results": [{"text": one.text, "score": round(one.score, 5), "node": one.node} for one in tree.results],
    }
