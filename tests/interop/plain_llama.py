"""llama2.c in NumPy, as plainly as can be: what our reading of its files is held against."""

import struct
from pathlib import Path

import numpy as np


class PlainLlama:
    """A checkpoint, run one token after another. Numbers are float64, so that nothing here is rounded."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        dim, hidden, self.layers, self.heads, self.kv_heads, vocab, steps = struct.unpack("<7i", content[:28])
        rest = np.frombuffer(content, np.float32, offset=28).astype(np.float64)
        kv_dim = dim // self.heads * self.kv_heads

        def take(*shape):
            nonlocal rest
            count = int(np.prod(shape))
            taken, rest = rest[:count].reshape(shape), rest[count:]
            return taken

        self.embedding = take(abs(vocab), dim)
        self.att_norm = take(self.layers, dim)
        self.wq = take(self.layers, dim, dim)
        self.wk = take(self.layers, kv_dim, dim)
        self.wv = take(self.layers, kv_dim, dim)
        self.wo = take(self.layers, dim, dim)
        self.ffn_norm = take(self.layers, dim)
        self.w1 = take(self.layers, hidden, dim)
        self.w2 = take(self.layers, dim, hidden)
        self.w3 = take(self.layers, hidden, dim)
        self.final_norm = take(dim)
        take(2, steps, dim // self.heads // 2)  # cosines and sines of the positions
        self.output = take(abs(vocab), dim) if vocab < 0 else self.embedding
        self.keys = [[] for _ in range(self.layers)]
        self.values = [[] for _ in range(self.layers)]

    def step(self, token: int) -> np.ndarray:
        """The logits after one more token."""
        position = len(self.keys[0])
        x = self.embedding[token]
        for layer in range(self.layers):
            h = norm(x, self.att_norm[layer])
            q = (self.wq[layer] @ h).reshape(self.heads, -1)
            k = (self.wk[layer] @ h).reshape(self.kv_heads, -1)
            v = (self.wv[layer] @ h).reshape(self.kv_heads, -1)
            self.keys[layer].append(turn(k, position))
            self.values[layer].append(v)
            q = turn(q, position)
            regarded = []
            for head in range(self.heads):
                group = head * self.kv_heads // self.heads
                scores = [q[head] @ key[group] / q.shape[1] ** 0.5 for key in self.keys[layer]]
                weights = np.exp(scores - np.max(scores))
                weights /= weights.sum()
                regarded.append(sum(w * value[group] for w, value in zip(weights, self.values[layer])))
            x = x + self.wo[layer] @ np.concatenate(regarded)
            h = norm(x, self.ffn_norm[layer])
            gate = self.w1[layer] @ h
            x = x + self.w2[layer] @ (gate / (1 + np.exp(-gate)) * (self.w3[layer] @ h))
        return self.output @ norm(x, self.final_norm)


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean() + 1e-5) * weight


def turn(x: np.ndarray, position: int) -> np.ndarray:
    """Neighbouring channels 2i and 2i + 1 turn together."""
    turned = np.empty_like(x)
    for i in range(0, x.shape[1], 2):
        angle = position / 10000.0 ** (i / x.shape[1])
        turned[:, i] = x[:, i] * np.cos(angle) - x[:, i + 1] * np.sin(angle)
        turned[:, i + 1] = x[:, i] * np.sin(angle) + x[:, i + 1] * np.cos(angle)
    return turned


def greedy(model: PlainLlama, prompt: list[int], count: int) -> list[int]:
    """The prompt and the most probable `count` tokens after it."""
    tokens = list(prompt)
    for token in prompt:
        logits = model.step(token)
    for _ in range(count):
        tokens.append(int(logits.argmax()))
        logits = model.step(tokens[-1])
    return tokens


def read_pieces(path: Path, size: int) -> list[tuple[bytes, float]]:
    content, place, pieces = path.read_bytes(), 4, []
    for _ in range(size):
        score, length = struct.unpack_from("<fi", content, place)
        pieces.append((content[place + 8 : place + 8 + length], score))
        place += 8 + length
    # Bytes, in the first files of llama2.c named after the letters with their numbers.
    pieces[3:259] = [(b"<0x%02X>" % byte, 0.0) for byte in range(256)]
    return pieces


def encode(pieces: list[tuple[bytes, float]], text: str) -> list[int]:
    """The ids of a text: characters, or bytes where there is no such piece, joined by the highest score first."""
    index = {piece: i for i, (piece, _) in enumerate(pieces)}
    tokens = []
    for character in " " + text if text else "":
        encoded = character.encode()
        tokens += [index[encoded]] if encoded in index else [byte + 3 for byte in encoded]
    while True:
        best, place = -1e10, None
        for i in range(len(tokens) - 1):
            joined = index.get(pieces[tokens[i]][0] + pieces[tokens[i + 1]][0])
            if joined is not None and pieces[joined][1] > best:
                best, place, found = pieces[joined][1], i, joined
        if place is None:
            return tokens
        tokens[place : place + 2] = [found]
