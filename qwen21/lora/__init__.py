"""LoRA files: read them, match their names to layers, and compute them beside the weights."""
