"""A model folder: the one place where a model and its tokenisers meet. A model of images has none of these.

config.json           what the model is: format, family, sizes; special ids, where they are not Regard's own; SHA-256
                      of the tokenizer files
model.safetensors     its weights, and nothing that could run
tokenizer.json        and target_tokenizer.json where the two sides differ
training.json         how it came to be: recipe, data fingerprints, seed, versions, scores
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as weights_to_bytes
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.config_reader import fill_config, json_bytes, read_json
from regard.data.text.special_tokens import READING, TRANSLATING, WRITING, Special
from regard.data.text.tokenizer import FOREIGN, Tokenizer
from regard.errors import RegardError
from regard.files import write_whole
from regard.models import FAMILIES, family_of, make_model
from regard.models.parameters import stack_heights
from regard.pipelines.image_model import ImageModel
from regard.pipelines.migration import migrate_names
from regard.pipelines.text_encoder import TextEncoder
from regard.pipelines.text_generator import LanguageModel
from regard.pipelines.translator import Translator
from regard.ranges import check_value, shown

FORMAT = 1
_TOKENIZER_FILES = ("tokenizer.json", "target_tokenizer.json")
_FINGERPRINTS = "tokenizer_sha256"
_FIX = "Fix the file, or put a good copy in its place."
_fill = partial(fill_config, hint="Upgrade regard, or fix the file.")
Device = Literal["auto", "cpu", "cuda", "mps"]
Bundle = Translator | LanguageModel | TextEncoder | ImageModel
B = TypeVar("B", Translator, LanguageModel, TextEncoder, ImageModel)


class Opened(NamedTuple):
    """What a folder of some family is opened as, with how many tokenisers; the special ids of those trained here; and
    who uses it.
    """

    kind: type[Any]
    sides: int
    special: Special
    says: str
    commands: str


OPENED = {
    "translator": Opened(Translator, 2, TRANSLATING, "a translator", "regard translate, evaluate, score, look, info"),
    "text_generator": Opened(LanguageModel, 1, WRITING, "a language model", "regard generate, evaluate, look, info"),
    "text_encoder": Opened(
        TextEncoder, 1, READING, "an encoder of texts", "regard embed, classify, answer, look, info"
    ),
    "image_model": Opened(
        ImageModel, 0, Special(), "a model of images", "regard classify, segment, evaluate, look, info"
    ),
}


def pipeline_kind(config: Any) -> Opened:
    """The kind of pipeline that runs models of this config.

    >>> pipeline_kind(FAMILIES["gpt"].config()).kind.__name__
    'LanguageModel'
    """
    return OPENED[FAMILIES[family_of(config)].pipeline]


def find_device(name: Device) -> torch.device:
    """The device by its name; auto takes the fastest there is.

    >>> find_device("cpu").type
    'cpu'
    """
    check_value(Device, name, "device")
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device(next(kind for kind in ("cuda", "mps", "cpu") if there[kind]))
    if not there[name]:
        raise RegardError(f"This machine has no {name} device.", "Use device auto or cpu.")
    return torch.device(name)


def save(path: str | Path, bundle: Bundle) -> None:
    """Writes a model folder. Each file is written whole or not at all, the weights last but one, config.json last."""
    folder = Path(path)
    write_tokenizers(folder, *bundle.tokenizers)
    write_whole(folder / "training.json", json_bytes(bundle.training))
    weights = {
        name: tensor.detach().cpu().contiguous() for name, tensor in bundle.model.named_parameters()
    }  # tied weights are listed once
    write_whole(folder / "model.safetensors", _align_tensors(weights_to_bytes(weights, metadata={"format": "pt"})))
    write_config(folder, bundle)


def write_config(folder: Path, bundle: Bundle) -> None:
    """Write config.json; the tokenizers must have been written."""
    family = family_of(bundle.model.config)
    config: dict[str, Any] = {"format": FORMAT, "family": family}
    if bundle.tokenizers:
        config["shared_tokenizer"] = bundle.tokenizers[0] is bundle.tokenizers[-1]
        config[_FINGERPRINTS] = _fingerprints(folder)
    if isinstance(bundle, Translator) and bundle.languages:
        config["languages"] = list(bundle.languages)
    # Another program's tokeniser is known by it.
    if bundle.special != pipeline_kind(bundle.model.config).special or any(
        one.kind == FOREIGN for one in bundle.tokenizers
    ):
        config["special"] = dataclasses.asdict(bundle.special)
    write_whole(folder / "config.json", json_bytes(config | dataclasses.asdict(bundle.model.config)))


def _align_tensors(file: bytes) -> bytes:
    """A safetensors file whose tensors begin at a multiple of 64 bytes: the header is padded with spaces.

    Loaded tensors are views of the file, and CPU kernels round differently on addresses that are not aligned.
    """
    end = 8 + int.from_bytes(file[:8], "little")
    padding = -end % 64
    return (end - 8 + padding).to_bytes(8, "little") + file[8:end] + b" " * padding + file[end:]


def write_tokenizers(folder: Path, *sides: Tokenizer) -> None:
    """A file for each tokeniser; a target's that is the source's too has none."""
    own = [side for i, side in enumerate(sides) if side is not sides[0] or i == 0]
    for name, tokenizer in zip(_TOKENIZER_FILES, own):
        tokenizer.save(folder / name)
    for name in _TOKENIZER_FILES[len(own) :]:
        (folder / name).unlink(missing_ok=True)  # of another model that was here before


def read_tokenizers(folder: Path, *, foreign: bool = False) -> tuple[Tokenizer, Tokenizer]:
    source, target = (folder / name for name in _TOKENIZER_FILES)
    first = Tokenizer.load(source, foreign=foreign)
    return first, Tokenizer.load(target, foreign=foreign) if target.exists() else first


@overload
def load(path: str | Path | Sequence[str | Path], device: Device = "auto", *, expect: type[B]) -> B: ...
@overload
def load(path: str | Path | Sequence[str | Path], device: Device = "auto") -> Any: ...
def load(path, device="auto", *, expect=None):
    """Opens a model folder, as what its family says: a Translator, LanguageModel, TextEncoder or ImageModel.

    No code from the folder runs. Several folders of translators vote together. Where only one kind will do, `expect`
    it: another is an error.

    >>> load("no-such-folder")
    Traceback (most recent call last):
    regard.errors.RegardError: no-such-folder: there is no such model folder. Train one with: regard train
    """
    if not isinstance(path, str | Path):
        return _ensemble(path, device)
    if not str(path) or "\0" in str(path):
        raise RegardError(f"{path!r} is not the name of a model folder.", "Name the folder of --out.")
    found = find_device(device)
    folder = Path(path)
    config, special = read_config(folder)
    opened = pipeline_kind(config)
    check_kind(folder, config, expect)
    weights_path = folder / "model.safetensors"
    weights = _read_weights(weights_path, config)
    model = model_of(config, weights, weights_path)
    tokenizers = read_tokenizers(folder, foreign=special is not None) if opened.sides else ()
    for tokenizer, size in zip(tokenizers, vocabularies(config)):
        if tokenizer.vocab_size > size or (special is None and tokenizer.vocab_size != size):
            raise RegardError(
                f"{folder}: a tokeniser of {tokenizer.vocab_size} entries, but the model knows {size}.",
                "Was the folder mixed with another model's?",
            )
    if opened.sides:
        _check_fingerprints(folder)
    training_path = folder / "training.json"
    training = read_json(training_path) if training_path.exists() else {}
    bundle = bundle_of(model.to(found).eval(), tokenizers, training, special)
    return dataclasses.replace(bundle, languages=read_languages(folder)) if opened.kind is Translator else bundle


def check_kind(folder: Path, config: Any, expect: type[Any] | None) -> None:
    """Refuse a folder whose family opens as another kind than expected."""
    opened = pipeline_kind(config)
    if expect not in (None, opened.kind):
        wanted = next(one for one in OPENED.values() if one.kind is expect)
        raise RegardError(f"{folder} holds {opened.says}, not {wanted.says}.", f"Use it with: {opened.commands}.")


def _ensemble(paths: Any, device: Device) -> Translator:
    if not isinstance(paths, Sequence) or isinstance(paths, bytes) or not paths:
        raise RegardError(
            f"A model folder is named by text or a path, several by a list (got {shown(paths)}).",
            'For example load("model").',
        )
    first, *others = [load(each, device, expect=Translator) for each in paths]
    for where, other in zip(paths[1:], others):
        if (other.tokenizers, other.special) != (first.tokenizers, first.special):
            raise RegardError(f"{where}: its tokenizers are not those of {paths[0]}.", "Models vote token by token.")
    return dataclasses.replace(first, partners=[other.model for other in others])


def _read_weights(path: Path, config: Any) -> dict[str, Tensor]:
    """The tensors of a file, whose names and shapes are compared with the config before they are read."""
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        _check_shapes(config, shapes, path)
        return migrate_names(load_file(path))
    except FileNotFoundError:
        hint = "Was the training interrupted early?"
        if next(path.parent.glob("*.onnx"), None):
            hint = "The folder holds ONNX graphs: open them with open_onnx, or with a command that runs models."
        raise RegardError(f"{path}: the weights are missing.", hint) from None
    except (SafetensorError, OSError, ValueError) as error:
        raise RegardError(f"{path}: damaged ({error}).", "Put a good copy in its place.") from None


def _fingerprints(folder: Path) -> dict[str, str]:
    """SHA-256 of the tokenizer files of a folder, by name; line ends count as they are on Unix."""
    files = (folder / name for name in _TOKENIZER_FILES)
    content = {file.name: file.read_bytes().replace(b"\r\n", b"\n") for file in files if file.exists()}
    return {name: hashlib.sha256(text).hexdigest() for name, text in content.items()}


def _check_fingerprints(folder: Path) -> None:
    """Refuse tokenizers other than those that the model was saved with; older folders do not state theirs."""
    path = folder / "config.json"
    stated = read_json(path).get(_FINGERPRINTS)
    if stated is None:
        return
    if not isinstance(stated, dict):
        raise RegardError(f"{path}: {_FINGERPRINTS} must be a table (got {shown(stated)}).", _FIX)
    for name, found in _fingerprints(folder).items():
        if stated.get(name) != found:
            raise RegardError(
                f"{folder / name}: not the tokenizer that the model was saved with.",
                f"Put that one back. If you changed it on purpose, remove {_FINGERPRINTS} from config.json.",
            )


def bundle_of(
    model: Any, tokenizers: tuple[Tokenizer, ...], training: dict[str, Any], special: Special | None = None
) -> Any:
    """A model with its tokenizers, if it has any, as the kind that its family is."""
    opened = pipeline_kind(model.config)
    if not opened.sides:
        return opened.kind(model, training=training)
    bundle = opened.kind(model, *tokenizers[: opened.sides], training=training, special=special or opened.special)
    if isinstance(bundle, Translator):  # of a run that is beginning: the folder has no config.json to state them yet
        bundle.languages = tuple(training.get("recipe", {}).get("data", {}).get("languages", ()))
    return bundle


def read_languages(folder: Path) -> tuple[str, ...]:
    """The codes of the languages that config.json states; none where it states none."""
    path = folder / "config.json"
    stated = read_json(path).get("languages", [])
    if not isinstance(stated, list) or not all(isinstance(one, str) for one in stated):
        raise RegardError(f"{path}: languages = {stated!r}; expected a list of codes.", "Fix the file.")
    return tuple(stated)


def vocabularies(config: Any) -> tuple[int, ...]:
    """The sizes of vocabulary that a model's config states: of both sides, of one, or of none.

    >>> vocabularies(FAMILIES["gpt"].config(vocab=7))
    (7,)
    """
    return tuple(getattr(config, name) for name in ("vocab", "source_vocab", "target_vocab") if hasattr(config, name))


def read_config(folder: Path) -> tuple[Any, Special | None]:
    """The model's config out of config.json, and the special ids where it states any, checked as a stranger's are."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise RegardError(f"{folder}: there is no such model folder.", "Train one with: regard train")
    if not path.exists() and (folder / "state").is_dir():
        raise RegardError(
            f"{folder} holds a run that ended before its first validation.",
            "Resume it with the same regard train command.",
        )
    if not path.exists():
        raise RegardError(f"{folder}: not a model folder, for it has no config.json.", "Name the folder of --out.")
    table = read_json(path)
    if type(table.get("format")) is not int:
        raise RegardError(f"{path}: not a config of Regard (it states no format).", "Name a folder that Regard wrote.")
    if table["format"] > FORMAT:
        raise RegardError(
            f"{path}: format {shown(table['format'])} is newer than this Regard knows.", "Upgrade regard."
        )
    family = FAMILIES[check_value(Literal[tuple(FAMILIES)], table.get("family"), f"{path}: family")]
    stated = table.pop("special", None)
    if stated is not None and not isinstance(stated, dict):
        raise RegardError(f"{path}: special must be a table (got {shown(stated)}).", _FIX)
    if table.get("shared_tokenizer") is False and not (folder / "target_tokenizer.json").exists():
        raise RegardError(f"{folder}: target_tokenizer.json is missing.", "Put it back: the two sides differ.")
    beside = ("format", "family", "shared_tokenizer", "languages", _FINGERPRINTS)
    config = _fill(family.config(), {key: value for key, value in table.items() if key not in beside}, path)
    try:
        config.check()
    except RegardError as error:
        raise RegardError(f"{path}: {error.message}", _FIX) from None
    return config, None if stated is None else _fill(Special(), stated, path, "special.")


def _check_shapes(config: Any, shapes: Mapping[str, Sequence[int]], origin: str | Path) -> None:
    """Refuse a config whose sizes cannot be those of the tensors, before anything of these sizes is made."""
    for name, height in stack_heights(config).items():
        if height > len(shapes):
            raise _misfit(origin, f"{name} is {height:,}, and there are {len(shapes):,} tensors")
    sizes = {"width": config.width}
    if hasattr(config, "heads"):
        sizes["heads × head width"] = config.heads * (getattr(config, "head_width", 0) or config.width // config.heads)
    dimensions = {size for shape in shapes.values() for size in shape}
    for name, size in sizes.items():
        if size not in dimensions:
            raise _misfit(origin, f"{name} is {size:,}, and no tensor has this dimension")


def _misfit(origin: str | Path, what: str) -> RegardError:
    return RegardError(
        f"{origin}: the weights do not fit the config: {what}.", "Was the folder mixed with another model's?"
    )


def model_of(config: Any, weights: Mapping[str, Tensor], origin: str | Path) -> Any:
    """A model that has these weights and never had others: none are drawn, and none copied that are float32 already.

    >>> config = FAMILIES["gpt"].config(width=8, heads=2, layers=1, feedforward=8, vocab=5)
    >>> weights = {name: one.detach() for name, one in make_model(config).named_parameters()}
    >>> model_of(config, weights, "memory").output.weight.data_ptr() == weights["embedding.tokens.weight"].data_ptr()
    True
    """
    _check_shapes(config, {name: tensor.shape for name, tensor in weights.items()}, origin)
    with _Unfilled():
        model = make_model(config)
    _refuse_others(dict(model.named_parameters()), weights, origin)
    new = {id(one): nn.Parameter(weights[name].float()) for name, one in model.named_parameters()}
    for module in model.modules():
        for name, one in list(module.named_parameters(recurse=False)):
            setattr(module, name, new[id(one)])
    return model


class _Unfilled(TorchFunctionMode):
    """Inside, new parameters have a shape and no memory; tables that are computed are as ever."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"]  # nothing to fill; and on meta tensors this would import torch._dynamo, for seconds
        return function(*args, **(kwargs | {"device": "meta"} if function is torch.empty else kwargs))


def fill_weights(
    model: nn.Module, weights: Mapping[str, Tensor], origin: str | Path, may_differ: tuple[str, ...] = ()
) -> None:
    """Copies weights into the model; names or shapes that do not fit are listed, unless they begin as they may."""
    own = dict(model.named_parameters())
    new = _refuse_others(own, weights, origin, may_differ)
    with torch.no_grad():
        for name, tensor in own.items():
            if name not in new:
                tensor.copy_(weights[name])


def _refuse_others(
    own: Mapping[str, Tensor], weights: Mapping[str, Tensor], origin: str | Path, may_differ: tuple[str, ...] = ()
) -> set[str]:
    """The names that differ and may; any other is an error."""
    wrong = {n for n in own.keys() | weights.keys() if n not in own or n not in weights}
    wrong |= {n for n in own.keys() & weights.keys() if own[n].shape != weights[n].shape}
    new = {n for n in wrong if n.startswith(may_differ)} if may_differ else set()
    wrong -= new
    if wrong:
        raise _misfit(origin, f"{', '.join(sorted(wrong)[:5])}{' …' if len(wrong) > 5 else ''}")
    return new
