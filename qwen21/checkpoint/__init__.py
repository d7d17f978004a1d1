"""Checkpoint files: read them lazily, identify the model in them, and fill the networks from them."""
