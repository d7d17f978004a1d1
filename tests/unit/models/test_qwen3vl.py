"""Building transformers' Qwen3-VL on the layers that are given."""

import sys
from types import SimpleNamespace

import pytest

from qwen21.config.networks import EncoderConfig
from qwen21.errors import UserError
from qwen21.models.text_encoder import TextEncoder


def test_transformers_without_qwen3_vl(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace())
    with pytest.raises(UserError, match=r"transformers, 4\.57 or newer"):
        TextEncoder(EncoderConfig(), device="meta")
