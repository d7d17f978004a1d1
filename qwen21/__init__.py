"""Qwen-Image 2.1 in plain PyTorch: encoder, VAE, diffusion transformer, schedules and the prefix K/V cache.

Nothing here imports ComfyUI. Start reading at `pipeline.py`.
"""

__version__ = "0.1.0"
