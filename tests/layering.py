"""Which part of the library may import which: a table of floors, and the rule that arrows only run down.

Imports for type checkers and within functions count like all others, so the table is the architecture.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tests.house_rules import Source

PACKAGE = "qwen21"
DOOR = ("__init__", "__main__")
# The highest floor first. What stands on one floor imports only from the floors below it, and within itself.
FLOORS = (
    ("cli",),
    ("server",),
    ("loading",),
    ("clients", "mini"),
    ("pipeline",),
    ("networks", "guidance_branch", "manifest"),
    ("memory", "request", "lora", "encode_cache"),
    ("checkpoint",),
    ("control",),
    ("models",),
    ("prefix",),
    ("sampling",),
    ("ops",),
    ("inputs",),
    ("config", "sequence"),
    ("atomic_write", "choices", "system_memory", "watch"),
    ("errors",),
)
MOST_FILES = 12  # at the top of the library, besides the door

Arrow = tuple[str, str]  # importing module, imported module: names below the package, such as `ops.attention`


def arrows(sources: Iterable[Source]) -> set[Arrow]:
    """Every import of one module of the library by another."""
    modules = {_module(source.name): source for source in sources}
    return {(name, found) for name, source in modules.items() for found in _imported(name, source, modules)}


def upward(found: Iterable[Arrow], floors: Sequence[Sequence[str]] = FLOORS) -> list[str]:
    """Arrows that do not run down the table, and modules that are not in it."""
    floor = {part: number for number, parts in enumerate(floors) for part in parts}
    findings = []
    for start, end in sorted(found):
        above, below = start.split(".")[0], end.split(".")[0]
        if above == below or above in DOOR or below in DOOR:
            continue  # within a room; the door stands outside and holds the version alone
        missing = [part for part in (above, below) if part not in floor]
        if missing:
            findings.append(f"{missing[0]} is on no floor; put it into the table")
        elif floor[below] <= floor[above]:
            findings.append(f"{start} imports {end}, which is not below it")
    return findings


def circles(found: Iterable[Arrow]) -> list[str]:
    """One line for each arrow that closes a circle of imports."""
    graph: dict[str, list[str]] = {}
    for start, end in sorted(found):
        if start != end:
            graph.setdefault(start, []).append(end)
    done: set[str] = set()
    findings: list[str] = []

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            findings.append(" -> ".join((*path[path.index(module) :], module)))
        elif module not in done:
            for following in graph.get(module, ()):
                visit(following, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())
    return findings


def _imported(module: str, source: Source, modules: Mapping[str, Source]) -> Iterator[str]:
    folder = module.split(".")[:-1] if not source.name.endswith("__init__.py") else module.split(".")
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        above = folder[: len(folder) - node.level + 1]
        base = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            named = f"{base}.{alias.name}" if base else alias.name
            yield named if named in modules else (base or DOOR[0])


def _module(path: str) -> str:
    """`qwen21/ops/attention.py` is `ops.attention`; a folder's `__init__.py` is the folder."""
    parts = path.removesuffix(".py").split("/")[1:]
    return ".".join(parts[:-1] if parts[-1] == DOOR[0] and len(parts) > 1 else parts)
