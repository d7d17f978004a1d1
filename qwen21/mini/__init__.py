"""The bundled miniature: what the demo runs without any download."""
