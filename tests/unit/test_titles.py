"""What people read of our nodes: no class names, no paths, nothing that the canvas rewrites."""

import ast
import re
from pathlib import Path

import pytest

from qwen21.errors import UserError
from tests.support.schemas import node_schemas

NODES = Path(__file__).resolve().parents[2] / "nodes"
DOCS = NODES.parent / "web" / "docs"


@pytest.fixture(scope="module")
def schemas():
    return node_schemas()


def test_the_errors_name_is_short_where_comfyui_shows_it():
    """It shows module and name."""
    assert f"{UserError.__module__}.{UserError.__qualname__}" == "qwen21.UserError"


def test_nodes_are_called_by_their_titles(schemas):
    """In every string but docstrings and the ids themselves."""
    found = []
    for file in sorted(NODES.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        ids = [
            k.value
            for call in ast.walk(tree)
            if isinstance(call, ast.Call)
            for k in call.keywords
            if k.arg == "node_id"
        ]
        quiet = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in [*ids, *quiet]:
                found += [f"{file.name}: {node.value}" for name in schemas if re.search(rf"\b{name}\b", node.value)]
    assert found == []


def test_help_calls_nodes_by_their_titles(schemas):
    pages = {page.name: page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md"))}
    assert pages
    assert [(page, name) for page, text in pages.items() for name in schemas if re.search(rf"\b{name}\b", text)] == []


def test_typed_text_is_left_alone(schemas):
    """With dynamicPrompts the canvas takes {a|b} apart and drops what stands behind //."""
    texts = [slot for schema in schemas.values() for slot in schema.inputs if slot.type == "STRING"]
    assert len(texts) >= 3
    assert [slot.name for slot in texts if slot.options.get("dynamic_prompts")] == []
