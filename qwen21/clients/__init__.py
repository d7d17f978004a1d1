"""Clients of servers that generate pictures: a running ComfyUI."""
