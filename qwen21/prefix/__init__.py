"""Keys and values of a prefix, kept between denoising steps, and between runs."""

from .cache import Prefix, Unit
from .codecs import CODECS, FIDELITY, Codec, codec_named, fitting_codec
from .keys import Origins, TextOrigin, content, text_origin, unit_keys
from .reuse import Place, PrefixInputs, Reuse, prefix_through
from .store import ModelIdentity, Store
from .transfer import LayerReader

NATIVE = CODECS["native"]

__all__ = [
    "CODECS",
    "FIDELITY",
    "NATIVE",
    "Codec",
    "LayerReader",
    "ModelIdentity",
    "Origins",
    "Place",
    "Prefix",
    "PrefixInputs",
    "Reuse",
    "Store",
    "TextOrigin",
    "Unit",
    "codec_named",
    "content",
    "fitting_codec",
    "prefix_through",
    "text_origin",
    "unit_keys",
]
