"""Model folders: reading and writing.

config.json           format, family and sizes of the model; special token ids, if not the default ones; SHA-256 of
                      the tokenizer files; CRC-32 of weights and sizes; precision, if int8; default options of
                      decoding, if not the usual ones; resizing of images and tokens of languages, if imported
model.safetensors     weights, in float32 or int8; no executable code
tokenizer.json        and target_tokenizer.json if source and target have different tokenizers; none for images
shortlist.safetensors target tokens that may translate each source token, if learned (see `regard shortlist`)
sentence_embedding.safetensors  linear layers of sentence embeddings, if any
training.json         provenance: recipe, data fingerprints, seed, versions, scores
"""

import dataclasses
import hashlib
import json
import logging
import shlex
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as weights_to_bytes
from torch import Tensor, nn

from regard.config_reader import fill_config, json_bytes, read_json
from regard.data.text.special_tokens import SpecialTokens
from regard.data.text.tokenizer import FOREIGN_KIND, Tokenizer
from regard.devices import find_device
from regard.errors import RegardError
from regard.files import check_output_folder, write_atomically
from regard.kernels.cpu.int8_linear import quantize_weight
from regard.layers.fusion import fuse_residuals
from regard.models import FAMILIES, family_name, make_model
from regard.models.parameters import SkipInitialization, find_change, layer_counts
from regard.pipelines.pipeline import Pipeline
from regard.ranges import OneOf, check_value, format_value

if TYPE_CHECKING:
    from regard.pipelines.image_model import ImageModel
    from regard.pipelines.text_encoder import TextEncoder
    from regard.pipelines.text_generator import TextGenerator
    from regard.pipelines.translator import Translator

    AnyPipeline = Translator | TextGenerator | TextEncoder | ImageModel

FORMAT = 1
# Folders with int8 weights: versions that do not support them refuse this format.
INT8_FORMAT = 2
WeightPrecision = Literal["float32", "int8"]
_TOKENIZER_FILES = ("tokenizer.json", "target_tokenizer.json")
_FINGERPRINTS = "tokenizer_sha256"
_PRECISION = "precision"
_CHECKSUM = "checksum"
# Bytes whose checksum a thread computes at a time.
_CHECKSUM_BLOCK = 1 << 24
logger = logging.getLogger("regard")
_FIX = "Fix the file, or restore it from a good copy."
_fill = partial(fill_config, hint="Upgrade regard, or fix the file.")
C = TypeVar("C")
P = TypeVar("P", "Translator", "TextGenerator", "TextEncoder", "ImageModel")
# The classes of pipelines by name, as modules: a command imports only the one that it runs.
PIPELINES = {
    "translator": ("regard.pipelines.translator", "Translator"),
    "text_generator": ("regard.pipelines.text_generator", "TextGenerator"),
    "text_encoder": ("regard.pipelines.text_encoder", "TextEncoder"),
    "image_model": ("regard.pipelines.image_model", "ImageModel"),
}
# Keys of config.json that are neither fields of the model config nor settings of the pipeline.
_FOLDER_KEYS = frozenset({"format", "family", "shared_tokenizer", "special", _FINGERPRINTS, _PRECISION, _CHECKSUM})


def pipeline_class(config: Any) -> type[Any]:
    """The class of the pipeline that runs models of this config.

    >>> pipeline_class(FAMILIES["gpt"].config()).__name__
    'TextGenerator'
    """
    module, name = PIPELINES[FAMILIES[family_name(config)].pipeline]
    return getattr(import_module(module), name)


@overload
def save(path: str | Path, pipeline: Pipeline, *, precision: WeightPrecision = "float32") -> None: ...
@overload
def save(path: Pipeline, pipeline: str | Path, *, precision: WeightPrecision = "float32") -> None: ...
def save(path: Any, pipeline: Any, *, precision: WeightPrecision = "float32") -> None:
    """Write a model folder, which must not contain another model; the arguments may be in either order.

    With `precision="int8"`, the weights of linear layers are stored as int8, in a quarter of the size. `load` converts
    them to float32; `DecodeConfig(precision="int8")` decodes with exactly the stored values. A folder stores the config
    and the parameters of a model: other changes are an error.
    """
    if isinstance(pipeline, str | Path) and not isinstance(path, str | Path):
        path, pipeline = pipeline, path
    check_value(WeightPrecision, precision, "precision")
    check_storable(pipeline)
    resolved = Path(path).resolve()
    check_output_folder(path, allow_content=resolved in pipeline.folders)
    write_model(Path(path), pipeline, precision)
    pipeline.folders |= {resolved}


def check_storable(pipeline: Any) -> None:
    """Raise an error if a pipeline has more than a config and parameters describe: other modules, or several models."""
    model = getattr(pipeline, "model", None)
    if not isinstance(pipeline, Pipeline) or not isinstance(model, nn.Module):
        what = "A model that runs ONNX graphs" if isinstance(pipeline, Pipeline) else type(pipeline).__name__
        raise RegardError(
            f"{what} cannot be stored as a model.", "Pass a pipeline that regard.load, train or import returned."
        )
    if getattr(pipeline, "ensemble_members", ()):
        raise RegardError("An ensemble of several models cannot be stored as one.", "Store each model by itself.")
    if change := find_change(model):
        raise RegardError(
            f"The model has changed in a way that its config does not describe: {change}.",
            "Undo the change; or describe it in the config: register a score or a family, and build the model with it.",
        )


def write_model(folder: Path, pipeline: Pipeline, precision: WeightPrecision = "float32") -> None:
    """Write a model folder, or replace it. Each file is written atomically; the weights and config.json come last."""
    pipeline = pipeline.as_saved()
    write_tokenizers(folder, *pipeline.tokenizers)
    write_atomically(folder / "training.json", json_bytes(pipeline.training))
    pipeline.write_files(folder)
    if precision == "int8":
        weights = quantize_weights(pipeline.model)
    else:
        # Tied weights are stored once.
        parameters = pipeline.model.named_parameters()
        weights = {name: tensor.detach().float().cpu().contiguous() for name, tensor in parameters}
    write_atomically(folder / "model.safetensors", _align_tensors(weights_to_bytes(weights, metadata={"format": "pt"})))
    write_config(folder, pipeline, precision, weights)


def write_config(
    folder: Path,
    pipeline: Pipeline,
    precision: WeightPrecision = "float32",
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write config.json, with the checksum of the stored weights; the tokenizers must be written before."""
    family = family_name(pipeline.model.config)
    config: dict[str, Any] = {"format": FORMAT, "family": family}
    if precision == "int8":
        config |= {"format": INT8_FORMAT, _PRECISION: precision}
    if pipeline.tokenizers:
        config["shared_tokenizer"] = pipeline.tokenizers[0] is pipeline.tokenizers[-1]
        config[_FINGERPRINTS] = _fingerprints(folder)
    config |= pipeline.write_settings(folder)
    # The special ids also mark a foreign tokenizer.
    has_foreign_tokenizer = any(tokenizer.kind == FOREIGN_KIND for tokenizer in pipeline.tokenizers)
    if has_foreign_tokenizer or pipeline.special != pipeline_class(pipeline.model.config).special:
        config["special"] = dataclasses.asdict(pipeline.special)
    fields = dataclasses.asdict(pipeline.model.config)
    checksum = {} if weights is None else {_CHECKSUM: _checksum(fields, weights)}
    config |= fields | checksum
    write_atomically(folder / "config.json", json_bytes(config))


def _checksum(fields: Mapping[str, Any], weights: Mapping[str, Tensor]) -> str:
    """CRC-32 of the fields of a model config and of the weights, with their names."""
    blocks: list[Any] = [json.dumps(fields, sort_keys=True).encode()]
    for name, tensor in sorted(weights.items()):
        blocks += [name.encode(), *tensor.reshape(-1).view(torch.uint8).split(_CHECKSUM_BLOCK)]
    with ThreadPoolExecutor() as pool:  # zlib releases the interpreter lock
        sums = pool.map(lambda block: zlib.crc32(block if isinstance(block, bytes) else block.numpy()), blocks)
        return f"{zlib.crc32(b''.join(checksum.to_bytes(4, 'big') for checksum in sums)):08x}"


def _align_tensors(file: bytes) -> bytes:
    """Pad the header of a safetensors file with spaces, so that the tensors start at a multiple of 64 bytes.

    Loaded tensors are views of the file, and CPU kernels round differently on unaligned addresses.
    """
    end = 8 + int.from_bytes(file[:8], "little")
    padding = -end % 64
    return (end - 8 + padding).to_bytes(8, "little") + file[8:end] + b" " * padding + file[end:]


def write_tokenizers(folder: Path, *tokenizers: Tokenizer) -> None:
    """Write one file per distinct tokenizer; a shared tokenizer is written once."""
    distinct = [tokenizer for i, tokenizer in enumerate(tokenizers) if tokenizer is not tokenizers[0] or i == 0]
    for name, tokenizer in zip(_TOKENIZER_FILES, distinct):
        tokenizer.save(folder / name)
    for name in _TOKENIZER_FILES[len(distinct) :]:
        (folder / name).unlink(missing_ok=True)  # left by a previous model in this folder


def read_tokenizers(folder: Path, *, foreign: bool = False) -> tuple[Tokenizer, Tokenizer]:
    """The source and target tokenizers of a folder, the same object if shared; `foreign`: from another format."""
    source_path, target_path = (folder / name for name in _TOKENIZER_FILES)
    source = Tokenizer.load(source_path, foreign=foreign)
    return source, Tokenizer.load(target_path, foreign=foreign) if target_path.exists() else source


@overload
def load(path: str | Path | Sequence[str | Path], device: str = "auto", *, expect: type[P]) -> P: ...
@overload
def load(path: str | Path, device: str = "auto") -> "AnyPipeline": ...
@overload
def load(path: list[Any] | tuple[Any, ...], device: str = "auto") -> "Translator": ...
def load(path, device="auto", *, expect=None):
    """Load a model folder as the pipeline of its family: Translator, TextGenerator, TextEncoder or ImageModel.

    No code from the folder is executed. A list of folders loads an ensemble of translators. If the pipeline is not of
    the class `expect`, an error is raised.

    >>> load("no-such-folder")
    Traceback (most recent call last):
    regard.errors.RegardError: no-such-folder: model folder not found. Train one with: regard train
    """
    if not isinstance(path, str | Path):
        return _load_ensemble(path, device)
    if not str(path) or "\0" in str(path):
        raise RegardError(
            f"{path!r} is not the path of a model folder.", "Pass a folder that regard train or regard import wrote."
        )
    torch_device = find_device(device)
    folder = ModelFolder.open(path, expect)
    model = model_from_weights(folder.config, folder.read_weights(), folder.weights_file)
    tokenizers = folder.read_tokenizers()
    training: dict[str, Any] = {}
    if (folder.path / "training.json").exists():
        try:
            training = read_json(folder.path / "training.json")
        except RegardError as error:  # only provenance: the model runs without it
            logger.warning("%s The model is used without it.", error.message)
    model = model.to(torch_device).eval()
    if torch_device.type == "cuda":
        fuse_residuals(model)
    pipeline = make_pipeline(model, tokenizers, training, folder.special)
    pipeline.folders = frozenset([folder.path.resolve()])
    pipeline.read_settings(folder)
    return pipeline


def _load_ensemble(paths: Any, device: str) -> "Translator":
    from regard.pipelines.translator import Translator

    if not isinstance(paths, Sequence) or isinstance(paths, bytes) or not paths:
        raise RegardError(
            f"Expected the path of a model folder, or a list of paths (got {format_value(paths)}).",
            'For example: load("model").',
        )
    first, *others = [load(path, device, expect=Translator) for path in paths]
    for path, other in zip(paths[1:], others):
        if (other.tokenizers, other.special) != (first.tokenizers, first.special):
            raise RegardError(
                f"{path}: its tokenizers differ from those of {paths[0]}.",
                "The models of an ensemble must share their tokenizers.",
            )
    return dataclasses.replace(first, ensemble_members=[other.model for other in others])


def _fingerprints(folder: Path) -> dict[str, str]:
    """SHA-256 of the tokenizer files of a folder, by file name, with Unix line ends."""
    files = (folder / name for name in _TOKENIZER_FILES)
    content = {file.name: file.read_bytes().replace(b"\r\n", b"\n") for file in files if file.exists()}
    return {name: hashlib.sha256(text).hexdigest() for name, text in content.items()}


def is_onnx_folder(folder: str | Path) -> bool:
    """Whether `export_onnx` wrote a folder.

    >>> is_onnx_folder("no-such-folder")
    False
    """
    return any((Path(folder) / f"{name}.onnx").exists() for name in ("encoder", "prompt", "decoder_step", "model"))


def make_pipeline(
    model: Any, tokenizers: tuple[Tokenizer, ...], training: dict[str, Any], special: SpecialTokens | None = None
) -> Any:
    """The pipeline of a model and its tokenizers (none for images), by the family of the model."""
    return pipeline_class(model.config).from_parts(model, tokenizers, training, special)


def vocab_sizes(config: Any) -> tuple[int, ...]:
    """The vocabulary sizes in a model config: source and target, one, or none.

    >>> vocab_sizes(FAMILIES["gpt"].config(vocab=7))
    (7,)
    """
    return tuple(getattr(config, name) for name in ("vocab", "source_vocab", "target_vocab") if hasattr(config, name))


@dataclass(frozen=True)
class ModelFolder:
    """A model folder, of which config.json has been read and checked; the other files are read by methods."""

    path: Path
    table: dict[str, Any] = field(repr=False)
    """config.json"""
    fields: dict[str, Any] = field(repr=False)
    """of these, the fields of the model config"""
    config: Any
    """config of the model"""
    special: SpecialTokens | None
    """special token ids, or None if they are the default ones"""

    @staticmethod
    def open(path: str | Path, expect: type[Any] | None = None) -> "ModelFolder":
        """Read config.json. If the pipeline of the folder is not of the class `expect`, an error is raised."""
        folder = Path(path)
        file = folder / "config.json"
        if not folder.is_dir():
            raise RegardError(f"{folder}: model folder not found.", "Train one with: regard train")
        if not file.exists() and (folder / "state").is_dir():
            raise RegardError(
                f"{folder} contains a training run that stopped before its first validation.",
                "Resume it with the same regard train command.",
            )
        if not file.exists():
            raise RegardError(
                f"{folder} is not a model folder: config.json is missing.",
                "Pass a folder that regard train or regard import wrote.",
            )
        table = read_json(file)
        if type(table.get("format")) is not int:
            advice = "Pass a folder that Regard wrote."
            if "architectures" in table:
                advice = f"Import the model first: regard import {shlex.quote(str(folder))} --out MODEL"
            raise RegardError(f"{file}: not a Regard config (`format` is missing).", advice)
        if table["format"] > INT8_FORMAT:
            number = format_value(table["format"])
            raise RegardError(
                f"{file}: format {number} is newer than this version of Regard supports ({INT8_FORMAT}).",
                "Upgrade regard.",
            )
        family = FAMILIES[check_value(Annotated[str, OneOf(FAMILIES)], table.get("family"), f"{file}: family")]
        special = read_section(file, table, "special", SpecialTokens())
        if table.get("shared_tokenizer") is False and not (folder / "target_tokenizer.json").exists():
            raise RegardError(
                f"{folder}: target_tokenizer.json is missing.", "Restore it: the tokenizers are not shared."
            )
        default = family.config()
        other = _FOLDER_KEYS | pipeline_class(default).stored_keys
        fields = {key: value for key, value in table.items() if key not in other}
        config = _fill(default, fields, file)
        try:
            config.check()
        except RegardError as error:
            raise RegardError(f"{file}: {error.message}", _FIX) from None
        stored = ModelFolder(folder, table, fields, config, special)
        actual = stored.pipeline_class
        if expect not in (None, actual):
            assert expect is not None
            raise RegardError(
                f"{folder} contains {actual.description}, not {expect.description}.", f"Use it with: {actual.commands}."
            )
        return stored

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def weights_file(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def pipeline_class(self) -> type[Any]:
        """The class of the pipeline that runs the model."""
        return pipeline_class(self.config)

    def read_section(self, key: str, default: C) -> C | None:
        """The config in an object inside config.json; None if there is none."""
        return read_section(self.config_file, self.table, key, default)

    def read_weights(self) -> dict[str, Tensor]:
        """The weights in float32; a warning if they, or the model config, have changed since the folder was written."""
        weights = _read_weights(self.weights_file, self.config)
        if _CHECKSUM in self.table and self.table[_CHECKSUM] != _checksum(self.fields, weights):
            logger.warning(
                "%s: weights or sizes are not those that were saved (%s in config.json). Restore the folder from a "
                "good copy; if you changed it on purpose, load and save it once.",
                self.path,
                _CHECKSUM,
            )
        name = f"{self.config_file}: {_PRECISION}"
        precision = check_value(WeightPrecision, self.table.get(_PRECISION, "float32"), name)
        return dequantize_weights(weights, self.weights_file) if precision == "int8" else weights

    def read_tokenizers(self) -> tuple[Tokenizer, ...]:
        """The tokenizers (none for images), after checking that they are those of the model."""
        if not self.pipeline_class.tokenizer_count:
            return ()
        tokenizers = read_tokenizers(self.path, foreign=self.special is not None)
        for tokenizer, size in zip(tokenizers, vocab_sizes(self.config)):
            entries = tokenizer.largest_id + 1
            if entries > size or (self.special is None and entries != size):
                raise RegardError(
                    f"{self.path}: the tokenizer has {entries} entries, but the model's vocabulary has {size}.",
                    "Check that all files come from the same model.",
                )
        self._check_fingerprints()
        return tokenizers

    def _check_fingerprints(self) -> None:
        """Check that the tokenizer files are those of the model; older folders have no fingerprints."""
        expected = self.table.get(_FINGERPRINTS)
        if expected is None:
            return
        if not isinstance(expected, dict):
            raise RegardError(
                f"{self.config_file}: {_FINGERPRINTS} must be an object (got {format_value(expected)}).", _FIX
            )
        for name, fingerprint in _fingerprints(self.path).items():
            if expected.get(name) != fingerprint:
                raise RegardError(
                    f"{self.path / name}: not the tokenizer that the model was saved with.",
                    f"Restore it. If you changed it on purpose, remove {_FINGERPRINTS} from config.json.",
                )


def read_section(file: Path, table: Mapping[str, Any], key: str, default: C) -> C | None:
    """The config in an object inside the table of a file; None if there is none."""
    section = table.get(key)
    if section is not None and not isinstance(section, dict):
        raise RegardError(f"{file}: {key} must be an object (got {format_value(section)}).", _FIX)
    return None if section is None else _fill(default, section, file, f"{key}.")


def _read_weights(path: Path, config: Any) -> dict[str, Tensor]:
    """Read the tensors of a file, after checking their names and shapes against the config."""
    try:
        # Read, not mapped: rewriting a mapped file in place would kill the process.
        with safe_open(path, framework="pt", backend="pread") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        _check_shapes(config, shapes, path)
        return load_file(path, backend="pread")
    except FileNotFoundError:
        hint = "Training may have been interrupted: resume it with the same command."
        if next(path.parent.glob("*.onnx"), None):
            hint = "The folder contains ONNX graphs: load them with load_onnx, or with a command that runs models."
        raise RegardError(f"{path}: file not found.", hint) from None
    except (SafetensorError, OSError, ValueError) as error:
        raise RegardError(f"{path}: the file is damaged ({error}).", "Restore the file from a good copy.") from None


def _check_shapes(config: Any, shapes: Mapping[str, Sequence[int]], origin: str | Path) -> None:
    """Check the sizes of a config against the tensors, before allocating anything of these sizes."""
    for name, count in layer_counts(config).items():
        if count > len(shapes):
            raise _mismatch(origin, f"{name} is {count:,}, but there are only {len(shapes):,} tensors")
    sizes = {"width": config.width}
    if hasattr(config, "heads"):
        sizes["heads × head width"] = config.heads * (getattr(config, "head_width", 0) or config.width // config.heads)
    dimensions = {size for shape in shapes.values() for size in shape}
    for name, size in sizes.items():
        if size not in dimensions:
            raise _mismatch(origin, f"{name} is {size:,}, but no tensor has this dimension")


def _mismatch(origin: str | Path, detail: str) -> RegardError:
    return RegardError(
        f"{origin}: the weights do not match the config: {detail}.", "Check that all files come from the same model."
    )


def model_from_weights(config: Any, weights: Mapping[str, Tensor], origin: str | Path) -> Any:
    """Build a model with these weights, without initializing others; float32 weights are not copied.

    >>> config = FAMILIES["gpt"].config(width=8, heads=2, layers=1, feedforward=8, vocab=5)
    >>> weights = {name: parameter.detach() for name, parameter in make_model(config).named_parameters()}
    >>> model = model_from_weights(config, weights, "memory")
    >>> model.output.weight.data_ptr() == weights["embedding.tokens.weight"].data_ptr()
    True
    """
    _check_shapes(config, {name: tensor.shape for name, tensor in weights.items()}, origin)
    with SkipInitialization():
        model = make_model(config)
    _check_names(dict(model.named_parameters()), weights, origin)
    loaded = {id(meta): nn.Parameter(weights[name].float()) for name, meta in model.named_parameters()}
    for module in model.modules():
        for name, meta in list(module.named_parameters(recurse=False)):
            setattr(module, name, loaded[id(meta)])
    return model


def load_weights(
    model: nn.Module, weights: Mapping[str, Tensor], origin: str | Path, allow_mismatch: tuple[str, ...] = ()
) -> None:
    """Copy weights into a model. Other names or shapes are an error, unless they start with `allow_mismatch`."""
    parameters = dict(model.named_parameters())
    reinitialized = _check_names(parameters, weights, origin, allow_mismatch)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name not in reinitialized:
                parameter.copy_(weights[name])


def _check_names(
    parameters: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    origin: str | Path,
    allow_mismatch: tuple[str, ...] = (),
) -> set[str]:
    """Names of missing, unexpected or reshaped weights; an error unless `allow_mismatch` covers them."""
    mismatched = {n for n in parameters.keys() | weights.keys() if n not in parameters or n not in weights}
    mismatched |= {n for n in parameters.keys() & weights.keys() if parameters[n].shape != weights[n].shape}
    allowed = {n for n in mismatched if n.startswith(allow_mismatch)} if allow_mismatch else set()
    mismatched -= allowed
    if mismatched:
        raise _mismatch(origin, f"{', '.join(sorted(mismatched)[:5])}{' …' if len(mismatched) > 5 else ''}")
    return allowed


SCALE_SUFFIX = "_scale"
"""the scales of the int8 tensor `layer.weight` are in the float32 tensor `layer.weight_scale`"""


@torch.no_grad()
def quantize_weights(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of a model, with the weights of its linear layers as int8 and their scales.

    The output layer often shares the embedding, which then is int8 too; tied weights are stored once. Other embeddings,
    biases and norms stay float32.

    >>> {name: str(tensor.dtype) for name, tensor in quantize_weights(nn.Linear(4, 2)).items()}
    {'weight': 'torch.int8', 'weight_scale': 'torch.float32', 'bias': 'torch.float32'}
    """
    is_linear = {id(module.weight) for module in model.modules() if type(module) is nn.Linear}
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.detach().cpu().float()
        if id(parameter) not in is_linear:
            weights[name] = tensor
            continue
        if not tensor.isfinite().all():
            raise RegardError(
                f"The weight {name} is not finite and cannot be saved as int8.",
                "Its training diverged: train the model again.",
            )
        weights[name], weights[name + SCALE_SUFFIX] = quantize_weight(tensor)
    return weights


def dequantize_weights(weights: Mapping[str, Tensor], origin: str | Path) -> dict[str, Tensor]:
    """The tensors of `quantize_weights` in float32. Quantizing them again gives the same int8 values and scales.

    >>> q, scale = torch.tensor([[127, -3]], dtype=torch.int8), torch.tensor([0.5])
    >>> dequantize_weights({"weight": q, "weight_scale": scale}, "memory")
    {'weight': tensor([[63.5000, -1.5000]])}
    """
    dequantized: dict[str, Tensor] = {}
    used = set()
    for name, tensor in weights.items():
        if tensor.dtype != torch.int8:
            dequantized[name] = tensor
            continue
        scale_name = name + SCALE_SUFFIX
        scale = weights.get(scale_name)
        if scale is None:
            raise _scale_error(origin, f"the int8 tensor {name} has no scales ({scale_name} is missing)")
        if tensor.dim() != 2 or scale.dtype != torch.float32 or scale.shape != tensor.shape[:1]:
            shape = f"{str(scale.dtype).removeprefix('torch.')} of shape {tuple(scale.shape)}"
            raise _scale_error(origin, f"{scale_name} is {shape}, for {name} of shape {tuple(tensor.shape)}")
        if not (scale.isfinite() & (scale > 0)).all():
            raise _scale_error(origin, f"{scale_name} must be positive and finite")
        dequantized[name] = tensor.float().mul_(scale[:, None])
        used.add(scale_name)
    return {name: tensor for name, tensor in dequantized.items() if name not in used}


def _scale_error(origin: str | Path, detail: str) -> RegardError:
    return RegardError(f"{origin}: {detail}.", "Restore the file from a good copy.")
