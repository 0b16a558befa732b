"""Translating with ONNX Runtime: the graphs of a Transformer, behind the protocol that all decoding speaks."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.data.special import TRANSLATING
from regard.errors import RegardError
from regard.folder import Translator, read_config, read_languages, read_tokenizers
from regard.interop.extras import need
from regard.interop.onnx_graphs import ENCODER, STEP
from regard.layers.packed import Packed
from regard.models.transformer import TransformerConfig


@dataclass
class OnnxState:
    """What decoding carries from token to token: arrays by the names that the graph has for them."""

    beams: int
    sources: dict[str, np.ndarray]  # B rows: the mask, and keys and values of the sources
    own: dict[str, np.ndarray]  # B·K rows: keys and values of the text so far


class OnnxModel:
    """The two graphs of a folder, as a model that can be decoded."""

    def __init__(self, config: TransformerConfig, encoder: Any, step: Any) -> None:
        self.config, self._encoder, self._step = config, encoder, step
        self._read, self._grown = ([one.name for one in session.get_outputs()] for session in (encoder, step))

    def eval(self) -> "OnnxModel":
        return self

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        """None: what its attentions regard stays inside the graphs."""
        return iter(())

    def start(self, source: Packed) -> OnnxState:
        ids, lengths = source.padded()
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).numpy()
        memory = dict(zip(self._read, self._encoder.run(None, {"ids": ids.numpy(), "mask": mask})))
        config = self.config
        groups, width = config.kv_heads or config.heads, config.head_width or config.width // config.heads
        nothing = np.zeros((len(ids), groups, 0, width), np.float32)
        own = {name.removeprefix("new_"): nothing for name in self._grown if name != "logits"}
        return OnnxState(1, {"mask": mask, **memory}, own)

    def step(self, state: OnnxState, last: Int[Tensor, "B K"]) -> tuple[Float[Tensor, "B K V"], OnnxState]:
        given = {"last": last.numpy(), **state.sources, **state.own}
        made = dict(zip(self._grown, self._step.run(None, given)))
        logits = torch.from_numpy(made.pop("logits"))
        own = {name.removeprefix("new_"): array for name, array in made.items()}
        return logits, OnnxState(state.beams, state.sources, own)

    def reorder(self, state: OnnxState, indices: Int[Tensor, "B2 K2"]) -> OnnxState:
        rows, sentences = indices.flatten().numpy(), (indices[:, 0] // state.beams).numpy()
        sources, count = state.sources, len(state.sources["mask"])
        if len(sentences) != count or (sentences != np.arange(count)).any():
            sources = {name: array[sentences] for name, array in sources.items()}
        return OnnxState(indices.shape[1], sources, {name: array[rows] for name, array in state.own.items()})

    def __call__(self, source: Packed, target: Packed) -> Float[Tensor, "N V"]:
        """Logits for the token after each target token, the target being given, step by step."""
        ids, lengths = target.padded()
        state, columns = self.start(source), []
        for t in range(ids.shape[1]):
            logits, state = self.step(state, ids[:, t : t + 1])
            columns.append(logits)
        return torch.cat(columns, dim=1)[torch.arange(ids.shape[1]) < lengths[:, None]]


class OnnxTranslator(Translator):
    """A translator whose model runs in ONNX Runtime, on CPUs."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def length_limit(self) -> int:
        """The graphs hold tables of positions, whatever their kind."""
        return self.trained_length


def holds_graphs(folder: str | Path) -> bool:
    """Whether a folder is one that `export_onnx` wrote.

    >>> holds_graphs("no-such-folder")
    False
    """
    return (Path(folder) / ENCODER).exists()


def open_onnx(folder: str | Path) -> OnnxTranslator:
    """A folder that `export_onnx` wrote, ready to translate and to score with.

    >>> open_onnx("no-such-folder")
    Traceback (most recent call last):
    regard.errors.RegardError: no-such-folder: there is no encoder.onnx. Make it with: regard export --to onnx
    """
    folder = Path(folder)
    for name in (ENCODER, STEP):
        if not (folder / name).exists():
            raise RegardError(f"{folder}: there is no {name}.", "Make it with: regard export --to onnx")
    runtime = need("onnxruntime", "onnx")
    config, special = read_config(folder)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    sessions = []
    for name in (ENCODER, STEP):
        try:
            sessions.append(runtime.InferenceSession(folder / name, options, providers=["CPUExecutionProvider"]))
        except Exception as error:  # of many kinds, which the library does not name
            raise RegardError(f"{folder / name}: not a graph ({error}).", "Export it again.") from None
    source, target = read_tokenizers(folder, foreign=special is not None)
    model = OnnxModel(config, *sessions)
    languages = read_languages(folder)
    return OnnxTranslator(model, source, target, special=special or TRANSLATING, languages=languages)  # type: ignore[arg-type]
