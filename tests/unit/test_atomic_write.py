"""New files beside others: none is replaced, and none is left half written."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from qwen21.atomic_write import write_new
from qwen21.errors import UserError


def numbered(folder):
    return (folder / f"{number}.png" for number in range(1000))


def test_writers_at_once_get_a_file_each(tmp_path):
    (tmp_path / "0.png").symlink_to("nowhere")
    contents = [bytes([i]) * 1000 for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda content: write_new(numbered(tmp_path), content), contents))
    assert [path.read_bytes() for path in paths] == contents
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "0.png", *paths])


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_file_that_cannot_be_finished_leaves_nothing(tmp_path, monkeypatch, error):
    def fail(*_):
        raise error

    (tmp_path / "0.png").write_bytes(b"mine")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises((UserError, KeyboardInterrupt)):
        write_new(numbered(tmp_path), b"content")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"mine"]
