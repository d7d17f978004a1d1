"""What the encoders made, kept between runs."""

import pytest
import torch

from qwen21 import encoded
from qwen21.encoded import KeptHeads
from qwen21.encoder import Head


@pytest.mark.parametrize(("free", "kept"), [(16, True), (15, False)])
def test_heads_of_the_last_references_are_kept_while_memory_allows(monkeypatch, free, kept):
    names = [("a",), ("b",), ("b", "a"), ("b", "a", "c")]
    heads = KeptHeads({name: Head(torch.zeros(4, 8), ()) for name in names})
    monkeypatch.setattr(encoded, "available_ram", lambda: free * 4 * 4 * 8)
    heads.settle(("b", "a"))
    assert list(heads) == [("b",), ("b", "a")] * kept
