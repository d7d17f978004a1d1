"""Marker for tests that compile C++."""

import shutil

import pytest

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
