"""Clients of servers that paint: a running ComfyUI."""
