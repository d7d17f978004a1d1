"""The prefix store among ComfyUI's loaded models, so that it yields memory as they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch
from torch import nn

from ...qwen21.memory import store_budget, total_ram
from ...qwen21.prefix import Store, Unit
from .host import free_ram

SPARE_RAM = 0.1  # of the machine's RAM stays free of prefixes
PRESSED = "ComfyUI needed the memory"


class _Shelf(nn.Module):
    """What ComfyUI takes for the model. It has no parameters: the patcher answers for its size."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device


class StorePatcher(comfy.model_patcher.ModelPatcher):
    """A store that ComfyUI may ask for memory, oldest prefixes first: they move to RAM while there is room, else go.

    What is not in ComfyUI's list of loaded models is never asked, so `register` puts the store there after a run.
    Nothing is ever loaded by ComfyUI: prefixes come by sampling. The patchers of several devices may share a store.
    """

    def __init__(self, load_device: torch.device, store: Store | None = None) -> None:
        self.store = Store(store_budget()) if store is None else store
        self.load_device = load_device  # ComfyUI 0.3.64 asks for the size while it is being made
        super().__init__(_Shelf(load_device), load_device, torch.device("cpu"))

    def register(self) -> None:
        """Be among the loaded models, if there is anything to yield.

        Not by way of `load_models_gpu`, which would first make room for a run, out of other models' weights.
        """
        self.spare_ram()
        known = any(loaded.model is self for loaded in comfy.model_management.current_loaded_models)
        if not known and self.loaded_size():
            entry = comfy.model_management.LoadedModel(self)
            entry.model_load()  # nothing: it only makes the entry a loaded one
            comfy.model_management.current_loaded_models.insert(0, entry)

    def spare_ram(self) -> None:
        """Give up prefixes in RAM where it runs short."""
        lacking = int(SPARE_RAM * total_ram()) - free_ram()
        if lacking > 0:
            self.store.release(lacking, torch.device("cpu"), "RAM ran short")

    def model_size(self) -> int:
        return self.loaded_size()

    def loaded_size(self) -> int:
        """Bytes on the load device. The same as the size: ComfyUI has nothing to load."""
        return self.store.nbytes(self.load_device)

    def current_loaded_device(self) -> torch.device:
        return self.load_device

    def partially_load(self, device_to: Any, extra_memory: float = 0, force_patch_weights: bool = False) -> int:
        return 0

    def partially_unload(self, device_to: Any, memory_to_free: float = 0, force_patch_weights: bool = False) -> int:
        """Free so many bytes of the load device, oldest prefixes first."""
        return self.give_up(int(min(memory_to_free, self.loaded_size())))

    def detach(self, unpatch_all: bool = True) -> Any:
        """With `unpatch_all` leave the load device. Without, ComfyUI only reorders its list, as on every load."""
        if unpatch_all:
            self.give_up(self.loaded_size())
        return self.model

    def give_up(self, nbytes: int, sparing: Sequence[Unit] = ()) -> int:
        """Free `nbytes` of the load device, but not those of units about to be used; returns what was freed."""
        store, device = self.store, self.load_device
        if device.type == "cpu":
            return store.release(nbytes, device, PRESSED, sparing=sparing)
        fits = max(0, free_ram() - int(SPARE_RAM * total_ram()))
        freed = store.release(nbytes, device, PRESSED, to=torch.device("cpu"), most=fits, sparing=sparing)
        if freed < nbytes:
            freed += store.release(nbytes - freed, device, PRESSED, sparing=sparing)
        return freed
