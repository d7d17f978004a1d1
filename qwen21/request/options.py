"""The options of a request by name, read from plain values: what JSON holds, or what a command line says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..choices import CANVASES, EDIT_NOISES, SCHEDULES
from ..config.validate import short
from ..errors import UserError

Reader = Callable[[Any], Any]


def read_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `options` as a request takes them, by name with underscores. None is left out: it was not given."""
    read = {}
    for key, value in options.items():
        name = str(key).replace("-", "_")
        if name not in READERS:
            raise UserError(f"there is no option {short(key)}; expected some of {', '.join(READERS)}")
        if value is not None:
            try:
                read[name] = READERS[name](value)
            except UserError as error:
                raise UserError(f"{name}: {error}") from error
    return read


def read_option(name: str, value: Any) -> Any:
    """One value as a request takes it. Raises `UserError` with what was got and what was expected."""
    return READERS[name](value)


def _refuse(value: Any, expected: str) -> UserError:
    return UserError(f"got {short(value)}, expected {expected}")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _refuse(value, "a string")
    return value


def _prompt(value: Any) -> str | tuple[str, ...]:
    return tuple(map(_text, value)) if isinstance(value, (list, tuple)) and value else _text(value)


def _whole(value: Any) -> int:
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return int(value)
        except ValueError:
            pass
    raise _refuse(value, "a whole number")


def _number(value: Any) -> float:
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    raise _refuse(value, "a number")


def _one_of(choices: tuple[str, ...]) -> Reader:
    def read(value: Any) -> str:
        if value not in choices:
            raise _refuse(value, f"one of {', '.join(choices)}")
        return value

    return read


def _switch(value: Any) -> bool:
    if value in ("on", "off"):
        return value == "on"
    if not isinstance(value, bool):
        raise _refuse(value, "on or off")
    return value


def _size(value: Any) -> tuple[int, int]:
    """`1024x768`, or [1024, 768]."""
    parts = value.lower().split("x") if isinstance(value, str) else value
    if isinstance(parts, (list, tuple)) and len(parts) == 2:
        try:
            return _whole(parts[0]), _whole(parts[1])
        except UserError:
            pass
    raise _refuse(value, "WIDTHxHEIGHT such as 1024x768")


def _sigmas(value: Any) -> tuple[float, ...]:
    """`1,0.7,0.3,0`, or [1, 0.7, 0.3, 0]."""
    parts = value.split(",") if isinstance(value, str) else value
    if isinstance(parts, (list, tuple)):
        try:
            return tuple(map(_number, parts))
        except UserError:
            pass
    raise _refuse(value, "a list of sigmas such as 1,0.7,0.3,0")


def _shift(value: Any) -> float | str:
    from ..sampling.schedule import DYNAMIC

    if value == DYNAMIC:
        return value
    try:
        mu = _number(value)
    except UserError:
        mu = math.nan
    if not math.isfinite(mu):
        raise _refuse(value, f"a number such as 0.7, or {DYNAMIC}")
    return mu


def read_cfg_range(value: Any) -> Any:
    """A `GuidanceRange` from `1:10:4.0`, or [1, 10, 4.0]: the first and last step, and the CFG between them."""
    from ..sampling.euler import GuidanceRange

    parts = value.split(":") if isinstance(value, str) else value
    if isinstance(parts, (list, tuple)) and len(parts) == 3:
        try:
            return GuidanceRange(_whole(parts[0]), _whole(parts[1]), _number(parts[2]))
        except UserError:
            pass
    raise _refuse(value, "A:B:CFG such as 1:10:4.0")


def _several(reader: Reader, is_one: Callable[[Any], bool]) -> Reader:
    """A list of what `reader` reads, or one of it."""

    def read(value: Any) -> tuple[Any, ...]:
        return (reader(value),) if is_one(value) or not isinstance(value, (list, tuple)) else tuple(map(reader, value))

    return read


def _is_one_range(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 3 and not isinstance(value[0], (str, list, tuple))


def _picture(value: Any) -> Any:
    if isinstance(value, (bool, int, float, dict, list, tuple)):
        raise _refuse(value, "a picture: a path, the bytes of a file, or a PIL image")
    return value


READERS: Mapping[str, Reader] = {
    "prompt": _prompt,
    "negative": _text,
    "image": _several(_picture, lambda value: False),
    "size": _size,
    "resolution": _whole,
    "canvas": _one_of(CANVASES),
    "batch": _whole,
    "init_image": _picture,
    "mask": _picture,
    "denoise": _number,
    "seed": _whole,
    "steps": _whole,
    "schedule": _one_of(SCHEDULES),
    "sigmas": _sigmas,
    "shift": _shift,
    "cfg": _number,
    "cfg_range": _several(read_cfg_range, _is_one_range),
    "edit_noise": _one_of(EDIT_NOISES),
    "prefix_cache": _switch,
}
