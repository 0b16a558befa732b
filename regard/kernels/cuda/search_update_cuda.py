"""Bookkeeping of a step of beam search and of greedy decoding in one launch (CUDA, Triton).

Plain twins: `BeamState._advance` and `StepwiseState._advance` of `regard.decode.engine`, which launch dozens of small
kernels. Nothing synchronizes with the host, and launches depend on shapes only, so calls can be captured in a CUDA
graph. B slots, K hypotheses per slot, N finished hypotheses per slot, T steps, S cache positions.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.kernels.triton_support import dependent_launch, next_power_of_two, triton_available

MAX_BEAM, MAX_CANDIDATES = 32, 1024
# Cache positions whose ancestors are copied at once; slots per program of `greedy_update`.
BLOCK_S, BLOCK_B = 64, 32


def supports(log_prob: Tensor, hypotheses: int, candidates: int) -> bool:
    """Whether the kernels run on the device of a tensor, for this many hypotheses with this many candidates each."""
    is_small = hypotheses <= MAX_BEAM and hypotheses * candidates <= MAX_CANDIDATES
    return triton_available() and log_prob.is_cuda and is_small


def beam_update(
    top: Float[Tensor, "B K C"],
    ids: Int[Tensor, "B K C"],
    positions: Int[Tensor, "B"],
    last_step: Int[Tensor, "B"],
    *,
    last: Int[Tensor, "B K"],
    step: Int[Tensor, "B"],
    done: Bool[Tensor, "B"],
    log_prob: Float[Tensor, "B K"],
    ancestors: Int[Tensor, "B K S"],
    tokens: Int[Tensor, "B T K"],
    parents: Int[Tensor, "B T K"],
    token_log_p: Float[Tensor, "B T K"],
    finished_score: Float[Tensor, "B N"],
    finished_log_prob: Float[Tensor, "B N"],
    finished_step: Int[Tensor, "B N"],
    finished_parent: Int[Tensor, "B N"],
    end_token: Int[Tensor, "B N"],
    end_log_p: Float[Tensor, "B N"],
    finished_count: Int[Tensor, "B"],
    eos: int,
    length_penalty: float,
    enough: float,
    early_stopping: bool = True,
) -> Int[Tensor, "B K"]:
    """Update the state of a beam search in place from the best C tokens of each beam; returns the parents of new beams.

    `top` are log-probabilities, best first. `positions` are the cache positions of the last tokens; ancestors beyond
    the next position are not updated. At `last_step` the first K candidates are finished, whatever their tokens. A
    search stops after `enough` finished hypotheses; without `early_stopping`, the best unfinished one is judged at its
    current length. Of equal candidates the first is kept. All tensors are contiguous; integers are int64 except
    `ancestors`, which are int32.
    """
    from regard.kernels.triton import search_update_triton

    B, K, C = top.shape
    N = finished_score.shape[1]
    new_parents = torch.empty_like(last)
    search_update_triton.beam_update[(B,)](
        *(top, ids, positions, last_step, last, step, done, log_prob, ancestors, tokens, parents, token_log_p),
        *(finished_score, finished_log_prob, finished_step, finished_parent, end_token, end_log_p, finished_count),
        new_parents,
        *(tokens.shape[1], ancestors.shape[2]),
        K=K,
        C=C,
        N=N,
        EOS=eos,
        PENALTY=length_penalty,
        ENOUGH=min(enough, 2.0**30),
        EARLY_STOPPING=early_stopping,
        BLOCK_K=next_power_of_two(K),
        BLOCK_C=next_power_of_two(K * C),
        BLOCK_B=next_power_of_two(min(2 * K, K * C)),
        BLOCK_N=next_power_of_two(N),
        BLOCK_S=BLOCK_S,
        num_warps=1,
        **dependent_launch(top),
    )
    return new_parents


def greedy_update(
    token: Int[Tensor, "B K"],
    log_p: Float[Tensor, "B K"],
    *,
    step: Int[Tensor, "B"],
    done: Bool[Tensor, "B"],
    live: Bool[Tensor, "B K"],
    last: Int[Tensor, "B K"],
    tokens: Int[Tensor, "B T K"],
    token_log_p: Float[Tensor, "B T K"],
    lengths: Int[Tensor, "B K"],
    eos: int,
) -> None:
    """Append a token to each of K independent hypotheses per slot, in place. All tensors are contiguous."""
    from regard.kernels.triton import search_update_triton

    B, K = token.shape
    search_update_triton.greedy_update[(-(-B // BLOCK_B),)](
        *(token, log_p, step, done, live, last, tokens, token_log_p, lengths, B, tokens.shape[1]),
        K=K,
        EOS=eos,
        BLOCK_B=BLOCK_B,
        BLOCK_K=next_power_of_two(K),
        num_warps=1,
        **dependent_launch(token),
    )
