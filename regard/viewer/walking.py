"""The walk: every number between a text and what the model makes of it, written on a tape, step by step.

A tape computes by itself from the model's parameters. What the model computed is only put beside it, to be compared:
each step says how far the two are apart.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from regard.errors import RegardError
from regard.folder import TextEncoder, Translator
from regard.layers.blocks import DecoderBlock, EncoderBlock
from regard.layers.packed import pack
from regard.layers.recurrent import StateAttention
from regard.models import GPT, Bert, Seq2Seq, Transformer
from regard.models.bert import MaskHead
from regard.models.seq2seq import Decoder
from regard.viewer.forcing import information
from regard.viewer.looking import Look, Side
from regard.viewer.measures import entropy
from regard.viewer.overlays import ImageLook
from regard.viewer.tape import Tape, Value
from regard.viewer.walk_recurrent import ONE, RecurrentParts

# Bytes of parameters, embeddings and output layer aside, up to which a walk carries all of them.
WHOLE = 8 << 20
# Bytes and tokens up to which a page has a walk without being asked.
SMALL, SHORT = 12 << 20, 64
# Tokens beyond which a walk would be longer than anybody's patience.
LONGEST = 512
KINDS = {"self": "self-attention", "masked": "masked self-attention"}


@dataclass(frozen=True, eq=False)
class Walk:
    """A tape, and what it is about: the tokens, those that are looked at first, and the names of what may come next."""

    tape: Tape
    sides: dict[str, Side]
    focus: dict[str, Any]
    names: dict[int, str]
    """of the columns of the last step that matter to somebody: the ten likeliest of each row"""
    note: str | None
    """what is given and not computed, where that is so"""
    linked: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    """sides that are followed along with another: whose, and which of their tokens for each of its"""


def walk_of(look: Look | ImageLook) -> Walk:
    """The walk of a look: each step from its text, or its picture, to the output.

    >>> walk = walk_of(look(translator, "The cat sleeps."))  # doctest: +SKIP
    >>> walk.tape["decoder.0.cross.a"].shape  # the weights a = softmax(e)  # doctest: +SKIP
    (4, 5, 6)
    """
    if isinstance(look, ImageLook):
        from regard.viewer.image_walking import walk_of_picture  # which builds on what is here

        return walk_of_picture(look)
    if look.bundle is None:
        raise RegardError("This look does not know its model: there is no walk.", "Make it with regard.look.")
    if (longest := max(map(len, look.ids))) > LONGEST:
        raise RegardError(f"The text has {longest} tokens: a walk takes at most {LONGEST}.", "Shorten the text.")
    return Walker(look).walk()


def walk_for(look: Look, wanted: bool | None = None) -> Walk | None:
    """A page's walk: if it is wanted, or if nobody said and model and text are small enough that it costs little."""
    if wanted is not None:
        return walk_of(look) if wanted else None
    if look.bundle is None or max(map(len, look.ids)) > SHORT or bytes_inside(look.bundle.model) > WHOLE:
        return None
    try:
        walk = walk_of(look)
    except RegardError:  # a score of somebody's own
        return None
    return walk if walk.tape.size <= SMALL else None


def header_of(walk: Walk, blobs: list[bytes]) -> dict[str, Any]:
    """What a scene's header says of a walk; its numbers go to the blobs."""
    tape = walk.tape
    places = {}
    for name, raw in (("params", tape.params), ("outputs", tape.outputs)):
        blobs.append(raw)
        places[name] = {"at": len(blobs) - 1, "shape": [len(raw) // 4], "type": "float32"}
    return {
        "sides": {
            name: {"tokens": side.tokens, "words": side.words}
            | (dict(zip(("of", "rows"), walk.linked[name])) if name in walk.linked else {})
            for name, side in walk.sides.items()
        },
        "focus": walk.focus,
        "names": {str(column): name for column, name in walk.names.items()},
        "note": walk.note,
        "sections": tape.sections,
        "steps": tape.steps,
        **places,
    }


def bytes_inside(model: nn.Module) -> int:
    """Of the parameters between embeddings and output layer, of whose rows only a few may be needed."""
    tables = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    output = getattr(model, "output", None)
    tables |= {id(output.weight)} if isinstance(output, nn.Linear) else set()
    return sum(4 * p.numel() for p in model.parameters() if id(p) not in tables)


class Walker(RecurrentParts):
    """Writes the tape of one forward of a whole model."""

    def __init__(self, look: Look) -> None:
        self.look, self.bundle, self.model = look, look.bundle, look.bundle.model.eval()
        super().__init__(self.model, [pack([ids]).to(self.bundle.device) for ids in look.ids])
        self.whole = bytes_inside(self.model) <= WHOLE
        self.chosen = look.alignment

    def walk(self) -> Walk:
        config = self.model.config
        if getattr(config, "cell", "") == "rnn" or not getattr(config, "bidirectional", True):
            raise RegardError("There is no walk through this kind of recurrent layer.", "Look at its heads.")
        if getattr(config, "pooling", "") == "query":
            raise RegardError("There is no walk through a query that pools a text.", "Look at its heads.")
        match self.model:
            case Transformer():
                self.transformer(self.model)
            case Seq2Seq():
                self.seq2seq(self.model)
            case GPT():
                self.gpt(self.model)
            case Bert():
                self.bert(self.model)
            case other:
                raise RegardError(f"There is no walk through a {type(other).__name__}.", "Look at its heads.")
        return Walk(self.tape, self.sides(), self.focus(), self.ends, self.note())

    # What is looked at

    def sides(self) -> dict[str, Side]:
        """The tokens of each axis; row t of the target is the one that predicts the next."""
        found = {side.name: side for one in self.look.maps.values() for side in (one.queries, one.keys)}
        if not isinstance(self.bundle, Translator):
            return {"text": found["text"]}
        if "target" not in found and "predicted" in found:
            begun = [self.bundle.target_tokenizer.vocabulary[i] for i in self.bundle.special.begun([])]
            _, tokens, words = found["predicted"]
            inside = slice(len(begun) - 1, -1)
            found["target"] = Side("", tokens[inside], words[inside]).framed("target", begun)
        sides = {}
        for name, ids, tokenizer in zip(("source", "target"), self.look.ids, self.bundle.tokenizers):
            plain = Side(name, [tokenizer.vocabulary[i] for i in ids], [-1] * len(ids))
            sides[name] = found.get(name, plain)
        return sides

    def focus(self) -> dict[str, Any]:
        """Where a walk begins: at the token of the clearest attention whose look is clearest."""
        one = self.chosen
        head = max(range(one.heads), key=lambda i: information(one.of(i)))
        weights = one.of(head)
        clear = np.log2(np.maximum((weights > 0).sum(1), 1)) - entropy(weights)
        words = np.array(one.queries.words) >= 0
        row = int(np.argmax(np.where(words | ~words.any(), clear, -1.0)))
        focus: dict[str, Any] = {"attention": one.name, "head": head}
        if one.kind == "cross":
            return focus | {"target": row, one.keys.name: int(np.argmax(weights[row]))}
        return focus | {one.queries.name: row}

    def note(self) -> str | None:
        if self.whole:
            return None
        if isinstance(self.model, Seq2Seq):
            return (
                "The model is large: the walk carries its attention and its output. "
                "The states of its recurrent layers are given."
            )
        layer = re.sub(r"\.(attention|cross)(\.\d+)?$", "", self.chosen.name)
        return f"The model is large: the walk carries {layer} alone. The output of its other layers is given."

    def token(self, number: int) -> str:
        tokenizer = self.bundle.tokenizers[-1]
        return tokenizer.decode([number]).strip() or tokenizer.vocabulary[number]

    # What all Transformers have

    def block(
        self,
        module: Any,
        x: Value,
        called: str,
        layer: int,
        bias: Value | None = None,
        memory: Value | None = None,
    ) -> Value:
        """One layer: its attentions and its feed-forward network; or, where it is not carried, what comes out of it."""
        path, title = self.paths[module], f"{called}, layer {layer}"
        says = {"side": x.axes[0], "layer": layer}
        carried = self.whole or self.chosen.name.startswith(f"{path}.")
        if not carried:
            self.tape.section(title, part="given", **says)
        with self.tape.silent(not carried):
            self.path = path
            own, cross = module.attention, getattr(module, "cross", None)
            self.tape.section(f"{title}: {KINDS[own.kind]}", **says, **self.looks(own))
            x = self.residual(module, x, lambda y: self.attention(own, y, bias=bias), "attention")
            if memory is not None and cross is not None:
                self.tape.section(f"{title}: cross-attention", **says, **self.looks(cross), keys=memory.axes[0])
                x = self.residual(module, x, lambda y: self.attention(cross, y, memory), "cross")
            self.tape.section(f"{title}: feed-forward", part="feedforward", **says)
            x = self.residual(module, x, lambda y: self.feed_forward(module.feedforward, y), "feedforward")
        if not carried:
            where = EncoderBlock.forward if memory is None else DecoderBlock.forward
            x = self.tape.give(x, f"{path}.out", "What comes out of this layer, given", where)
        return self.tape.compare(x, self.own.output(module, self.call))

    def looks(self, attention: Any) -> dict[str, Any]:
        """What a section says of its attention; calls of shared layers are numbered, as in a look."""
        name = self.paths[attention]
        seen = name if len(self.own.recording[name].calls) == 1 else f"{name}.{self.call}"
        return {"part": "attention", "attention": seen, "heads": attention.heads}

    def last_norm(self, x: Value, module: nn.Module, called: str, where: Callable[..., Any]) -> Value:
        if isinstance(module, nn.Identity):
            return x
        self.path = self.paths[module]
        self.tape.section(called, side=x.axes[0], part="norm")
        return self.norm(x, module, "n", where)

    # The families

    def transformer(self, model: Transformer) -> None:
        source, target = self.look.ids
        x = self.embed(model.source_embedding, source, "source", "The source's tokens become vectors")
        bias = self.relative(model.encoder_bias, len(source), "source")
        for layer, block in enumerate(model.encoder):
            x = self.block(block, x, "Encoder", layer, bias)
        memory = self.last_norm(x, model.encoder_norm, "The encoder's last norm", Transformer.encode)
        x = self.embed(model.target_embedding, target, "target", "The translation's tokens become vectors")
        bias = self.relative(model.decoder_bias, len(target), "target")
        for layer, above in enumerate(model.decoder):
            x = self.block(above, x, "Decoder", layer, bias, memory)
        finished = Transformer._final_norm
        x = self.last_norm(x, model.decoder_norm, "The decoder's last norm", finished)
        self.tape.section("The next token", side="target", part="output")
        if model.config.output_scale:
            self.path = "output"
            x = self.do("scale", "scaled", finished, [x], says="output_scaled", by=float(model.output_factor))
        self.output(x, model.output, Transformer.forward, self.token)

    def gpt(self, model: GPT) -> None:
        (ids,) = self.look.ids
        x = self.embed(model.embedding, ids, "text", "Tokens become vectors")
        for layer, block in enumerate(model.blocks):
            x = self.block(block, x, "Decoder", layer)
        x = self.last_norm(x, model.norm, "The last norm", GPT._features)
        self.tape.section("The next token", side="text", part="output")
        self.output(x, model.output, GPT.forward, self.token)

    def bert(self, model: Bert) -> None:
        (ids,) = self.look.ids
        x = self.embed(model.embedding, ids, "text", "Tokens become vectors")
        if isinstance(model.widen, nn.Linear):
            x = self.linear(x, model.widen, "widened", Bert.encode)
        layers, groups = model.config.layers, len(model.blocks)
        calls = [0] * groups
        for layer in range(layers):
            group = layer * groups // layers
            self.call = calls[group]
            calls[group] += 1
            x = self.block(model.blocks[group], x, "Encoder", layer)
        self.call = 0
        x = self.last_norm(x, model.norm, "The last norm", Bert.encode)
        titles = {"none": "The text's vector", "mask": "What stands where", "classify": "The label"}
        self.tape.section(titles.get(model.config.head, "The answer"), side="text", part="output")
        self.path = "head"
        self.bert_head(model, x)

    def bert_head(self, model: Bert, x: Value) -> None:
        if model.output is None:
            x = self.do("mean", "mean", TextEncoder.embed, [x], axes=ONE)
            self.do("normalise", "vector", TextEncoder.embed, [x], eps=1e-12)
        elif model.mask_head is not None:
            head, where = model.mask_head, MaskHead.forward
            x = self.linear(x, head.dense, "dense", where)
            x = self.activate("activated", where, x, head.activation, f"y = {head.activation}(x)")
            self.output(self.norm(x, head.norm, "norm", where), model.output, Bert.forward, self.token)
        elif model.config.head == "classify" and model.pooler is not None:
            labels, function = model.config.labels, model.config.pooler
            x = self.do("take", "first", Bert.pooled, [x], rows=[0], axes=ONE)
            x = self.linear(x, model.pooler, "pooled", Bert.pooled)
            x = self.activate("activated", Bert.pooled, x, function, f"y = {function}(x)")
            self.output(x, model.output, Bert.forward, lambda i: labels[i], says="l_labels")
        else:
            logits = self.linear(x, model.output, "l", Bert.forward, says="l_ends")
            logits = self.do("turn", "turned", TextEncoder.answer, [logits], axes=("ends", "text"))
            self.do("softmax", "p", TextEncoder.answer, [logits], says="p_ends")

    def seq2seq(self, model: Seq2Seq) -> None:
        source, target = self.look.ids
        decoder, where = model.decoder, Decoder._attentional
        x = self.embed(model.source_embedding, source, "source", "The source's tokens become vectors")
        encoded, states = self.encoder(model.encoder, x)
        y = self.embed(model.target_embedding, target, "target", "The translation's tokens become vectors")
        self.path = "decoder"
        self.tape.section("What the decoder looks at", side="source", part="memory")
        memory = self.linear(encoded, decoder.memory, "memory", Decoder.remember)
        axes = ("source", "heads", "channels")
        k = self.do("split", "keys", StateAttention.forward, [memory], axes=axes, heads=1)
        steps = self.luong if decoder.place == "luong" else self.bahdanau
        rows = steps(decoder, y, states, k)
        self.path = "decoder"
        self.tape.section("The attentional state", side="target", part="combine")
        u = self.linear(rows, decoder.combine, "combined", where)
        s = self.do("activate", "attentional", where, [u], function="tanh")
        self.tape.compare(s, self.own.output(decoder))
        self.tape.section("The next token", side="target", part="output")
        self.output(s, model.output, Seq2Seq.forward, self.token)
