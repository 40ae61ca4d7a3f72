"""The weights of Headway's embedded model, written down: one function per block of the circuit.

``scripts/make_embedded_model.py`` calls ``weights`` and stores the result; ``src/headway/runtime/embedded/README.md``
explains the circuit as a whole. Everything is Python and elementwise NumPy, rounded to eight significant bits at
the end, so the bytes do not depend on the platform and a bfloat16 copy loses nothing.
"""

from __future__ import annotations

import cmath
import math
import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from embedded_layout import (
    ASSISTANT,
    CHAT_OFFSET,
    CHATTY,
    DELTA,
    EARLY,
    END,
    END_ANSWER,
    FALL,
    FIELDS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INDUCE,
    INNER,
    KERNEL,
    KV_HEADS,
    LOCAL,
    MATCH,
    NUMERIC,
    ONE,
    PAIRS,
    RECENT,
    STATES,
    USER,
    VOCAB,
    Array,
    answer_of,
    at,
    code,
    embedding,
    freq,
    nearness,
    norm_weight,
    put,
    reach_bias,
    signs,
    unit,
)


def attention0() -> dict[str, Array]:
    """Layer 0: previous tokens, and how far back the last trigger stands, as four soft thermometer bits."""
    q, k = np.zeros((HEADS * HEAD_DIM, HIDDEN)), np.zeros((KV_HEADS * HEAD_DIM, HIDDEN))
    v, o = np.zeros_like(k), np.zeros((HIDDEN, HEADS * HEAD_DIM))
    u, scale = unit(0), math.sqrt(HEAD_DIM)
    for head in range(HEADS):
        for pair, gain in enumerate(KERNEL):
            turned = gain * cmath.exp(-1j * freq(pair) * DELTA[head])
            put(q, head * HEAD_DIM, pair, at("one"), turned * scale / (ONE * u))
        put(q, head * HEAD_DIM, 15, at("one"), reach_bias(head) * scale / (ONE * u * 8))
    for kv in range(KV_HEADS):
        base = kv * HEAD_DIM
        for kind in ("plain", "digit", "space"):
            for pair in range(8):
                put(k, base, pair, at(kind), 1 / u)
        for pair, z in enumerate(FALL, start=1):
            put(k, base, pair, at("trigger"), z / KERNEL[pair] / u)
            put(k, base, pair, at("chat"), z * cmath.exp(-1j * freq(pair) * CHAT_OFFSET) / KERNEL[pair] / u)
        for kind in ("trigger", "chat"):
            put(k, base, 15, at(kind), 8 / u)
        for i in range(12):
            v[base + i, at("code_a", i)] = v[base + 12 + i, at("code_b", i)] = 1 / u
        for i in range(6):
            v[base + 26 + i, at("out", i)] = 1 / u
        for kind in ("trigger", "chat"):
            v[base + 24, at(kind)] = 1 / u
        v[base + 25, at("chat")] = 1 / u
    for head in range(HEADS):
        o[at("near"), head * HEAD_DIM + 24] = o[at("near_chat"), head * HEAD_DIM + 25] = 1
    for i in range(12):
        o[at("prev1_a", i), 32 + i] = o[at("prev1_b", i), 32 + 12 + i] = 1
        o[at("prev2_b", i), 64 + 12 + i] = o[at("prev3_a", i), 96 + i] = 1
    for i in range(6):
        o[at("self", i), 26 + i] = 1
    return {"q": q, "k": k, "v": v, "o": o}


class Neurons:
    """SwiGLU neurons added one by one; rows in units of features, scaled for the norm in front."""

    def __init__(self, norm: int) -> None:
        self.gate, self.up = np.zeros((INNER, HIDDEN)), np.zeros((INNER, HIDDEN))
        self.down, self.used, self.unit = np.zeros((HIDDEN, INNER)), 0, unit(norm)

    def step(self, terms: dict[int, float], bias: float, writes: dict[int, float], gain: float) -> None:
        """Write ``writes`` where ``terms + bias > 0``: the difference of two ramps that are 10 apart."""
        for ramp in (5.0, -5.0):
            n, self.used = self.used, self.used + 1
            for dim, weight in terms.items():
                self.gate[n, dim] += weight * gain / self.unit
            self.gate[n, at("one")] += bias * gain / (ONE * self.unit)
            for i in range(4):  # one of them is 1 for every token; kept apart so that rounding spares the difference
                self.gate[n, at("row", i)] = ramp / self.unit
            self.up[n, at("one")] = 1 / (ONE * self.unit)
            for dim, weight in writes.items():
                self.down[dim, n] += weight / (2 * ramp)

    def hashes(self, seed: int, reads: Sequence[str], writes: str, weight: float) -> None:
        """Fill the rest with products of random sign sums: a fixed noise on the logits that depends on the input."""
        rng = random.Random(seed)
        dims = [at(name, i) for name in reads for i in range(FIELDS[name])]
        for n in range(self.used, INNER):
            for matrix, size in ((self.gate, 0.25), (self.up, 0.25)):
                for dim in rng.sample(dims, 8):
                    matrix[n, dim] = rng.choice((-size, size))
            for i in rng.sample(range(FIELDS[writes]), 4):
                self.down[at(writes, i), n] = rng.choice((-weight, weight))

    def arrays(self) -> dict[str, Array]:
        """The three matrices."""
        return {"gate": self.gate, "up": self.up, "down": self.down}


def mlp0() -> Neurons:
    """Layer 0: decode the distance into the code a token offers (have) and the one it looks for (want)."""
    mlp = Neurons(1)
    level = [nearness(d) for d in range(2, 12)]
    cuts = [(near + far) / 2 for near, far in pairwise(level)]
    cuts[0] = 0.6 * level[0] + 0.4 * level[1]  # distance 2 or less is nearly saturated, 3 is the noisier side
    for k in range(2, 11):  # a step for "distance <= k"; differences of steps single out one distance
        writes: dict[int, float] = {at("held"): 1.0} if k == 10 else {at("asking"): 1.0} if k == 9 else {}
        for i in range(4):
            here, after = STATES[k - 2][i], STATES[k - 1][i] if k < 10 else 0
            writes[at("have", i)] = here - after
            wanted = STATES[0][i] if k == 2 else after  # want the state after this one; " is" wants the space
            following = STATES[k][i] if k < 9 else 0
            writes[at("want", i)] = (wanted - following) if k < 10 else 0
        mlp.step({at("near"): 1, at("trigger"): -8}, -cuts[k - 2], writes, 64)
    change = {at("want", i): float(STATES[1][i] - STATES[0][i]) for i in range(4)}
    mlp.step({at("near"): 1, at("space"): 1, at("chat"): 1, at("trigger"): -8}, -cuts[0] - 1, change, 64)
    mlp.step({at("near"): 1, at("digit"): -8, at("space"): -8}, -cuts[3], {at("early"): 1}, 64)
    mlp.hashes(21, ("code_a", "code_b", "prev1_a", "prev3_a", "self"), "hash", 0.5)
    return mlp


def attention1() -> dict[str, Array]:
    """Layer 1: heads 0 and 2 fetch the next token of the passkey line, heads 1 and 3 are induction heads."""
    q, k = np.zeros((HEADS * HEAD_DIM, HIDDEN)), np.zeros((KV_HEADS * HEAD_DIM, HIDDEN))
    v, o = np.zeros_like(k), np.zeros((HIDDEN, HEADS * HEAD_DIM))
    u, scale = unit(2), math.sqrt(HEAD_DIM)
    for head in range(HEADS):
        base, fetches = head * HEAD_DIM, head % 2 == 0
        for pair, gain in enumerate(LOCAL if fetches else RECENT):
            put(q, base, pair, at("one"), gain * cmath.exp(-1j * freq(pair)) * scale / (ONE * u))
        if fetches:
            for i in range(4):
                q[base + 13 + i % 2 + PAIRS * (i // 2), at("want", i)] = MATCH / 4 * scale / u
            put(q, base, 15, at("asking"), NUMERIC * scale / u)
        else:
            name, user, own = ("code_a", code(USER, 1229), code(ASSISTANT, 1229)) if head == 1 else ("prev1_b", [], [])
            for i in range(12):
                row = base + 7 + i % 6 + PAIRS * (i // 6)
                q[row, at(name, i)] = INDUCE / 12 * scale / u
                if head == 1:  # the assistant header looks for what followed the user header
                    q[row, at("chat")] = (user[i] - own[i]) * INDUCE / 12 * scale / u
    for kv in range(KV_HEADS):
        base = kv * HEAD_DIM
        for pair in range(7):
            put(k, base, pair, at("one"), 1 / (ONE * u))
        for i in range(12):
            k[base + 7 + i % 6 + PAIRS * (i // 6), at(("prev1_a", "prev2_b")[kv], i)] = 1 / u
        for i in range(4):
            k[base + 13 + i % 2 + PAIRS * (i // 2), at("have", i)] = 1 / u
        worth = {"digit": 1.0, "space": 1.0, "near_chat": -CHATTY / NUMERIC, "early": -EARLY / NUMERIC}
        for name, weight in worth.items():
            put(k, base, 15, at(name), weight / u)
        for i, dim in enumerate(_values(kv)):
            v[base + i, dim] = 1 / u
        for head in (2 * kv, 2 * kv + 1):
            for i, dim in enumerate(_targets(kv)):
                copied = at("copy") <= dim < at("copy", 55)
                o[dim, head * HEAD_DIM + i] = (0.25, 1.0, 0.25, 0.5)[head] if copied else 1.0 - head % 2
    return {"q": q, "k": k, "v": v, "o": o}


def _values(kv: int) -> list[int]:
    """Residual dimensions that key-value head ``kv`` of layer 1 carries: half an answer, half a token."""
    half = [at("row", i) for i in range(4)] if kv == 0 else [at("col", i) for i in range(3)]
    return [*half, at("held"), *(at("out", i) for i in (range(27) if kv == 0 else range(27, 55)))]


def _targets(kv: int) -> list[int]:
    """Where layer 1 writes what ``_values`` reads."""
    half = [at("got_row", i) for i in range(4)] if kv == 0 else [at("got_col", i) for i in range(3)]
    return [*half, at("got_held", kv), *(at("copy", i) for i in (range(27) if kv == 0 else range(27, 55)))]


def mlp1() -> Neurons:
    """Layer 1: an answer is the AND of its row (from head 0), its column (from head 2) and that one was asked for."""
    mlp = Neurons(3)
    for answer in range(12):
        terms = {at("got_row", answer // 3): 1.0, at("got_col", answer % 3): 1.0, at("got_held", 0): 1.0,
                 at("got_held", 1): 1.0, at("asking"): 1.0}  # fmt: skip
        mlp.step(terms, -4.4, {at("answer", answer): 12.0}, 64)
    mlp.hashes(22, ("code_a", "code_b", "copy", "prev1_b", "prev2_b"), "copy", 0.125)
    return mlp


def lm_head(pieces: Sequence[str]) -> Array:
    """Logits: the copied token's code, the answer twelve times as loud, and a small fixed bias that breaks ties."""
    table, rng = np.zeros((VOCAB, HIDDEN)), random.Random(12)
    codes = embedding(pieces)[:, at("out") : at("out") + 55]
    for token, piece in enumerate(pieces):
        row = table[token]
        row[at("copy") : at("copy") + 55] = codes[token] * 0.25
        row[at("hash") : at("hash") + 16] = np.array(signs(rng, 16)) * 0.125
        for name in ("prev1_a", "prev2_b", "prev3_a"):
            row[at(name) : at(name) + 12] = np.array(signs(rng, 12)) * 0.03125
        row[at("self") : at("self") + 6] = np.array(signs(rng, 6)) * 0.03125
        row[at("one")] = rng.randrange(-64, 65) / 4096
        answer = END_ANSWER if token == END else answer_of(piece)
        if token == END or answer != END_ANSWER:
            row[at("answer", answer)] = 3.0
    return table


def rounded(array: Array) -> npt.NDArray[np.float32]:
    """Round to eight significant bits."""
    mantissa, exponent = np.frexp(array)
    exact: Array = np.ldexp(np.rint(mantissa * 256) / 256, exponent)
    return exact.astype(np.float32)


def weights(pieces: Sequence[str]) -> dict[str, npt.NDArray[np.float32]]:
    """Every tensor of the checkpoint by its Hugging Face name; ``pieces`` are the vocabulary's tokens in order."""
    norms = [norm_weight(n) for n in range(5)]
    tensors = {"model.embed_tokens.weight": embedding(pieces), "model.norm.weight": norms[4]}
    tensors["lm_head.weight"] = lm_head(pieces) / norms[4]
    for layer, (heads, mlp) in enumerate(((attention0(), mlp0()), (attention1(), mlp1()))):
        name = f"model.layers.{layer}."
        tensors[name + "input_layernorm.weight"] = norms[2 * layer]
        tensors[name + "post_attention_layernorm.weight"] = norms[2 * layer + 1]
        for key, matrix in heads.items():
            tensors[f"{name}self_attn.{key}_proj.weight"] = matrix if key == "o" else matrix / norms[2 * layer]
        for key, matrix in mlp.arrays().items():
            tensors[f"{name}mlp.{key}_proj.weight"] = matrix if key == "down" else matrix / norms[2 * layer + 1]
    return {key: rounded(matrix) for key, matrix in tensors.items()}
