"""Run workflows on a remote ComfyUI over HTTP; receiving its messages needs the package websocket-client."""
