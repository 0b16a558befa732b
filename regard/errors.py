"""Errors that a user can act on."""

import difflib
import importlib
import shlex
import sys
from collections.abc import Iterable
from typing import Any


class _Sentence(BaseException):
    """What happened, and a hint what to do."""

    exit_code = 2
    """exit code of the command line"""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} {hint}".strip())
        self.message = message
        self.hint = hint


class RegardError(_Sentence, Exception):
    """An error that a user can fix: what is wrong, and a hint what to do.

    >>> raise RegardError("pairs.tsv, line 3: no tab.", hint="Write source<TAB>target on every line.")
    Traceback (most recent call last):
    regard.errors.RegardError: pairs.tsv, line 3: no tab. Write source<TAB>target on every line.
    """


class Interrupted(_Sentence, KeyboardInterrupt):
    """Stopped by Ctrl-C after the work so far was saved. Like any KeyboardInterrupt, no `except Exception` catches it.

    >>> Interrupted("Interrupted at step 7.", "The same command resumes the run.").exit_code
    130
    """

    exit_code = 130


class Preempted(Interrupted):
    """Stopped by SIGTERM or SIGUSR1 after the work so far was saved: a cluster can start the same command again.

    >>> Preempted("Interrupted at step 7.").exit_code  # EX_TEMPFAIL
    75
    """

    exit_code = 75


# Names that other libraries use.
_SYNONYMS = {
    "epochs": ("steps",),
    "num_epochs": ("steps",),
    "n_epochs": ("steps",),
    "num_train_epochs": ("steps",),
    "max_epochs": ("steps",),
    "max_steps": ("steps",),
    "learning_rate": ("lr",),
    "batch_size": ("batch_tokens", "batch_images"),
    "per_device_train_batch_size": ("batch_tokens", "batch_images"),
    "gradient_accumulation_steps": ("accumulate",),
    "grad_clip": ("clip",),
    "max_grad_norm": ("clip",),
    "warmup_steps": ("warmup",),
    "num_workers": ("workers",),
    "d_model": ("width",),
    "hidden_size": ("width",),
    "num_heads": ("heads",),
    "num_layers": ("layers", "encoder_layers"),
    "max_length": ("max_len",),
    "output_dir": ("out",),
}


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.6) -> str:
    """Hint with the known names of the same meaning or the closest one; `otherwise` if none is similar to `cutoff`.

    Names may be options, or keys with their sections.

    >>> did_you_mean("trian", ["train", "look"]), did_you_mean("x", ["train"], "Use train.")
    ('Did you mean train?', 'Use train.')
    >>> did_you_mean("--batch-size", ["--batch-tokens", "--train.batch-images", "--beam-size"])
    'Did you mean --batch-tokens or --train.batch-images?'
    """
    known = list(known)
    plain = {other: other.replace("-", "_").lstrip("_").rpartition(".")[2] for other in [*known, name]}
    matches = [
        min((other for other in known if plain[other] == same), key=len)
        for same in _SYNONYMS.get(plain[name], ())
        if any(plain[other] == same for other in known)
    ] or difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"Did you mean {' or '.join(matches)}?" if matches else otherwise


def require_package(name: str, extra: str) -> Any:
    """Import an optional package; if it is missing, the error has the command that installs those of its extra.

    >>> require_package("no_such_package", "gguf")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    regard.errors.RegardError: no_such_package is not installed. Install it with: ... -m pip install "gguf...
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        from importlib import metadata  # slow

        try:
            declared = metadata.requires("regard") or []
        except metadata.PackageNotFoundError:
            declared = []
        needed = [text.partition(";")[0].strip() for text in declared if f'extra == "{extra}"' in text]
        packages = " ".join(f'"{package}"' for package in needed or [name.partition(".")[0]])
        command = f"{shlex.quote(sys.executable or 'python')} -m pip install {packages}"
        raise RegardError(f"{name} is not installed.", f"Install it with: {command}") from None
