"""Schedules of LoRAs that were distilled to a few steps: a run with such a LoRA takes its schedule by itself.

Source of the sigmas: the releases of these LoRAs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..config.networks import ScheduleConfig
from ..errors import UserError
from .schedule import DYNAMIC, Schedule, custom_schedule, make_schedule

BY_NAME = "its name alone (a hint)"  # the evidence that may be wrong


@dataclass(frozen=True)
class FewSteps:
    """The schedule of a distilled LoRA: falling sigmas without the last 0, and the exponential shift that they get
    (`dynamic` is the released one of the picture's size). Without sigmas it is Turbo's."""

    title: str
    sigmas: tuple[float, ...] = ()
    shift: float | str | None = None
    cfg: float = 1.0

    @property
    def kind(self) -> str:
        """The name of the schedule in reports: turbo, pruna, ..."""
        return self.title.lower()

    def steps(self, config: ScheduleConfig = ScheduleConfig()) -> int:
        return len(self.sigmas or config.turbo_sigmas)

    def schedule(self, tokens: int, config: ScheduleConfig = ScheduleConfig(), denoise: float = 1.0) -> Schedule:
        """The schedule for a target of `tokens` latent tokens. A `denoise` below 1 keeps the last round(steps denoise)
        steps, as Turbo's."""
        if not self.sigmas:
            return make_schedule("turbo", tokens, denoise=denoise, config=config)
        if not 0 < denoise <= 1:
            raise UserError(f"denoise is {denoise:g}, expected above 0 and at most 1")
        whole = custom_schedule([*self.sigmas, 0.0], tokens, self.shift, config)
        kept = max(round(self.steps() * denoise), 1)
        return replace(whole, sigmas=whole.sigmas[-(kept + 1) :], kind=self.kind)


TURBO = FewSteps("Turbo")
PRUNA_8 = FewSteps("Pruna", (1.0, 0.9333, 0.8571, 0.7692, 0.6667, 0.5455, 0.4, 0.2222))
PRUNA_5 = FewSteps("Pruna", (1.0, 0.94, 0.8571, 0.6667, 0.4))
VIGGLE = FewSteps("Viggle", (1.0, 0.9375, 0.875, 0.75, 0.5, 0.25), DYNAMIC)
LIGHTNING = FewSteps("Lightning", (1.0, 0.75, 0.5, 0.25), DYNAMIC)


class Distilled(NamedTuple):
    """A LoRA that was distilled to a few steps: its file's name, its schedule, and what tells so."""

    lora: str
    few: FewSteps
    told: str


def agreed(loras: Sequence[Distilled]) -> Distilled | None:
    """The one whose schedule a run with `loras` takes; None without any. Raises `UserError` where two disagree."""
    for other in loras[1:]:
        first = loras[0]
        if replace(other.few, title="") != replace(first.few, title=""):
            raise UserError(
                f"LoRA {first.lora} is for {first.few.title}'s {first.few.steps()} steps and LoRA {other.lora} for "
                f"{other.few.title}'s {other.few.steps()}, which cannot both be run; leave one out, or give its "
                "strength as 0"
            )
    return loras[0] if loras else None


def distilled_schedule(
    one: Distilled, tokens: int, config: ScheduleConfig, denoise: float = 1.0, asked: int | None = None
) -> Schedule:
    """The schedule of a distilled LoRA for a target of `tokens` latent tokens. It warns where the LoRA is known by its
    name alone, and where another number of steps was `asked` for."""
    schedule, steps, lines = one.few.schedule(tokens, config, denoise), one.few.steps(config), []
    if one.told == BY_NAME:
        what = f"{one.few.title}'s {steps} steps, by {one.told}"
        lines.append(f"LoRA {one.lora} gives {what}; schedule base overrules it")
    if asked not in (None, steps):
        lines.append(f"LoRA {one.lora} has {steps} fixed steps: {schedule.steps} run, not {asked}")
    return replace(schedule, warnings=(*schedule.warnings, *lines))


def distilled_warnings(kind: str, steps: int, cfg: float, loras: Sequence[Distilled] = ()) -> list[str]:
    """Warnings where a run of a schedule of `kind` does not suit distilled steps.

    `cfg` is the largest CFG above 1, else 1; `loras` are the active distilled LoRAs.
    """
    lines = []
    for lora, few, told in loras:
        if kind in ("base", "turbo") and kind != few.kind:
            fitting = "schedule turbo" if few == TURBO else "schedule auto"
            lines.append(
                f"LoRA {lora} is for {few.title}'s steps, by {told}: {fitting} at CFG {few.cfg:g} fits it, but {steps} "
                f"steps of the {kind} schedule run"
            )
    if kind == "turbo" and cfg != 1:
        lines.append(
            f"CFG {cfg:g} does not fit schedule turbo, whose steps have guidance trained into them: CFG 1 does"
        )
    elif (one := next((each for each in loras if each.few.kind == kind), None)) and cfg != one.few.cfg:
        lines.append(f"CFG {cfg:g} does not fit the steps of LoRA {one.lora}: CFG {one.few.cfg:g} does")
    return lines
