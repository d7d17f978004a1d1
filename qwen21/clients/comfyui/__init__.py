"""Running workflows on a ComfyUI somewhere else, over HTTP; its messages need the package websocket-client."""
