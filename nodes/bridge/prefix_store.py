"""The prefixes of a MODEL: from its store, or for one run only where the model is changed in ways no key covers."""

from __future__ import annotations

import contextlib
import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...qwen21.memory.estimate import store_budget, working_bytes
from ...qwen21.prefix import (
    CODECS,
    ModelIdentity,
    Placement,
    PrefixService,
    Reuse,
    RunLocal,
    Store,
    kv_block_bytes,
)
from ...qwen21.system_memory import GIB
from .condition import Conditions, RunPrefix
from .host import free_bytes, free_ram
from .patch_digest import PatchDigest, Unseen, require_visible
from .settings import PrefixSettings, settings_of, settings_warnings
from .store_patcher import StorePatcher

if TYPE_CHECKING:
    from .condition import Condition

log = logging.getLogger(__name__)


class PrefixStore:
    """A base model's store, which lives as long as the model, and a patcher of it for each device the model ran on.

    Nodes that give a MODEL another device, or a run several devices, do so by other patchers of the model or by another
    model.
    """

    def __init__(self, model: Any) -> None:
        self._owner = weakref.ref(model)  # weak, so that the model is freed without the garbage collector
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
        """The store's patcher for the device that the model runs on."""
        if self.device not in self._patchers:
            self._patchers[self.device] = StorePatcher(self.device, self.store)
        return self._patchers[self.device]

    def prefix(
        self, condition: Condition, row: int, x: Tensor, options: dict[str, Any], prefilling: dict[str, Any]
    ) -> tuple[RunPrefix, Reuse]:
        """The prefix of one text of a condition, contiguous for targets like `x` [B, 64, h, w] where memory allows.

        Call it within the model's forward, where its weights, patches and hooks are active. `prefilling` goes to
        `DiT.prefill`.
        """
        settings = settings_of(options)
        self.device = self._model.current_patcher.load_device
        dit, inputs = self._model.diffusion_model, condition.inputs(row, x)
        tokens = inputs.layout.kv_block_tokens
        working = working_bytes(dit.config, x.shape[0], x.shape[-1] * x.shape[-2], tokens, x.dtype)
        placement = self._placement(settings, working, x.device)
        self.store.budget = int(settings.budget * GIB) or store_budget()

        def identity(codec: str) -> ModelIdentity | RunLocal:
            if not settings.cache:
                return RunLocal("off", "the prefix cache is off")
            if not condition.stable:
                return RunLocal("off", "hooks may change weights between steps")
            try:
                return self._identity(self._model.current_patcher, x, codec, options)
            except Unseen as unseen:
                return RunLocal("miss", f"kept for this run only: {unseen}")

        service, target = PrefixService(dit, placement, settings.storage, identity), x.shape[-1] * x.shape[-2]
        prefix, reuse = service.get(inputs, **prefilling)
        laid_out = None if reuse.kind == "off" else service.lay_out(prefix, target, x.dtype)
        return RunPrefix(prefix, laid_out, target), reuse

    def _placement(self, settings: PrefixSettings, working: int, device: torch.device) -> Placement:
        def free() -> int:
            return free_bytes(self._model.current_patcher, device)

        return Placement(settings.device, device, working, self.store, free, free_ram, self.patcher.evict)

    def _identity(self, patcher: Any, x: Tensor, codec: str, options: dict[str, Any]) -> ModelIdentity:
        require_visible(patcher, options)
        patches = self._digest.of(patcher.patches)
        made_of = self._model.diffusion_model.made_of
        return ModelIdentity(made_of, str(x.dtype), codec, patches, str(x.device))

    @property
    def is_running(self) -> bool:
        """Whether a run is going on. Between runs a cached tensor's content may change unnoticed."""
        return self.upcoming is not None

    def begin(self, patcher: Any) -> None:
        """Prepare for a run of `patcher`, before ComfyUI asks for its memory needs. None: there is no run any more."""
        self.upcoming, self._counted = patcher, set()
        self.conditions.forget()
        if patcher is not None:
            self.device = patcher.load_device
            for warning in settings_warnings(patcher.model_options.get("transformer_options", {})):
                log.warning("Qwen-Image 2.1: %s", warning)

    def watch(self, condition: Condition) -> None:
        """Register a condition of the run, because some guiders keep theirs where nothing else finds them."""
        self._conditions.add(condition)

    def end(self) -> None:
        """Finish a run: release its prefixes, which only the store may keep, and let ComfyUI evict from the store."""
        self.upcoming = None
        self.conditions.forget()
        for condition in self._conditions:
            condition.prefixes.clear()
        self.patcher.register()

    def bytes_to_come(self, condition: Condition) -> int:
        """Bytes that a condition's prefixes will add to the device.

        Blocks that the store holds there already, or that were counted for another condition of the run, are not
        included.
        """
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
            total += sum(kv_block_bytes(config, tokens, dtype, codec) for _, tokens in unseen)
        return total

    def _absent(self, condition: Condition, row: int, settings: PrefixSettings, codec: str) -> list[tuple[str, int]]:
        """Key and tokens of those KV blocks of a text that are not on the device."""
        keys, tokens = condition.keys[row], condition.layout(row).kv_block_tokens
        present = 0
        if len(self.store) and settings.cache and condition.stable:
            x = torch.empty(0, dtype=self._model.compute_dtype, device=self.device)
            options = self.upcoming.model_options.get("transformer_options", {})
            with contextlib.suppress(Unseen):
                identity = self._identity(self.upcoming, x, codec, options)
                present = self.store.holds(identity, keys, self.device)
        return list(zip(keys, tokens, strict=True))[present:]


def note_reuse(guider: Any) -> None:
    """At a run's end, log how each prefix was obtained, and store it by condition name as `guider.qwen21_reuse`."""
    guider.qwen21_reuse = {}
    for name, entries in getattr(guider, "conds", {}).items():
        held = [entry.get("model_conds", {}).get("qwen21") for entry in entries]
        facts = [reuse for one in held if one is not None for _, reuse in sorted(one.cond.reuse.items())]
        for reuse in facts:
            log.info("Qwen-Image 2.1: %s prefix: %s", name, reuse)
        if facts:
            guider.qwen21_reuse[name] = [reuse.timed_facts for reuse in facts]
