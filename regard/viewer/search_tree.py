"""Search trees: the candidates of every decoding step (kept, pruned, refused) with their attention weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float

from regard.attention import record
from regard.decode import DecodeConfig, Hypothesis, SearchHistory, SearchStep
from regard.errors import RegardError
from regard.evaluation.teacher_forcing import attention_names, mutual_information
from regard.pipelines.pipeline import DecodingPipeline

NodeState = Literal["best", "finished", "kept", "pruned", "refused"]

# Candidates per step (fewer in long searches), candidates per tree, refused candidates per step.
MAX_CANDIDATES, MAX_NODES, MAX_REFUSED = 12, 1500, 3
# Tokens per forward pass when the attention of the steps is computed.
BATCH_TOKENS = 8192


@dataclass(frozen=True)
class SearchNode:
    """One candidate: the output of its parent extended by one token."""

    step: int
    parent: int | None
    """index of the parent node; None at the first step"""
    id: int
    token: str
    text: str
    """the output up to and including this token"""
    logprob: float
    """log-probability of the token, given the tokens before it"""
    total: float
    """log-probability of all tokens so far"""
    score: float
    """ranking score if the output ended here; NaN for a refused candidate"""
    state: NodeState
    ends: bool
    """whether this is a finished output"""
    reason: str
    """why the candidate was pruned (see `SearchStep.reasons`) or refused (see `RefusedToken`)"""
    row: int | None
    """row of `SearchTree.weights` from which this token was predicted"""


@dataclass(frozen=True)
class SearchResult:
    """One output of the n-best list and its last node."""

    text: str
    score: float
    logprob: float
    node: int | None


@dataclass(frozen=True, eq=False)
class SearchTree:
    """The candidates of a search, ordered by step and, within a step, best first."""

    source: list[str]
    nodes: list[SearchNode]
    results: list[SearchResult]
    """n-best outputs, best first"""
    config: DecodeConfig
    limit: int
    """maximum number of output tokens"""
    prefix: list[str]
    """forced first tokens of the output"""
    stopped: str
    """why the search stopped: see `SearchHistory`"""
    omitted: list[int]
    """number of candidates per step that the tree does not contain"""
    attention: str | None
    """name of the attention in `weights`: by default the cross-attention with the largest mutual information"""
    weights: Float[np.ndarray, "R S"]
    """attention weights over the source, averaged over heads, one row per continued output. The columns of a language
    model are the prompt followed by the generated tokens."""

    @property
    def steps(self) -> int:
        return len(self.omitted)

    def path(self, node: int) -> list[int]:
        """Indices of the nodes from the first step to this one."""
        path = [node]
        while (parent := self.nodes[path[-1]].parent) is not None:
            path.append(parent)
        return path[::-1]

    def children(self, node: int | None) -> list[int]:
        """Indices of the nodes that continue this one; None: the nodes of the first step."""
        return [index for index, one in enumerate(self.nodes) if one.parent == node]

    def __repr__(self) -> str:
        best = f"{self.results[0].text!r} at {self.results[0].score:.3f}" if self.results else "no output"
        return f"SearchTree({self.config.method}: {best}, {self.steps} steps, {len(self.nodes)} candidates)"


def record_search(
    pipeline: DecodingPipeline,
    text: str,
    config: DecodeConfig | None = None,
    *,
    prefix: str = "",
    required: Sequence[str] = (),
    forbidden: Sequence[str] = (),
) -> SearchTree:
    """Translate a sentence, or continue a prompt, and return the search as a tree.

    `prefix` is the forced beginning of a translation; `required` and `forbidden` are phrases. The outputs are the same
    as those of `translate` or `generate`.

    >>> tree = record_search(translator, "The cat sleeps.", DecodeConfig(beam=3))  # doctest: +SKIP
    >>> [(node.token, node.state) for node in tree.nodes if node.step == 0]  # doctest: +SKIP
    [('Le', 'best'), ('La', 'kept'), ('Un', 'kept'), ('Ce', 'pruned'), ('Mon', 'pruned')]
    """
    if not text.strip():
        raise RegardError("The text is empty: there is nothing to decode.", "Pass a sentence.")
    if not isinstance(pipeline, DecodingPipeline):
        raise RegardError("This model does not generate text: there is no search to record.", "Use look instead.")
    config = config or pipeline.decoding
    outputs, ids = pipeline.record_search(text, config, prefix, required=required, forbidden=forbidden)
    history = outputs[0].history
    assert history is not None
    return build_tree(pipeline, ids, [output.hypothesis for output in outputs], history, config, prefix=prefix)


def build_tree(
    pipeline: DecodingPipeline,
    source: list[int],
    hypotheses: Sequence[Hypothesis],
    history: SearchHistory,
    config: DecodeConfig,
    *,
    prefix: str = "",
    attention: str | None = None,
) -> SearchTree:
    """Build the tree of a recorded search; `source` are the ids of the source or prompt. See `record_search`."""
    label, source_tokens = pipeline.tokenizers[-1].label, _source_tokens(pipeline, source)
    paths = [history.path(hypothesis) for hypothesis in hypotheses]
    nodes, node_indices, omitted = _grow(history, paths)
    ids = _ids(nodes)
    texts = _texts(pipeline, source, ids)
    nodes = [replace(node, token=label(node.id), text=text) for node, text in zip(nodes, texts)]
    last = [node_indices[len(path) - 1, path[-1]] if path else None for path in paths]
    outputs = zip(hypotheses, _texts(pipeline, source, [hypothesis.ids for hypothesis in hypotheses]), last)
    results = [SearchResult(text, hypothesis.score, hypothesis.logprob, node) for hypothesis, text, node in outputs]
    nodes, attention, weights = _add_weights(pipeline, source, nodes, ids, hypotheses[0].ids, attention)
    forced = pipeline.forced_ids(prefix)
    return SearchTree(
        source=source_tokens,
        nodes=nodes,
        results=results,
        config=config,
        limit=max(pipeline.output_limit(config, source), len(forced)),
        prefix=[label(i) for i in forced],
        stopped=history.stopped,
        omitted=omitted,
        attention=attention,
        weights=weights,
    )


def _grow(
    history: SearchHistory, paths: Sequence[Sequence[int]]
) -> tuple[list[SearchNode], dict[tuple[int, int], int], list[int]]:
    """The nodes without texts and rows, the node index of each candidate (step, index), and omitted counts per step.

    Candidates on the path to an output always become nodes; then kept and finished ones, then the best of the others.
    """
    width = max(2, min(MAX_CANDIDATES, MAX_NODES // max(1, len(history.steps))))
    nodes: list[SearchNode] = []
    node_indices: dict[tuple[int, int], int] = {}
    omitted = []
    beam: list[int | None] = [None]  # node index of each live candidate; -1: omitted
    for t, step in enumerate(history.steps):
        needed = {path[t] for path in paths if t < len(path)}
        available = [i for i, parent in enumerate(step.parents) if beam[parent] != -1]
        ranked = sorted(available, key=lambda i: (i not in needed, step.statuses[i] == "pruned", i))
        chosen = sorted(ranked[: max(width, len(needed))])
        best = paths[0][t] if t < len(paths[0]) else None
        for i in chosen:
            node_indices[t, i] = len(nodes)
            nodes.append(_node(t, step, i, beam[step.parents[i]], nodes, best=i == best))
        refused = [one for one in step.refused if beam[one.parent] != -1]
        for one in refused[:MAX_REFUSED]:
            parent = beam[one.parent]
            logprob = one.logprob - (0.0 if parent is None else nodes[parent].total)
            nodes.append(
                SearchNode(
                    t, parent, one.token, "", "", logprob, one.logprob, float("nan"), "refused", False, one.reason, None
                )
            )
        omitted.append(len(step.tokens) - len(chosen) + len(step.refused) - len(refused[:MAX_REFUSED]))
        beam = [node_indices.get((t, i), -1) for i, status in enumerate(step.statuses) if status == "live"]
    return nodes, node_indices, omitted


def _node(t: int, step: SearchStep, i: int, parent: int | None, nodes: list[SearchNode], *, best: bool) -> SearchNode:
    total, status = step.logprobs[i], step.statuses[i]
    logprob = total - (0.0 if parent is None else nodes[parent].total)
    state: NodeState = "best" if best else "kept" if status == "live" else status
    return SearchNode(
        t,
        parent,
        step.tokens[i],
        "",
        "",
        logprob,
        total,
        step.scores[i],
        state,
        status == "finished",
        step.reasons[i],
        None,
    )


def _ids(nodes: Sequence[SearchNode]) -> list[list[int]]:
    """Output ids of each node."""
    ids: list[list[int]] = []
    for node in nodes:
        ids.append([*([] if node.parent is None else ids[node.parent]), node.id])
    return ids


def _source_tokens(pipeline: DecodingPipeline, source: list[int]) -> list[str]:
    tokenizer = pipeline.tokenizers[0]
    pieces = [piece for piece, _ in tokenizer.decode_as_pieces(source)]
    return [piece or tokenizer.label(i) for piece, i in zip(pieces, source)]


def _texts(pipeline: DecodingPipeline, source: list[int], ids: Sequence[list[int]]) -> list[str]:
    """Decode outputs; those of a language model after the end of the prompt, for correct spacing."""
    context = source[-8:] if pipeline.continues_source else []
    tokenizer = pipeline.tokenizers[1]
    start = len(tokenizer.decode(context))
    return [text[start:] for text in tokenizer.decode_batch([context + output for output in ids])]


def _add_weights(
    pipeline: DecodingPipeline,
    source: list[int],
    nodes: list[SearchNode],
    ids: list[list[int]],
    best: list[int],
    attention: str | None,
) -> tuple[list[SearchNode], str | None, Float[np.ndarray, "R S"]]:
    """The nodes with their row indices, the name of the attention, and its rows.

    The rows come from a teacher-forced pass over the outputs, so nothing has to be recorded during the search: a row
    depends on the tokens before it alone.
    """
    kind = "masked" if pipeline.continues_source else "cross"
    names = attention_names(pipeline, kind)
    if not names:
        return nodes, None, np.zeros((0, len(source)), np.float32)
    if attention is None:
        rows = _rows(pipeline, source, [best], names)
        attention = max(names, key=lambda name: mutual_information(rows[name][0]))
    parents = {node.parent: ids[node.parent] if node.parent is not None else [] for node in nodes}
    # An output that is a prefix of another one shares its forward pass.
    longest_first = sorted((tuple(one) for one in parents.values()), key=len, reverse=True)
    pass_indices: dict[tuple[int, ...], int] = {}
    outputs: list[list[int]] = []
    for one in longest_first:
        if one not in pass_indices:
            pass_indices |= {one[:n]: len(outputs) for n in range(len(one) + 1) if one[:n] not in pass_indices}
            outputs.append(list(one))
    by_output = _rows(pipeline, source, outputs, [attention])[attention]
    row_indices = {parent: i for i, parent in enumerate(parents)}
    width = max(len(row) for one in by_output for row in one)
    weights = np.zeros((len(row_indices), width), np.float32)
    for parent, i in row_indices.items():
        row = by_output[pass_indices[tuple(parents[parent])]][len(parents[parent])]
        weights[i, : len(row)] = row
    return [replace(node, row=row_indices[node.parent]) for node in nodes], attention, weights


def _rows(
    pipeline: DecodingPipeline, source: list[int], outputs: Sequence[list[int]], names: Sequence[str]
) -> dict[str, list[Float[np.ndarray, "t S"]]]:
    """Attention weights, averaged over heads, for each token of each output and for the token after the last."""
    rows: dict[str, list[np.ndarray]] = {name: [] for name in names}
    batch_size = max(1, BATCH_TOKENS // (len(source) + max(map(len, outputs)) + 1))
    for start in range(0, len(outputs), batch_size):
        batch = outputs[start : start + batch_size]
        pipeline.model.eval()
        with torch.inference_mode(), record(pipeline.model, list(names)) as recording:
            pipeline.model(*pipeline.forced_inputs(source, batch))
        first = len(source) - 1 if pipeline.continues_source else 0
        for name in names:
            weights = recording[name].weights().float().mean(1).cpu().numpy()
            rows[name] += [maps[first : first + len(one) + 1] for maps, one in zip(weights, batch)]
    return rows


def search_header(tree: SearchTree, blob: dict[str, Any] | None) -> dict[str, Any]:
    """A tree as JSON for the page. `blob` describes the array of its weights."""
    nodes = []
    for node in tree.nodes:
        parent_text = "" if node.parent is None else tree.nodes[node.parent].text
        extends = node.text.startswith(parent_text)
        nodes.append(
            {
                "step": node.step,
                "parent": node.parent,
                "token": node.token,
                "piece": node.text[len(parent_text) :] if extends else node.text,
                "whole": not extends,  # the piece is the full text: the token changes the text before it
                "logprob": _significant(node.logprob),
                "total": _significant(node.total),
                "score": None if node.state == "refused" else _significant(node.score),
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
        "weights": blob,
        "omitted": tree.omitted,
        "nodes": nodes,
        "results": [
            {"text": result.text, "score": _significant(result.score), "node": result.node} for result in tree.results
        ],
    }


def _significant(value: float) -> float:
    """A number with six significant digits: log-probabilities of certain tokens are small, but not 0.

    >>> _significant(-0.0000199998)
    -1.99998e-05
    """
    return float(f"{value:.6g}")
