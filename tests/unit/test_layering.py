"""The architecture as a test: imports run down the table of floors, and nowhere in a circle."""

from pathlib import Path

import pytest

from tests import layering
from tests.house_rules import Source

LIBRARY = Path(__file__).resolve().parents[2] / layering.PACKAGE


def _library() -> list[Source]:
    files = sorted(LIBRARY.rglob("*.py"))
    return [Source(f"{layering.PACKAGE}/{f.relative_to(LIBRARY).as_posix()}", f.read_text("utf-8")) for f in files]


def _arrows(**files: str) -> set[layering.Arrow]:
    """Arrows of a made-up library: `ops__rope` is the file ops/rope.py."""
    return layering.arrows([Source(f"qwen21/{name.replace('__', '/')}.py", text) for name, text in files.items()])


def test_no_arrow_runs_up():
    arrows = layering.arrows(_library())
    assert len(arrows) > 300
    assert layering.upward(arrows) == []


def test_no_circle():
    assert layering.circles(layering.arrows(_library())) == []


def test_few_files_lie_at_the_top():
    files = {path.stem for path in LIBRARY.glob("*.py")} - set(layering.DOOR)
    assert len(files) <= layering.MOST_FILES
    folders = {path.parent.name for path in LIBRARY.glob("*/__init__.py")}
    assert files | folders <= {part for floor in layering.FLOORS for part in floor}


@pytest.mark.parametrize(
    "text",
    [
        "from ..models.dit import DiT",
        "from ..models import dit",
        "def f():\n    from ..models.dit import DiT",
        "if TYPE_CHECKING:\n    from ..models.dit import DiT",
    ],
    ids=["a name", "a module", "within a function", "for types alone"],
)
def test_an_arrow_up_is_found(text):
    found = _arrows(ops__rope=text, models__dit="")
    assert layering.upward(found) == ["ops.rope imports models.dit, which is not below it"]


def test_arrows_down_and_within_a_room_are_fine():
    found = _arrows(models__dit="from ..ops.rope import rotation\nfrom .vae import VAE", ops__rope="", models__vae="")
    assert found == {("models.dit", "ops.rope"), ("models.dit", "models.vae")}
    assert layering.upward(found) == layering.circles(found) == []


def test_a_new_room_needs_a_floor():
    found = _arrows(attic__boxes="from ..errors import UserError", errors="")
    assert layering.upward(found) == ["attic is on no floor; put it into the table"]


def test_circles_are_found():
    found = _arrows(
        ops__a="from .b import x",
        ops__b="def f():\n    from .c import y",
        ops__c="from . import a",
        ops__d="from .a import z",
    )
    assert layering.circles(found) == ["ops.a -> ops.b -> ops.c -> ops.a"]
