"""The prefixes of a MODEL: by way of its store where nothing acts on the model unseen, for one run otherwise."""

from __future__ import annotations

import contextlib
import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...qwen21.memory import store_budget, working_bytes
from ...qwen21.prefix import (
    CODECS,
    ModelIdentity,
    Placement,
    Prefix,
    Reuse,
    Store,
    prefix_for_now,
    prefix_through,
    unit_bytes,
)
from ...qwen21.ram import GIB
from .condition import Conditions
from .host import free_bytes, free_ram
from .identity import PatchDigest, Unseen, require_visible
from .settings import PrefixSettings, settings_of, settings_warnings
from .shelf import StorePatcher

if TYPE_CHECKING:
    from .condition import Condition

log = logging.getLogger(__name__)


class PrefixStore:
    """A base model's store, as long-lived as the model, and a patcher of it for each device that the model ran on.

    Nodes give a MODEL another device, or a run more of them, by other patchers of the model or by another model.
    """

    def __init__(self, model: Any) -> None:
        self._owner = weakref.ref(model)  # ComfyUI wants models to go without the garbage collector
        self._conditions: weakref.WeakSet[Condition] = weakref.WeakSet()
        self._digest = PatchDigest()
        self.store = Store(store_budget())
        self._patchers: dict[torch.device, StorePatcher] = {}
        self.conditions = Conditions()
        self.device = torch.device("cpu")
        self.upcoming: Any = None
        self._counted: set[str] = set()

    @property
    def _model(self) -> Any:
        return self._owner()

    @property
    def patcher(self) -> StorePatcher:
        """Of the device that the model runs on."""
        if self.device not in self._patchers:
            self._patchers[self.device] = StorePatcher(self.device, self.store)
        return self._patchers[self.device]

    def prefix(
        self, condition: Condition, row: int, x: Tensor, options: dict[str, Any], prefilling: dict[str, Any]
    ) -> tuple[Prefix, Reuse]:
        """The prefix of one text of a condition for targets like `x` [B, 64, h, w]. Called within the model's forward,
        where its weights, patches and hooks are in force; `prefilling` goes to `DiT.prefill`."""
        settings = settings_of(options)
        self.device = self._model.current_patcher.load_device
        dit, inputs = self._model.diffusion_model, condition.inputs(row, x)
        working = working_bytes(dit.config, x.shape[0], x.shape[-1] * x.shape[-2], inputs.layout.unit_tokens, x.dtype)
        placement = self._placement(settings, working, x.device)
        codec = inputs.codec(settings.storage, dit, *placement.room())
        kind = "off"
        reason = "the prefix cache is off" if condition.stable else "hooks may change weights between steps"
        if settings.cache and condition.stable:
            try:
                identity = self._identity(self._model.current_patcher, x, codec, options)
            except Unseen as unseen:
                kind, reason = "miss", f"kept for this run only: {unseen}"
            else:
                self.store.budget = int(settings.budget * GIB) or store_budget()
                return prefix_through(self.store, identity, dit, inputs, placement.place, **prefilling)
        return prefix_for_now(dit, inputs, codec, placement.place, kind, reason, **prefilling)

    def _placement(self, settings: PrefixSettings, working: int, device: torch.device) -> Placement:
        def free() -> int:
            return free_bytes(self._model.current_patcher, device)

        return Placement(settings.device, device, working, self.store, free, free_ram, self.patcher.give_up)

    def _identity(self, patcher: Any, x: Tensor, codec: str, options: dict[str, Any]) -> ModelIdentity:
        require_visible(patcher, options)
        patches = self._digest.of(patcher.patches)
        made_of = self._model.diffusion_model.made_of
        return ModelIdentity(made_of, str(x.dtype), codec, patches, str(x.device))

    @property
    def is_running(self) -> bool:
        """Whether a run began: between runs nothing tells that a tensor still holds what it held."""
        return self.upcoming is not None

    def begin(self, patcher: Any) -> None:
        """Before a run, and before ComfyUI asks what it needs: `patcher` is about to sample. None after it."""
        self.upcoming, self._counted = patcher, set()
        self.conditions.forget()
        if patcher is not None:
            self.device = patcher.load_device
            for warning in settings_warnings(patcher.model_options.get("transformer_options", {})):
                log.warning("Qwen-Image 2.1: %s", warning)

    def watch(self, condition: Condition) -> None:
        """A condition of the run: some guiders keep theirs where nobody else finds them."""
        self._conditions.add(condition)

    def end(self) -> None:
        """After a run: let go of its prefixes, which only the store may keep, and be ready to yield them."""
        self.upcoming = None
        self.conditions.forget()
        for condition in self._conditions:
            condition.prefixes.clear()
        self.patcher.register()

    def bytes_to_come(self, condition: Condition) -> int:
        """Bytes that a condition's prefixes will add to the device: without what the store holds there already, and
        without what another condition of the run was asked for before."""
        if self.upcoming is None:
            return 0
        settings = settings_of(self.upcoming.model_options.get("transformer_options", {}))
        if settings.device == "cpu":
            return 0
        config, dtype = self._model.diffusion_model.config, self._model.compute_dtype
        codec = CODECS["native" if settings.storage == "auto" else settings.storage]
        total = 0
        for row in range(len(condition.texts)):
            unseen = [
                (key, tokens)
                for key, tokens in self._absent(condition, row, settings, codec.name)
                if key not in self._counted
            ]
            self._counted.update(key for key, _ in unseen)
            total += sum(unit_bytes(config, tokens, dtype, codec) for _, tokens in unseen)
        return total

    def _absent(self, condition: Condition, row: int, settings: PrefixSettings, codec: str) -> list[tuple[str, int]]:
        """Key and tokens of the units of a text that are not on the device."""
        keys, tokens = condition.keys[row], condition.layout(row).unit_tokens
        present = 0
        if len(self.store) and settings.cache and condition.stable:
            x = torch.empty(0, dtype=self._model.compute_dtype, device=self.device)
            options = self.upcoming.model_options.get("transformer_options", {})
            with contextlib.suppress(Unseen):
                identity = self._identity(self.upcoming, x, codec, options)
                present = self.store.holds(identity, keys, self.device)
        return list(zip(keys, tokens, strict=True))[present:]


def note_reuse(guider: Any) -> None:
    """At a run's end: say what became of each prefix, in the log and, by condition name, as `guider.qwen21_reuse`."""
    guider.qwen21_reuse = {}
    for name, entries in getattr(guider, "conds", {}).items():
        held = [entry.get("model_conds", {}).get("qwen21") for entry in entries]
        facts = [reuse for one in held if one is not None for _, reuse in sorted(one.cond.reuse.items())]
        for reuse in facts:
            log.info("Qwen-Image 2.1: %s prefix: %s", name, reuse)
        if facts:
            guider.qwen21_reuse[name] = [reuse.timed_facts for reuse in facts]
