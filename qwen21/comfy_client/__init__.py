"""Running workflows on a ComfyUI somewhere else, over HTTP, with the standard library alone."""
