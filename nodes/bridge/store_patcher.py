"""Register the prefix store among ComfyUI's loaded models, so that it gives up memory as they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch
from torch import nn

from ...qwen21.memory.estimate import store_budget, total_ram
from ...qwen21.prefix import KVBlock, Store
from .host import free_ram

SPARE_RAM = 0.1  # share of the machine's RAM that prefixes leave free
EVICTED_FOR_HOST = "ComfyUI needed the memory"


class _StoreModule(nn.Module):
    """The module that ComfyUI takes for the model. It has no parameters: the patcher reports its size."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device


class StorePatcher(comfy.model_patcher.ModelPatcher):
    """A store that ComfyUI may ask for memory. The oldest prefixes move to RAM while there is room, else are dropped.

    ComfyUI only asks models in its list of loaded ones, so `register` puts the store there after a run. ComfyUI never
    loads anything here: prefixes are created by sampling. The patchers of several devices may share a store.
    """

    def __init__(self, load_device: torch.device, store: Store | None = None) -> None:
        self.store = Store(store_budget()) if store is None else store
        self.load_device = load_device  # ComfyUI 0.3.64 asks for the size during construction
        super().__init__(_StoreModule(load_device), load_device, torch.device("cpu"))

    def register(self) -> None:
        """Join the list of loaded models, if there is anything to evict.

        `load_models_gpu` is not used, because it would first make room for a run by unloading other models' weights.
        """
        self.spare_ram()
        known = any(loaded.model is self for loaded in comfy.model_management.current_loaded_models)
        if not known and self.loaded_size():
            entry = comfy.model_management.LoadedModel(self)
            entry.model_load()  # loads nothing: it only marks the entry as loaded
            comfy.model_management.current_loaded_models.insert(0, entry)

    def spare_ram(self) -> None:
        """Evict prefixes from RAM where it runs short."""
        lacking = int(SPARE_RAM * total_ram()) - free_ram()
        if lacking > 0:
            self.store.release(lacking, torch.device("cpu"), "RAM ran short")

    def model_size(self) -> int:
        return self.loaded_size()

    def loaded_size(self) -> int:
        """Bytes on the load device, equal to the size, because ComfyUI has nothing to load."""
        return self.store.nbytes(self.load_device)

    def current_loaded_device(self) -> torch.device:
        return self.load_device

    def partially_load(self, device_to: Any, extra_memory: float = 0, force_patch_weights: bool = False) -> int:
        return 0

    def partially_unload(self, device_to: Any, memory_to_free: float = 0, force_patch_weights: bool = False) -> int:
        """Free `memory_to_free` bytes of the load device, oldest prefixes first."""
        return self.evict(int(min(memory_to_free, self.loaded_size())))

    def detach(self, unpatch_all: bool = True) -> Any:
        """Leave the load device if `unpatch_all`. Without it ComfyUI only reorders its list, as on every load."""
        if unpatch_all:
            self.evict(self.loaded_size())
        return self.model

    def evict(self, nbytes: int, exclude: Sequence[KVBlock] = ()) -> int:
        """Free `nbytes` of the load device, sparing the KV blocks `exclude`; return the bytes that were freed."""
        store, device = self.store, self.load_device
        if device.type == "cpu":
            return store.release(nbytes, device, EVICTED_FOR_HOST, exclude=exclude)
        fits = max(0, free_ram() - int(SPARE_RAM * total_ram()))
        freed = store.release(nbytes, device, EVICTED_FOR_HOST, to=torch.device("cpu"), most=fits, exclude=exclude)
        if freed < nbytes:
            freed += store.release(nbytes - freed, device, EVICTED_FOR_HOST, exclude=exclude)
        return freed
