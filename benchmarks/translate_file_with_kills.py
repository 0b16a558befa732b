"""Kill test of file translation: a run that is killed with SIGKILL repeatedly writes the same file as one that is not.

    python benchmarks/translate_file_with_kills.py MODEL --lines 100000 --kills 5 -- --method greedy

`regard translate MODEL --input … --output …` translates a file in a separate process, first a tenth of the lines (to
compare memory), then all of them, then all of them again with kills at random times, after each of which the same
command is run again. Options after `--` are passed on. The lines are those of --corpus (default: the phrasebook),
repeated as often as needed. Prints a Markdown table. Exit status 1 means a difference.
"""

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from regard.data import read_pairs
from regard.data.text.readers import read_lines

COMMAND = "import sys; from regard.cli import main; sys.exit(main(sys.argv[1:]))"


class Run(NamedTuple):
    """A run of the command: its exit code, or -9 if it was killed; seconds; and peak memory in MiB."""

    code: int
    seconds: float
    memory: float


def translate(model: str, source: Path, output: Path, options: list[str], kill_after: float | None = None) -> Run:
    """Translate a file in a separate process, which is killed after some seconds."""
    words = ["translate", model, "--input", str(source), "--output", str(output), "--quiet", *options]
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", COMMAND, *words])
    if kill_after is not None:
        while time.perf_counter() - start < kill_after and process.poll() is None:
            time.sleep(0.005)
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        else:
            return Run(process.returncode, time.perf_counter() - start, 0.0)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Run(process.returncode, time.perf_counter() - start, usage.ru_maxrss / 1024)


def write_corpus(path: Path, corpus: str | None, count: int) -> None:
    """Write `count` lines of a corpus, which is repeated if it is shorter."""
    lines = read_lines(corpus) if corpus else [source for source, _ in read_pairs(["phrasebook"])[: min(count, 20_000)]]
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in itertools.islice(itertools.cycle(lines), count))


def finished_lines(output: Path) -> int:
    """The number of lines that the journal records."""
    journal = output.with_name(output.name + ".partial.json")
    return json.loads(journal.read_text())["items"] if journal.exists() else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--corpus", help="file with one line per text; default: the phrasebook")
    parser.add_argument("--suffix", default=".gz", help='suffix of the output file; "" for plain text')
    parser.add_argument("--seed", type=int, default=0)
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments, options = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    draw = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small, large = folder / "small.txt", folder / "large.txt"
        write_corpus(small, arguments.corpus, max(1, arguments.lines // 10))
        write_corpus(large, arguments.corpus, arguments.lines)
        paths = {kind: folder / f"{kind}{arguments.suffix}" for kind in ("small-output", "undisturbed", "killed")}
        tenth = translate(arguments.model, small, paths["small-output"], options)
        whole = translate(arguments.model, large, paths["undisturbed"], options)
        if tenth.code or whole.code:
            return 1
        startup = max(0.0, tenth.seconds - (whole.seconds - tenth.seconds) / 9)
        kills, resumed_at = 0, []
        while kills < arguments.kills and not paths["killed"].exists():
            seconds = startup + draw.uniform(0.2, 1.0) * (whole.seconds - startup) / (arguments.kills + 1)
            kills += translate(arguments.model, large, paths["killed"], options, seconds).code == -9
            resumed_at.append(finished_lines(paths["killed"]))
        if not paths["killed"].exists() and translate(arguments.model, large, paths["killed"], options).code:
            return 1
        identical = paths["killed"].read_bytes() == paths["undisturbed"].read_bytes()
        leftovers = sorted(path.name for path in folder.glob("*.partial*"))
    print("| lines | kills | finished at each kill | identical | lines/s | peak MiB | peak MiB, a tenth of the lines |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    rate = arguments.lines / (whole.seconds - startup)
    print(
        f"| {arguments.lines:,} | {kills} | {', '.join(f'{n:,}' for n in resumed_at)} | {'yes' if identical else 'NO'} "
        f"| {rate:,.0f} | {whole.memory:,.0f} | {tenth.memory:,.0f} |"
    )
    return 0 if identical and not leftovers else 1


if __name__ == "__main__":
    sys.exit(main())
