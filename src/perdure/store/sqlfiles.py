"""Named SQL: every statement an adapter runs stands in a `.sql` file under a name of its own.

A file is a sequence of blocks, each headed by `-- name: verb_noun`. Comment lines between the
head and the statement belong to the block and are dropped. Names are the same in each dialect.
"""

import re
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from types import MappingProxyType

_HEAD = re.compile(r"--\s*name:\s*(\S*)\s*")
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)+")


class BadSqlFile(ValueError):
    """A `.sql` file breaks the rules above; its author can mend it."""


def parse_statements(text: str, source: str) -> dict[str, str]:
    """Return the statements of one file by name; raise BadSqlFile naming `source`."""
    found: dict[str, list[str]] = {}
    name: str | None = None
    for number, line in enumerate(text.split("\n"), start=1):
        head = _HEAD.fullmatch(line.strip())
        if head is not None:
            name = str(head[1])
            if _NAME.fullmatch(name) is None:
                raise BadSqlFile(f"{source}:{number}: {name!r} is not of the form verb_noun")
            if name in found:
                raise BadSqlFile(f"{source}:{number}: {name} is there twice")
            found[name] = []
        elif line.strip() and not line.lstrip().startswith("--"):
            if name is None:
                raise BadSqlFile(f"{source}:{number}: SQL before the first name")
            found[name].append(line.rstrip())
    return {name: _closed(lines, name, source) for name, lines in found.items()}


def _closed(lines: list[str], name: str, source: str) -> str:
    if not lines:
        raise BadSqlFile(f"{source}: {name} is empty")
    return "\n".join(lines).removesuffix(";")


def load_statements(folder: Traversable) -> Mapping[str, str]:
    """Return every statement of the `.sql` files in `folder`; a name may occur only once."""
    found: dict[str, str] = {}
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if not file.name.endswith(".sql"):
            continue
        for name, statement in parse_statements(file.read_text("utf-8"), file.name).items():
            if name in found:
                raise BadSqlFile(f"{file.name}: {name} is in another file too")
            found[name] = statement
    return MappingProxyType(found)
