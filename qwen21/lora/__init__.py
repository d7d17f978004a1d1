"""LoRA files: read them, match their names, and compute them beside the weights."""
