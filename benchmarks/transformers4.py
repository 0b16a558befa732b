"""Exported folders in an earlier version of transformers: the outputs that Regard computes.

    python benchmarks/transformers4.py [--version 4.57.*] [--environment FOLDER] [--only Llama]

All configurations of `tests/interop/huggingface/architectures.py` are made with random weights in the installed version
of transformers, imported, and exported with `export_huggingface`. Another version, in an environment of its own that
this script creates with pip, loads the folders and runs them. PyTorch is that of this environment.
"""

import argparse
import json
import logging
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", default="4.57.*", help="version of transformers (default: 4.57.*)")
    parser.add_argument("--environment", type=Path, help="folder of its environment (default: a temporary one)")
    parser.add_argument("--only", default="", help="part of the names of the classes (default: all)")
    parser.add_argument("--check", type=Path, help=argparse.SUPPRESS)  # the folders, inside of the environment
    options = parser.parse_args()
    if options.check:
        check_folders(options.check)
        return
    with tempfile.TemporaryDirectory() as temporary:
        python = create_environment(options.environment or Path(temporary) / "environment", options.version)
        folders = Path(temporary) / "folders"
        export_folders(folders, options.only)
        subprocess.run([python, __file__, "--check", folders], check=True)


def create_environment(folder: Path, version: str) -> Path:
    """The Python of an environment with this version of transformers; an existing environment is used as it is."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"transformers=={version}"], check=True)
        # PyTorch from here. Packages of the new environment take precedence.
        [packages] = folder.glob("lib/python*/site-packages")
        (packages / "torch-from-here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def export_folders(folders: Path, only: str) -> None:
    """Write a folder per configuration: the exported model, and the inputs and outputs of Regard."""
    import torch
    import transformers
    from safetensors.torch import save_file

    from regard.interop import export_huggingface, import_huggingface
    from tests.interop.huggingface.architecture_comparison import make_inputs, make_model, run_model
    from tests.interop.huggingface.architectures import ARCHITECTURES, configurations

    torch.set_num_threads(1)
    logging.getLogger("regard").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(f"exported with Regard from transformers {transformers.__version__}")
    for name, architecture in ARCHITECTURES.items():
        for seed, sizes in enumerate(configurations(name)) if only in name else ():
            folder = folders / name / str(seed)
            config = getattr(transformers, architecture.config)(**sizes)
            with tempfile.TemporaryDirectory() as original:
                make_model(transformers, name, config, Path(original), seed)
                pipeline = import_huggingface(original)
            export_huggingface(pipeline, folder)
            inputs = make_inputs(name, pipeline)[-1]
            outputs = run_model(pipeline.model, name, inputs, needs_maps=False).tensors
            save_file({key: tensor.contiguous() for key, tensor in inputs.hf.items()}, folder / "inputs.tensors")
            save_file({str(i): tensor.contiguous() for i, tensor in enumerate(outputs)}, folder / "outputs.tensors")


def check_folders(folders: Path) -> None:
    """Load the folders in transformers, and print the largest error of each class."""
    import transformers

    transformers.logging.set_verbosity_error()
    print(f"loaded with transformers {transformers.__version__}", end="\n\n")
    print("| class | folders | largest error |\n| --- | --- | --- |")
    for folder in sorted(folders.iterdir(), key=lambda folder: folder.stat().st_mtime_ns):
        cases = sorted(folder.iterdir())
        errors, failures = [], []
        for case in cases:
            try:
                errors.append(largest_error(transformers, case))
            except Exception as error:  # transformers raises many kinds
                failures.append(f"{case.name}: {type(error).__name__}: {str(error).strip()[:200]}")
        result = f"{max(errors):.0e}" if errors else "–"
        if failures:
            result += f"; {len(failures)} failed"
        print(f"| {folder.name} | {len(cases)} | {result} |", *failures, sep="\n  ", flush=True)


def largest_error(transformers: Any, folder: Path) -> float:
    """The largest difference from the outputs of Regard; missing or unexpected tensors are an error."""
    import torch
    from safetensors.torch import load_file

    [name] = json.loads((folder / "config.json").read_text())["architectures"]
    model, report = getattr(transformers, name).from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    if any(report.values()):
        raise ValueError({key: value for key, value in report.items() if value})
    with torch.no_grad():
        output = model.eval()(**load_file(folder / "inputs.tensors"))
    expected = load_file(folder / "outputs.tensors")
    if "start_logits" in output:
        found = [torch.stack([output.start_logits, output.end_logits], dim=-1)]
    elif "logits" in output:
        found = [output.logits]
    else:
        hidden = output.last_hidden_state
        pooled = output.get("pooler_output")
        # SigLIP without its head: the mean of the patches.
        found = [hidden, hidden.mean(1) if pooled is None else pooled]
    return max(float((found[int(i)].reshape(tensor.shape) - tensor).abs().max()) for i, tensor in expected.items())


if __name__ == "__main__":
    sys.exit(main())
