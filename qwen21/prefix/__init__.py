"""The prefix cache: keys and values of a prefix, kept between denoising steps and between runs."""

from .codecs import CODECS, FIDELITY, NATIVE, Codec, codec_named, fitting_codec, kv_block_bytes
from .contiguous import ContiguousKV
from .keys import Origins, TextOrigin, content, kv_block_keys, text_origin
from .kv import KVBlock, Prefix
from .placement import Placement
from .reader import LayerReader
from .reuse import PrefixFacts, Reuse
from .service import PrefixInputs, PrefixService, RunLocal, run_local_prefix, stored_prefix
from .store import ModelIdentity, Store

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
    "PrefixFacts",
    "PrefixInputs",
    "PrefixService",
    "Reuse",
    "RunLocal",
    "Store",
    "TextOrigin",
    "KVBlock",
    "codec_named",
    "content",
    "fitting_codec",
    "run_local_prefix",
    "stored_prefix",
    "text_origin",
    "kv_block_bytes",
    "kv_block_keys",
]
