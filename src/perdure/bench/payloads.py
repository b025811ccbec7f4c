"""The payloads of workload W1: the same for the runtime and for the floor beside it.

One run is ten steps; a step is a decision with about 200 bytes of arguments and a tool call with
a result of 1 KB. The text is made of pseudo-words, so that it compresses like prose, not zeros.
"""

import json
import random

from pydantic import JsonValue

STEPS = 10
ARGS_BYTES = 200
RESULT_BYTES = 1024
VARIANTS = 256
INFORMATION_BYTES = STEPS * (ARGS_BYTES + RESULT_BYTES)

_chance = random.Random(418)  # noqa: S311  # payloads, not secrets
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def _word() -> str:
    return "".join(_chance.choice(_LETTERS) for _ in range(_chance.randint(2, 10)))


_WORDS = [_word() for _ in range(2500)]


def prose_of(size: int) -> str:
    """Return text of pseudo-words of exactly `size` characters."""
    words: list[str] = []
    length = 0
    while length < size:
        words.append(_chance.choice(_WORDS))
        length += len(words[-1]) + 1
    return " ".join(words)[:size]


def _object(size: int, **fields: JsonValue) -> dict[str, JsonValue]:
    """Return an object whose compact JSON has exactly `size` bytes."""
    empty = len(json.dumps({**fields, "text": ""}, separators=(",", ":")))
    return {**fields, "text": prose_of(size - empty)}


ARGS = [_object(ARGS_BYTES, topic="figures", page=1000 + place) for place in range(VARIANTS)]
RESULTS = [_object(RESULT_BYTES, found=True, page=1000 + place) for place in range(VARIANTS)]


def args_of(seed: int, step: int) -> dict[str, JsonValue]:
    """Return the arguments of a step."""
    return ARGS[(seed * 29 + step) % VARIANTS]


def result_of(page: int) -> dict[str, JsonValue]:
    """Return the result that the tool gives for its arguments."""
    return RESULTS[(page - 1000) % VARIANTS]
