"""What the encoders made, kept between runs."""

import pytest
import torch

from qwen21 import encode_cache
from qwen21.encode_cache import ReferenceContexts
from qwen21.models.text_encoder import ReferenceContext


@pytest.mark.parametrize(("free", "kept"), [(16, True), (15, False)])
def test_heads_of_the_last_references_are_kept_while_memory_allows(monkeypatch, free, kept):
    names = [("a",), ("b",), ("b", "a"), ("b", "a", "c")]
    contexts = ReferenceContexts({name: ReferenceContext(torch.zeros(4, 8), ()) for name in names})
    monkeypatch.setattr(encode_cache, "available_ram", lambda: free * 4 * 4 * 8)
    contexts.keep_only(("b", "a"))
    assert list(contexts) == [("b",), ("b", "a")] * kept
