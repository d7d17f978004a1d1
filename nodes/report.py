"""The sampler's report: what ran, what a rerun has to pin, and the same in a few lines for the node."""

from ..qwen21.manifest import library_versions
from ..qwen21.mini import size_warning
from ..qwen21.prompt import placeholder_warnings
from ..qwen21.sequence import settle_slots
from .bridge.lora import attached
from .bridge.model import is_reshaped
from .bridge.settings import settings_warnings
from .common import LATENTS, PADS, REPORT, SLOTS


def build_report(model, positive, negative, schedule, settings, unguided=None):
    """The report as a dictionary. `negative` is None where nothing was guided; `settings` are the sampler's own,
    `unguided` says why no step was guided, where that is worth a warning."""
    return {
        "model": _model(model),
        "schedule": {"kind": schedule.kind, "sigmas": [round(s, 7) for s in schedule.sigmas.tolist()]},
        **settings,
        "positive": positive[0][1].get(REPORT),
        "negative": None if negative is None else negative[0][1].get(REPORT),
        "warnings": _warnings(model, settings["size"], schedule, positive[0][1], unguided),
        "versions": library_versions(),
    }


def _model(model):
    part = getattr(model.model, "part", None)
    if part is None:
        return {"class": type(model.model).__name__}
    return {
        "file": part.checkpoint.path.name,
        "fingerprint": part.checkpoint.fingerprint,
        "weights": model.model.stored_as,
        "dtype": str(model.model.compute_dtype).removeprefix("torch."),
        "patched_weights": len(model.patches),
        "loras": attached(model),
    }


def _warnings(model, size, schedule, extra, unguided):
    found = list(schedule.warnings)
    part = getattr(model.model, "part", None)
    if part and (warning := size_warning(part.checkpoint.path, tuple(size))):
        found.append(warning)
    if PADS in extra:
        found.append("references were seen by the encoder alone: wire the VAE into Qwen21EncodePrompt")
    latents, slots = len(extra.get(LATENTS) or []), len(extra.get(SLOTS) or [])
    if warning := settle_slots([0] * slots, latents, 0)[1]:
        found.append(warning)
    if unguided:
        found.append(unguided)
    found += settings_warnings(model.model_options.get("transformer_options", {}))
    if schedule.kind != "custom" and is_reshaped(model):
        found.append("a node gave the MODEL another shift, which the released schedule does not use; wire its sigmas")
    asked = extra.get(REPORT) or {}
    found += placeholder_warnings([asked.get("prompt", "")], len(asked.get("references", [])))
    return found


def summary(report):
    """A few lines for the node."""
    from ..qwen21.prefix import Reuse

    references = (report["positive"] or {}).get("references", [])
    width, height = report["size"]
    lines = [
        f"{report['schedule']['kind']}, {len(report['schedule']['sigmas']) - 1} steps, {report['sampler']}",
        f"{width}x{height}, seed {report['seed']}, {report['noise']['mode']} noise",
    ]
    for i, r in enumerate(references, 1):
        original, resized = ("x".join(map(str, r[key])) for key in ("original", "resized"))
        lines.append(f"reference {i}: {original} as {resized}, {r['tokens']} tokens")
    for side in ("positive", "negative"):
        for facts in (report.get("prefix") or {}).get(side, []):
            lines.append(f"{side} prefix: {Reuse(**facts)}")
    return "\n".join([*lines, *[f"! {warning}" for warning in report["warnings"]]])
