"""One workflow for every node of core that takes or gives what our nodes give or take: what it does with ours."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from tests.comfy.graphs import Graph, ksampler, loaders, node, prompt
from tests.comfy.installation import ROOT, installations
from tests.comfy.models import write_models
from tests.comfy.server import PACK, LiveServer, Result

OURS = {"MODEL", "CONDITIONING", "LATENT", "SIGMAS", "VAE", "IMAGE", "MASK"}
SOURCES = {
    "MODEL": "dit",
    "CONDITIONING": "pos",
    "LATENT": "encoded",
    "VAE": "vae",
    "SIGMAS": "sigmas",
    "IMAGE": "picture",
    "MASK": "mask",
    "SAMPLER": "euler",
    "GUIDER": "guider",
    "NOISE": "noise",
    "LATENT_OPERATION": "operation",
}
SMALL = {"width": 64, "height": 64, "batch_size": 1, "steps": 2, "resolution": 64, "megapixels": 0.01, "step": 1}
LEAST = ("length", "frames", "frame_count", "video_frames")  # as few frames as the node takes
INSIDE = ("ComfyDiT", "Qwen21", "ComfyVAE", "qwen21")  # an error that names these is not core's alone
KEPT_OUT = ("api", "custom_nodes")  # modules of nodes that are not core's own


def swept(object_info: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Core's nodes that take or give one of our types, by name."""
    return {
        name: found
        for name, found in sorted(object_info.items())
        if not any(part in found["python_module"] for part in KEPT_OUT)
        and OURS & {kind for kind, _ in inputs(found).values()} | OURS & set(map(str, found["output"]))
    }


def inputs(found: dict[str, Any], *groups: str) -> dict[str, tuple[str, Any]]:
    """(type, options) of a node's inputs. A combo's type is COMBO, its options hold the list."""
    read = {}
    for group in groups or ("required", "optional"):
        for name, given in (found["input"].get(group) or {}).items():
            kind, options = given[0], dict(given[1]) if len(given) > 1 and given[1] else {}
            if isinstance(kind, list):
                kind, options = "COMBO", options | {"options": kind}
            read[name] = (kind, options)
    return read


def workflow(name: str, found: dict[str, Any]) -> Graph | str:
    """The node among ours, every output of a type of ours used; or what it needs that there is not."""
    given: dict[str, Any] = {}
    for key, (kind, options) in inputs(found, "required").items():
        value = _value(key, kind, options)
        if value is None:
            return kind if kind != "COMBO" else f"a file for {key}"
        given |= value
    for key, (kind, _) in inputs(found, "optional").items():
        if kind in SOURCES:
            given[key] = [SOURCES[kind], 0]
    return _base() | {"tried": node(name, **given)} | _uses(found)


def _value(key: str, kind: str, options: dict[str, Any]) -> dict[str, Any] | None:
    """What goes into an input, by its key; a dynamic one has several. None where there is nothing to give."""
    if kind == "CONDITIONING" and key.startswith(("negative", "empty")):
        return {key: ["neg", 0]}  # the perpendicular to what is the same would be a division by zero
    if kind in SOURCES:
        return {key: [SOURCES[kind], 0]}
    if kind == "COMFY_AUTOGROW_V3":
        template = options["template"]
        one = next(iter((template["input"].get("required") or template["input"]["optional"]).items()))
        names = template.get("names") or [f"{template['prefix']}{i}" for i in range(max(1, template.get("min", 1)))]
        return _together(key, {n: (one[1][0], one[1][1] if len(one[1]) > 1 else {}) for n in names[:2]})
    if kind == "COMFY_DYNAMICCOMBO_V3":
        first = options["options"][0]
        rest = _together(key, inputs({"input": first["inputs"]}, "required"))
        return None if rest is None else {key: first["key"]} | rest
    if kind == "COMBO":
        chosen = options.get("default", next(iter(options.get("options") or []), None))
        return None if chosen is None else {key: chosen}
    if key in LEAST:
        return {key: options.get("min", 1)}
    if key in SMALL and kind in ("INT", "FLOAT"):
        return {key: min(max(SMALL[key], options.get("min", 0)), options.get("max", SMALL[key]))}
    plain = {"INT": 1, "FLOAT": 1.0, "STRING": "", "BOOLEAN": False}
    if kind in plain:
        return {key: options.get("default", plain[kind])}
    default = options.get("default")
    if isinstance(default, list):
        return {key: {"__value__": default}}
    return None if default is None else {key: default}


def _together(key: str, several: dict[str, tuple[str, Any]]) -> dict[str, Any] | None:
    values: dict[str, Any] = {}
    for name, (kind, options) in several.items():
        value = _value(name, kind, options)
        if value is None:
            return None
        values |= {f"{key}.{one}": given for one, given in value.items()}
    return values


def _base() -> Graph:
    """Our own types, tiny."""
    return loaders() | {
        "picture": node("ProbeImage", n=1, height=64, width=64, channels=3, offset=0),
        "refs": node("Qwen21AddReference", image=["picture", 0], resolution=32, fit="resize"),
        "pos": prompt("put <image1> there", references=["refs", 0], vae=["vae", 0], width=64, height=64),
        "neg": prompt("dull", width=64, height=64),
        "encoded": node("VAEEncode", pixels=["picture", 0], vae=["vae", 0]),
        "mask": node("SolidMask", value=1.0, width=64, height=64),
        "sigmas": node("Qwen21Schedule", schedule="base", steps=2, denoise=1.0, width=64, height=64),
        "euler": node("KSamplerSelect", sampler_name="euler"),
        "noise": node("RandomNoise", noise_seed=5),
        "guider": node("BasicGuider", model=["dit", 0], conditioning=["pos", 0]),
        "operation": node("LatentOperationTonemapReinhard", multiplier=1.0),
    }


def _uses(found: dict[str, Any]) -> Graph:
    """What takes each output: a picture is encoded, a latent decoded and sampled from, anything else sampled with."""
    graph: Graph = {}
    for index, kind in enumerate(found["output"]):
        graph |= {f"{key}{index}": use for key, use in _use(str(kind), ["tried", index], str(index)).items()}
    if not graph and not found["output_node"]:
        graph["seen"] = node("ProbeFinite", value=["tried", 0])
    return graph


def _use(kind: str, made: list[Any], index: str) -> Graph:
    guided = {"latent_image": ["encoded", 0], "steps": 2, "cfg": 2.0, "negative": ["neg", 0]}
    custom = {key: [key if key != "sampler" else "euler", 0] for key in ("noise", "guider", "sampler", "sigmas")}
    if kind in ("NOISE", "GUIDER", "SAMPLER", "SIGMAS"):
        wired = custom | {kind.lower(): made, "latent_image": ["encoded", 0]}
        return _seen(node("SamplerCustomAdvanced", **wired), index)
    if kind == "MODEL":
        return _seen(ksampler(**guided | {"model": made}), index)
    if kind == "CONDITIONING":
        return _seen(ksampler(**guided | {"positive": made, "cfg": 1.0}), index)
    if kind == "LATENT":
        started = guided | {"latent_image": made, "cfg": 1.0, "denoise": 0.6, "steps": 3}
        decoded = node("VAEDecode", samples=[f"use{index}", 0], vae=["vae", 0])
        return _seen(ksampler(**started), index) | {"decoded": decoded, "picture": _finite([f"decoded{index}", 0])}
    if kind == "VAE":
        return _seen(node("VAEDecode", samples=["encoded", 0], vae=made), index)
    if kind == "IMAGE":
        return _seen(node("VAEEncode", pixels=made, vae=["vae", 0]), index)
    if kind == "MASK":
        start = guided | {"latent_image": [f"masked{index}", 0], "cfg": 1.0}
        masked = node("SetLatentNoiseMask", samples=["encoded", 0], mask=made)
        return _seen(ksampler(**start), index) | {"masked": masked}
    return {}


def _seen(use: dict[str, Any], index: str) -> Graph:
    return {"use": use, "finite": _finite([f"use{index}", 0])}


def _finite(source: list[Any]) -> dict[str, Any]:
    return node("ProbeFinite", value=source)


def outcome(result: Result) -> str:
    """works; `refused: ` by us, and how; `core: ` where core's node ends before it reaches ours, as those of other
    models do; or `crashes: `."""
    if not result.error:
        return "works"
    told = next((data for kind, data in result.messages if kind == "execution_error"), None)
    line, *more = re.sub(r"/\S+/", "", result.error.strip()).splitlines()
    if told is None:
        return f"core: {line}"
    if "raise UserError(" in told["traceback"][-1] or "raise NotOurs(" in told["traceback"][-1]:
        return f"crashes: several lines: {line}" if more else f"refused: {line}"
    inside = told["node_id"] != "tried" or PACK in told["traceback"][-1] or any(name in line for name in INSIDE)
    return f"{'crashes' if inside else 'core'}: {told['exception_type']}: {line[:120]}"


def try_node(server: LiveServer, name: str, found: dict[str, Any]) -> str:
    graph = workflow(name, found)
    return f"needs {graph}" if isinstance(graph, str) else outcome(server.post(graph))


def main() -> None:
    """Write sweep.json: what becomes of each node, by version of ComfyUI."""
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        models = write_models(Path(folder) / "models")
        for installation in installations():
            if problem := installation.prepare(Path(folder)):
                raise SystemExit(problem)
            with LiveServer(installation, Path(folder) / f"base {installation}", models) as server:
                nodes = swept(server.object_info())
                table[str(installation)] = {name: try_node(server, name, found) for name, found in nodes.items()}
    file = ROOT / "tests" / "comfy" / "sweep.json"
    file.write_text(json.dumps(dict(sorted(table.items())), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
