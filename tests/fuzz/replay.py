"""Run all targets on their seeds and on the stored corpus, in this process: python -m tests.fuzz.replay [TARGET …]

Prints one JSON object per input: target, input, the message of the RegardError ("" if the target succeeds) and, if it
fails otherwise, the traceback.
"""

import json
import logging
import signal
import sys
import tempfile
import traceback
from pathlib import Path

from tests.fuzz.targets import TARGETS, forbid_side_effects, limit_memory, prepare, run

CORPUS = Path(__file__).parent / "corpus"
SECONDS = 10
"""limit on the CPU time of one input: on a busy machine it may take longer"""


def main(names: list[str]) -> None:
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        seeds = {name: prepare(TARGETS[name], root / name) for name in names or TARGETS}
        forbid_side_effects(root)
        limit_memory()
        for name, contents in seeds.items():
            stored = {file.name: file.read_bytes() for file in sorted((CORPUS / name).glob("*")) if file.is_file()}
            for label, content in ({f"seed {i}": seed for i, seed in enumerate(contents)} | stored).items():
                print(json.dumps({"target": name, "input": label, **_result(name, root, content)}), flush=True)


def _result(name: str, root: Path, content: bytes) -> dict[str, str]:
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # ends the process
    try:
        return {"error": run(TARGETS[name], root / name, content)}
    except BaseException:
        return {"error": "", "traceback": traceback.format_exc()}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
