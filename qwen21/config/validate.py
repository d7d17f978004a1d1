"""Checks of values from files, before anything is built from them: numbers by type and range, shapes, counts."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np

from ..errors import UserError

LARGEST = 2**20  # limit of every size in a config, several times the largest released size
MOST_LAYERS = 4096
MOST_VALUES = 1024  # limit of a list's length where its type has none


@dataclass(frozen=True)
class Within:
    """A range with both ends included: `Annotated[float, Within(0, 1)]`. Without one, integers are 1 to `LARGEST`."""

    low: float
    high: float


def short(value: Any) -> str:
    """The `repr` of any `value` on one line of at most 80 characters."""
    cut = reprlib.Repr()
    cut.maxlevel, cut.maxlist, cut.maxdict, cut.maxstring, cut.maxlong, cut.maxother = 3, 8, 4, 76, 40, 76
    text = cut.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def printable(name: str) -> str:
    """`name` unchanged, or shortened and quoted where it is long or not printable."""
    return name if len(name) <= 80 and name.isprintable() else short(name)


# --- numbers of JSON files -----------------------------------------------------------------------------------------


def pick(cls: type, config: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """The values in a JSON `config` of the fields of dataclass `cls`; `keys` maps fields to JSON keys. Fields that are
    absent in `config` are left out.

    `UserError` where a value has not the field's type and range, or a list not its length.
    """
    hints = get_type_hints(cls, include_extras=True)
    return {name: _checked(key, config[key], hints[name]) for name, key in keys.items() if key in config}


def table(config: Mapping[str, Any], key: str, *, null: bool = False) -> Mapping[str, Any]:
    """The JSON object at `key` of `config`, empty if absent (or null, where `null` allows it)."""
    value = config.get(key, {})
    if value is None and null:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(f"{key} is {short(value)}, expected a JSON object; download the file again")
    return value


def flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{key} is {short(value)}, expected true or false; download the file again")
    return value


def flags(key: str, value: Any) -> tuple[bool, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > MOST_VALUES or not all(isinstance(v, bool) for v in value):
        raise UserError(f"{key} is {short(value)}, expected a list of true and false; download the file again")
    return tuple(value)


def _checked(key: str, value: Any, hint: Any) -> Any:
    is_list = get_origin(hint) is tuple
    kinds = get_args(hint) if is_list else (hint,)
    kind, limits = _kind(kinds[0])
    length = "" if not is_list else "a list of " if kinds[-1] is Ellipsis else f"a list of {len(kinds)} "
    if not is_list:
        values = [value]
    elif isinstance(value, (list, tuple)) and (len(value) <= MOST_VALUES if kinds[-1] is Ellipsis else True):
        values = list(value) if kinds[-1] is Ellipsis or len(value) == len(kinds) else [None]
    else:
        values = [None]
    if not all(_fits(v, kind, limits) for v in values):
        name = "whole number" if kind is int else "number"
        raise UserError(
            f"{key} is {short(value)}, expected {length or 'a '}{name}{'s' if is_list else ''} from {limits.low:g} to "
            f"{limits.high:g}; download the file again"
        )
    return tuple(kind(v) for v in values) if is_list else kind(value)


def _kind(hint: Any) -> tuple[type, Within]:
    """The type (int or float) and the range that a field's type `hint` declares."""
    if get_origin(hint) is Annotated:
        return get_args(hint)
    return hint, Within(1, LARGEST) if hint is int else Within(-1e6, 1e6)


def _fits(value: Any, kind: type, limits: Within) -> bool:
    if type(value) not in (int, float) or not limits.low <= value <= limits.high:  # false for NaN as well
        return False
    return kind is float or value == int(value)


def require_falling(values: Sequence[float], what: str) -> None:
    """Raise `UserError` unless the sigmas `values` lie within 0 and 1 and strictly fall, also in fp32; `what` names
    them."""
    if not all(isinstance(v, Real) and not isinstance(v, bool) and 0 <= v <= 1 for v in values):
        raise UserError(f"{what} must lie within 0 and 1; 1 is pure noise, 0 the finished picture")
    rounded = np.array(values, dtype=np.float32)
    if not (rounded[1:] < rounded[:-1]).all():
        raise UserError(f"{what} must strictly fall, each smaller than the one before")


def sample_sigmas(value: Any) -> tuple[float, ...]:
    """Read Turbo's sigmas from `sample_sigmas` in `model_index.json`, and check that they strictly fall.

    The final 0 is not among them.
    """
    if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= 1000:
        count = f" ({len(value)} values)" if isinstance(value, (list, tuple)) else ""
        raise UserError(f"sample_sigmas is {short(value)}{count}, expected a list of 1 to 1000 numbers")
    require_falling(value, f"sample_sigmas {short(value)}")
    if np.float32(value[-1]) == 0:
        raise UserError(f"sample_sigmas {short(value)} must end above 0; the final 0 is added to it")
    return tuple(float(v) for v in value)


# --- shapes of checkpoints -----------------------------------------------------------------------------------------


def shape_of(shapes: Mapping[str, tuple[int, ...]], name: str, rank: int) -> tuple[int, ...]:
    """The shape of the tensor `name`; `UserError` if it is absent, empty or not of rank `rank`."""
    if name not in shapes:
        raise UserError(f"tensor {name!r} is missing, so the model's size cannot be read; download it again")
    shape = tuple(shapes[name])
    if len(shape) != rank or not all(shape):
        raise UserError(
            f"tensor {name!r} has shape {list(shape)}, expected {rank} dimensions, none empty; download it again"
        )
    return shape


def count_of(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> int:
    """The number of consecutive groups named `prefix` + index + `.`, from 0; `UserError` for a gap."""
    # Longer runs of digits are not indices; int() refuses more than 4300 digits.
    indices = (re.match(r"(0|[1-9][0-9]{0,17})\.", key[len(prefix) :]) for key in shapes if key.startswith(prefix))
    found = {int(match[1]) for match in indices if match}
    for i in range(len(found)):
        if i not in found:
            raise UserError(f"'{prefix}{i}' is missing between others that are there; is a shard missing?")
    if len(found) > MOST_LAYERS:
        raise UserError(f"there are {len(found)} of '{prefix}', expected at most {MOST_LAYERS}; is this another model?")
    return len(found)


def quotient(value: int, divisor: int, what: str, unit: str) -> int:
    if value % divisor:
        raise UserError(f"{what} {value} is not a multiple of {unit} {divisor}; is this another model?")
    return value // divisor
