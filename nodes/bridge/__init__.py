"""Where the library meets ComfyUI: the only place that knows patchers, base models, devices and interrupts."""
