"""What to paint: a request, and everything about it that can be decided before a weight is loaded."""

from .request import Request
from .resolve import (
    MAX_SIDE,
    MAX_STEPS,
    SEEDS,
    ResolvedRequest,
    decide,
    require_seed,
    resolve_request,
    size_warning,
)

__all__ = [
    "MAX_SIDE",
    "MAX_STEPS",
    "SEEDS",
    "Request",
    "ResolvedRequest",
    "decide",
    "require_seed",
    "resolve_request",
    "size_warning",
]
