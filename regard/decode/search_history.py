"""What greedy decoding and sampling considered at each step, for those who want to see it."""

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor

from regard.decode.constraints import Constraints, log_softmax
from regard.decode.decode_config import DecodeConfig
from regard.decode.hypotheses import BeamHistory, BeamStep, Fate, Refused
from regard.decode.protocol import Special

# So many continuations of each output are noted, besides the one that was taken.
CONSIDERED = 5


class Watch:
    """Grows the tree of each sentence. Samples that have been equal so far are one branch of it."""

    def __init__(self, config: DecodeConfig, special: Special, B: int, K: int) -> None:
        self.config, self.special = config, special
        self.trees = [BeamHistory(special.eos, stopped="ended") for _ in range(B)]
        # Which live candidate of the step before each output is (None: it has ended), and their log-probabilities.
        self.branches: list[list[int | None]] = [[0] * K for _ in range(B)]
        self.totals: list[list[float]] = [[0.0] for _ in range(B)]

    def step(
        self,
        rows: Int[Tensor, "B"],
        logits: Float[Tensor, "B K V"],
        log_p: Float[Tensor, "B K V"],
        taken: Int[Tensor, "B K"],
        constraints: Constraints,
        t: int,
    ) -> None:
        """Is told one step of the sentences `rows`: what might come, what was allowed of it, and what was taken."""
        free = log_softmax(logits)
        for i, row in enumerate(rows.tolist()):
            branches = self.branches[row]
            if all(branch is None for branch in branches):
                continue
            self._grow(row, free[i], log_p[i], taken[i].tolist(), lambda token, i=i: constraints.why(i, t, token), t)

    def _grow(
        self,
        row: int,
        free: Float[Tensor, "K V"],
        log_p: Float[Tensor, "K V"],
        taken: list[int],
        why: Callable[[int], str],
        t: int,
    ) -> None:
        """One step of one sentence."""
        branches, totals = self.branches[row], self.totals[row]
        drawn = {(branch, token) for branch, token in zip(branches, taken) if branch is not None}
        found: list[tuple[float, int, int, str]] = []
        refused: list[Refused] = []
        for branch in sorted({branch for branch, _ in drawn}):
            k = branches.index(branch)
            own = {token for of, token in drawn if of == branch}
            best = log_p[k].topk(min(CONSIDERED, log_p.shape[-1])).indices.tolist()
            reasons = self._reasons(log_p[k], best)
            for token in [*best, *sorted(own - set(best))]:
                price = float(log_p[k, token])
                if price > -float("inf"):
                    found.append((totals[branch] + price, branch, token, "" if token in own else reasons[token]))
            for token in free[k].topk(min(CONSIDERED, free.shape[-1])).indices.tolist():
                if float(log_p[k, token]) == -float("inf") < float(free[k, token]):
                    refused.append(Refused(branch, token, totals[branch] + float(free[k, token]), why(token)))
        found.sort(key=lambda one: -one[0])
        fates: list[Fate] = [self._fate(token, reason) for _, _, token, reason in found]
        scores = [total / (t + 1) ** self.config.length_penalty for total, *_ in found]
        columns = [list(column) for column in zip(*found)] or [[], [], [], []]
        self.trees[row].steps.append(BeamStep(columns[1], columns[2], columns[0], fates, scores, columns[3], refused))
        live = [(branch, token) for (_, branch, token, _), fate in zip(found, fates) if fate == "live"]
        self.totals[row] = [total for (total, *_), fate in zip(found, fates) if fate == "live"]
        pairs = zip(branches, taken)
        self.branches[row] = [live.index(pair) if pair in live else None for pair in pairs]

    def _fate(self, token: int, reason: str) -> Fate:
        return "pruned" if reason else "finished" if token == self.special.eos else "live"

    def _reasons(self, log_p: Float[Tensor, "V"], best: list[int]) -> dict[int, str]:
        """Why each of the best tokens, best first, would not be taken."""
        if self.config.method == "greedy":
            return dict.fromkeys(best, "greedy")
        top_k, top_p = self.config.top_k, self.config.top_p
        p = (log_p / self.config.temperature).softmax(-1)
        if top_k > 0:
            p = p / p.topk(min(top_k, len(p))).values.sum()
        before = 0.0  # the probability of all better ones
        reasons = {}
        for rank, token in enumerate(best):
            cut = "top_k" if 0 < top_k <= rank else "top_p" if before >= top_p else "not drawn"
            reasons[token] = cut
            before += float(p[token])
        return reasons
