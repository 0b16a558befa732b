"""Parameters of a model without memory: their count from a config alone, and models without initial weights."""

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.attention import Score
from regard.errors import RegardError
from regard.layers.fusion import unfused
from regard.layers.quantized import Float8Linear, Int8Linear
from regard.models import FAMILIES, ModelConfig, ViTConfig, family_name
from regard.ranges import definition, format_value


class SkipInitialization(TorchFunctionMode):
    """Context in which new parameters are meta tensors and are not initialized; computed buffers are not affected.

    >>> with SkipInitialization():
    ...     torch.nn.Linear(2, 3).weight.device
    device(type='meta')
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Meta tensors have no memory to fill, and torch would import torch._dynamo, which takes a second.
        if getattr(function, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"]
        if function in _FILL_METHODS and args[0].is_meta:
            return args[0]
        return function(*args, **(kwargs | {"device": "meta"} if function is torch.empty else kwargs))


_FILL_METHODS = (Tensor.normal_, Tensor.uniform_, Tensor.zero_, Tensor.fill_)
# Positions without a computed table.
_UNTABULATED = ("rotary", "learned", "relative", "none")
# Larger buffers are not computed.
_MAX_BUFFER_ELEMENTS = 2**24


@contextmanager
def shapes_only(config: Any) -> Iterator[None]:
    """Context in which a model of this config is built without memory, for the shapes of its parameters.

    >>> from regard.models import GPT, GPTConfig
    >>> config = GPTConfig(width=8, heads=2, feedforward=8, vocab=10**9)
    >>> with shapes_only(config):
    ...     GPT(config).embedding.tokens.weight.shape
    torch.Size([1000000000, 8])
    """
    length = 1
    if isinstance(config, ViTConfig):
        length = max(1, config.image_height // config.patch) * max(1, config.image_width // config.patch)
    elif getattr(config, "positions", "") not in _UNTABULATED:
        length = config.max_len
    with ExitStack() as stack:
        if config.width * length > _MAX_BUFFER_ELEMENTS:
            stack.enter_context(torch.device("meta"))  # for buffers too; it imports torch._dynamo
        stack.enter_context(SkipInitialization())
        yield


def find_change(model: nn.Module) -> str:
    """How a model differs from a new one of its config, apart from the values of its parameters; "" if it does not.

    >>> from regard.models import GPT, GPTConfig
    >>> model = GPT(GPTConfig(width=8, heads=2, feedforward=8, vocab=5))
    >>> find_change(model)
    ''
    >>> model.blocks[1].attention.score = torch.nn.Identity()
    >>> find_change(model)
    'blocks.1.attention.score is Identity instead of ScaledDot'
    """
    config: Any = model.config
    with SkipInitialization():
        new = FAMILIES[family_name(config)].model(config)
    modules, expected = (dict(module.named_modules(remove_duplicate=False)) for module in (model, new))
    for path in expected | modules:
        name = path or "the model"
        if path not in expected or path not in modules:
            return f"{name} is {'missing' if path in expected else 'an additional module'}"
        module, other = modules[path], expected[path]
        if definition(unfused(type(module))) != definition(type(other)):
            return f"{name} is {type(module).__name__} instead of {type(other).__name__}"
        settings, defaults = _settings(module), _settings(other)
        for key in defaults | settings:
            if key not in settings or key not in defaults or not _is_same(settings[key], defaults[key]):
                value, default = (
                    format_value(values[key]) if key in values else "missing" for values in (settings, defaults)
                )
                return f"{name} has {key} = {value} instead of {default}"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name} has a hook, which may change its output"
    shapes, expected_shapes = ({name: p.shape for name, p in module.named_parameters()} for module in (model, new))
    for name in expected_shapes | shapes:  # of tied parameters only the first
        if shapes.get(name) != expected_shapes.get(name):
            shape, expected_shape = (
                list(found.get(name, ())) or "tied or missing" for found in (shapes, expected_shapes)
            )
            return f"the parameter {name} is {shape} instead of {expected_shape}"
    return ""


def find_replacement(model: nn.Module) -> str:
    """The first module of a model that computes something else than its config says; "" if there is none.

    A subclass that redefines no method computes the same. Scores and quantized linear layers are left out: code that
    runs the parameters of a model by itself supports them.

    >>> from regard.models import GPT, GPTConfig
    >>> model = GPT(GPTConfig(width=8, heads=2, feedforward=8, vocab=5))
    >>> model.blocks[1].feedforward = nn.Identity()
    >>> find_replacement(model)
    'blocks.1.feedforward'
    """
    config: Any = model.config
    if definition(type(config)) not in {definition(family.config) for family in FAMILIES.values()}:
        return "the model"  # no registered family says what its layers are
    return _find_replacement(model, _class_tree(config), "")


class _ClassTree(NamedTuple):
    """The class of a module, and those of the modules in it."""

    cls: type[nn.Module]
    children: "dict[str, _ClassTree | None]"


@functools.lru_cache(maxsize=32)
def _class_tree(config: Any) -> _ClassTree:
    def build(module: nn.Module) -> _ClassTree:
        children = module._modules.items()
        return _ClassTree(type(module), {name: None if child is None else build(child) for name, child in children})

    with shapes_only(config):
        return build(FAMILIES[family_name(config)].model(config))


def _find_replacement(module: nn.Module, expected: _ClassTree, path: str) -> str:
    cls = unfused(type(module))
    if issubclass(cls, Score) and issubclass(expected.cls, Score):
        return ""
    is_linear = expected.cls is nn.Linear and cls in (Int8Linear, Float8Linear)
    if not (is_linear or _computes_as(cls, expected.cls)) or "forward" in module.__dict__:
        return path or "the model"
    for name, child in module._modules.items():
        tree, child_path = expected.children.get(name), f"{path}.{name}" if path else name
        if child is None or tree is None:
            if child is not tree:
                return child_path
        elif found := _find_replacement(child, tree, child_path):
            return found
    return ""


def _computes_as(cls: type[Any], base: type[Any]) -> bool:
    """Whether a class is another, or a subclass that redefines nothing of it but its constructor."""
    if not issubclass(cls, base):
        return False
    names = {name for parent in cls.__mro__[: cls.__mro__.index(base)] for name in vars(parent)}
    return not any(hasattr(base, name) for name in names if not name.startswith("__") or name == "__call__")


def _settings(module: nn.Module) -> dict[str, Any]:
    """The public attributes and buffers of a module; attributes that begin with an underscore are caches."""
    attributes = {
        name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"
    }
    return attributes | dict(module.named_buffers(recurse=False))


def _is_same(value: Any, other: Any) -> bool:
    """Whether a setting of a module is the same as another: equal, or built in the same way."""
    if value is other:
        return True
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        # In the precision of the model, which may have been converted.
        return value.shape == other.shape and (other.is_meta or torch.equal(value.cpu(), other.to(value.dtype)))
    if isinstance(value, type) or inspect.isroutine(value):
        return hasattr(other, "__qualname__") and definition(value) == definition(other)
    if definition(type(value)) != definition(type(other)):
        return False
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(_is_same, value, other))
    if isinstance(value, nn.Module):
        return True  # compared at its own path
    if isinstance(value, functools.partial):
        return _is_same([value.func, value.args, value.keywords], [other.func, other.args, other.keywords])
    if type(value).__eq__ is object.__eq__:
        return _is_same([*vars(value).items()], [*vars(other).items()])
    return bool(value == other)


class ParameterCount(NamedTuple):
    """Parameters of a model: the number of tensors, and the number of elements in all of them."""

    tensors: int
    elements: int


def layer_counts(config: ModelConfig) -> dict[str, int]:
    """The number of layers of each stack of a model, by the name of the config field.

    >>> from regard.models import ViTConfig
    >>> layer_counts(ViTConfig())
    {'layers': 12}
    """
    names = getattr(config, "layer_fields", ("layers",))
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Count the parameters of a model of this config, tied ones once.

    The cost does not depend on the number of layers: models with two and three layers are built without memory (on
    torch's meta device), and every further layer adds as much as the third.

    >>> from regard.models import GPTConfig
    >>> count_parameters(GPTConfig(width=8, heads=2, feedforward=8, layers=10_000, vocab=5)).elements
    4080048
    """
    plain: Any = config
    if getattr(plain, "groups", 0):
        plain = dataclasses.replace(plain, layers=plain.groups, groups=0)
    layers = layer_counts(plain)
    small = dataclasses.replace(plain, **{name: min(count, 2) for name, count in layers.items()})
    base = _count(small)
    tensors, elements = base
    for name, count in layers.items():
        if count > 2:
            larger = _count(dataclasses.replace(small, **{name: 3}))
            tensors += (larger.tensors - base.tensors) * (count - 2)
            elements += (larger.elements - base.elements) * (count - 2)
    return ParameterCount(tensors, elements)


def _count(config: Any) -> ParameterCount:
    try:
        with shapes_only(config):
            parameters = list(FAMILIES[family_name(config)].model(config).parameters())
    except (RuntimeError, OverflowError, MemoryError, TypeError) as error:
        if isinstance(error, TypeError) and "verflow" not in str(error):
            raise  # an error in a custom component
        # A tensor whose size in bytes does not fit into 64 bits.
        raise RegardError(
            f"A model of these sizes is too large to be built ({str(error).splitlines()[0]}).",
            "Choose a smaller width, vocabulary or number of layers.",
        ) from None
    return ParameterCount(len(parameters), sum(parameter.numel() for parameter in parameters))
