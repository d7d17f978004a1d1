"""Workflows in API format for the tests, put together from nodes, and reading what probes showed."""

from __future__ import annotations

import base64
import json
import secrets
from typing import Any

import numpy as np
import torch

from tests.comfy.models import DIT, ENCODER, VAE

Graph = dict[str, dict[str, Any]]
WIDTH, HEIGHT, STEPS = 96, 64, 3


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def loaders() -> Graph:
    return {
        "dit": node("Qwen21LoadDiT", file=DIT, dtype="default"),
        "encoder": node("Qwen21LoadEncoder", file=ENCODER, dtype="default", device="default"),
        "vae": node("Qwen21LoadVAE", file=VAE, dtype="fp32", alpha="keep"),
    }


def prompt(text: str = "a red cat", **inputs: Any) -> dict[str, Any]:
    """Qwen21EncodePrompt."""
    defaults = {"canvas": "size", "width": WIDTH, "height": HEIGHT, "batch": 1}
    return node("Qwen21EncodePrompt", encoder=["encoder", 0], prompt=text, **(defaults | inputs))


def sampler(**inputs: Any) -> dict[str, Any]:
    """Qwen21Sampler of `pos` on its own canvas."""
    defaults = {
        "model": ["dit", 0],
        "positive": ["pos", 0],
        "latent": ["pos", 1],
        "seed": 5,
        "steps": STEPS,
        "cfg": 1.0,
        "schedule": "auto",
        "sampler_name": "euler",
        "denoise": 1.0,
        "edit_noise": "released",
        "prefix_cache": "on",
    }
    return node("Qwen21Sampler", **(defaults | inputs))


def ksampler(**inputs: Any) -> dict[str, Any]:
    defaults = {
        "model": ["dit", 0],
        "positive": ["pos", 0],
        "negative": ["pos", 0],
        "latent_image": ["pos", 1],
        "seed": 5,
        "steps": STEPS,
        "cfg": 1.0,
        "sampler_name": "euler",
        "scheduler": "simple",
        "denoise": 1.0,
    }
    return node("KSampler", **(defaults | inputs))


def probe(model: str = "dit", interrupt: str = "never", override: bool = False) -> dict[str, Any]:
    """A MODEL that counts from zero in every workflow."""
    fresh = secrets.randbelow(2**31)
    return node("ProbeModel", model=[model, 0], interrupt=interrupt, override=override, fresh=fresh)


def counts(model: str = "probe", after: str = "sample") -> dict[str, Any]:
    return node("ProbeShow", value=[model, 1], after=[after, 0])


def show(source: str, output: int = 0, **inputs: Any) -> dict[str, Any]:
    return node("ProbeShow", value=[source, output], **inputs)


def text_to_image(**nodes: Any) -> Graph:
    """A prompt, our sampler, and its latent shown as `out`; `nodes` replace or add some."""
    return loaders() | {"pos": prompt(), "sample": sampler(), "out": show("sample")} | nodes


def two_references(**nodes: Any) -> Graph:
    """An edit of two references with latents."""
    graph = {
        "picture": node("ProbeImage", n=1, height=64, width=64, channels=4, offset=0),
        "other": node("ProbeImage", n=1, height=64, width=96, channels=3, offset=3),
        "first": node("Qwen21AddReference", image=["picture", 0], resolution=64, fit="resize"),
        "refs": node("Qwen21AddReference", image=["other", 0], references=["first", 0], resolution=64, fit="resize"),
        "pos": prompt("put <image1> on <image2>", references=["refs", 0], vae=["vae", 0]),
    }
    return text_to_image(**(graph | nodes))


def custom_sampling(source: list[Any], **nodes: Any) -> Graph:
    """SamplerCustomAdvanced's nodes, from `pos` along the SIGMAS of `source`."""
    graph = {
        "noise": node("RandomNoise", noise_seed=5),
        "guider": node("BasicGuider", model=["dit", 0], conditioning=["pos", 0]),
        "euler": node("KSamplerSelect", sampler_name="euler"),
        "sample": node(
            "SamplerCustomAdvanced",
            noise=["noise", 0],
            guider=["guider", 0],
            sampler=["euler", 0],
            sigmas=source,
            latent_image=["pos", 1],
        ),
    }
    return graph | nodes


def unpack(value: Any) -> Any:
    """What a probe showed, its tensors as tensors."""
    if isinstance(value, dict) and set(value) == {"shape", "dtype", "data"}:
        array = np.frombuffer(base64.b64decode(value["data"]), dtype=np.float32)
        return torch.from_numpy(array.copy()).view(value["shape"])
    if isinstance(value, dict):
        return {key: unpack(one) for key, one in value.items()}
    return [unpack(one) for one in value] if isinstance(value, list) else value


def shown(outputs: dict[str, Any], name: str = "out") -> Any:
    """What the ProbeShow `name` saw."""
    return unpack(json.loads(outputs[name]["shown"][0]))


def against_fresh(graph: Graph, model: str = "") -> Graph:
    """Beside the sampler `sample` a `fresh` one that stores no prefix and takes none, and `report`, if there is one."""
    inputs = graph["sample"]["inputs"]
    names = {"latent_image": "latent", "model": "model", "positive": "positive", "negative": "negative"}
    same = {names.get(key, key): value for key, value in inputs.items() if key not in ("scheduler", "prefix_cache")}
    if model:
        same["model"] = [model, 0]
    extra = {"fresh": sampler(**same, prefix_cache="off"), "fresh_out": show("fresh")}
    if graph["sample"]["class_type"] == "Qwen21Sampler":
        extra["report"] = show("sample", 1)
    return graph | extra
