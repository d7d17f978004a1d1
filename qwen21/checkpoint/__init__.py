"""Checkpoint files: reading them lazily, saying what they are, and filling the networks from them."""
