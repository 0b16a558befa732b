"""A model folder: the one place where a model and its tokenisers meet.

config.json           what the model is: format, family, sizes
model.safetensors     its weights, and nothing that could run
tokenizer.json        and target_tokenizer.json where the two sides differ
training.json         how it came to be: recipe, data fingerprints, seed, versions, scores
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load as weights_from_bytes
from safetensors.torch import save as weights_to_bytes
from torch import Tensor

from regard.data import EOS, SOS, Tokenizer
from regard.decode import BeamHistory, DecodeConfig, Ensemble, Hypothesis, decode_all
from regard.errors import RegardError
from regard.files import write_whole
from regard.layers.packed import Packed, pack
from regard.models import FAMILIES, TranslationModel, family_of, make_model

FORMAT = 1
Device = Literal["auto", "cpu", "cuda", "mps"]


@dataclass(frozen=True)
class Translation:
    """One translation of one line, what the model thought of it, and, where asked for, the search that found it."""

    text: str
    score: float
    hypothesis: Hypothesis
    history: BeamHistory | None = None


@dataclass(frozen=True)
class PairScore:
    """The log-probability of a given target, and over how many tokens (its end included)."""

    logprob: float
    tokens: int

    @property
    def mean(self) -> float:
        return self.logprob / self.tokens


@dataclass
class Translator:
    """A model with its tokenisers, ready to use.

    >>> translator = load("model")  # doctest: +SKIP
    >>> translator("The cat chased the mouse.")  # doctest: +SKIP
    'Le chat a chassé la souris.'
    """

    model: TranslationModel
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    training: dict[str, Any] = field(default_factory=dict)
    # further models that vote with the first one
    partners: list[TranslationModel] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def __call__(self, line: str) -> str:
        return self.translate([line])[0][0].text

    def source_ids(self, line: str, *, name: str = "the line", truncate: bool = False) -> list[int]:
        """A source line as the model takes it, `<eos>` at its end; too long a line is an error, or is cut short."""
        return [*self._within_limit(self.source_tokenizer.encode(line), name, truncate), EOS]

    def target_ids(self, line: str, *, name: str = "the line", truncate: bool = False) -> list[int]:
        return self._within_limit(self.target_tokenizer.encode(line), name, truncate)

    def _within_limit(self, ids: list[int], name: str, truncate: bool) -> list[int]:
        room = min(model.config.max_len for model in [self.model, *self.partners]) - 1
        if len(ids) > room and not truncate:
            raise RegardError(
                f"{name} has {len(ids)} tokens, and the model takes at most {room}.",
                "Split it, or use --truncate to cut it short.",
            )
        return ids[:room]

    @torch.no_grad()
    def translate(
        self,
        lines: Sequence[str],
        config: DecodeConfig | None = None,
        *,
        prefixes: Sequence[str] | None = None,
        truncate: bool = False,
        history: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[list[Translation]]:
        """For each line its best translations, best first. An empty line is answered by an empty one.

        `prefixes` are beginnings that the translations must have; `history` keeps the beam's tree.
        """
        config = config or DecodeConfig()
        limit = min(model.config.max_len for model in [self.model, *self.partners]) - 1
        config = dataclasses.replace(config, max_len=min(config.max_len, limit))
        filled = [i for i, line in enumerate(lines) if line.strip()]
        sources = [self.source_ids(lines[i], name=f"line {i + 1}", truncate=truncate) for i in filled]
        forced = None
        if prefixes is not None:
            forced = [self.target_ids(prefixes[i], name=f"prefix {i + 1}", truncate=truncate) for i in filled]
        model = self.model if not self.partners else Ensemble([self.model, *self.partners])
        for member in [self.model, *self.partners]:
            member.eval()
        answers: list[list[Translation]] = [[] for _ in lines]
        found = decode_all(model, sources, self._packed, config, prefixes=forced, history=history, progress=progress)
        for i, n_best in zip(filled, found):
            answers[i] = [Translation(self.target_tokenizer.decode(h.ids), h.score, h, n_best.history) for h in n_best]
        nothing = Translation("", 0.0, Hypothesis([], 0.0, 0.0, []))
        return [answer or [nothing] for answer in answers]

    @torch.no_grad()
    def score(
        self, pairs: Iterable[tuple[str, str]], *, truncate: bool = False, batch_tokens: int = 4096
    ) -> list[PairScore]:
        """The log-probability that the model (or the mean of several) gives to each target, its source being given."""
        encoded = []
        for i, (line, given) in enumerate(pairs, 1):
            name = f"pair {i}"
            if not line.strip():
                raise RegardError(f"{name}: the source is empty.", "Remove the pair: there is nothing to translate.")
            limits: dict[str, Any] = {"name": name, "truncate": truncate}
            encoded.append((self.source_ids(line, **limits), self.target_ids(given, **limits)))
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i][0]) + len(encoded[i][1]))
        scores: list[PairScore | None] = [None] * len(encoded)
        models = [self.model.eval(), *(partner.eval() for partner in self.partners)]
        while order:
            batch: list[int] = []
            while order and (not batch or len(batch) * (len(encoded[order[-1]][1]) + 1) <= batch_tokens):
                batch.append(order.pop())
            source, target = self.teacher_forced([encoded[i] for i in batch])
            wanted = torch.tensor([t for i in batch for t in [*encoded[i][1], EOS]], device=self.device)
            votes = [_logprobs(model(source, target).float(), wanted) for model in models]
            logprobs = torch.stack(votes).logsumexp(0) - math.log(len(votes))  # of the mean probability
            for i, own in zip(batch, logprobs.split([len(encoded[i][1]) + 1 for i in batch])):
                scores[i] = PairScore(float(own.double().sum()), len(own))
        return [score for score in scores if score is not None]

    def teacher_forced(self, pairs: Sequence[tuple[list[int], list[int]]]) -> tuple[Packed, Packed]:
        """Source ids (as from source_ids) and target ids as the model takes them when the target is given."""
        return self._packed([s for s, _ in pairs]), self._packed([[SOS, *t] for _, t in pairs])

    def _packed(self, sequences: Sequence[Sequence[int]]) -> Packed:
        return pack(sequences).to(self.device)

    def save(self, path: str | Path) -> None:
        save(path, self)


def find_device(name: Device) -> torch.device:
    """The device by its name; auto takes the fastest there is.

    >>> find_device("cpu").type
    'cpu'
    """
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device(next(kind for kind in ("cuda", "mps", "cpu") if there[kind]))
    if not there[name]:
        raise RegardError(f"This machine has no {name} device.", "Use device auto or cpu.")
    return torch.device(name)


def save(path: str | Path, translator: Translator) -> None:
    """Writes a model folder. Each file is written whole or not at all, the weights last but one, config.json last."""
    folder = Path(path)
    shared = translator.source_tokenizer is translator.target_tokenizer
    write_tokenizers(folder, translator.source_tokenizer, translator.target_tokenizer)
    write_whole(folder / "training.json", _json(translator.training))
    weights = {
        name: tensor.detach().cpu().contiguous() for name, tensor in translator.model.named_parameters()
    }  # tied weights are listed once
    write_whole(folder / "model.safetensors", weights_to_bytes(weights, metadata={"format": "pt"}))
    config = {"format": FORMAT, "family": family_of(translator.model.config), "shared_tokenizer": shared}
    write_whole(folder / "config.json", _json(config | dataclasses.asdict(translator.model.config)))


def write_tokenizers(folder: Path, source: Tokenizer, target: Tokenizer) -> None:
    source.save(folder / "tokenizer.json")
    if target is not source:
        target.save(folder / "target_tokenizer.json")
    else:
        (folder / "target_tokenizer.json").unlink(missing_ok=True)  # of another model that was here before


def read_tokenizers(folder: Path) -> tuple[Tokenizer, Tokenizer]:
    source = Tokenizer.load(folder / "tokenizer.json")
    target_path = folder / "target_tokenizer.json"
    return source, Tokenizer.load(target_path) if target_path.exists() else source


def load(path: str | Path | Sequence[str | Path], device: Device = "auto") -> Translator:
    """Opens a model folder; several folders vote together. Runs no code from them.

    >>> load("no-such-folder")
    Traceback (most recent call last):
    regard.errors.RegardError: no-such-folder: there is no such model folder. Train one with: regard train
    """
    if not isinstance(path, str | Path):
        first, *others = [load(each, device) for each in path]
        for where, other in zip(path[1:], others):
            if (other.source_tokenizer, other.target_tokenizer) != (first.source_tokenizer, first.target_tokenizer):
                raise RegardError(f"{where}: its tokenisers are not those of {path[0]}.", "Models vote token by token.")
        return dataclasses.replace(first, partners=[other.model for other in others])
    folder = Path(path)
    config = read_config(folder)
    model = make_model(config)
    weights_path = folder / "model.safetensors"
    try:
        weights = weights_from_bytes(weights_path.read_bytes())
    except FileNotFoundError:
        raise RegardError(f"{weights_path}: the weights are missing.", "Was the training interrupted early?") from None
    except SafetensorError as error:
        raise RegardError(f"{weights_path}: damaged ({error}).", "Put a good copy in its place.") from None
    fill_weights(model, weights, weights_path)
    source, target = read_tokenizers(folder)
    for tokenizer, size in ((source, config.source_vocab), (target, config.target_vocab)):
        if tokenizer.vocab_size != size:
            raise RegardError(
                f"{folder}: a tokeniser of {tokenizer.vocab_size} entries, but the model knows {size}.",
                "Was the folder mixed with another model's?",
            )
    training_path = folder / "training.json"
    training = _read_json(training_path) if training_path.exists() else {}
    return Translator(model.to(find_device(device)).eval(), source, target, training)


def read_config(folder: Path) -> Any:
    """The model's config out of config.json, with the checks that a stranger's folder needs."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise RegardError(f"{folder}: there is no such model folder.", "Train one with: regard train")
    if not path.exists():
        raise RegardError(f"{folder}: not a model folder, for it has no config.json.", "Name the folder of --out.")
    table = _read_json(path)
    if not isinstance(table.get("format"), int):
        raise RegardError(f"{path}: not a config of Regard (it states no format).", "Name a folder that Regard wrote.")
    if table["format"] > FORMAT:
        raise RegardError(f"{path}: format {table['format']} is newer than this Regard knows.", "Upgrade regard.")
    family = FAMILIES.get(str(table.get("family")))
    if family is None:
        raise RegardError(f"{path}: family {table.get('family')!r} is not known.", f"Known: {', '.join(FAMILIES)}.")
    known = {f.name: f.type for f in dataclasses.fields(family.config)}
    unknown = table.keys() - known.keys() - {"format", "family", "shared_tokenizer"}
    if unknown:
        raise RegardError(f"{path}: unknown key {sorted(unknown)[0]!r}.", "Upgrade regard, or mend the file.")
    if table.get("shared_tokenizer") is False and not (folder / "target_tokenizer.json").exists():
        raise RegardError(f"{folder}: target_tokenizer.json is missing.", "Put it back: the two sides differ.")
    plain = family.config()
    given = {key: value for key, value in table.items() if key in known}
    for key, value in given.items():
        wanted = type(getattr(plain, key))
        choices = get_args(known[key]) if get_origin(known[key]) is Literal else ()
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise RegardError(f"{path}: {key} = {value!r} should be of type {wanted.__name__}.", "Mend the file.")
        if (choices and value not in choices) or (wanted is int and value < 0):
            raise RegardError(f"{path}: {key} = {value!r} cannot be.", "Upgrade regard, or mend the file.")
    return family.config(**given)


def fill_weights(model: TranslationModel, weights: dict[str, Tensor], origin: Path) -> None:
    """Copies weights into the model; names or shapes that do not fit are listed."""
    own = dict(model.named_parameters())
    wrong = sorted(n for n in own.keys() | weights.keys() if n not in own or n not in weights)
    wrong += sorted(n for n in own.keys() & weights.keys() if own[n].shape != weights[n].shape)
    if wrong:
        raise RegardError(
            f"{origin}: the weights do not fit the config: {', '.join(wrong[:5])}{' …' if len(wrong) > 5 else ''}.",
            "Was the folder mixed with another model's?",
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])


def _logprobs(logits: Float[Tensor, "N V"], wanted: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    return logits.gather(1, wanted[:, None])[:, 0] - logits.logsumexp(-1)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RegardError(f"{path}: not JSON ({error}).", "Put a good copy in its place.") from None
    if not isinstance(table, dict):
        raise RegardError(f"{path}: not a JSON object.", "Put a good copy in its place.")
    return table


def _json(table: dict[str, Any]) -> bytes:
    return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()
