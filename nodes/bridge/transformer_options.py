"""What other nodes set in the transformer's options: attention, compiling, and patches that are not supported."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import comfy.patcher_extension
from comfy.ldm.modules.attention import optimized_attention
from torch import Tensor

from ...qwen21.config.networks import DiTConfig
from ...qwen21.errors import UserError
from ...qwen21.ops.attention import sdpa
from ...qwen21.ops.pointwise import CompiledKernels, Kernels
from ...qwen21.ops.pointwise_kitchen import uncompiled
from ..titles import ENCODE_PROMPT
from .condition import Condition

log = logging.getLogger(__name__)

COMPILED = "torch.compile"  # the key of the wrapper that core's TorchCompileModel adds


class Compiler:
    """The kernels of one transformer: compiled ones once TorchCompileModel requests them.

    Core's wrapper would compile the whole transformer for one size and one number of references. Our kernels serve all
    of them and contain no weights, so weights may still be patched, quantized or moved.
    """

    def __init__(self) -> None:
        self._plain: Kernels | None = None
        self._compiled: Kernels | None = None

    def kernels(self, config: DiTConfig, x: Tensor, options: dict[str, Any]) -> Kernels:
        if self._plain is None:
            self._plain = uncompiled(x.device)
            self._plain.prepare(config, x.dtype, x.device)
        if COMPILED not in options.get("wrappers", {}).get(comfy.patcher_extension.WrappersMP.APPLY_MODEL, {}):
            return self._plain
        if self._compiled is None:
            self._compiled = compiled = CompiledKernels()
            try:
                compiled.prepare(config, x.dtype, x.device)
                log.info("Qwen-Image 2.1: compiled in %.1f s", compiled.seconds)
            except UserError as error:
                self._compiled = self._plain
                log.warning("Qwen-Image 2.1 samples without compiling: %s", error)
        return self._compiled


def refuse_unsupported(control: Any, options: dict[str, Any], condition: Condition | None) -> None:
    if condition is None:
        raise UserError(f"the Qwen-Image 2.1 MODEL got no conditioning; wire '{ENCODE_PROMPT}' into positive")
    if control is not None:
        raise UserError("this pack does not apply ControlNets yet; remove the Apply ControlNet node")
    refuse_patches(options)


def refuse_patches(options: Mapping[str, Any]) -> None:
    """Refuse replacements of parts of the transformer, and name where they come from.

    Called before a run and again in its steps, because hooks may add some in between.
    """
    given = dict(options.get("patches", {}))
    given |= {f"patches_replace.{name}": found for name, found in options.get("patches_replace", {}).items()}
    given["rope_options"] = options.get("rope_options")
    names = [name for name, found in given.items() if found]
    if not names:
        return
    if any(_is_fun_control(found) for found in given.values()):
        raise UserError(
            "a ControlNet is on this MODEL (by core's node QwenImage21FunControlNetApply), which this pack does not "
            "apply yet; remove that node, or take core's own MODEL"
        )
    raise UserError(
        f"a node patches the transformer's blocks ({', '.join(names)}), which this MODEL does not support: its prefix "
        f"is computed apart from its steps; remove that node{_of_whom(given.values())}"
    )


def _is_fun_control(patch: Any) -> bool:
    return any("FunControl" in _name(one) for one in _functions(patch))


def _of_whom(patches: Iterable[Any]) -> str:
    """Format ` (of a, b)`: the Python modules that the patches come from, which identify the node."""
    modules = {getattr(one, "__module__", None) for patch in patches for one in _functions(patch)}
    found = sorted(module for module in modules if module)
    return f" (of {', '.join(found)})" if found else ""


def _name(function: Any) -> str:
    """Name of a function, or of the class of an object with `__call__`."""
    owner = getattr(function, "__self__", None)
    return getattr(function, "__qualname__", type(function).__qualname__) + (type(owner).__qualname__ if owner else "")


def _functions(patch: Any) -> list[Any]:
    """The candidates for functions in a patch: the values of a mapping, the items of a list."""
    held = patch.values() if isinstance(patch, Mapping) else patch if isinstance(patch, (list, tuple)) else []
    return [patch] if callable(patch) else [one for each in held for one in _functions(each)]


def attention(options: dict[str, Any]) -> Any:
    """ComfyUI's selected attention, overrides included. Masked text stays with PyTorch's, which handles masks right."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        if mask is not None or causal:
            return sdpa(q, k, v, mask=mask, causal=causal)
        return optimized_attention(
            q, k, v, q.shape[1], skip_reshape=True, skip_output_reshape=True, transformer_options=options
        )

    return attend
