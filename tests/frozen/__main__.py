"""Write the frozen values: `python -m tests.frozen [GROUP…]`. Only where a commit changes them on purpose.

One line per case, so that a change shows in a diff which cases changed.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.frozen.cases import CASES, compute
from tests.frozen.models import MODELS, SHAPES, VALUES, frozen_shapes, initial_statistics, make_pipeline


def write(path: Path, table: dict[str, Any]) -> None:
    lines = [f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in table.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{path.name}: {len(lines)} cases, {path.stat().st_size >> 10} KiB")


VALUES.mkdir(exist_ok=True)
for name in MODELS:
    make_pipeline(name)  # adds the shapes of new models
for group in sys.argv[1:] or CASES:
    table = {}
    for name in CASES[group]:
        with tempfile.TemporaryDirectory() as folder:
            table[name] = compute(group, name, Path(folder))
    write(VALUES / f"{group}.json", table)
write(SHAPES, frozen_shapes())
write(VALUES / "initial.json", {name: initial_statistics(name) for name in MODELS})
