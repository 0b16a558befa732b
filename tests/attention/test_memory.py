"""Memory is linear in the length: the peak memory of a separate process, case by case."""

import os
import subprocess
import sys

PREPARE = """
import resource, torch
from regard.attention import *
from tests.attention.helpers import Slope

def attention(T, *, H=1, G=None, S=None, D=16, Dv=16, **options):
    q, k, v = torch.randn(1, H, T, D), torch.randn(1, G or H, S or T, D), torch.randn(1, G or H, S or T, Dv)
    attend(*(x.requires_grad_() for x in (q, k, v)), **options).sum().backward()

def one_head(T):
    attend(*(x.requires_grad_() for x in torch.randn(3, 1, T, 16)), mask=causal()).sum().backward()

def packed(T, **options):
    offsets = Offsets(torch.tensor([0, T, T, T + 7]), total=T + 7, max_len=T)
    q, k, v = (x.requires_grad_() for x in torch.randn(3, T + 7, 1, 16))
    attend(q, k, v, q_offsets=offsets, k_offsets=offsets, **options).sum().backward()

def recorded(T):
    class Attention(torch.nn.Module):
        kind = "masked"
        def forward(self, x):
            return attend(x, x, x, mask=causal())
    model = Attention()
    with torch.no_grad(), record(model) as recording:
        model(torch.randn(1, 2, T, 16))
    recording[""].weights(heads=1, queries=range(0, T, T // 64))

def short_by_5(T):
    return padding(torch.tensor([T - 5]))

def peak_growth(run):
    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    before = peak()
    run()
    return peak() - before

torch.manual_seed(0)
"""

CASES = (
    PREPARE
    + """
CASES = {
    "plain": lambda T: attention(T),
    "causal": lambda T: attention(T, mask=causal()),
    "padding": lambda T: attention(T, mask=short_by_5(T)),
    "causal & padding": lambda T: attention(T, mask=causal() & short_by_5(T)),
    "T < S": lambda T: attention(T * 3 // 4, S=T, mask=causal() & short_by_5(T)),
    "T > S": lambda T: attention(T, S=T * 3 // 4, mask=causal()),
    "grouped heads": lambda T: attention(T, H=2, G=1, mask=causal()),
    "grouped heads, padding": lambda T: attention(T, H=2, G=1, mask=short_by_5(T)),
    "wide values": lambda T: attention(T, Dv=24, mask=causal()),
    "narrow values": lambda T: attention(T, Dv=8, mask=short_by_5(T)),
    "cosine": lambda T: attention(T, score=Cosine(10.0, learned=True), mask=causal()),
    "general": lambda T: attention(T, score=General(16, 16), mask=causal() & short_by_5(T)),
    "location": lambda T: attention(T, score=Location(16, T), mask=short_by_5(T)),
    "one head": one_head,
    "packed": lambda T: packed(T),
    "packed, causal": lambda T: packed(T, mask=causal()),
    "few queries": lambda T: attention(T // 8, S=T, mask=causal() & short_by_5(T)),
    "window": lambda T: attention(T, mask=window(64) & short_by_5(T)),
    "local": lambda T: attention(T, mask=local(64) & short_by_5(T)),
    "or": lambda T: attention(T, mask=~causal() | short_by_5(T)),
    "bias": lambda T: attention(T, mask=causal(), bias=Slope(1)),
    "concat": lambda T: attention(T, score=Concat(16, 16, hidden=2), mask=causal()),
    "recorded": recorded,
}
FUSED = 16
for group in (list(CASES.items())[:FUSED], list(CASES.items())[FUSED:]):
    for _, run in group:
        run(1500)  # one block is as large at any length: allocate its memory before measuring
    for name, run in group:
        print(f"{peak_growth(lambda: run(6144)):.1f} {name}")
"""
)

CONCAT = (
    PREPARE
    + """
attention(64, D=64, Dv=64, score=Concat(64, 64, hidden=64), mask=causal())
print(peak_growth(lambda: attention(4096, D=64, Dv=64, score=Concat(64, 64, hidden=64), mask=causal())))
"""
)


def run_script(script: str) -> list[str]:
    # Return large blocks to the system as soon as they are freed; otherwise glibc caches an unpredictable amount.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_no_case_is_quadratic():
    """At T = S = 6144 one float32 T×S matrix would be 144 MiB, a boolean one 36."""
    growth = {name: float(number) for number, name in (line.split(" ", 1) for line in run_script(CASES))}
    assert len(growth) == 23
    assert sum(list(growth.values())[:16]) < 20, growth
    assert sum(list(growth.values())[16:]) < 60, growth


def test_causal_concat_of_4096_tokens_needs_less_than_1_gib():
    assert float(run_script(CONCAT)[0]) < 1024
