"""Choices that people are offered, by name. Nothing else is imported, so that menus cost nothing to build."""

FITS = ("resize", "mirror")  # how a reference meets the grid of 32 pixels
EDIT_NOISES = ("decorrelated", "released")  # where an edit's noise comes from
CANVASES = ("last", "first", "largest")  # which reference the output's size follows
SCHEDULES = ("auto", "base", "turbo")
COMPONENTS = {"transformer": "dit", "text_encoder": "encoder", "vae": "vae"}  # folder of a whole model -> slot
COMPONENT_FOLDERS = {slot: name for name, slot in COMPONENTS.items()}
KV_STORAGES = ("auto", "native", "fp8", "fp8_v", "int8")  # how a prefix is kept; see `prefix/codecs.py`
KV_DEVICES = ("auto", "gpu", "cpu")  # where a prefix is kept
PREFILLS = ("segments", "flex")  # how a prefix is computed; see `models/flex_prefill.py`
# Kernels that attend; see `ops/attention_backends.py`.
ATTENTIONS = ("auto", "sdpa", "cudnn", "flash", "efficient", "sage", "compiled")
