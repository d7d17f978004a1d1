"""The plan: what `plan` prints, from headers alone, and that a run then takes what was planned."""

import json
import re
import struct
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from qwen21.checkpoint.container import Reader
from qwen21.checkpoint.load import find_folder, module_of
from qwen21.cli import pictures
from qwen21.cli import plan as planning
from qwen21.cli.main import build_parser, main
from qwen21.config.networks import DiTConfig
from qwen21.inputs import images
from qwen21.memory import estimate, show
from qwen21.memory.choose import size
from qwen21.memory.plan import MemoryJob, plan_memory
from qwen21.memory.show import plan_report
from qwen21.pipeline import Pipeline, Request, Watch
from tests.support import tiny
from tests.support.live_bytes import LiveBytes

GIB = 2**30
STAGES = {
    "encoding the prompt": "prompt",
    "encoding the references": "encode",
    "prefilling": "prefill",
    "denoising": "step",
    "decoding": "decode",
}  # of a run -> of a plan


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.Tiny(tmp_path_factory.mktemp("model")).folder


@pytest.fixture
def plan(model, tmp_path, capsys):
    """Runs `plan` on the tiny model; returns its exit code, stdout and stderr."""

    def run(*arguments, files=("--model", str(model))):
        code = main(["plan", *files, *map(str, arguments)])
        return (code, *capsys.readouterr())

    return run


def planned(*arguments):
    """The plan itself."""
    a = build_parser().parse_args(["plan", *map(str, arguments)])
    return planning.plan_of(a, find_folder(a.model))[0]


def save(path, size, colour="red", **kw):
    Image.new("RGB", size, colour).save(path, **kw)
    return path


def test_a_run_takes_what_was_planned(model, tmp_path):
    """A guided edit of two references on the CPU: everything alive in each stage, weights included."""
    pictures = [save(tmp_path / f"{colour}.png", (300, 200), colour) for colour in ("red", "blue")]
    made = planned("--model", model, "--image", *pictures, "--prompt", "put <image1> on <image2>", "--negative", "dull",
                   "--cfg", 3, "--resolution", 256)  # fmt: skip
    opened = tuple(Image.open(path) for path in pictures)
    request = Request("put <image1> on <image2>", "dull", opened, cfg=3.0, resolution=256, steps=1)
    pipeline = Pipeline(find_folder(model))
    peaks: dict[str, int] = {}
    with LiveBytes() as live:

        def on_stage(name):
            """The peak since the last one was called, and a new count."""
            peaks[on_stage.name] = max(live.peak, peaks.get(on_stage.name, 0))
            on_stage.name, live.peak = STAGES.get(name, ""), live.now

        on_stage.name = ""
        pipeline.generate(request, Watch(on_stage=on_stage))
        on_stage("")
    for stage in made.stages:
        assert stage.total == pytest.approx(peaks[stage.name], rel=0.1), stage


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """Headers of the released transformer (but for its text width) over a file of holes."""
    header, at = {}, 0
    for name, parameter in module_of("dit", DiTConfig(text_width=tiny.TEXT_WIDTH)).named_parameters():
        header[name] = {
            "dtype": "BF16",
            "shape": list(parameter.shape),
            "data_offsets": [at, at + 2 * parameter.numel()],
        }
        at += 2 * parameter.numel()
    raw = json.dumps(header).encode()
    path = tmp_path_factory.mktemp("released") / "dit.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + at)
    return path, at


@pytest.fixture
def parts(model, released):
    """The released transformer beside a tiny encoder and VAE."""
    names = {"--encoder": "text_encoder", "--vae": "vae", "--tokenizer": "processor"}
    files = [word for flag, name in names.items() for word in (flag, str(model / name))]
    return ["--dit", str(released[0]), *files]


def refuse(*args, **kw):
    raise AssertionError("weights or pixels were read")


def test_released_sizes_from_headers_alone(plan, parts, released, tmp_path, monkeypatch):
    """A native reference of 1024 x 1024 is 2 GiB; both branches share two of them; 24 GiB hold that, 16 do not."""
    monkeypatch.setattr(Reader, "read", refuse)
    monkeypatch.setattr(images, "open_image", refuse)
    monkeypatch.setattr(estimate, "available_ram", lambda: 7 * GIB)
    pictures = [save(tmp_path / f"{i}.png", (1024, 1024)) for i in range(2)]
    edit = ["--image", *pictures, "--prompt", "make it red", "--negative", "dull", "--cfg", "4"]
    code, out, err = plan(*edit, "--free", "24", files=parts)
    assert (code, err) == (0, "")
    table = {line.split("  ")[0]: re.split(r"  +", line)[1:] for line in out.splitlines() if "|" not in line}
    assert table["K/V of the prefix"] == ["tokens", "native", "int8", "fp8_v", "fp8"]
    assert {"reference 1", "reference 2", "the text, positive", "the text, negative", "all"} <= set(table)
    assert table["reference 2"][1] == "2.00 GiB" and 4096 < int(table["reference 2"][0]) < 4110
    assert table["all"][1][:4] in ("4.00", "4.01", "4.02")
    assert size(released[1]) == "13.2 GiB" and table["step"][:2] == ["13.2 GiB", table["all"][1]]
    assert "prefix: native K/V on the GPU" in out
    _, small, _ = plan(*edit, "--free", "16", files=parts)
    assert "prefix: int8 K/V on the GPU" in small
    monkeypatch.setattr(estimate, "available_ram", lambda: 9 * GIB)
    assert "prefix: native K/V in RAM" in plan(*edit, "--free", "16", files=parts)[1]


def test_the_table_adds_up(plan, model, tmp_path):
    """Weights and K/V of each stage as they are; bars as long as their numbers."""
    code, out, err = plan("--image", save(tmp_path / "a.png", (64, 64)), "--resolution", 64, "--free", 0.02)
    assert (code, err) == (0, "")
    made = planned("--model", model, "--image", tmp_path / "a.png", "--resolution", 64, "--free", 0.02)
    for stage in made.stages:
        row = next(line for line in out.splitlines() if line.startswith(stage.name))
        assert re.split(r"  +", row)[1] == size(stage.weights)
        assert re.split(r"  +", row)[4] == size(stage.weights + stage.prefix + stage.activations)
        bar = next(line for line in out.splitlines() if re.match(rf"{stage.name} +[WKa.]", line) and "|" in line)
        drawn = sum(bar[9:].count(mark) for mark in "WKa")
        assert drawn == pytest.approx(show.BAR * stage.total / made.free, abs=1)
    weights = sum(p.numel() for p in module_of("dit", find_folder(model).dit.config).parameters())
    assert made.stages[-2].weights == 2 * weights + made.needs.weights["vae"]  # bf16 on a GPU


def test_the_picture_shows_the_stages(plan, model, tmp_path):
    target = tmp_path / "plan.png"
    code, _, _ = plan("--resolution", 64, "--free", 0.02, "--picture", target)
    made = planned("--model", model, "--resolution", 64, "--free", 0.02)
    with Image.open(target) as picture:
        pixels = picture.convert("RGB").load()
    assert code == 0
    span = show.WIDTH - show.LEFT - show.RIGHT
    for i, stage in enumerate(made.stages):
        y = show.TOP + show.ROW * i + 3
        row = [pixels[x, y] for x in range(show.LEFT, show.WIDTH - show.RIGHT)]
        for colour, part in zip(show.COLOURS, (stage.weights, stage.prefix, stage.activations), strict=True):
            assert row.count(colour) == pytest.approx(span * part / made.free, abs=2)
    line = show.LEFT + span
    assert pixels[line, show.TOP - 5] == show.LINE


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_sizes_are_those_of_upright_pictures(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(tmp_path / "a.jpg", (96, 64), exif=exif)
    assert pictures.picture_size(path) == images.open_image(path).size


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--free", "0"], ["--free is 0"]),
        (["--free", "nan"], ["--free is nan"]),
        (["--free", "8", "--device", "cpu"], ["--free", "--device is cpu"]),
        (["--image", "missing.png"], ["missing.png", "does not exist"]),
        (["--picture", "plan.jpg"], ["must end in .png"]),
        (["--batch", "65"], ["batch is 65"]),
        (["--resolution", "7"], ["resolution"]),
    ],
)
def test_mistakes_are_one_line(plan, arguments, words):
    code, out, err = plan(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert all(word in err for word in words)


def test_warnings_of_a_run_are_those_of_its_plan(plan):
    _, out, err = plan("--size", "70x64", "--negative", "dull")
    assert "64x64" in err and "the negative prompt is unused: it needs a CFG above 1" in err
    assert "64x64 pixels, batch 1, 0 references, not guided" in out


def test_typical_prompts(model):
    """Without a tokenizer: every picture a KV block of its own, the branches' texts apart."""
    parts = vars(find_folder(model))
    job = MemoryJob.typical([(64, 96)] * 3, (128, 64), batch=2, branches=2)
    made = plan_memory({name: parts[name] for name in ("dit", "encoder", "vae")}, job, free=None, ram=GIB)
    assert [(kept.name, kept.tokens) for kept in made.kv_blocks] == [
        *((f"reference {i}", 32) for i in (1, 2, 3)),
        ("the text, positive", 128),
        ("the text, negative", 128),
    ]
    assert made.dtype == torch.float32 and not made.gpu


def test_prefixes_are_laid_out_once_where_half_of_the_room_holds_them(model, tmp_path):
    picture = save(tmp_path / "a.png", (64, 64))
    edit = ["--model", model, "--image", picture, "--resolution", 64, "--negative", "dull", "--cfg", 2]
    made = planned(*edit, "--free", 1)
    config = find_folder(model).dit.config
    both = [2 * config.layers * (layout.length + 16) * config.width * 2 for layout in made.job.prefixes]
    assert made.laid_out == sum(both) and f"K/V, {size(sum(both))} more" in plan_report(made)
    step, prefill = (next(stage for stage in made.stages if stage.name == name) for name in ("step", "prefill"))
    assert step.prefix == prefill.prefix + sum(both)
    beside = made.needs.resident + made.needs.prefix["native"]
    one, two = (2 * (nbytes + made.needs.working("native", False)) for nbytes in both)
    two += both[0]  # which is taken by then
    for free, expected in ((one - 1, 0), (one, both[0]), (two - 1, both[0]), (two, sum(both))):
        assert replace(made, free=free + beside).laid_out == expected
    assert planned(*edit, "--free", 1, "--prefix-cache", "off").laid_out == 0


def test_what_the_arguments_of_a_run_change(model, tmp_path):
    picture = save(tmp_path / "a.png", (64, 64))
    edit = ["--model", model, "--image", picture, "--resolution", 64, "--negative", "dull", "--cfg", 2, "--free", 1]
    plain = planned(*edit)
    one, apart = len(plain.kv_blocks), planned(*edit, "--prefix-cache", "off")
    assert (one, len(apart.kv_blocks)) == (3, 4)
    assert [kept.name for kept in apart.kv_blocks][::2] == ["reference 1, positive", "reference 1, negative"]
    assert apart.needs.prefix["native"] == plain.needs.prefix["native"] + plain.kv_blocks[0].nbytes["native"]
    assert planned(*edit, "--batch", 3).needs.step["native"] > 2 * plain.needs.step["native"]
    started = planned("--model", model, "--resolution", 64, "--init-image", picture)
    assert "encode" in {stage.name for stage in started.stages}
    assert "encode" not in {stage.name for stage in planned("--model", model, "--resolution", 64).stages}
    chosen = planned(*edit, "--kv-device", "cpu", "--kv-storage", "fp8").choice
    assert (chosen.placement, chosen.codec) == ("cpu", "fp8")


def test_the_vae_of_an_fp16_run_is_fp32(model):
    wide, half = (planned("--model", model, "--resolution", 64, "--dtype", dtype).needs for dtype in ("fp32", "fp16"))
    assert half.weights["vae"] == wide.weights["vae"] and half.decode == wide.decode
    assert 2 * half.weights["dit"] == wide.weights["dit"]


def test_a_prefix_above_the_stores_budget_is_told(plan, monkeypatch):
    monkeypatch.setattr(estimate, "store_budget", lambda: 1000)
    assert "larger than its budget of 1000 B" in plan("--resolution", 64)[1]
    monkeypatch.setattr(estimate, "store_budget", lambda: GIB)
    assert "budget" not in plan("--resolution", 64)[1]


def test_what_a_run_refuses_its_plan_refuses(plan, model, tmp_path):
    """A VAE that cannot encode, where a picture has to be."""
    weights = load_file(next((model / "vae").glob("*.safetensors")))
    half = {name: value for name, value in weights.items() if name.startswith(("decoder.", "post_quant"))}
    save_file(half, tmp_path / "vae.safetensors")
    names = {"--dit": "transformer", "--encoder": "text_encoder", "--tokenizer": "processor"}
    files = [word for flag, name in names.items() for word in (flag, model / name)]
    files = [str(word) for word in (*files, "--vae", tmp_path / "vae.safetensors")]
    assert plan("--resolution", 64, files=files)[0] == 0
    code, out, err = plan("--resolution", 64, "--image", save(tmp_path / "a.png", (64, 64)), files=files)
    assert (code, out) == (2, "") and "has no encoder" in err
