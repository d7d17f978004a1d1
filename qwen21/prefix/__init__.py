"""Keys and values of a prefix, kept between denoising steps, and between runs."""

from .codecs import CODECS, FIDELITY, NATIVE, Codec, codec_named, fitting_codec, unit_bytes
from .contiguous import Joined
from .keys import Origins, TextOrigin, content, text_origin, unit_keys
from .kv import Prefix, Unit
from .placement import Placement
from .reuse import PrefixInputs, Reuse, prefix_for_now, prefix_through
from .store import ModelIdentity, Store
from .transfer import LayerReader

__all__ = [
    "CODECS",
    "FIDELITY",
    "NATIVE",
    "Codec",
    "Joined",
    "LayerReader",
    "ModelIdentity",
    "Origins",
    "Placement",
    "Prefix",
    "PrefixInputs",
    "Reuse",
    "Store",
    "TextOrigin",
    "Unit",
    "codec_named",
    "content",
    "fitting_codec",
    "prefix_for_now",
    "prefix_through",
    "text_origin",
    "unit_bytes",
    "unit_keys",
]
