"""ComfyUI runs this before it loads any node: where the tests ask for it, the newest core's stand-in comes first."""

import importlib.util
import os
from pathlib import Path

if os.environ.get("QWEN21_AS_NEWEST_CORE"):
    file = Path(__file__).resolve().parents[1] / "newest_core.py"
    spec = importlib.util.spec_from_file_location("qwen21_newest_core", file)
    newest_core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(newest_core)
    newest_core.install()
