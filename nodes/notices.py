"""Warnings before a run starts: found in its conditioning, shown in the log and in the browser."""

import logging
import sys

import torch

from ..qwen21.errors import UserError
from .common import CHOSEN, ENCODER_ONLY, LATENTS, PADS, REPORT, SLOTS
from .titles import ENCODE_PROMPT, LOAD_VAE

log = logging.getLogger(__name__)
EVENT = "qwen21.warnings"  # the event that web/report.js and the command `run` listen for


def tell(warnings):
    """Show `warnings` now: in the server's log, and to the browser or client that queued the workflow."""
    for warning in warnings:
        log.warning("Qwen-Image 2.1: %s", warning)
    # Not imported here: where nodes run without a server there is none, and importing it would move core's own `utils`.
    server = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
    if warnings and getattr(server, "client_id", None) is not None:
        facts = {"prompt_id": server.last_prompt_id, "node": server.last_node_id, "warnings": list(warnings)}
        server.send_sync(EVENT, facts, server.client_id)


def tell_of(guider):
    """Show the warnings about core's samplers' conditioning. Our sampler shows its own earlier, for its report."""
    if getattr(guider, "tells_warnings", False):
        return
    conds = getattr(guider, "conds", {})
    negative = conds.get("negative", []) if getattr(guider, "cfg", None) != 1 else []
    tell(conditioning_warnings(conds.get("positive", []), negative))


def shown(text, warnings=()):
    """A node's output for web/report.js: the text to show, and the warnings for clients that connected later."""
    return {"text": (text,), "qwen21_warnings": tuple(warnings)}


def require_seen(positive):
    """Refuse references that only the encoder saw, unless the user chose that. `positive` holds the entries' dicts."""
    if any(_half_seen(extra) for extra in positive):
        raise UserError(
            f"the references were encoded without a VAE, so the picture would not look like them: wire '{LOAD_VAE}' "
            f"into vae of '{ENCODE_PROMPT}', or set seen_by there to {ENCODER_ONLY}"
        )


def conditioning_warnings(positive, negative=()):
    """Warnings about the dictionaries of a CONDITIONING's entries, and of the negative's where there is one."""
    found = [warning for extra in positive for warning in _entry_warnings(extra, "")]
    found += [warning for extra in negative for warning in _entry_warnings(extra, "negative ")]
    if positive and negative:
        found += _negative_warnings(positive[0], negative[0])
    return list(dict.fromkeys(found))


def _half_seen(extra):
    return bool(extra.get(PADS)) and not extra.get(CHOSEN)


def _entry_warnings(extra, side):
    """Warnings about one entry. `side` precedes the text for any entry but the positive's."""
    from ..qwen21.inputs.prompt import placeholder_warnings  # not above, because it would slow ComfyUI's start
    from ..qwen21.sequence import settle_slots

    found = []
    if _half_seen(extra):
        found.append(
            f"the {side}prompt's references were seen by the encoder alone: wire '{LOAD_VAE}' into vae of "
            f"'{ENCODE_PROMPT}'"
        )
    latents, slots = len(extra.get(LATENTS) or []), len(extra.get(SLOTS) or [])
    if latents > slots:
        found.append(
            f"{latents - slots} of {latents} {side}reference latents have no slot in the prompt and follow the text"
        )
    elif slots > latents > 0 and (warning := settle_slots([0] * slots, latents, 0)[1]):
        found.append(warning)
    asked = extra.get(REPORT) or {}
    strange = placeholder_warnings([asked.get("prompt", "")], len(asked.get("references", [])))
    return found + [warning.replace("the prompt", f"the {side}prompt", 1) for warning in strange]


def _negative_warnings(positive, negative):
    """Warn where the negative prompt has other references than the positive."""
    ours, theirs = (extra.get(LATENTS) or extra.get(PADS) or [] for extra in (positive, negative))
    remedy = f"wire the same references into both nodes '{ENCODE_PROMPT}'"
    if len(ours) != len(theirs):
        return [
            f"the negative prompt was encoded with {len(theirs)} references, the positive with {len(ours)}; {remedy}"
        ]
    if bool(positive.get(LATENTS)) == bool(negative.get(LATENTS)) and not all(map(_same, ours, theirs)):
        return [f"the negative prompt was encoded with other references than the positive; {remedy}"]
    return []


def _same(one, other):
    """Whether two references are the same picture: compares latents by values, and spans of the encoder by digest."""
    if isinstance(one, torch.Tensor):
        return one is other or (one.shape == other.shape and torch.equal(one.cpu(), other.cpu()))
    return one[-1] == other[-1]
