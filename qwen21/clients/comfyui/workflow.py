"""A workflow in ComfyUI's API format: find the node and input that a name means, and set it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from ...errors import UserError

EXPORT = "open it in ComfyUI and choose File > Export (API)"


class Workflow:
    """A workflow's nodes by id; `set` changes them in place."""

    def __init__(self, nodes: dict[str, dict[str, Any]]) -> None:
        self.nodes = nodes

    @classmethod
    def read(cls, file: Path) -> Workflow:
        try:
            nodes = json.loads(file.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror}); give a workflow in API format") from error
        except ValueError as error:
            raise UserError(f"{file}: not JSON ({error}); give a workflow in API format") from error
        nodes = _unwrapped(nodes)
        if isinstance(nodes, dict) and isinstance(nodes.get("nodes"), list):
            raise UserError(f"{file}: a workflow in the editor's format, expected the API format; {EXPORT}")
        if not isinstance(nodes, dict) or not nodes:
            raise UserError(f"{file}: no workflow in API format, expected an object of nodes by id; {EXPORT}")
        for name, node in nodes.items():
            if not isinstance(node, dict) or not isinstance(node.get("class_type"), str):
                raise UserError(f"{file}: {name!r} is no node, expected an object with a class_type; {EXPORT}")
            if not isinstance(node.setdefault("inputs", {}), dict):
                raise UserError(f"{file}: the inputs of node {name!r} are no object; {EXPORT}")
        return cls(nodes)

    def label(self, node: str, class_type: str = "") -> str:
        """Name of a node for messages. `class_type` is used for nodes that the server added."""
        known = self.nodes.get(node, {"class_type": class_type})
        title = _title(known)
        shown = f' "{title}"' if title not in ("", known["class_type"]) else ""
        return f"node {node}{shown}" + (f" ({known['class_type']})" if known["class_type"] else "")

    def find(self, name: str) -> str | None:
        """Id of the node that `name` means: an id, or the class or title of exactly one node."""
        if name in self.nodes:
            return name
        found = [node for node, content in self.nodes.items() if name in (content["class_type"], _title(content))]
        if len(found) > 1:
            listed = ", ".join(self.label(node) for node in found)
            raise UserError(f"{name!r} means {len(found)} nodes ({listed}); give the id of one")
        return found[0] if found else None

    def setting(self, text: str) -> tuple[str, str, Any]:
        """Parse `NODE.INPUT=VALUE` to (node, input, value). The value is JSON, else a string."""
        target, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set {text!r}: expected NODE.INPUT=VALUE")
        node, name = self._target(target, "--set", "NODE.INPUT=VALUE")
        return node, name, _json_or_string(value)

    def picture(self, text: str) -> tuple[str, str, Path]:
        """Parse `NODE.INPUT=FILE` to (node, input, file). A node alone means its input `image`."""
        target, equals, file = text.partition("=")
        if not equals or not file:
            raise UserError(f"--image {text!r}: expected NODE=FILE or NODE.INPUT=FILE")
        if (node := self.find(target)) is not None:
            return node, "image", Path(file)
        return *self._target(target, "--image", "NODE=FILE or NODE.INPUT=FILE"), Path(file)

    def set(self, node: str, name: str, value: Any) -> None:
        old = self.nodes[node]["inputs"].get(name)
        if _is_link(old) and old[0] in self.nodes and not _is_link(value):
            source = self.label(old[0])
            raise UserError(f"input {name!r} of {self.label(node)} is wired to {source}; set the value there")
        self.nodes[node]["inputs"][name] = value

    def _target(self, text: str, flag: str, form: str) -> tuple[str, str]:
        """Parse `NODE.INPUT` to node and input. Names may contain dots: the longest NODE that exists wins."""
        cuts = [i for i, character in enumerate(text) if character == "." and 0 < i < len(text) - 1]
        for cut in reversed(cuts):
            if (node := self.find(text[:cut])) is not None:
                return node, text[cut + 1 :]
        if not cuts:
            raise UserError(f"{flag} {text!r}: expected {form}")
        self._unknown(flag, text[: cuts[-1]])

    def _unknown(self, flag: str, name: str) -> NoReturn:
        listed = ", ".join(self.label(node) for node in self.nodes)
        raise UserError(f"{flag}: the workflow has no node {name!r}; it has {listed}")


def _unwrapped(content: Any) -> Any:
    """Return the nodes in `{"prompt": {...}}`, the form that servers take, and anything else unchanged.

    A node may also have the id `prompt`; it is recognised by its class.
    """
    inner = content.get("prompt") if isinstance(content, dict) else None
    return inner if isinstance(inner, dict) and "class_type" not in inner else content


def _title(node: dict[str, Any]) -> str:
    meta = node.get("_meta")
    return str(meta.get("title") or "") if isinstance(meta, dict) else ""


def _is_link(value: Any) -> bool:
    """Whether an input's value is a link: [id of the node, index of its output]."""
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int)


def _json_or_string(text: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(constant)  # NaN and Infinity are not JSON

    try:
        return json.loads(text, parse_constant=refuse)
    except ValueError:
        return text
