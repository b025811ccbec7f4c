"""What a docstring says of a function and of its parameters: Google and Sphinx forms."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field

_SECTION = re.compile(
    r"^(args|arguments|parameters|params|returns?|raises|yields?|examples?|notes?|warnings?"
    r"|attributes|see also|references|todo)\s*:\s*$",
    re.IGNORECASE,
)
_ARGS = re.compile(r"^(args|arguments|parameters|params)\s*:\s*$", re.IGNORECASE)
_GOOGLE = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_SPHINX = re.compile(r"^:(?:param|parameter|arg|argument)\s+(?:[^:]*\s)?\*{0,2}(\w+)\s*:\s*(.*)$")
_SPHINX_OTHER = re.compile(r"^:\w+[^:]*:")


@dataclass(slots=True)
class Described:
    """A function's description and those of its parameters."""

    text: str = ""
    parameters: dict[str, str] = field(default_factory=dict[str, str])


def describe(function: Callable[..., object]) -> Described:
    """Return what the docstring of a function says."""
    lines = inspect.cleandoc(function.__doc__ or "").splitlines()
    described = Described()
    head: list[str] = []
    index = 0
    while index < len(lines):
        line = lines[index].rstrip()
        if _ARGS.match(line):
            index = _google_args(lines, index + 1, described.parameters)
        elif _SECTION.match(line):
            index = _skip_block(lines, index + 1)
        elif match := _SPHINX.match(line):
            index = _sphinx_param(lines, index, match, described.parameters)
        elif _SPHINX_OTHER.match(line):
            index = _skip_block(lines, index + 1)
        else:
            head.append(line)
            index += 1
    described.text = "\n".join(head).strip()
    return described


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _skip_block(lines: list[str], index: int) -> int:
    while index < len(lines) and (not lines[index].strip() or _indent(lines[index]) > 0):
        index += 1
    return index


def _google_args(lines: list[str], start: int, found: dict[str, str]) -> int:
    end = _skip_block(lines, start)
    block = [line for line in lines[start:end] if line.strip()]
    base = min((_indent(line) for line in block), default=0)
    name = ""
    for line in block:
        match = _GOOGLE.match(line.strip()) if _indent(line) == base else None
        if match:
            name = match[1]
            found[name] = match[2].strip()
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return end


def _sphinx_param(lines: list[str], index: int, match: re.Match[str], found: dict[str, str]) -> int:
    text = [match[2].strip()]
    index += 1
    while index < len(lines) and lines[index].strip() and _indent(lines[index]) > 0:
        text.append(lines[index].strip())
        index += 1
    found[match[1]] = " ".join(text).strip()
    return index
