"""ONNX Runtime models: the graphs of an ONNX export with the interface of the models they were exported from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import RegardError, require_package
from regard.layers.packed import Packed
from regard.models import family_name
from regard.models.bert import TEXT_HEADS
from regard.pipelines import ModelFolder, make_pipeline
from regard.pipelines.folder import is_onnx_folder

GRAPHS = {
    "transformer": ("encoder", "decoder_step"),
    "seq2seq": ("encoder", "decoder_step"),
    "gpt": ("prompt", "decoder_step"),
    "bert": ("model",),
    "vit": ("model",),
}


class OnnxModel:
    """Base class: the ONNX Runtime sessions of a folder, on CPU."""

    def __init__(self, config: Any, sessions: dict[str, Any], graphs: Sequence[Path] = ()) -> None:
        self.config, self.sessions, self.graphs = config, sessions, graphs

    def eval(self) -> "OnnxModel":
        return self

    def parameters(self) -> Iterator[Tensor]:
        """An empty tensor, whose device is the one that the graphs run on."""
        yield torch.empty(0)

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        """No modules: attention inside a graph cannot be recorded."""
        return iter(())

    def run(self, graph: str, inputs: dict[str, np.ndarray], names: Sequence[str] = ()) -> dict[str, np.ndarray]:
        """Run a graph; return its outputs, or those with these names, by name."""
        session = self.sessions[graph]
        names = names or [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, inputs)))


def _pad(source: Packed) -> dict[str, np.ndarray]:
    ids, lengths = source.padded()
    return {"ids": ids.numpy(), "mask": (torch.arange(ids.shape[1]) < lengths[:, None]).numpy()}


class OnnxImageModel(OnnxModel):
    """An image model for images of one size."""

    def __call__(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "..."]:
        size = (self.config.image_height, self.config.image_width)
        if not isinstance(images, Tensor) or images.shape[2:] != size:
            raise RegardError(f"The ONNX graph expects images of {size[0]}×{size[1]} pixels.", "Resize the images.")
        return torch.from_numpy(self.run("model", {"images": images.numpy()})["output"])


class OnnxEncoder(OnnxModel):
    """A text encoder."""

    def __call__(self, tokens: Packed, segments: Int[Tensor, "N"] | None = None) -> Float[Tensor, "rows V"]:
        output, mask = self._run(tokens, segments, "output")
        return output if TEXT_HEADS[self.config.head].is_per_text else output[mask]

    def encode(self, tokens: Packed, segments: Int[Tensor, "N"] | None = None) -> Float[Tensor, "N E"]:
        name = "encoded" if TEXT_HEADS[self.config.head].output_size(self.config) else "output"
        known = [output.name for output in self.sessions["model"].get_outputs()]
        if name not in known or self.config.pooling == "query":
            raise RegardError(
                f"This ONNX graph has no embeddings (outputs: {', '.join(known)}; pooling = {self.config.pooling!r}).",
                "Export the model again, or embed with the model folder that it was exported from.",
            )
        encoded, mask = self._run(tokens, segments, name)
        return encoded[mask]

    def _run(self, tokens: Packed, segments: Int[Tensor, "N"] | None, name: str) -> tuple[Tensor, Tensor]:
        """An output of the graph, and the mask of the tokens that are not padding."""
        inputs = _pad(tokens)
        mask = torch.from_numpy(inputs["mask"])
        if self.config.segments > 1:
            segment_ids = torch.zeros(mask.shape, dtype=torch.long)
            if segments is not None:
                segment_ids[mask] = segments
            inputs["segments"] = segment_ids.numpy()
        return torch.from_numpy(self.run("model", inputs, [name])[name]), mask


@dataclass
class OnnxState:
    """Decoding state: arrays by the names of the inputs of the decoder step."""

    beams: int
    sources: dict[str, np.ndarray]  # B rows, one per sentence
    hypotheses: dict[str, np.ndarray]  # B·K rows, one per hypothesis
    logits: Float[Tensor, "B K V"] | None = None
    """logits of the first step, if the prompt graph has computed them"""


class OnnxDecoder(OnnxModel):
    """A translator or language model that generates text token by token."""

    @property
    def continues_source(self) -> bool:
        """Language models have a graph of the prompt."""
        return "prompt" in self.sessions

    def start(self, source: Packed) -> OnnxState:
        inputs = _pad(source)
        if "prompt" in self.sessions:
            hypotheses = self.run("prompt", inputs)
            logits = torch.from_numpy(hypotheses.pop("logits"))
            last = logits[torch.arange(len(logits)), hypotheses["lengths"] - 1][:, None]
            return OnnxState(1, {}, hypotheses, last)
        outputs = self.run("encoder", inputs)
        memory = {name: array for name, array in outputs.items() if name.startswith("memory")}
        hypotheses = {name: array for name, array in outputs.items() if name not in memory}
        for step_input in self.sessions["decoder_step"].get_inputs():
            if step_input.name.startswith(("keys_", "values_")):
                shape = (len(inputs["ids"]), step_input.shape[1], 0, step_input.shape[3])
                hypotheses[step_input.name] = np.zeros(shape, np.float32)
        return OnnxState(1, {"mask": inputs["mask"], **memory}, hypotheses)

    def step(self, state: OnnxState, last: Int[Tensor, "B K"]) -> tuple[Float[Tensor, "B K V"], OnnxState]:
        if state.logits is not None:
            return state.logits, OnnxState(state.beams, state.sources, state.hypotheses)
        inputs = {"last": last.numpy(), **state.sources, **state.hypotheses}
        names = {step_input.name for step_input in self.sessions["decoder_step"].get_inputs()}
        outputs = self.run("decoder_step", {name: array for name, array in inputs.items() if name in names})
        logits = torch.from_numpy(outputs.pop("logits"))
        hypotheses = {name.removeprefix("new_"): array for name, array in outputs.items()}
        return logits, OnnxState(state.beams, state.sources, hypotheses)

    def reorder(self, state: OnnxState, indices: Int[Tensor, "B2 K2"]) -> OnnxState:
        rows, sentences = indices.flatten().numpy(), (indices[:, 0] // state.beams).numpy()
        sources = {name: array[sentences] for name, array in state.sources.items()}
        logits = None if state.logits is None else state.logits.flatten(0, 1)[rows].unflatten(0, indices.shape)
        hypotheses = {name: array[rows] for name, array in state.hypotheses.items()}
        return OnnxState(indices.shape[1], sources, hypotheses, logits)

    def __call__(self, source: Packed, target: Packed | None = None) -> Float[Tensor, "N V"]:
        """Logits of the next token: after each target token (teacher forcing), or after each token of a text."""
        if target is None:
            inputs = _pad(source)
            return torch.from_numpy(self.run("prompt", inputs)["logits"])[torch.from_numpy(inputs["mask"])]
        ids, lengths = target.padded()
        state, columns = self.start(source), []
        for t in range(ids.shape[1]):
            logits, state = self.step(state, ids[:, t : t + 1])
            columns.append(logits)
        return torch.cat(columns, dim=1)[torch.arange(ids.shape[1]) < lengths[:, None]]


def load_onnx(folder: str | Path, *, expect: type[Any] | None = None) -> Any:
    """Load a folder that `export_onnx` wrote; like `regard.load` for the model folder that it was exported from.

    `expect` is the expected class, such as Translator; another one is an error.

    >>> load_onnx("no-such-folder")
    Traceback (most recent call last):
    regard.errors.RegardError: no-such-folder: no ONNX graphs in the folder. Export them with: regard export --to onnx
    """
    folder = Path(folder)
    if not is_onnx_folder(folder):
        raise RegardError(f"{folder}: no ONNX graphs in the folder.", "Export them with: regard export --to onnx")
    runtime = require_package("onnxruntime", "onnx")
    stored = ModelFolder.open(folder, expect)
    family = family_name(stored.config)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    sessions = {}
    for name in GRAPHS[family]:
        path = folder / f"{name}.onnx"
        if not path.exists():
            raise RegardError(f"{folder}: {path.name} is missing.", "Export the model again.")
        try:
            sessions[name] = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime does not document its exceptions
            raise RegardError(f"{path}: not a valid ONNX graph ({error}).", "Export the model again.") from None
    model_class = {"bert": OnnxEncoder, "vit": OnnxImageModel}.get(family, OnnxDecoder)
    graphs = [folder / f"{name}.onnx" for name in sessions]
    model = model_class(stored.config, sessions, graphs)
    pipeline = make_pipeline(model, stored.read_tokenizers(), {}, stored.special)
    pipeline.read_settings(stored)
    return pipeline
