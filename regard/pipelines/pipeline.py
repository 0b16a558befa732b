"""Base classes of the pipelines."""

import dataclasses
import hashlib
import logging
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from regard.data.text.special_tokens import SpecialTokens
from regard.data.text.tokenizer import Tokenizer
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.layers.packed import Packed, pack
from regard.models import family_name
from regard.models.config_checks import length_limit
from regard.pipelines.resumable_file import AllowedChange

if TYPE_CHECKING:
    from regard.pipelines.folder import ModelFolder

logger = logging.getLogger("regard")


@dataclass(eq=False)
class _Stored:
    """The part of a pipeline that remembers where it is stored."""

    folders: frozenset[Path] = field(default=frozenset(), kw_only=True, repr=False, compare=False)
    """folders that it was loaded from or saved to, which `save` may replace"""


class Pipeline(_Stored):
    """Base class of all pipelines: a model, ready to use, that can be saved as a model folder."""

    description: ClassVar[str]
    """noun phrase with its article, for messages"""
    commands: ClassVar[str]
    """commands that run it, for messages"""
    tokenizer_count: ClassVar[int]
    """number of tokenizers: 2 for source and target, 1 for text, 0 for images"""
    sides: ClassVar[tuple[str, ...]] = ("text",)
    """the sequences that the model reads"""
    fields: tuple[str, ...] = ("source",)
    """names of the inputs of `look`"""
    abilities: tuple[str, ...] = ()
    """methods that the model supports, such as translate or classify; chat models also `chat`"""
    continues_source: ClassVar[bool] = False
    """whether the output of the model continues its input, as that of a language model does"""
    stored_keys: ClassVar[frozenset[str]] = frozenset()
    """keys of config.json that `write_settings` may return"""
    head: Any = None
    """what the outputs of an encoder or image model are; None for models that generate text"""
    model: Any
    training: dict[str, Any]
    special: SpecialTokens = SpecialTokens()
    """special token ids; the default is that of models trained with Regard"""

    @classmethod
    def from_parts(
        cls,
        model: Any,
        tokenizers: tuple[Tokenizer, ...],
        training: dict[str, Any],
        special: SpecialTokens | None = None,
    ) -> Any:
        """The pipeline of a model and its tokenizers, of which there may be more than it uses."""
        more = {} if special is None else {"special": special}
        return cls(model, *tokenizers[: cls.tokenizer_count], training=training, **more)  # type: ignore[call-arg]

    def with_target(self, to: str | None = None, source_language: str | None = None) -> Any:
        """The pipeline for these languages; only a translator has any."""
        if (to, source_language) != (None, None):
            raise RegardError("Only a translator has languages.", "Leave out to and source_language.")
        return self

    def inherit_settings(self, origin: Any) -> None:
        """Take over the settings of the pipeline from which this one is fine-tuned."""

    def as_saved(self) -> Any:
        """The pipeline as it is stored in a model folder."""
        return self

    def write_files(self, folder: Path) -> None:
        """Write the files of a model folder beside config, weights and tokenizers, and remove those of other models."""

    def write_settings(self, folder: Path) -> dict[str, Any]:
        """Keys of config.json beside those of the model config; also writes what they need."""
        return {}

    def read_settings(self, folder: "ModelFolder") -> None:
        """Set what `write_files` and `write_settings` have stored."""

    @property
    def tokenizers(self) -> tuple[Tokenizer, ...]:
        """The tokenizers of source and target; empty for images."""
        return ()

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    def __repr__(self) -> str:
        """The model, its input, and its training: one line each."""
        config = self.model.config
        count = sum(parameter.numel() for parameter in self.model.parameters())
        sizes = f"width {config.width}" + (f", {count:,} parameters" if count else "")
        lines = [f"{type(self).__name__}: {family_name(config)} of {sizes}, on {self.device}"]
        lines += [f"  input: {self._describe_input()}"]
        facts = [f"step {self.training['step']}"] if "step" in self.training else []
        scores = self.training.get("validation")
        if isinstance(scores, dict):
            facts += [f"{name} {value:.4g}" for name, value in scores.items() if isinstance(value, float)]
        return "\n".join([*lines, *([f"  training: {', '.join(facts)}"] if facts else [])])

    def _describe_input(self) -> str:
        distinct = self.tokenizers[: 1 if self.tokenizers[0] is self.tokenizers[-1] else 2]
        return ", ".join(f"{tokenizer.kind} tokenizer of {tokenizer.vocab_size:,} entries" for tokenizer in distinct)

    def fingerprint(self) -> str:
        """A hash of the weights, config and tokenizers."""
        digest = hashlib.sha256()
        for tokenizer in self.tokenizers:
            digest.update(tokenizer.backend_tokenizer.to_str().encode())
        for model in [self.model, *getattr(self, "ensemble_members", ())]:
            digest.update(repr(model.config).encode())
            for tensor in model.parameters():
                digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
            for graph in getattr(model, "graphs", ()):  # an ONNX model has no parameters
                digest.update(graph.read_bytes())
        return digest.hexdigest()[:16]

    def save(self, path: str | Path, *, precision: Literal["float32", "int8"] = "float32") -> None:
        """Write a model folder, which `load` opens; with `precision="int8"` in a quarter of the size.

        The folder must not contain another model.
        """
        from regard.pipelines.folder import save  # imports every pipeline

        save(path, self, precision=precision)


def best_text(inputs: str | Sequence[str], results: Sequence[Any]) -> Any:
    """The text of the best of the results of one input, or a list with that of each input."""
    return results[0].text if isinstance(inputs, str) else [n_best[0].text for n_best in results]


class TextPipeline(Pipeline):
    """Base class of the pipelines for text: batches of token ids, and length limits."""

    _has_warned_of_length = False

    @property
    def models(self) -> Sequence[Any]:
        """The model and, in an ensemble, its other members."""
        return [self.model]

    @property
    def trained_length(self) -> int:
        """Maximum sequence length in training, in tokens including special ones."""
        return min(model.config.max_len for model in self.models)

    @property
    def length_limit(self) -> int | None:
        """Maximum sequence length of the model, in tokens including special ones; None if its positions extrapolate."""
        limits = (length_limit(model.config) for model in self.models)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def truncation_changes(self) -> tuple[AllowedChange, ...]:
        """Whether an output file may be resumed with `truncate` after a text was too long.

        It may if the model cannot process texts beyond the trained length: none of the texts so far was.
        """
        return (("truncate", False, True),) if self.length_limit == self.trained_length else ()

    def pack(self, sequences: Sequence[Sequence[int]]) -> Packed:
        """Pack sequences of ids into one batch on the model's device."""
        return pack(sequences).to(self.device)

    def limit_length(
        self, ids: list[int], name: str, truncate: bool, *, special_count: int, keep_end: bool = False
    ) -> list[int]:
        """Check or truncate the ids of a text to which `special_count` special tokens will be added.

        With `truncate`, a text beyond the trained length is cut; `keep_end` keeps its end instead of its beginning.
        Otherwise such a text gives a warning, or an error if it exceeds the model's length limit. `name` identifies the
        text in the error.
        """
        trained = self.trained_length - special_count
        if len(ids) <= trained:
            return ids
        if truncate:
            return ids[len(ids) - trained :] if keep_end else ids[:trained]
        limit = self.length_limit
        if limit is not None and len(ids) > limit - special_count:
            hint = "Shorten it, or use --truncate to drop its beginning."
            raise RegardError(
                f"{name} has {len(ids)} tokens; the model supports at most {limit - special_count}.",
                hint if keep_end else "Split it, or use --truncate to drop its end.",
            )
        self.warn_beyond_trained_length()
        return ids

    def warn_beyond_trained_length(self) -> None:
        """Warn, once per pipeline, that a text is longer than any in training."""
        if not self._has_warned_of_length:
            self._has_warned_of_length = True
            logger.warning(
                "Warning: a text exceeds the maximum training length of %d tokens; quality may be lower.",
                self.trained_length,
            )


class DecodingPipeline(TextPipeline):
    """Base class of the pipelines that write text, token by token: translators and language models."""

    stored_keys = frozenset({"decoding"})
    decoding: DecodeConfig
    """default options of decoding"""

    @abstractmethod
    def record_search(
        self, text: str, config: DecodeConfig, prefix: str, **phrases: Any
    ) -> tuple[list[Any], list[int]]:
        """Decode a text; the outputs, of which the first has the search history, and the ids of the text."""

    @abstractmethod
    def forced_ids(self, prefix: str) -> list[int]:
        """The ids with which every output begins, given a forced prefix."""

    @abstractmethod
    def output_limit(self, config: DecodeConfig, source: Sequence[int]) -> int:
        """The maximum length of an output in tokens."""

    @abstractmethod
    def forced_inputs(self, source: list[int], outputs: Sequence[list[int]]) -> tuple[Any, ...]:
        """Arguments of the model's forward for outputs of one source (teacher forcing)."""

    def inherit_settings(self, origin: Any) -> None:
        self.decoding = origin.decoding

    def write_settings(self, folder: Path) -> dict[str, Any]:
        is_default = self.decoding == type(self).decoding
        return {} if is_default else {"decoding": changed_fields(self.decoding)}

    def read_settings(self, folder: "ModelFolder") -> None:
        self.decoding = folder.read_section("decoding", DecodeConfig()) or self.decoding


def changed_fields(decoding: DecodeConfig) -> dict[str, Any]:
    """The options of decoding that differ from those of `DecodeConfig()`.

    >>> changed_fields(DecodeConfig(beam=4, suppress_sequences=((7,),)))
    {'beam': 4, 'suppress_sequences': ((7,),)}
    """
    usual = dataclasses.asdict(DecodeConfig())
    return {name: value for name, value in dataclasses.asdict(decoding).items() if value != usual[name]}
