"""The choice of the next tokens on a CPU: log-softmax and top-k of a row in one pass, without a matrix of logits.

Reference: regard.decode.rules.best_tokens.
"""

from typing import Any

import numpy as np

from regard.kernels.cpu.decode_rows import exp_float, largest_value
from regard.kernels.cpu.support import SIZES, jit, numba_available
from regard.kernels.cpu.vector_code import LANES, VectorCode

# Tokens per block: most blocks contain none of the best tokens and are not searched.
_BLOCK = 128


@jit
def start_rows(top, ids, statistics):
    """Empty lists of tokens. `statistics` of a row: its maximum m, Σ exp(logit - m) and the logit of a forced token."""
    infinity = np.float32(np.inf)
    top[:] = -infinity
    ids[:] = 0
    statistics[:] = -infinity
    statistics[:, 1] = np.float32(0)


def _make_lanes_above() -> Any:
    """A function of float32 values, an index and a threshold: bit j is set if value index + j exceeds it, j < LANES."""
    if not numba_available():
        return None
    from numba import types
    from numba.extending import intrinsic

    @intrinsic
    def lanes_above(typing_context, values, index, threshold):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            code = VectorCode(builder)
            address, *_ = code.array(context, signature.args[0], arguments[0])
            values = code.load(code.add(address, arguments[1], 4), code.floats)
            limit = code.broadcast(arguments[2])
            bits = builder.bitcast(builder.fcmp_ordered(">", values, limit), code.ir.IntType(LANES))
            return builder.zext(bits, code.int64)

        return types.int64(values, types.int64, types.float32), generate

    return lanes_above


_HAS_VECTOR_CODE, _lanes_above = numba_available(), _make_lanes_above()


@jit
def best_tokens_rows(
    y, row_scale, scale, bias, first, positions, columns, refused, banned, eos, forced, ban_eos, top, ids, statistics
):
    """Update the best allowed tokens of each row, best first, with the logits of tokens `first` onwards.

    Row r belongs to slot r // columns, which is empty if its position is negative. `y`, `row_scale`, `scale` and `bias`
    are the matrix product of a part of the output layer, see `decode_rows`. `refused` (slots, tokens) is True for
    tokens that a slot excludes from the softmax; without tokens: none.
    """
    V, count = y.shape[1], top.shape[1]
    if min(len(scale), len(bias)) < V or len(y) > min(len(row_scale), min(len(top), len(statistics))):
        raise ValueError(SIZES)
    if refused.shape[1] and first + V > refused.shape[1]:
        raise ValueError(SIZES)
    logits = np.empty(_BLOCK, np.float32)
    infinity = np.float32(np.inf)
    for r in range(len(y)):
        b = r // columns
        if positions[b] < 0:
            continue
        best, best_ids, factor = top[r], ids[r], row_scale[r]
        largest, total, threshold = statistics[r, 0], statistics[r, 1], best[count - 1]
        for start in range(0, V, _BLOCK):
            size = min(_BLOCK, V - start)
            sums, scales, biases = y[r, start : start + size], scale[start : start + size], bias[start : start + size]
            for j in range(size):
                logits[j] = np.float32(sums[j]) * factor * scales[j] + biases[j]
            if refused.shape[1]:
                is_refused = refused[b, first + start : first + start + size]
                for j in range(size):
                    logits[j] = -infinity if is_refused[j] else logits[j]
            block_max = largest_value(logits, size)
            if block_max == -infinity:  # all tokens are refused
                continue
            if block_max > largest:
                total *= exp_float(largest - block_max)
                largest = block_max
            block_total = np.float32(0)
            for j in range(size):
                block_total += exp_float(logits[j] - largest)
            total += block_total
            token = first + start  # of the first logit
            if forced[b] >= token and forced[b] < token + size:
                statistics[r, 2] = logits[forced[b] - token]
            if not block_max > threshold:
                continue
            for other in banned:
                if other >= token and other < token + size:
                    logits[other - token] = -infinity
            if ban_eos[b] and eos >= token and eos < token + size:
                logits[eos - token] = -infinity
            logits[size:] = -infinity
            for group in range(0, size, LANES):
                if _HAS_VECTOR_CODE and _lanes_above(logits, group, threshold) == 0:
                    continue
                for j in range(group, group + LANES):
                    if logits[j] > threshold:
                        i = count - 1
                        while i > 0 and logits[j] > best[i - 1]:
                            best[i], best_ids[i] = best[i - 1], best_ids[i - 1]
                            i -= 1
                        best[i], best_ids[i] = logits[j], token + j
                        threshold = best[count - 1]
        statistics[r, 0], statistics[r, 1] = largest, total


@jit
def finish_rows(forced, columns, top, ids, statistics):
    """Turn the logits of the best tokens into log-probabilities; a forced token is the only one."""
    for r in range(len(top)):
        token = forced[r // columns]
        if token >= 0:
            top[r] = -np.float32(np.inf)
            top[r, 0] = statistics[r, 2]
            ids[r] = token
        if statistics[r, 1] == 0:  # the row of an empty slot
            top[r] = np.float32(0)
        else:
            log_sum = statistics[r, 0] + np.float32(np.log(statistics[r, 1]))
            for i in range(top.shape[1]):
                top[r, i] -= log_sum


@jit
def start_step(step, done, offsets, limit, prefix, eos, min_len, positions, forced, ban_eos):
    """The cache position of the last tokens of each slot (-1: the slot is done) and the constraints of the next token:
    the only one allowed (-1: there is a choice), and whether <eos> is banned.
    """
    width = prefix.shape[1]
    for b in range(len(step)):
        t = step[b]
        positions[b] = -1 if done[b] else offsets[b] + t
        forced[b] = eos if t >= limit[b] else -1
        if t < width and prefix[b, t] >= 0:
            forced[b] = prefix[b, t]
        ban_eos[b] = t < min_len


@jit
def greedy_update(top, ids, eos, step, done, live, last, tokens, token_log_p, lengths):
    """`StepwiseState._advance`, for slots that are not done."""
    K = last.shape[1]
    for b in range(len(step)):
        if done[b]:
            continue
        if step[b] >= tokens.shape[1]:
            raise ValueError(SIZES)
        any_live = False
        for k in range(K):
            token, log_p = ids[b * K + k, 0], top[b * K + k, 0]
            if log_p == -np.inf:
                live[b, k] = False
            tokens[b, step[b], k] = token
            token_log_p[b, step[b], k] = log_p
            if live[b, k]:
                lengths[b, k] += 1
            live[b, k] = live[b, k] and token != eos
            any_live = any_live or live[b, k]
            last[b, k] = token
        step[b] += 1
        done[b] = not any_live


@jit
def beam_update(
    top,
    ids,
    positions,
    last_step,
    eos,
    length_penalty,
    enough,
    early_stopping,
    last,
    step,
    done,
    log_prob,
    ancestors,
    tokens,
    parents,
    token_log_p,
    finished_score,
    finished_log_prob,
    finished_step,
    finished_parent,
    end_token,
    end_log_p,
    finished_count,
):
    """`BeamState._advance`, for slots that are not done."""
    B, K = last.shape
    C, N = top.shape[1], finished_score.shape[1]
    capacity = ancestors.shape[2]
    count = min(2 * K, K * C)
    infinity = np.float32(np.inf)
    best, best_parent, best_column = np.empty(count, np.float32), np.empty(count, np.int64), np.empty(count, np.int64)
    old_ancestors = np.empty((K, capacity), np.int32)
    for b in range(B):
        if done[b]:
            continue
        t, p = step[b], positions[b]
        if t >= tokens.shape[1] or not 0 <= p < capacity:
            raise ValueError(SIZES)
        best[:] = -infinity
        best_parent[:] = 0
        best_column[:] = 0
        filled = 0
        for k in range(K):
            for c in range(C):
                total = log_prob[b, k] + top[b * K + k, c]
                if filled == count and not total > best[count - 1]:
                    break  # the others of this hypothesis are worse
                filled = min(filled + 1, count)
                i = filled - 1
                while i > 0 and total > best[i - 1]:
                    best[i], best_parent[i], best_column[i] = best[i - 1], best_parent[i - 1], best_column[i - 1]
                    i -= 1
                best[i], best_parent[i], best_column[i] = total, k, c
        length = np.float32(t + 1) ** np.float32(length_penalty)
        old_ancestors[:] = ancestors[b]
        beam, is_last = 0, t >= last_step[b]
        for i in range(count):
            parent = best_parent[i]
            token, token_score = ids[b * K + parent, best_column[i]], top[b * K + parent, best_column[i]]
            if token == eos or is_last:
                score = best[i] / length
                if i >= K or not score > -infinity:
                    continue
                finished_count[b] += 1
                n = N
                while n > 0 and score > finished_score[b, n - 1]:
                    n -= 1
                for m in range(N - 1, n, -1):
                    finished_score[b, m] = finished_score[b, m - 1]
                    finished_log_prob[b, m] = finished_log_prob[b, m - 1]
                    finished_step[b, m] = finished_step[b, m - 1]
                    finished_parent[b, m] = finished_parent[b, m - 1]
                    end_token[b, m], end_log_p[b, m] = end_token[b, m - 1], end_log_p[b, m - 1]
                if n < N:
                    finished_score[b, n], finished_log_prob[b, n] = score, best[i]
                    finished_step[b, n], finished_parent[b, n] = t, parent
                    end_token[b, n], end_log_p[b, n] = token, token_score
            elif beam < K:
                last[b, beam] = token
                tokens[b, t, beam] = token
                parents[b, t, beam] = parent
                token_log_p[b, t, beam] = token_score
                log_prob[b, beam] = best[i]
                for s in range(p + 1):
                    ancestors[b, beam, s] = old_ancestors[parent, s]
                if p + 1 < capacity:
                    ancestors[b, beam, p + 1] = beam
                beam += 1
        for k in range(beam, K):
            log_prob[b, k] = -infinity
            last[b, k] = eos
            tokens[b, t, k] = eos
            parents[b, t, k] = 0
            token_log_p[b, t, k] = -infinity
            if p + 1 < capacity:
                ancestors[b, k, p + 1] = k
        final_length = last_step[b] + 1 if early_stopping else t + 1
        bound = log_prob[b, 0] / np.float32(final_length) ** np.float32(length_penalty)
        is_enough = finished_count[b] >= enough
        done[b] = finished_score[b, N - 1] >= bound or is_enough or is_last
        step[b] += 1
