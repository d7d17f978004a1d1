"""The command `plan` beside `generate`: what one refuses or warns of, the other does too."""

import pytest
from PIL import Image

from qwen21.cli import main
from tests import loras, tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.Tiny(tmp_path_factory.mktemp("model")).folder


@pytest.fixture
def plan(model, tmp_path, capsys, monkeypatch):
    """Runs `plan` in a folder of its own that holds wide.png, 64x32; returns its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 32), "red").save("wide.png")

    def run(*arguments):
        code = main(["plan", "--model", str(model), "--resolution", "32", *map(str, arguments)])
        return (code, *capsys.readouterr())

    return run


def test_its_picture_overwrites_no_input(plan, tmp_path):
    lora = loras.write(tmp_path / "lora.png", loras.make(1, ["img_in"]))
    for flag, path in (("--init-image", "wide.png"), ("--mask", "wide.png"), ("--lora", lora.name)):
        before = (tmp_path / path).read_bytes()
        code, out, err = plan(flag, path, "--picture", path)
        assert (code, out) == (2, "") and f"'{path}' is an input of this run and would be overwritten" in err
        assert (tmp_path / path).read_bytes() == before
