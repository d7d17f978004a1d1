"""Bring single weights from their file to their device: unquantized, quantized, or quantized to fp8 on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..config.validate import short
from ..errors import UserError
from ..ops.formats import Fp8Weight, PackedWeight
from ..ops.formats.fp8 import E4M3, fp8_scales, to_e4m3_range_
from ..ops.formats.hadamard import hadamard
from ..ops.formats.scaled import require_finite
from ..ops.quantized import QuantLayers
from .container import Reader
from .fp8_policy import Fp8
from .names import Source
from .paths import errors_naming
from .quant_formats import FLOATS, stays_packed

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
        self.reader, self.dtype, self.device, self.fp8, self.layers = reader, dtype, torch.device(device), fp8, layers
        self._rotations: dict[int, Tensor] = {}
        self._space: Tensor | None = None

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read a parameter in `self.dtype`; a quantized one is dequantized."""
        source = self.sources[name]
        if source.key in self.packings:
            return self._load(source).dequantized(self.dtype).reshape(shape)
        value = self._read(source).reshape(shape)
        # copy=True: a tensor that maps the file would crash the process if the file changed later
        return value.to(device=self.device, dtype=self.dtype, copy=True)

    def layer(self, name: str, plain: nn.Module) -> nn.Module | None:
        """Build the quantized layer that replaces the layer `name`; None if neither the file nor `fp8` quantizes it."""
        packed = self._packed(f"{name}.weight", plain)
        if packed is None:
            return None
        if isinstance(plain, nn.Embedding):
            return self.layers.embedding(packed)
        bias = None if plain.bias is None else self.tensor(f"{name}.bias", tuple(plain.bias.shape))
        return self.layers.linear(packed, bias)

    def _packed(self, name: str, plain: nn.Module) -> PackedWeight | None:
        if not isinstance(plain, (nn.Linear, nn.Embedding)):
            return None
        source = self.sources[name]
        packing = self.packings.get(source.key)
        if packing is not None:
            return self._load(source) if stays_packed(packing, name) else None
        if self.fp8 and isinstance(plain, nn.Linear) and self.fp8.takes(name.removesuffix(".weight")):
            return self.quantized(source)
        return None

    def _load(self, source: Source) -> PackedWeight:
        with errors_naming(self.path):
            return self.packings[source.key].load(self, source.rows)

    def quantized(self, *sources: Source, common: Tensor | None = None) -> Fp8Weight:
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
        return Fp8Weight(data, scale if common is None else common)

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
        if source.frames:
            return torch.stack([self.reader.read(key) for key in source.frames], dim=2)
        return self.reader.read(source.key, source.rows)

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """A tensor of the file as it is stored; see `WeightReader`."""
        return self.reader.read(key, rows)

    def rotation(self, group: int) -> Tensor:
        """Hadamard matrix of a group size, shared by all layers."""
        if group not in self._rotations:
            self._rotations[group] = hadamard(group).to(self.device, torch.bfloat16)
        return self._rotations[group]

    def _require_finite(self, scale: Tensor, key: str) -> None:
        with errors_naming(self.path):
            require_finite(scale, key)


def check_storage(plain: nn.Module, part: Component) -> None:
    """Refuse weights whose dtype no network accepts: quantized norms, and integers without a quantization marker; and
    formats whose package is not installed."""
    tensors, packings = part.checkpoint.tensors, part.identity.packings
    for packing in {type(packing): packing for packing in packings.values()}.values():
        if packing.PACKAGE and find_spec(packing.PACKAGE) is None:
            name = packing.PACKAGE.replace("_", "-")
            raise UserError(
                f"{part.checkpoint.path}: its weights are {packing.title}, which needs the package {name}; install it "
                f"(pip install {name}), or take another file of this model"
            )
    for path, layer in plain.named_modules():
        for leaf, _ in layer.named_parameters(recurse=False):
            key = part.identity.sources[f"{path}.{leaf}"].key
            if key in packings and "Norm" in type(layer).__name__:
                raise UserError(
                    f"{part.checkpoint.path}: the norm {short(key)} is {packings[key].title}, but norms are never "
                    "quantized; the file is broken, take another one"
                )
            if key not in packings and tensors[key].dtype not in FLOATS:
                raise UserError(
                    f"{part.checkpoint.path}: tensor {short(key)} is {tensors[key].dtype}, expected BF16, F16 or F32; "
                    "download the file again"
                )
