"""Keys and values of a prefix, kept between denoising steps, and between runs."""

from .codecs import CODECS, FIDELITY, NATIVE, Codec, codec_named, fitting_codec, kv_block_bytes
from .contiguous import ContiguousKV
from .keys import Origins, TextOrigin, content, kv_block_keys, text_origin
from .kv import KVBlock, Prefix
from .placement import Placement
from .reuse import PrefixInputs, Reuse, prefix_for_now, prefix_through
from .store import ModelIdentity, Store
from .transfer import LayerReader

__all__ = [
    "CODECS",
    "FIDELITY",
    "NATIVE",
    "Codec",
    "ContiguousKV",
    "LayerReader",
    "ModelIdentity",
    "Origins",
    "Placement",
    "Prefix",
    "PrefixInputs",
    "Reuse",
    "Store",
    "TextOrigin",
    "KVBlock",
    "codec_named",
    "content",
    "fitting_codec",
    "prefix_for_now",
    "prefix_through",
    "text_origin",
    "kv_block_bytes",
    "kv_block_keys",
]
