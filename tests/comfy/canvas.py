"""A workflow as nodes in columns, written in ComfyUI's two forms: for the canvas (UI) and for /prompt (API)."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from tests.support.schemas import Schema, Slot

TITLE, ROW, WIDGET, TEXT, PAD = 30, 20, 28, 150, 20  # heights on the canvas, in pixels
GAP, COLUMN_GAP, GROUP_PAD, GROUP_TITLE = 90, 70, 25, 50
OPTIONAL_SHAPE = 7  # a hollow socket

Source = tuple["Node", int]


def _core(node_id: str, title: str, inputs: dict[str, Any], outputs: dict[str, str]) -> Schema:
    """A node of ComfyUI itself: inputs by name, a socket's type in capitals or a widget's default."""
    slots = []
    for name, value in inputs.items():
        if isinstance(value, str) and value.isupper() and value not in ("EULER",):
            slots.append(Slot(name, value, {}))
        else:
            kind = {int: "INT", float: "FLOAT", str: "STRING"}[type(value)]
            slots.append(Slot(name, kind, {"default": value, "control_after_generate": name == "seed"}))
    return Schema(node_id, title, "", "", tuple(slots), tuple(Slot(k, v, {}) for k, v in outputs.items()))


CORE = {
    schema.node_id: schema
    for schema in (
        _core("LoadImage", "Load Image", {"image": "example.png"}, {"IMAGE": "IMAGE", "MASK": "MASK"}),
        _core("VAEDecode", "VAE Decode", {"samples": "LATENT", "vae": "VAE"}, {"IMAGE": "IMAGE"}),
        _core("SaveImage", "Save Image", {"images": "IMAGE", "filename_prefix": "qwen21"}, {}),
        _core(
            "KSampler",
            "KSampler",
            {
                "model": "MODEL", "positive": "CONDITIONING", "negative": "CONDITIONING", "latent_image": "LATENT",
                "seed": 0, "steps": 40, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0,
            },
            {"LATENT": "LATENT"},
        ),
    )
}  # fmt: skip


@dataclass(eq=False)
class Node:
    id: int
    schema: Schema
    title: str
    values: dict[str, Any]
    wires: dict[str, Source]
    size: tuple[int, int]
    look: dict[str, str]
    pos: tuple[int, int] = (0, 0)

    def __getitem__(self, output: str) -> Source:
        return self, [slot.name for slot in self.schema.outputs].index(output)

    @property
    def sockets(self) -> list[Slot]:
        """Inputs in the canvas's order: sockets, then widgets."""
        return sorted(self.schema.ordered, key=lambda slot: slot.is_widget)

    @property
    def widgets(self) -> list[Slot]:
        return [slot for slot in self.schema.ordered if slot.is_widget]


@dataclass
class Graph:
    name: str
    schemas: dict[str, Schema]
    nodes: list[Node] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    x: int = 0

    def add(self, node_id: str, title: str = "", *, tall: int = 0, look: dict | None = None, **inputs: Any) -> Node:
        """A node, at least `tall` pixels. Inputs are values of widgets, or outputs of other nodes (`node["name"]`)."""
        schema = self.schemas.get(node_id) or CORE[node_id]
        wires = {name: value for name, value in inputs.items() if isinstance(value, tuple)}
        widgets = [slot for slot in schema.inputs if slot.is_widget]
        values = {slot.name: inputs.get(slot.name, _default(slot)) for slot in widgets}
        unknown = set(inputs) - {slot.name for slot in schema.inputs}
        if unknown:
            raise ValueError(f"{node_id} has no input {unknown}")
        sockets = len(schema.inputs) - len(widgets)
        texts = [slot for slot in widgets if slot.options.get("multiline")]
        extra = sum(1 for slot in widgets if slot.options.get("control_after_generate"))
        rows = (
            max(sockets, len(schema.outputs)) * ROW + (len(widgets) + extra - len(texts)) * WIDGET + len(texts) * TEXT
        )
        node = Node(len(self.nodes) + 1, schema, title, values, wires, (0, max(tall, rows + PAD)), look or {})
        self.nodes.append(node)
        return node

    def column(self, title: str, *rows: Node | tuple[Node, ...], width: int = 340) -> None:
        """A group of nodes below each other; nodes of one row stand side by side. To the right of what is there."""
        y, widest, left = 0, 0, self.x + GROUP_PAD
        for row in rows:
            row = row if isinstance(row, tuple) else (row,)
            for i, node in enumerate(row):
                node.pos = (left + i * (width + COLUMN_GAP), y)
                node.size = (width, node.size[1])
                widest = max(widest, node.pos[0] + width - left)
            y += max(node.size[1] for node in row) + GAP
        top = -TITLE - GROUP_TITLE
        box = [self.x, top, widest + 2 * GROUP_PAD, y - GAP + GROUP_PAD - top]
        self.groups.append({"id": len(self.groups) + 1, "title": title, "bounding": box, "color": "#3f789e",
                            "font_size": 24, "flags": {}})  # fmt: skip
        self.x += box[2] + COLUMN_GAP

    def note(self, title: str, text: str, width: int = 480, height: int = 620) -> None:
        """Markdown in a column of its own."""
        self.notes.append({"title": title, "text": text, "pos": [self.x, 0], "size": [width, height]})
        self.x += width + COLUMN_GAP

    def to_api(self) -> dict[str, Any]:
        """What /prompt takes."""
        return {
            str(node.id): {
                "class_type": node.schema.node_id,
                "inputs": node.values | {k: [str(source.id), slot] for k, (source, slot) in node.wires.items()},
                "_meta": {"title": node.title or node.schema.display_name},
            }
            for node in self.nodes
        }

    def to_ui(self) -> dict[str, Any]:
        """What the canvas opens."""
        links = []
        for node in self.nodes:
            for slot, socket in enumerate(node.sockets):
                if socket.name in node.wires:
                    source, output = node.wires[socket.name]
                    links.append([len(links) + 1, source.id, output, node.id, slot, socket.type])
        nodes = [_ui_node(node, order, links) for order, node in enumerate(self.nodes)]
        first_note = len(nodes) + 1
        nodes += [_ui_note(note, first_note + i, len(nodes) + i) for i, note in enumerate(self.notes)]
        return {
            "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"qwen21/{self.name}")),
            "revision": 0,
            "last_node_id": len(nodes),
            "last_link_id": len(links),
            "nodes": nodes,
            "links": links,
            "groups": self.groups,
            "config": {},
            "extra": {"ds": {"scale": 0.6, "offset": [60, 160]}},
            "version": 0.4,
        }


def _default(slot: Slot) -> Any:
    """The value ComfyUI gives a new widget."""
    if "default" in slot.options:
        return slot.options["default"]
    return slot.options["options"][0]


def _ui_node(node: Node, order: int, links: list[list[Any]]) -> dict[str, Any]:
    inputs = []
    for slot, socket in enumerate(node.sockets):
        link = next((link[0] for link in links if link[3:5] == [node.id, slot]), None)
        entry = {"name": socket.name, "type": socket.type, "link": link}
        if socket.options.get("optional"):
            entry["shape"] = OPTIONAL_SHAPE
        if socket.is_widget:
            entry["widget"] = {"name": socket.name}
        inputs.append(entry)
    outputs = [
        {
            "name": socket.options.get("display_name", socket.name),
            "type": socket.type,
            "links": [link[0] for link in links if link[1:3] == [node.id, slot]] or None,
        }
        for slot, socket in enumerate(node.schema.outputs)
    ]
    values: list[Any] = []
    for widget in node.widgets:
        values.append(node.values[widget.name])
        if widget.options.get("control_after_generate"):
            values.append("randomize")
    if node.schema.node_id == "LoadImage":  # its upload button is a widget of its own
        values.append("image")
        inputs[0]["type"] = "COMBO"
        inputs.append({"name": "upload", "type": "IMAGEUPLOAD", "link": None, "widget": {"name": "upload"}})
    properties = {"Node name for S&R": node.schema.node_id}
    if node.schema.node_id in CORE:
        properties["cnr_id"] = "comfy-core"
    return {
        "id": node.id,
        "type": node.schema.node_id,
        "pos": list(node.pos),
        "size": list(node.size),
        "flags": {},
        "order": order,
        "mode": 0,
        "inputs": inputs,
        "outputs": outputs,
        **({"title": node.title} if node.title else {}),
        "properties": properties,
        "widgets_values": values,
        **node.look,
    }


def _ui_note(note: dict[str, Any], node_id: int, order: int) -> dict[str, Any]:
    return {
        "id": node_id,
        "type": "MarkdownNote",
        "pos": note["pos"],
        "size": note["size"],
        "flags": {},
        "order": order,
        "mode": 0,
        "inputs": [],
        "outputs": [],
        "title": note["title"],
        "properties": {},
        "widgets_values": [note["text"]],
        "color": "#432",
        "bgcolor": "#653",
    }
