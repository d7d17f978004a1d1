"""The node that sets how a MODEL stores its prefixes, for users of ComfyUI's own samplers."""

from comfy_api.latest import io

from ..qwen21.choices import KV_STORAGES
from ..qwen21.errors import UserError
from .common import CATEGORY, SWITCH, check_choices
from .titles import LOAD_DIT, PREFIX_CACHE, SAMPLER

PLACES = ["auto", "gpu", "cpu"]


class Qwen21PrefixCache(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="Qwen21PrefixCache",
            display_name=PREFIX_CACHE,
            category=CATEGORY,
            description=(
                f"How the prefix of text and references is kept, for people who use KSampler. '{SAMPLER}' has its "
                "own switch."
            ),
            inputs=[
                io.Model.Input("base_model", display_name="model", tooltip=f"From '{LOAD_DIT}'."),
                io.Combo.Input(
                    "prefix_cache",
                    options=SWITCH,
                    default="on",
                    tooltip="off computes text and references again at every step: slow, for checking.",
                ),
                io.Combo.Input(
                    "device",
                    options=PLACES,
                    default="auto",
                    tooltip="Where the prefix is kept: auto is the GPU while it fits there beside a step, else RAM.",
                ),
                io.Combo.Input(
                    "storage",
                    options=list(KV_STORAGES),
                    default="auto",
                    optional=True,
                    tooltip=(
                        "How the prefix is kept: native is exact, int8 takes half and loses least, fp8 takes half too, "
                        "fp8_v keeps the keys exact and takes three quarters; auto is native while that fits, else "
                        "int8."
                    ),
                ),
                io.Float.Input(
                    "budget",
                    default=0.0,
                    min=0.0,
                    max=4096.0,
                    step=0.5,
                    optional=True,
                    tooltip="GiB that the prefixes of this model may keep between runs; 0 is a quarter of the RAM.",
                ),
            ],
            outputs=[io.Model.Output("model", display_name="model", tooltip="The same model with these settings.")],
        )

    @classmethod
    def execute(cls, base_model, prefix_cache, device, storage="auto", budget=0.0):
        from .bridge.model import is_ours, with_prefix_options

        check_choices(prefix_cache=(prefix_cache, SWITCH), device=(device, PLACES), storage=(storage, KV_STORAGES))
        if not is_ours(base_model):
            raise UserError(
                f"the MODEL is a {type(base_model.model).__name__}; only MODELs of '{LOAD_DIT}' keep a prefix"
            )
        settings = {"device": device, "storage": storage, "budget": budget}
        return io.NodeOutput(with_prefix_options(base_model, cache=prefix_cache == "on", **settings))
