"""Keys and values of a prefix, kept between denoising steps."""

from .cache import Prefix, prefix_bytes

__all__ = ["Prefix", "prefix_bytes"]
