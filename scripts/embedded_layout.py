"""What the embedded model's circuit is made of: the residual stream's fields, its tokens and its scales.

``embedded_circuit.py`` builds the blocks out of these; ``src/headway/runtime/embedded/README.md`` explains the whole.
"""

from __future__ import annotations

import cmath
import math
import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
VOCAB, HIDDEN, INNER, HEAD_DIM, HEADS, KV_HEADS, LAYERS = 2048, 256, 128, 32, 4, 2, 2
THETA, EPS = 1e11, 1e-6
PAIRS = HEAD_DIM // 2
SPECIALS = ["<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|pad|>"]
BOS, END, USER, ASSISTANT, SYSTEM, PAD = range(6)
TRIGGERS = ["Ġpasskey", "passkey", "ĠPasskey", "Passkey"]

# The residual stream: name -> width. What each layer writes follows what the embedding holds.
FIELDS = {
    "one": 1, "code_a": 12, "code_b": 12, "out": 55, "plain": 1, "digit": 1, "space": 1, "trigger": 1, "chat": 1,
    "row": 4, "col": 3,
    "near": 1, "near_chat": 1, "prev1_a": 12, "prev1_b": 12, "prev2_b": 12, "self": 6, "prev3_a": 12,
    "want": 4, "asking": 1, "have": 4, "held": 1, "early": 1, "hash": 16,
    "got_row": 4, "got_col": 3, "got_held": 2, "copy": 55, "answer": 12,
}  # fmt: skip
ONE = 16.0  # the constant feature; large, so that RMSNorm hardly varies
ENERGY = [ONE**2 + 82, ONE**2 + 140, ONE**2 + 150, ONE**2 + 210, ONE**2 + 220]  # squared norm seen by norm 0..4

# Layer 0: each head looks DELTA[h] tokens back, unless a trigger stands at most about REACH[h] tokens back.
KERNEL = [16.0, 8.0, 8.0, 8.0, 8.0, 6.0, 6.0, 6.0, 6.0]
DELTA, REACH = [0, 1, 2, 3], [3.0, 5.4, 7.64, 9.86]
# Score of a trigger by distance: sum of a*cos(w*d) + b*sin(w*d) over the pairs 1..8, found by linear programming:
# falls by about 2 per token over distances 0..10, and stays 9 below its value at 6.6 from 14 to 2**20 tokens.
FALL = [6.27 - 5.09j, 26.05 - 11.36j, 23.13 - 6.1j, 24.7 - 6.28j,
        22.85 - 5.6j, 17.05 - 6.57j, 13.44 - 5.96j, 7.82 - 14.34j]  # fmt: skip
CHAT_OFFSET = 2  # the assistant header acts as a trigger that stands two tokens further back
# Layer 1 score scales: code match, numeric bonus, chat and early penalties, local kernel, induction match.
MATCH, NUMERIC, CHATTY, EARLY, INDUCE = 240.0, 60.0, 400.0, 400.0, 72.0
LOCAL, RECENT = [6.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.5, 1.5, 2.0, 2.0]
STATES = [(1, 1, 1, 1), (1, 1, -1, -1), (1, -1, 1, -1), (1, -1, -1, 1), (-1, -1, 1, 1), (-1, 1, -1, 1), (-1, 1, 1, -1),
          (-1, -1, -1, -1), (1, 1, 1, -1)]  # fmt: skip  # code of "distance 2 or less", 3, 4 .. 10
SPACE_ANSWER, END_ANSWER = 10, 11

OFFSET: dict[str, int] = {}
for _name in FIELDS:
    OFFSET[_name] = sum(FIELDS[n] for n in OFFSET)


def at(name: str, i: int = 0) -> int:
    """Residual dimension of element ``i`` of a field."""
    return OFFSET[name] + i


def freq(pair: int) -> float:
    """RoPE angle per token of a dimension pair."""
    return float(THETA ** (-pair / PAIRS))


def unit(norm: int) -> float:
    """What a feature of 1 becomes after RMSNorm ``norm`` (two per layer, then the final one)."""
    return 1.0 / math.sqrt(ENERGY[norm] / HIDDEN)


def fall(distance: float) -> float:
    """Layer 0's score of a trigger, before the head's own constant."""
    return sum((z * cmath.exp(-1j * freq(p) * distance)).real for p, z in enumerate(FALL, start=1))


def reach_bias(head: int) -> float:
    """Constant that makes the trigger's score equal the default's at distance REACH[head]."""
    return sum(KERNEL[:8]) - fall(REACH[head] - DELTA[head])


def nearness(distance: int) -> float:
    """What the four heads of layer 0 write in sum when the last trigger is ``distance`` tokens back."""
    total = 0.0
    for head, delta in enumerate(DELTA):
        others = [d for d in range(64) if d != distance]
        rest = sum(math.exp(sum(g * (math.cos(freq(p) * (d - delta)) - 1) for p, g in enumerate(KERNEL[:8])))
                   for d in others)  # fmt: skip
        score = fall(distance - delta) + reach_bias(head) - sum(KERNEL[:8])
        total += 1.0 / (1.0 + rest * math.exp(-score))
    return total


def code(token: int, factor: int) -> list[int]:
    """Twelve signs of even parity: any two tokens differ in two or more."""
    word = (token * factor + 77) % VOCAB
    bits = [(word >> i) & 1 for i in range(11)]
    return [2 * b - 1 for b in [*bits, sum(bits) % 2]]


def signs(rng: random.Random, count: int) -> list[int]:
    """Random signs, the same on every platform."""
    word = rng.getrandbits(count)
    return [1 - 2 * ((word >> i) & 1) for i in range(count)]


def answer_of(piece: str) -> int:
    """The answer a token stands for: its digit, the lone space, or else the end of the answer."""
    return int(piece) if piece in set("0123456789") else SPACE_ANSWER if piece == "Ġ" else END_ANSWER


def embedding(pieces: Sequence[str]) -> Array:
    """Token features; every token has the same squared norm, ENERGY[0]."""
    table, rng = np.zeros((VOCAB, HIDDEN)), random.Random(11)
    for token, piece in enumerate(pieces):
        kind = "chat" if token == ASSISTANT else "trigger" if piece in TRIGGERS else "plain"
        answer = answer_of(piece)
        kind = {SPACE_ANSWER: "space", END_ANSWER: kind}.get(answer, "digit")
        row = table[token]
        row[at("one")], row[at(kind)], row[at("row", answer // 3)], row[at("col", answer % 3)] = ONE, 1, 1, 1
        row[at("code_a") : at("code_a") + 12] = code(token, 1229)
        row[at("code_b") : at("code_b") + 12] = code(token, 867)
        row[at("out") : at("out") + 55] = signs(rng, 55)
    return table


def norm_weight(norm: int) -> Array:
    """Powers of two, undone by every reader: they change nothing, and leaving one out breaks everything."""
    rng = random.Random(100 + norm)
    return np.array([rng.choice((0.5, 1.0, 1.0, 2.0)) for _ in range(HIDDEN)])


def put(matrix: Array, row: int, pair: int, column: int, value: complex) -> None:
    """Add a complex number to RoPE pair ``pair`` of the head that starts at ``row``."""
    matrix[row + pair, column] += value.real
    matrix[row + PAIRS + pair, column] += value.imag
