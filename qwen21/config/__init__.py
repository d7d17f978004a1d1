"""Sizes of the networks, and the JSON files that hold them."""
