"""How a MODEL keeps its prefixes: what our nodes asked for, and what core's own cache node did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OPTIONS = "qwen21_prefix"  # in transformer_options: the fields of PrefixSettings
CORES = "qwen_image21_cache"  # beside it, from core's QwenImage21Cache: a device and a dtype
PLACES = ("auto", "gpu", "cpu")
STORAGES = {"int8": "int8", "int4": "int8"}  # core's dtypes that are not its default, as ours


@dataclass(frozen=True)
class PrefixSettings:
    """How a MODEL keeps its prefixes. `budget` in GiB for all of them between runs, 0 for the default."""

    cache: bool = True
    device: str = "auto"
    storage: str = "auto"
    budget: float = 0.0


def settings_of(options: Mapping[str, Any]) -> PrefixSettings:
    """The settings in a MODEL's transformer options. Where our own prefix cache node spoke, core's node is not asked.

    The sampler's switch alone is no such word: its `on` is what nobody touched, and core's `off` stands.
    """
    ours = options.get(OPTIONS, {})
    if "device" in ours:
        return PrefixSettings(**ours)
    return PrefixSettings(**{**ours, **_cores(options)})


def settings_warnings(options: Mapping[str, Any]) -> list[str]:
    """What core's node asks for and does not get."""
    spoken = "device" in options.get(OPTIONS, {})
    if spoken or "storage" not in _cores(options) or options[CORES]["dtype"] != "int4":
        return []
    return ["core's cache node asks for a prefix in int4, which this MODEL does not have: it is kept as int8"]


def _cores(options: Mapping[str, Any]) -> dict[str, Any]:
    """What core's node asks for, as fields of `PrefixSettings`."""
    asked = options.get(CORES) or {}
    device, dtype = asked.get("device"), asked.get("dtype")
    if device == "off":
        return {"cache": False}
    found = {"device": device} if device in PLACES else {}
    return found | ({"storage": STORAGES[dtype]} if dtype in STORAGES else {})
