"""The node pack as ComfyUI sees it. Nothing of ComfyUI is imported here until it asks for the nodes."""

import logging

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    """The pack's `ComfyExtension`. A failure is logged with its traceback, of which ComfyUI shows the message only."""
    try:
        from .nodes import Qwen21Extension

        return Qwen21Extension()
    except Exception:
        logging.exception("Qwen-Image 2.1: the nodes could not be loaded")
        raise


__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
