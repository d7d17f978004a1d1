"""The options that flags and nodes offer, by name. This module imports nothing, so that menus are cheap to build."""

FITS = ("resize", "mirror")  # how a reference is fitted to the grid of 32 pixels
EDIT_NOISES = ("decorrelated", "released")  # how an edit's noise is seeded; see `sampling/euler.py`
CANVASES = ("last", "first", "largest")  # which reference the output's size follows
SCHEDULES = ("auto", "base", "turbo")
COMPONENTS = {"transformer": "dit", "text_encoder": "encoder", "vae": "vae"}  # folder of a whole model -> slot
COMPONENT_FOLDERS = {slot: name for name, slot in COMPONENTS.items()}
KV_STORAGES = ("auto", "native", "fp8", "fp8_v", "int8")  # codecs of K and V; see `prefix/codecs.py`
KV_DEVICES = ("auto", "gpu", "cpu")  # where a prefix is kept
GGUF_TYPES = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")  # that `convert` writes
PREFILLS = ("segments", "flex")  # how a prefix is computed; see `models/flex_prefill.py`
# Attention kernels; see `ops/attention_backends.py`.
ATTENTIONS = ("auto", "sdpa", "cudnn", "flash", "efficient", "sage", "compiled")
