"""The copies of ComfyUI on this machine, and what starts them.

COMFYUI_PATHS names several (separated as PATH is), COMFYUI_PATH one; without them ~/ComfyUI and ~/ComfyUI-0.3.64.
COMFYUI_FRONTEND is a version of the frontend's package; without it each copy gets the one that it asks for.
COMFYUI_NEWEST_CORE=1 runs each a second time with what the newest core has and it lacks (newest_core.py).
COMFYUI_PYTHON is the interpreter that has ComfyUI's requirements, by default the one that runs the tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FRONTEND = "comfyui-frontend-package"
NEEDED = ("aiohttp", "alembic", "torchsde", "yaml")  # of ComfyUI's requirements, those that nobody else brings
NEWEST = "QWEN21_AS_NEWEST_CORE"  # tells a process of ComfyUI to put the stand-in in place
PROBE = """
import importlib.metadata as m, importlib.util as u, sys
missing = [name for name in sys.argv[2:] if u.find_spec(name) is None]
try:
    version = m.version(sys.argv[1])
except m.PackageNotFoundError:
    version = ""
print(",".join(missing) + "|" + version)
"""


class Installation:
    """One checkout of ComfyUI. `prepare` first."""

    def __init__(self, path: Path, newest: bool = False) -> None:
        """`newest`: with our stand-in of the newest core in place before the pack is loaded."""
        self.path, self.newest = path, newest
        self.python_path = os.environ.get("COMFYUI_PYTHON") or sys.executable
        self._side: Path | None = None  # packages that this version needs in another version than is installed

    def __str__(self) -> str:
        return f"{self.version} as newest" if self.newest else self.version

    @property
    def version(self) -> str:
        file = self.path / "comfyui_version.py"
        found = re.search(r'__version__ = "([\w.]+)"', file.read_text()) if file.is_file() else None
        return found[1] if found else self.path.name

    def as_newest(self) -> Installation:
        """The same checkout, prepared as this one is, as the newest core."""
        twin = Installation(self.path, newest=True)
        twin._side = self._side
        return twin

    def prepare(self, folder: Path) -> str:
        """Make it runnable, with `folder` for packages; returns why it cannot be, or nothing."""
        if not (self.path / "main.py").is_file():
            return f"ComfyUI not found at {self.path}; set COMFYUI_PATH"
        command = [self.python_path, "-c", PROBE, FRONTEND, *NEEDED]
        try:
            probe = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except OSError as error:
            return f"{self.python_path} does not run ({error.strerror}); set COMFYUI_PYTHON"
        if probe.returncode:
            return f"{self.python_path} does not run; set COMFYUI_PYTHON: {probe.stderr[-200:]}"
        missing, frontend = probe.stdout.strip().split("|")
        if missing:
            return f"{self.python_path} lacks {missing} of ComfyUI's requirements; set COMFYUI_PYTHON"
        asked = re.search(rf"^{FRONTEND}==([\w.]+)", (self.path / "requirements.txt").read_text(), re.MULTILINE)
        wanted = os.environ.get("COMFYUI_FRONTEND") or (asked[1] if asked else frontend)
        return self._install_beside(f"{FRONTEND}=={wanted}", folder) if wanted != frontend else ""

    def environment(self) -> dict[str, str]:
        """Of its processes: two threads that sleep while they wait, and none of our own folders on the path."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", NEWEST)}
        kept |= {NEWEST: "1"} if self.newest else {}
        side = {"PYTHONPATH": str(self._side)} if self._side else {}
        threads = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
        return {**kept, **side, **threads, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}

    def python(self, *arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run its interpreter in its folder, where `-c` and `-m` can import ComfyUI's modules."""
        command = [self.python_path, *map(str, arguments)]
        options = {"capture_output": True, "text": True, "timeout": timeout}
        run = subprocess.run(command, cwd=self.path, env=self.environment(), **options)
        assert run.returncode == 0, run.stderr[-4000:]
        return run

    def _install_beside(self, requirement: str, folder: Path) -> str:
        side = folder / requirement.replace("==", "-")
        if not (side / FRONTEND.replace("-", "_")).is_dir():
            command = [self.python_path, "-m", "pip", "install", "--quiet", "--no-deps", "--no-input"]
            pip = subprocess.run([*command, "--target", str(side), requirement], capture_output=True, text=True)
            if pip.returncode:
                return f"ComfyUI {self} needs {requirement}, which pip cannot install: {pip.stderr.strip()[-200:]}"
        self._side = side
        return ""


def installations() -> list[Installation]:
    several, one = os.environ.get("COMFYUI_PATHS"), os.environ.get("COMFYUI_PATH")
    if several:
        paths = [Path(path).expanduser() for path in several.split(os.pathsep) if path]
    elif one:
        paths = [Path(one).expanduser()]
    else:
        paths = [Path.home() / "ComfyUI", Path.home() / "ComfyUI-0.3.64"]
    kinds = [False, True] if os.environ.get("COMFYUI_NEWEST_CORE") else [False]
    return [Installation(path, newest) for path in paths for newest in kinds]
