"""The sampler's report: what ran, what a rerun has to pin, and a summary in a few lines for the node."""

from ..qwen21.checkpoint.model_index import trained_sizes
from ..qwen21.manifest import library_versions
from ..qwen21.request import size_warning
from ..qwen21.sampling.few_steps import distilled_warnings
from .bridge.lora import attached, distilled_loras
from .bridge.model import is_reshaped
from .bridge.settings import settings_warnings
from .common import REPORT
from .notices import conditioning_warnings


def build_report(model, positive, negative, schedule, settings, warnings):
    """Build the report as a dictionary. `negative` is None without guidance; `settings` are the sampler's own."""
    return {
        "warnings": warnings,
        "model": _model(model),
        "schedule": {"kind": schedule.kind, "sigmas": [round(s, 7) for s in schedule.sigmas.tolist()]},
        **settings,
        "positive": positive[0][1].get(REPORT),
        "negative": None if negative is None else negative[0][1].get(REPORT),
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


def warnings_of(model, positive, negative, schedule, size, cfg=1.0, unguided=None):
    """Warnings about a run that are known before its first step.

    `positive` and `negative` are CONDITIONINGs, the latter None where no step is guided at `cfg`. `unguided` says why
    no step is guided, where that deserves a warning.
    """
    found = conditioning_warnings(*([extra for _, extra in side or []] for side in (positive, negative)))
    found += schedule.warnings
    found += distilled_warnings(schedule.kind, schedule.steps, cfg, distilled_loras(model))
    part = getattr(model.model, "part", None)
    resized = [tuple(each["resized"]) for each in (positive[0][1].get(REPORT) or {}).get("references", [])]
    if part and (warning := size_warning(trained_sizes(part), tuple(size), resized)):
        found.append(warning)
    if unguided:
        found.append(unguided)
    found += settings_warnings(model.model_options.get("transformer_options", {}))
    if schedule.kind != "custom" and is_reshaped(model):
        found.append("a node gave the MODEL another shift, which the released schedule does not use; wire its sigmas")
    return found


def summary(report):
    """Summarise the report in a few lines for the node, warnings first."""
    from ..qwen21.prefix import Reuse

    references = (report["positive"] or {}).get("references", [])
    width, height = report["size"]
    lines = [f"! {warning}" for warning in report["warnings"]]
    lines += [
        f"{report['schedule']['kind']}, {len(report['schedule']['sigmas']) - 1} steps, {report['sampler']}",
        f"{width}x{height}, seed {report['seed']}, {report['noise']['mode']} noise",
    ]
    for i, r in enumerate(references, 1):
        original, resized = ("x".join(map(str, r[key])) for key in ("original", "resized"))
        lines.append(f"reference {i}: {original} as {resized}, {r['tokens']} tokens")
    for side in ("positive", "negative"):
        for facts in (report.get("prefix") or {}).get(side, []):
            lines.append(f"{side} prefix: {Reuse(**facts)}")
    return "\n".join(lines)
