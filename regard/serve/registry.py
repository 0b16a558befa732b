"""The models of a server: loading, lookup by name, and hot reload of changed folders."""

import dataclasses
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, singledispatch
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from torch import nn

from regard.data.text.languages import LanguageTokens
from regard.data.text.questions import Question
from regard.decode.precision import copy_modules
from regard.errors import RegardError, did_you_mean
from regard.interop.onnx_runner import load_onnx
from regard.pipelines import ImageModel, TextEncoder, TextGenerator, Translator, load
from regard.pipelines.decoding_request import DecodingRequest
from regard.pipelines.folder import is_onnx_folder
from regard.serve.errors import RequestError
from regard.serve.pool import SchedulerPool, default_workers
from regard.viewer import look

logger = logging.getLogger("regard.serve")

# Abilities of pipelines that have a route.
SERVED = frozenset({"translate", "generate", "chat", "score", "embed", "classify", "answer", "segment"})
# Names of classifiers' labels that are language codes have at most this many letters.
_LANGUAGE_CODE_LENGTH = 3
# Rounds and seconds of the requests before the first.
_WARM_UP_ROUNDS = 2
_WARM_UP_SECONDS = 600.0
EXAMPLE_TEXT = "a b c d"
# A request looks up its model first and submits its work a moment later.
_GRACE_SECONDS = 5.0


@dataclass(eq=False)
class ServedModel:
    """A loaded model with its scheduler."""

    name: str
    path: Path
    pipeline: Any
    scheduler: SchedulerPool
    look_lock: threading.Lock = field(default_factory=threading.Lock)
    files: tuple[Any, ...] = ()
    """state of the files that it was loaded from"""
    loaded_at: float = field(default_factory=time.time)

    @cached_property
    def viewed_pipeline(self) -> Any:
        """The pipeline for the viewer, which puts hooks on modules: other requests use other modules.

        The weights are shared.
        """
        model = self.pipeline.model
        if not isinstance(model, nn.Module):
            return self.pipeline
        return dataclasses.replace(self.pipeline, model=copy_modules(model))

    @property
    def tasks(self) -> list[str]:
        """What the model can do, by the names of the routes."""
        return [*(name for name in self.pipeline.abilities if name in SERVED), "attention"]

    @property
    def language_pairs(self) -> tuple[tuple[str, str], ...]:
        """The codes of source and target language of every pair of a translator; empty if they are not known."""
        return tuple((pair[0], pair[1]) for pair in getattr(self.pipeline, "language_pairs", ()))

    @property
    def language_tokens(self) -> LanguageTokens | None:
        """The languages of a translator between any two of them (NLLB, M2M100, mBART)."""
        return getattr(self.pipeline, "language_tokens", None)

    @property
    def has_languages(self) -> bool:
        """Whether the languages of a translator are known."""
        return bool(self.language_pairs) or self.language_tokens is not None

    def translates(self, source: str, target: str) -> bool:
        """Whether the model translates from one language, or "auto", to another."""
        if self.language_tokens is None:
            return any(pair[1] == target and source in ("auto", pair[0]) for pair in self.language_pairs)
        codes = self.language_tokens.ids
        has_source = source in codes or (source == "auto" and self.language_tokens.default_source is not None)
        return target in codes and has_source

    @property
    def detects_languages(self) -> bool:
        """Whether the model is a text classifier whose labels are language codes."""
        if not {"embed", "classify"}.issubset(self.tasks):
            return False
        labels = self.pipeline.model.config.labels
        return len(labels) > 1 and all(_is_language_code(label) for label in labels)


def _is_language_code(label: str) -> bool:
    return label.isascii() and label.isalpha() and label.islower() and 2 <= len(label) <= _LANGUAGE_CODE_LENGTH


class ModelRegistry:
    """The models of a server by name. `watch` reloads folders whose files changed.

    >>> ModelRegistry(["model", "other=model"]).names  # doctest: +SKIP
    ['model', 'other']
    """

    def __init__(
        self, models: Sequence[str | Path], *, device: str = "auto", latency_target: float = 0.5, workers: int = 0
    ) -> None:
        self.device, self.latency_target, self.workers = device, latency_target, workers
        paths = dict(parse_model(model) for model in models)
        if len(paths) < len(models):
            raise RegardError("Two models have the same name.", "Name them: regard serve NAME=FOLDER OTHER=FOLDER")
        if not paths:
            raise RegardError("No model is given.", "Pass one or more model folders.")
        self.reload_errors: dict[str, str] = {}
        """models whose folder changed and could not be loaded, with the reason"""
        self._refused: dict[str, tuple[Any, ...]] = {}
        self._models = {name: self._load(name, path) for name, path in paths.items()}
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def names(self) -> list[str]:
        return list(self._models)

    @property
    def models(self) -> list[ServedModel]:
        return list(self._models.values())

    def find(self, name: str | None, task: str) -> ServedModel:
        """The model of this name, or the only one with this task; an error if there is none."""
        if name is None:
            able = [model for model in self.models if task in model.tasks]
            if len(able) == 1:
                return able[0]
            if not able:
                raise RequestError(f"No model of this server can {task}.", "See /v1/models.", status=404)
            names = ", ".join(model.name for model in able)
            raise RequestError(f"Several models can {task}: {names}.", "Name one in the field model.")
        model = self._models.get(name)
        if model is None:
            hint = did_you_mean(name, self.names, f"Models: {', '.join(self.names)}.")
            raise RequestError(f"There is no model {name[:100]!r}.", hint, status=404)
        if task not in model.tasks:
            hint = "Use /v1/completions." if task == "chat" else f"It can: {', '.join(model.tasks)}."
            reason = "it has no chat template" if task == "chat" else "it was not trained for that"
            raise RequestError(f"The model {name!r} cannot {task}: {reason}.", hint)
        return model

    def _load(self, name: str, path: Path) -> ServedModel:
        files = _file_states(path)
        pipeline = load_onnx(path) if is_onnx_folder(path) else load(path, self.device)
        workers = self.workers or default_workers(pipeline.device.type)
        scheduler = SchedulerPool(workers, latency_target=self.latency_target, name=name)
        model = ServedModel(name, path, pipeline, scheduler, files=files)
        try:
            warm_up(model)
        except BaseException:
            scheduler.close()
            raise
        return model

    def reload_changed(self) -> None:
        """Load the folders whose files changed; a model is replaced once the new one is ready."""
        for name, old in list(self._models.items()):
            files = _file_states(old.path)
            if files == old.files:
                self._refused.pop(name, None)
                self.reload_errors.pop(name, None)
                continue
            if files == self._refused.get(name):
                continue
            try:
                new = self._load(name, old.path)
            except Exception as error:
                if files != _file_states(old.path):
                    continue  # still being written: try again later
                self._refused[name] = files
                self.reload_errors[name] = str(error)
                logger.error("reload failed", extra={"fields": {"model": name, "error": str(error)}})
                continue
            self._models[name] = new
            self._refused.pop(name, None)
            self.reload_errors.pop(name, None)
            logger.info("model reloaded", extra={"fields": {"model": name}})
            # Requests that began with the old model end with it.
            timer = threading.Timer(_GRACE_SECONDS, old.scheduler.close)
            timer.daemon = True
            timer.start()

    def watch(self, interval: float = 2.0) -> None:
        """Look for changed folders in a thread, until `close`."""

        def run() -> None:
            while not self._stop.wait(interval):
                self.reload_changed()

        self._watcher = threading.Thread(target=run, name="regard-serve-watch", daemon=True)
        self._watcher.start()

    def close(self, timeout: float | None = None) -> bool:
        """Finish all accepted requests and stop; False if that took too long."""
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join()
        deadline = None if timeout is None else time.monotonic() + timeout
        is_finished = True
        for model in self.models:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            is_finished = model.scheduler.close(left) and is_finished
        return is_finished


def parse_model(model: str | Path) -> tuple[str, Path]:
    """The name and the folder of a model: FOLDER, or NAME=FOLDER.

    >>> parse_model("en-fr=models/best"), parse_model("models/best")[0]
    (('en-fr', PosixPath('models/best')), 'best')
    """
    name, separator, folder = str(model).partition("=")
    if separator and name and folder and not Path(str(model)).exists():
        return name, Path(folder)
    path = Path(model)
    return path.resolve().name, path


def _file_states(folder: Path) -> tuple[Any, ...]:
    """Identifies the content of a folder: names, sizes and times of its files."""
    states = []
    try:
        for file in sorted(folder.iterdir()):
            if file.suffix in (".json", ".safetensors", ".onnx") and file.name != "training.json":
                stat = file.stat()
                states.append((file.name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
    except OSError:
        return ("unreadable",)
    return tuple(states)


def attention_page(seen: Any) -> bytes:
    """The page of the viewer for a recorded attention."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        seen.save(path, with_model=False)
        return path.read_bytes()


def warm_up(model: ServedModel) -> None:
    """Run a short input through everything that requests use.

    Modules are imported, kernels compiled and programs derived, and the throughput is known, before the first request.
    """
    requests, calls = _warm_up_work(model)
    for worker in model.scheduler.workers:
        # The first of each kind takes longest. The others come last, so that the measured throughput is theirs.
        for request in requests[::-1] + requests * _WARM_UP_ROUNDS:
            worker.submit(request, timeout=_WARM_UP_SECONDS).result()
        for call in calls:
            worker.call(("warm-up", call), lambda _, call=call: [call()], [0], timeout=_WARM_UP_SECONDS).result()


def _warm_up_work(model: ServedModel) -> tuple[list[DecodingRequest[Any]], list[Callable[[], Any]]]:
    """Requests to decode, the most frequent last, and other calls of a model."""
    work = example_work(model.pipeline)
    viewed = dataclasses.replace(work.pipeline, model=model.viewed_pipeline.model)
    calls = [*work.calls, lambda: attention_page(look(viewed, work.source, name=model.name))]
    return work.requests, [_ignore_errors(call) for call in calls]


class ExampleWork(NamedTuple):
    """Short work for a pipeline: requests to decode, other calls, and an input of `look`."""

    pipeline: Any
    source: Any
    requests: list[DecodingRequest[Any]]
    calls: list[Callable[[], Any]]


@singledispatch
def example_work(pipeline: Any) -> ExampleWork:
    """Short work of each kind that a pipeline supports; each class of pipelines registers a function."""
    return ExampleWork(pipeline, EXAMPLE_TEXT, [], [])


@example_work.register
def translator_work(translator: Translator) -> ExampleWork:
    to = next(iter(translator.target_languages), None)
    bound = translator.with_target(to, next(iter(translator.source_languages), None))
    score = partial(bound.score, [(EXAMPLE_TEXT, EXAMPLE_TEXT)], truncate=True)
    return ExampleWork(bound, EXAMPLE_TEXT, _example_requests(bound), [score])


@example_work.register
def generator_work(generator: TextGenerator) -> ExampleWork:
    calls: list[Callable[[], Any]] = [partial(generator.score, [EXAMPLE_TEXT], truncate=True)]
    if "chat" in generator.abilities:
        calls.append(partial(generator.chat_prompt, [{"role": "user", "content": EXAMPLE_TEXT}]))
    return ExampleWork(generator, EXAMPLE_TEXT, _example_requests(generator), calls)


def _example_requests(pipeline: Any) -> list[DecodingRequest[Any]]:
    configs = [dataclasses.replace(pipeline.decoding, method=method) for method in ("sample", "greedy", "beam")]
    shorter = dict(max_len=min(8, pipeline.decoding.max_len), min_len=0, n_best=1)
    short = [dataclasses.replace(config, **shorter) for config in (*configs, pipeline.decoding)]
    return [pipeline.prepare([EXAMPLE_TEXT], config, truncate=True) for config in short]


@example_work.register
def encoder_work(encoder: TextEncoder) -> ExampleWork:
    calls: dict[str, Callable[[], Any]] = {
        "embed": partial(encoder.embed, [EXAMPLE_TEXT], truncate=True),
        "classify": partial(encoder.classify, [EXAMPLE_TEXT], truncate=True),
        "answer": partial(encoder.answer, [Question("0", EXAMPLE_TEXT, EXAMPLE_TEXT)]),
    }
    return ExampleWork(encoder, EXAMPLE_TEXT, [], [calls[name] for name in encoder.abilities if name in calls])


@example_work.register
def image_work(model: ImageModel) -> ExampleWork:
    image = Image.new("RGB", (32, 32))
    return ExampleWork(model, image, [], [partial(getattr(model, name), [image]) for name in model.abilities])


def _ignore_errors(call: Callable[[], Any]) -> Callable[[], Any]:
    """A call without the errors that a request for the same would get: they do not keep a server from starting."""

    def run() -> None:
        try:
            call()
        except RegardError:
            pass
        except Exception as error:
            logger.error("warm-up failed", exc_info=error)

    return run
