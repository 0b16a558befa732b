"""Run the graphs of an ONNX export in ONNX Runtime, behind the interface of the models they were made from."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import RegardError
from regard.interop.optional_packages import need
from regard.layers.packed import Packed
from regard.models import family_of
from regard.pipelines import Translator, bundle_of, check_kind, read_config, read_languages, read_tokenizers

GRAPHS = {
    "transformer": ("encoder", "decoder_step"),
    "seq2seq": ("encoder", "decoder_step"),
    "gpt": ("prompt", "decoder_step"),
    "bert": ("model",),
    "vit": ("model",),
}


class OnnxModel:
    """The graphs of a folder in place of a model; they run on CPUs."""

    def __init__(self, config: Any, sessions: dict[str, Any]) -> None:
        self.config, self.sessions = config, sessions

    def eval(self) -> "OnnxModel":
        return self

    def parameters(self) -> Iterator[Tensor]:
        """An empty tensor: its device is where the graphs run."""
        yield torch.empty(0)

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        """None: attention inside a graph cannot be recorded."""
        return iter(())

    def run(self, graph: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs of a graph by their names."""
        session = self.sessions[graph]
        return dict(zip((one.name for one in session.get_outputs()), session.run(None, inputs)))


def _padded(source: Packed) -> dict[str, np.ndarray]:
    ids, lengths = source.padded()
    return {"ids": ids.numpy(), "mask": (torch.arange(ids.shape[1]) < lengths[:, None]).numpy()}


class OnnxImageModel(OnnxModel):
    """Of images of one size."""

    def __call__(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "..."]:
        size = (self.config.image_height, self.config.image_width)
        if not isinstance(images, Tensor) or images.shape[2:] != size:
            raise RegardError(f"The graph takes images of {size[0]}×{size[1]} pixels.", "Resize the images.")
        return torch.from_numpy(self.run("model", {"images": images.numpy()})["output"])


class OnnxEncoder(OnnxModel):
    """Of texts."""

    def __call__(self, tokens: Packed, segments: Int[Tensor, "N"] | None = None) -> Float[Tensor, "rows V"]:
        inputs = _padded(tokens)
        mask = torch.from_numpy(inputs["mask"])
        if self.config.segments > 1:
            kinds = torch.zeros(mask.shape, dtype=torch.long)
            if segments is not None:
                kinds[mask] = segments
            inputs["segments"] = kinds.numpy()
        output = torch.from_numpy(self.run("model", inputs)["output"])
        return output if self.config.head == "classify" else output[mask]

    def encode(self, tokens: Packed, segments: Int[Tensor, "N"] | None = None) -> Float[Tensor, "N E"]:
        if self.config.head != "none" or self.config.pooling == "query":
            raise RegardError(
                f"This ONNX graph (head {self.config.head}, pooling {self.config.pooling}) does not give embeddings.",
                "Embed with the model folder that it was exported from, or export a model without head and query.",
            )
        return self(tokens, segments)


@dataclass
class OnnxState:
    """State of decoding: arrays by the names of the step's inputs."""

    beams: int
    sources: dict[str, np.ndarray]  # B rows: one per sentence
    own: dict[str, np.ndarray]  # B·K rows: one per hypothesis
    logits: Float[Tensor, "B K V"] | None = None
    """of the first step, where reading the prompt gave them"""


class OnnxDecoder(OnnxModel):
    """Of texts that are written token by token."""

    def start(self, source: Packed) -> OnnxState:
        inputs = _padded(source)
        if "prompt" in self.sessions:
            own = self.run("prompt", inputs)
            logits = torch.from_numpy(own.pop("logits"))
            return OnnxState(1, {}, own, logits[torch.arange(len(logits)), own["lengths"] - 1][:, None])
        outputs = self.run("encoder", inputs)
        memory = {name: array for name, array in outputs.items() if name.startswith("memory")}
        own = {name: array for name, array in outputs.items() if name not in memory}
        for one in self.sessions["decoder_step"].get_inputs():
            if one.name.startswith(("keys_", "values_")):
                own[one.name] = np.zeros((len(inputs["ids"]), one.shape[1], 0, one.shape[3]), np.float32)
        return OnnxState(1, {"mask": inputs["mask"], **memory}, own)

    def step(self, state: OnnxState, last: Int[Tensor, "B K"]) -> tuple[Float[Tensor, "B K V"], OnnxState]:
        if state.logits is not None:
            return state.logits, OnnxState(state.beams, state.sources, state.own)
        inputs = {"last": last.numpy(), **state.sources, **state.own}
        known = {one.name for one in self.sessions["decoder_step"].get_inputs()}
        outputs = self.run("decoder_step", {name: array for name, array in inputs.items() if name in known})
        logits = torch.from_numpy(outputs.pop("logits"))
        own = {name.removeprefix("new_"): array for name, array in outputs.items()}
        return logits, OnnxState(state.beams, state.sources, own)

    def reorder(self, state: OnnxState, indices: Int[Tensor, "B2 K2"]) -> OnnxState:
        rows, sentences = indices.flatten().numpy(), (indices[:, 0] // state.beams).numpy()
        sources = {name: array[sentences] for name, array in state.sources.items()}
        logits = None if state.logits is None else state.logits.flatten(0, 1)[rows].unflatten(0, indices.shape)
        own = {name: array[rows] for name, array in state.own.items()}
        return OnnxState(indices.shape[1], sources, own, logits)

    def __call__(self, source: Packed, target: Packed | None = None) -> Float[Tensor, "N V"]:
        """Logits of the token after each target token (teacher forcing), or after each token of a text."""
        if target is None:
            inputs = _padded(source)
            return torch.from_numpy(self.run("prompt", inputs)["logits"])[torch.from_numpy(inputs["mask"])]
        ids, lengths = target.padded()
        state, columns = self.start(source), []
        for t in range(ids.shape[1]):
            logits, state = self.step(state, ids[:, t : t + 1])
            columns.append(logits)
        return torch.cat(columns, dim=1)[torch.arange(ids.shape[1]) < lengths[:, None]]


def holds_graphs(folder: str | Path) -> bool:
    """Whether a folder is one that `export_onnx` wrote.

    >>> holds_graphs("no-such-folder")
    False
    """
    return any((Path(folder) / f"{name}.onnx").exists() for names in GRAPHS.values() for name in names)


def open_onnx(folder: str | Path, *, expect: type[Any] | None = None) -> Any:
    """Open a folder that `export_onnx` wrote, as `regard.load` opens the model folder that it was made from.

    If only one kind will do, such as Translator, `expect` it: another is an error.

    >>> open_onnx("no-such-folder")
    Traceback (most recent call last):
    regard.errors.RegardError: no-such-folder: there is no ONNX graph. Make it with: regard export --to onnx
    """
    folder = Path(folder)
    if not holds_graphs(folder):
        raise RegardError(f"{folder}: there is no ONNX graph.", "Make it with: regard export --to onnx")
    runtime = need("onnxruntime", "onnx")
    config, special = read_config(folder)
    check_kind(folder, config, expect)
    family = family_of(config)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    sessions = {}
    for name in GRAPHS[family]:
        path = folder / f"{name}.onnx"
        if not path.exists():
            raise RegardError(f"{folder}: there is no {path.name}.", "Export the model again.")
        try:
            sessions[name] = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # of many kinds, which the library does not name
            raise RegardError(f"{path}: not an ONNX graph ({error}).", "Export the model again.") from None
    kind = {"bert": OnnxEncoder, "vit": OnnxImageModel}.get(family, OnnxDecoder)
    tokenizers = () if family == "vit" else read_tokenizers(folder, foreign=special is not None)
    bundle = bundle_of(kind(config, sessions), tokenizers, {}, special)
    if isinstance(bundle, Translator):
        bundle.languages = read_languages(folder)
    return bundle
