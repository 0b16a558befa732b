"""Reference implementation of llama2.c in NumPy, for comparison with imported checkpoints."""

import struct
from pathlib import Path

import numpy as np


class ReferenceLlama:
    """A checkpoint, run token by token in float64."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        dim, hidden, self.layers, self.heads, self.kv_heads, vocab, steps = struct.unpack("<7i", content[:28])
        values = np.frombuffer(content, np.float32, offset=28).astype(np.float64)
        kv_dim = dim // self.heads * self.kv_heads

        def take(*shape):
            nonlocal values
            count = int(np.prod(shape))
            tensor, values = values[:count].reshape(shape), values[count:]
            return tensor

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
        take(2, steps, dim // self.heads // 2)  # cosines and sines of rotary positions
        self.output = take(abs(vocab), dim) if vocab < 0 else self.embedding
        self.keys = [[] for _ in range(self.layers)]
        self.values = [[] for _ in range(self.layers)]

    def step(self, token: int) -> np.ndarray:
        """Appends a token; returns the logits of the next one."""
        position = len(self.keys[0])
        x = self.embedding[token]
        for layer in range(self.layers):
            h = norm(x, self.att_norm[layer])
            q = (self.wq[layer] @ h).reshape(self.heads, -1)
            k = (self.wk[layer] @ h).reshape(self.kv_heads, -1)
            v = (self.wv[layer] @ h).reshape(self.kv_heads, -1)
            self.keys[layer].append(apply_rotary(k, position))
            self.values[layer].append(v)
            q = apply_rotary(q, position)
            outputs = []
            for head in range(self.heads):
                group = head * self.kv_heads // self.heads
                scores = [q[head] @ key[group] / q.shape[1] ** 0.5 for key in self.keys[layer]]
                weights = np.exp(scores - np.max(scores))
                weights /= weights.sum()
                outputs.append(sum(w * value[group] for w, value in zip(weights, self.values[layer])))
            x = x + self.wo[layer] @ np.concatenate(outputs)
            h = norm(x, self.ffn_norm[layer])
            gate = self.w1[layer] @ h
            x = x + self.w2[layer] @ (gate / (1 + np.exp(-gate)) * (self.w3[layer] @ h))
        return self.output @ norm(x, self.final_norm)


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean() + 1e-5) * weight


def apply_rotary(x: np.ndarray, position: int) -> np.ndarray:
    """Rotates the channel pairs (2i, 2i + 1)."""
    rotated = np.empty_like(x)
    for i in range(0, x.shape[1], 2):
        angle = position / 10000.0 ** (i / x.shape[1])
        rotated[:, i] = x[:, i] * np.cos(angle) - x[:, i + 1] * np.sin(angle)
        rotated[:, i + 1] = x[:, i] * np.sin(angle) + x[:, i + 1] * np.cos(angle)
    return rotated


def greedy(model: ReferenceLlama, prompt: list[int], count: int) -> list[int]:
    """Continues a prompt greedily by `count` tokens."""
    tokens = list(prompt)
    for token in prompt:
        logits = model.step(token)
    for _ in range(count):
        tokens.append(int(logits.argmax()))
        logits = model.step(tokens[-1])
    return tokens


def read_pieces(path: Path, size: int) -> list[tuple[bytes, float]]:
    """The pieces of a tokenizer file with their scores."""
    content, offset, pieces = path.read_bytes(), 4, []
    for _ in range(size):
        score, length = struct.unpack_from("<fi", content, offset)
        pieces.append((content[offset + 8 : offset + 8 + length], score))
        offset += 8 + length
    # Byte pieces; early files of llama2.c name them by the character with that code.
    pieces[3:259] = [(b"<0x%02X>" % byte, 0.0) for byte in range(256)]
    return pieces


def encode(pieces: list[tuple[bytes, float]], text: str) -> list[int]:
    """The ids of a text: characters, or bytes if a character has no piece, merged by descending score."""
    index = {piece: i for i, (piece, _) in enumerate(pieces)}
    tokens = []
    for character in " " + text if text else "":
        encoded = character.encode()
        tokens += [index[encoded]] if encoded in index else [byte + 3 for byte in encoded]
    while True:
        best, position = -1e10, None
        for i in range(len(tokens) - 1):
            merged = index.get(pieces[tokens[i]][0] + pieces[tokens[i + 1]][0])
            if merged is not None and pieces[merged][1] > best:
                best, position, chosen = pieces[merged][1], i, merged
        if position is None:
            return tokens
        tokens[position : position + 2] = [chosen]
