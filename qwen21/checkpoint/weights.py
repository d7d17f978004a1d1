"""Bring single weights from their file to their device: unquantized, quantized, or quantized to fp8 on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..config.validate import short
from ..errors import UserError
from ..ops.quantized import E4M3, QuantizedWeight, QuantLayers, dequantized, fp8_scales, hadamard, to_e4m3_range_
from .fp8_policy import Fp8
from .names import Source
from .quant_formats import FLOATS, WeightStorage
from .safetensors_file import Reader

if TYPE_CHECKING:
    from .component import Component

CHUNK_BYTES = 2**24  # of fp32 rows that are quantized at once


class Weights:
    """Reads the weights of one component, each straight to its dtype and device, with one at a time in memory."""

    def __init__(
        self,
        part: Component,
        reader: Reader,
        dtype: torch.dtype,
        device: torch.device | str,
        fp8: Fp8 | None = None,
        layers: QuantLayers = QuantLayers(),
    ) -> None:
        self.path, self.sources, self.packings = part.checkpoint.path, part.identity.sources, part.identity.packings
        self.reader, self.dtype, self.device, self.fp8, self.layers = reader, dtype, device, fp8, layers
        self._rotations: dict[int, Tensor] = {}
        self._space: Tensor | None = None

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read a parameter in `self.dtype`; a quantized one is dequantized."""
        packing = self.packings.get(self.sources[name].key)
        value = self._read(self.sources[name]).reshape(shape)
        if packing is not None:
            packed = QuantizedWeight(value.to(self.device), self._scale(self.sources[name], packing), packing.group)
            return dequantized(packed, self.dtype)
        # copy=True: a tensor that maps the file would crash the process if the file changed later
        return value.to(device=self.device, dtype=self.dtype, copy=True)

    def layer(self, name: str, plain: nn.Module) -> nn.Module | None:
        """Build the quantized layer that replaces the layer `name`; None if neither the file nor `fp8` quantizes it."""
        packed = self._packed(f"{name}.weight", plain)
        if packed is None:
            return None
        rotation = self._rotation(packed.group) if packed.group else None
        if isinstance(plain, nn.Embedding):
            return self.layers.embedding(packed, rotation)
        bias = None if plain.bias is None else self.tensor(f"{name}.bias", tuple(plain.bias.shape))
        return self.layers.linear(packed, bias, rotation)

    def _packed(self, name: str, plain: nn.Module) -> QuantizedWeight | None:
        if not isinstance(plain, (nn.Linear, nn.Embedding)):
            return None
        source = self.sources[name]
        packing = self.packings.get(source.key)
        if packing is not None:
            data = self._read(source).to(device=self.device, copy=True)
            return QuantizedWeight(data, self._scale(source, packing), packing.group)
        if self.fp8 and isinstance(plain, nn.Linear) and self.fp8.takes(name.removesuffix(".weight")):
            return self.quantized(source)
        return None

    def quantized(self, *sources: Source, common: Tensor | None = None) -> QuantizedWeight:
        """Quantize the concatenated rows of `sources` to fp8, with a scale per row, or with the scale `common`.

        Rows pass through a small buffer, a few at a time, so there is no second copy of a weight in memory.
        """
        values = [self._read(source) for source in sources]
        count = sum(len(value) for value in values)
        data = torch.empty(count, values[0].shape[1], dtype=E4M3, device=self.device)
        scale = torch.empty(count, 1, dtype=torch.float32, device=self.device)
        for start, rows in self._chunks(values):
            part = slice(start, start + len(rows))
            scale[part] = fp8_scales(rows) if common is None else common
            data[part] = to_e4m3_range_(rows, scale[part])
        self._require_finite(scale, sources[0].key)
        return QuantizedWeight(data, scale if common is None else common)

    def common_scale(self, *sources: Source) -> Tensor:
        """One fp8 scale [1, 1] for the concatenated rows of `sources`."""
        values = [self._read(source) for source in sources]
        largest = [fp8_scales(rows).max() for _, rows in self._chunks(values)]
        scale = torch.stack(largest).max().reshape(1, 1)
        self._require_finite(scale, sources[0].key)
        return scale

    def _chunks(self, values: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield (number of rows before, a few rows in fp32). The buffer is reused, so the next rows overwrite these."""
        before, columns = 0, values[0].shape[1]
        step = max(1, CHUNK_BYTES // (4 * columns))
        if self._space is None or self._space.numel() < columns:  # kept: new buffers would fragment the heap
            self._space = torch.empty(max(CHUNK_BYTES // 4, columns), device=self.device)
        for value in values:
            for part in value.split(step):
                rows = self._space[: part.numel()].view(part.shape)
                yield before, rows.copy_(part)
                before += len(part)

    def _read(self, source: Source) -> Tensor:
        return self.reader.read(source.key, source.rows)

    def _scale(self, source: Source, packing: WeightStorage) -> Tensor | None:
        """Scale of a quantized weight in fp32, [rows, 1] or [1, 1]; None without one."""
        if packing.scale is None:
            return None
        scale = self.reader.read(packing.scale).to(self.device, torch.float32, copy=True).reshape(-1, 1)
        self._require_finite(scale, packing.scale)
        if packing.per_row and source.rows:
            scale = scale[source.rows[0] : source.rows[1]].clone()
        return scale

    def _rotation(self, group: int) -> Tensor:
        """Hadamard matrix of a group size, shared by all layers."""
        if group not in self._rotations:
            self._rotations[group] = hadamard(group).to(self.device, torch.bfloat16)
        return self._rotations[group]

    def _require_finite(self, scale: Tensor, key: str) -> None:
        if not bool(torch.isfinite(scale).all()):
            raise UserError(f"{self.path}: {short(key)} holds NaN or infinity; download the file again")


def check_storage(plain: nn.Module, part: Component) -> None:
    """Refuse weights whose dtype no network accepts: quantized norms, and integers without a quantization marker."""
    tensors, packings = part.checkpoint.tensors, part.identity.packings
    for path, layer in plain.named_modules():
        for leaf, _ in layer.named_parameters(recurse=False):
            key = part.identity.sources[f"{path}.{leaf}"].key
            if key in packings and "Norm" in type(layer).__name__:
                raise UserError(
                    f"{part.checkpoint.path}: the norm {short(key)} is {packings[key].kind}, but norms are never "
                    "quantized; the file is broken, take another one"
                )
            if key not in packings and tensors[key].dtype not in FLOATS:
                raise UserError(
                    f"{part.checkpoint.path}: tensor {short(key)} is {tensors[key].dtype}, expected BF16, F16 or F32; "
                    "download the file again"
                )
