"""What the nodes share: their category and the types of our own."""

from comfy_api.latest import io

CATEGORY = "Qwen-Image 2.1"
Encoder = io.Custom("QWEN21_ENCODER")
References = io.Custom("QWEN21_REFERENCES")
MAX_SIDE = 16384
