"""How a MODEL stores its prefixes: the settings of our nodes and of core's own cache node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OPTIONS = "qwen21_prefix"  # key in transformer_options: the fields of PrefixSettings
CORES = "qwen_image21_cache"  # key of core's QwenImage21Cache: a device and a dtype
PLACES = ("auto", "gpu", "cpu")
STORAGES = {"int8": "int8", "int4": "int8"}  # core's non-default dtypes -> our storages


@dataclass(frozen=True)
class PrefixSettings:
    """How a MODEL stores its prefixes. `budget` is GiB for all of them between runs, 0 for the default."""

    cache: bool = True
    device: str = "auto"
    storage: str = "auto"
    budget: float = 0.0


def settings_of(options: Mapping[str, Any]) -> PrefixSettings:
    """The settings in a MODEL's transformer options. Our own prefix cache node takes precedence over core's.

    The sampler's switch does not: its `on` is the untouched default, so core's `off` remains valid.
    """
    ours = options.get(OPTIONS, {})
    if "device" in ours:
        return PrefixSettings(**ours)
    return PrefixSettings(**{**ours, **_cores(options)})


def settings_warnings(options: Mapping[str, Any]) -> list[str]:
    """Warnings about what core's node requests and does not get."""
    spoken = "device" in options.get(OPTIONS, {})
    if spoken or "storage" not in _cores(options) or options[CORES]["dtype"] != "int4":
        return []
    return ["core's cache node asks for a prefix in int4, which this MODEL does not have: it is kept as int8"]


def _cores(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of core's node, as fields of `PrefixSettings`."""
    asked = options.get(CORES) or {}
    device, dtype = asked.get("device"), asked.get("dtype")
    if device == "off":
        return {"cache": False}
    found = {"device": device} if device in PLACES else {}
    return found | ({"storage": STORAGES[dtype]} if dtype in STORAGES else {})
