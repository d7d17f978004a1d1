"""Connect the library to ComfyUI: the only place that knows patchers, base models, devices and interrupts."""
