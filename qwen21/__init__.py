"""Qwen-Image 2.1 in plain PyTorch: encoder, VAE, diffusion transformer, schedules and the prefix K/V cache.

    from qwen21 import Request, load

    pipeline = load(model="qwen21-mini")
    result = pipeline.generate(Request("A big red circle at the center on a white background.", size=(96, 96)))
    result.images[0].save("circle.png")

Nothing here imports ComfyUI. Start reading at `pipeline.py`.
"""

from importlib import import_module

__version__ = "0.1.0"

# The public names, and where each is defined. Imported when asked for: the command line's help needs no PyTorch.
_HOMES = {
    "Cancelled": "errors",
    "Pipeline": "pipeline",
    "Request": "request",
    "Result": "pipeline",
    "UserError": "errors",
    "Watch": "watch",
    "load": "loading",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
