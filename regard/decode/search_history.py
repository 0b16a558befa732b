"""Search history of greedy decoding and sampling: the candidates of every step."""

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor

from regard.decode.decode_config import DecodeConfig
from regard.decode.hypotheses import CandidateStatus, RefusedToken, SearchHistory, SearchStep
from regard.decode.protocol import SpecialTokens
from regard.decode.rules.constraints import Constraints, log_softmax

# Number of continuations recorded per branch and step, in addition to the chosen one.
MAX_CANDIDATES = 5


class SearchRecorder:
    """Records the search history of each sentence. Samples that have been equal so far share a branch."""

    def __init__(self, config: DecodeConfig, special: SpecialTokens, B: int, K: int) -> None:
        self.config, self.special = config, special
        self.histories = [SearchHistory(special.eos, stopped="ended") for _ in range(B)]
        # For each output, its index among the live candidates of the previous step (None: it has ended), and the
        # log-probabilities of these candidates.
        self.branches: list[list[int | None]] = [[0] * K for _ in range(B)]
        self.totals: list[list[float]] = [[0.0] for _ in range(B)]

    def add_step(
        self,
        rows: Int[Tensor, "B"],
        logits: Float[Tensor, "B K V"],
        log_p: Float[Tensor, "B K V"],
        chosen: Int[Tensor, "B K"],
        constraints: Constraints,
        t: int,
    ) -> None:
        """Record step t of the sentences `rows`: logits, constrained log-probabilities and the chosen tokens."""
        unconstrained = log_softmax(logits)
        for i, row in enumerate(rows.tolist()):
            if all(branch is None for branch in self.branches[row]):
                continue
            self._add_sentence_step(
                row,
                unconstrained[i],
                log_p[i],
                chosen[i].tolist(),
                lambda beam, token, i=i: constraints.refusal_reason(i, beam, t, token),
                t,
                is_last=t >= int(constraints.last_step[i]),
            )

    def _add_sentence_step(
        self,
        row: int,
        unconstrained: Float[Tensor, "K V"],
        log_p: Float[Tensor, "K V"],
        chosen: list[int],
        refusal_reason: Callable[[int, int], str],
        t: int,
        is_last: bool,
    ) -> None:
        branches, totals = self.branches[row], self.totals[row]
        chosen_pairs = {(branch, token) for branch, token in zip(branches, chosen) if branch is not None}
        candidates: list[tuple[float, int, int, str]] = []
        refused: list[RefusedToken] = []
        for branch in sorted({branch for branch, _ in chosen_pairs}):
            k = branches.index(branch)
            branch_tokens = {token for parent, token in chosen_pairs if parent == branch}
            best = log_p[k].topk(min(MAX_CANDIDATES, log_p.shape[-1])).indices.tolist()
            reasons = self._pruning_reasons(log_p[k], best)
            for token in [*best, *sorted(branch_tokens - set(best))]:
                token_log_p = float(log_p[k, token])
                if token_log_p > -float("inf"):
                    reason = "" if token in branch_tokens else reasons[token]
                    candidates.append((totals[branch] + token_log_p, branch, token, reason))
            for token in unconstrained[k].topk(min(MAX_CANDIDATES, unconstrained.shape[-1])).indices.tolist():
                if float(log_p[k, token]) == -float("inf") < float(unconstrained[k, token]):
                    total = totals[branch] + float(unconstrained[k, token])
                    refused.append(RefusedToken(branch, token, total, refusal_reason(k, token)))
        candidates.sort(key=lambda candidate: -candidate[0])
        ends = set(self.special.ends)
        statuses: list[CandidateStatus] = [
            "pruned" if reason else "finished" if is_last or token in ends else "live"
            for _, _, token, reason in candidates
        ]
        scores = [total / (t + 1) ** self.config.length_penalty for total, *_ in candidates]
        log_probs, parents, tokens, reasons_column = (
            [list(column) for column in zip(*candidates)] if candidates else ([], [], [], [])
        )
        tokens = [self.special.eos if token in ends else token for token in tokens]
        self.histories[row].steps.append(
            SearchStep(parents, tokens, log_probs, statuses, scores, reasons_column, refused)  # type: ignore[arg-type]
        )
        live = [(branch, token) for (_, branch, token, _), status in zip(candidates, statuses) if status == "live"]
        self.totals[row] = [total for (total, *_), status in zip(candidates, statuses) if status == "live"]
        pairs = zip(branches, chosen)
        self.branches[row] = [live.index(pair) if pair in live else None for pair in pairs]

    def _pruning_reasons(self, log_p: Float[Tensor, "V"], best: list[int]) -> dict[int, str]:
        """Why each of the best tokens (best first) would not be chosen."""
        if self.config.method == "greedy":
            return dict.fromkeys(best, "greedy")
        top_k, top_p = self.config.top_k, self.config.top_p
        p = (log_p / self.config.temperature).softmax(-1)
        if top_k > 0:
            p = p / p.topk(min(top_k, len(p))).values.sum()
        before = 0.0  # total probability of the better tokens
        reasons = {}
        for rank, token in enumerate(best):
            reasons[token] = "top_k" if 0 < top_k <= rank else "top_p" if before >= top_p else "not drawn"
            before += float(p[token])
        return reasons
