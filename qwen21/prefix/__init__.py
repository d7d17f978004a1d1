"""Keys and values of a prefix, kept between denoising steps."""

from .cache import Prefix, placement, prefix_bytes

__all__ = ["Prefix", "placement", "prefix_bytes"]
