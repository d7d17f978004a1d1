"""The memory plan as a report (tables, bars of characters, the choices in words) and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from PIL import Image, ImageDraw, ImageFont

from ..checkpoint.quant_formats import name_of
from .choose import size
from .plan import MemoryPlan, Stage

BAR = 56  # characters
MARKS = "W", "K", "a"
LEGEND = "weights", "K/V", "activations"
BACKGROUND, INK, LINE = (255, 255, 255), (40, 40, 40), (200, 30, 30)
COLOURS = (70, 110, 180), (235, 160, 50), (110, 180, 110)
WIDTH, LEFT, RIGHT, TOP, ROW, THICK = 960, 90, 130, 96, 52, 30  # pixels of the picture


def plan_report(plan: MemoryPlan) -> str:
    """The whole report of `plan` as text."""
    blocks = [_head(plan), _prefix_table(plan), _stage_table(plan), _bars(plan), _words(plan)]
    return "\n\n".join("\n".join(lines) for lines in blocks)


def _head(plan: MemoryPlan) -> list[str]:
    job = plan.job
    references = len(job.patches)
    title = [
        f"{job.size[0]}x{job.size[1]} pixels",
        f"batch {job.batch}",
        f"{references} reference{'' if references == 1 else 's'}",
        "guided" if len(job.prefixes) > 1 else "not guided",
        f"computed in {name_of(plan.dtype)}",
    ]
    where = f"{size(plan.free)} free on the GPU, {size(plan.ram)} of RAM" if plan.gpu else f"{size(plan.free)} of RAM"
    verdict = [] if plan.choice.fits else ["This run does not fit: the choices below say what takes too much"]
    return [f"Memory plan: {', '.join(title)}", f"Available: {where}", *verdict]


def _prefix_table(plan: MemoryPlan) -> list[str]:
    codecs = list(plan.needs.prefix)
    rows = [["K/V of the prefix", "tokens", *codecs]]
    rows += [[kept.name, str(kept.tokens), *(size(kept.nbytes[name]) for name in codecs)] for kept in plan.kv_blocks]
    total = sum(kept.tokens for kept in plan.kv_blocks)
    return _table([*rows, ["all", str(total), *(size(plan.needs.prefix[name]) for name in codecs)]])


def _stage_table(plan: MemoryPlan) -> list[str]:
    rows = [["Stage", "weights", "K/V", "activations", "all", "of free"]]
    for stage in plan.stages:
        parts = [size(part) if part else "-" for part in _parts(stage)]
        rows.append([stage.name, *parts, size(stage.total), f"{100 * stage.total / max(1, plan.free):.0f}%"])
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose first column is aligned left, all others right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append("  ".join(cells))
    return lines


def _parts(stage: Stage) -> tuple[int, int, int]:
    return stage.weights, stage.prefix, stage.activations


def _scale(plan: MemoryPlan) -> int:
    """Bytes that the full width of a bar stands for."""
    return max(plan.free, *(stage.total for stage in plan.stages), 1)


def _bars(plan: MemoryPlan) -> list[str]:
    whole = _scale(plan)
    lines = []
    for stage in plan.stages:
        ends = [0, *(round(BAR * end / whole) for end in accumulate(_parts(stage)))]
        drawn = "".join(mark * (b - a) for mark, a, b in zip(MARKS, ends, ends[1:], strict=False))
        cells = list(drawn.ljust(BAR, ".") + " ")
        cells[round(BAR * plan.free / whole)] = "|"
        lines.append(f"{stage.name.ljust(8)} {''.join(cells).rstrip()}")
    legend = ", ".join(f"{mark} {name}" for mark, name in zip(MARKS, LEGEND, strict=True))
    return [*lines, f"{' ' * 9}{legend}, | {size(plan.free)} free"]


def _words(plan: MemoryPlan) -> list[str]:
    choice = plan.choice
    lines = list(choice.reasons)
    lines.append(f"prefill: KV blocks of up to {choice.chunk} tokens at once, larger ones in equal chunks")
    if plan.laid_out:
        more = size(plan.laid_out)
        lines.append(f"steps: the prefix is laid out once for all of them, with room for the target's K/V, {more} more")
    kept, budget = plan.needs.prefix[choice.codec], plan.budget
    if not plan.job.shared:
        lines.append("store: the prefix cache is off, so no prefix is kept: every step prefills again")
    elif kept > budget:
        lines.append(f"store: the prefix is larger than its budget of {size(budget)}, so the next run cannot reuse all")
    return ["Choices", *(f"- {line}" for line in lines)]


def draw(plan: MemoryPlan) -> Image.Image:
    """An RGB picture of the plan's stages: bars of weights, K/V and activations, and a line at the free memory."""
    stages, whole = plan.stages, _scale(plan)
    height = TOP + ROW * len(stages) + 62
    image = Image.new("RGB", (WIDTH, height), BACKGROUND)
    pen, font, small = ImageDraw.Draw(image), ImageFont.load_default(18), ImageFont.load_default(14)

    def at(nbytes: int) -> int:
        return LEFT + round((WIDTH - LEFT - RIGHT) * nbytes / whole)

    pen.text((16, 14), _head(plan)[0], fill=INK, font=font)
    x = LEFT
    for name, colour in zip(LEGEND, COLOURS, strict=True):
        pen.rectangle((x, 52, x + 14, 66), fill=colour)
        pen.text((x + 20, 50), name, fill=INK, font=small)
        x += 130
    for i, stage in enumerate(stages):
        y = TOP + ROW * i
        pen.text((16, y + 6), stage.name, fill=INK, font=small)
        ends = [0, *accumulate(_parts(stage))]
        for colour, start, stop in zip(COLOURS, ends, ends[1:], strict=False):
            if stop > start:
                pen.rectangle((at(start), y, max(at(start), at(stop) - 1), y + THICK), fill=colour)
        pen.text((WIDTH - RIGHT + 12, y + 6), size(stage.total), fill=INK, font=small)
    bottom = TOP + ROW * len(stages) - (ROW - THICK) + 8
    pen.line((at(plan.free), TOP - 10, at(plan.free), bottom), fill=LINE, width=2)
    label = f"{size(plan.free)} free"
    left = min(at(plan.free) - pen.textlength(label, font=small) / 2, WIDTH - pen.textlength(label, font=small) - 8)
    pen.text((max(8, left), bottom + 6), label, fill=LINE, font=small)
    pen.text((16, height - 34), plan.choice.reasons[0], fill=INK, font=small)
    return image
