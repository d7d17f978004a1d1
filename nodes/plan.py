"""The node that shows a run's memory plan before anything is loaded."""

from comfy_api.latest import io

from ..qwen21.choices import KV_STORAGES
from ..qwen21.config.networks import MAX_REFERENCES
from .bridge import host
from .common import CATEGORY, batch_input, check_choices, resolution_input, size_inputs
from .notices import shown
from .titles import ADD_REFERENCE, LOAD_DIT, LOAD_ENCODER, LOAD_VAE, MEMORY_PLAN


class Qwen21MemoryPlan(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="Qwen21MemoryPlan",
            display_name=MEMORY_PLAN,
            category=CATEGORY,
            description="What a run will need, and whether it fits, from the files' headers alone: loads no weights.",
            inputs=[
                io.Combo.Input(
                    "transformer", options=host.choices("dit"), tooltip=f"The file that '{LOAD_DIT}' would load."
                ),
                io.Combo.Input(
                    "encoder", options=host.choices("encoder"), tooltip=f"The file that '{LOAD_ENCODER}' would load."
                ),
                io.Combo.Input("vae", options=host.choices("vae"), tooltip=f"The file that '{LOAD_VAE}' would load."),
                *size_inputs("Of the output, in pixels."),
                io.Int.Input(
                    "references", default=0, min=0, max=MAX_REFERENCES, tooltip="How many pictures the edit looks at."
                ),
                resolution_input(f"Each reference has about resolution x resolution pixels, as in '{ADD_REFERENCE}'."),
                batch_input(),
                io.Boolean.Input(
                    "guided", default=False, tooltip="With a negative prompt and a cfg other than 1: one more prefix."
                ),
                io.Combo.Input(
                    "kv_storage",
                    options=list(KV_STORAGES),
                    default="auto",
                    tooltip="How the prefix is kept. auto is native where that fits, else the next best that does.",
                ),
                io.Float.Input(
                    "free_gib",
                    default=0.0,
                    min=0.0,
                    max=4096.0,
                    step=0.5,
                    tooltip="GiB of free GPU memory to plan for; 0 asks this machine.",
                ),
                io.Combo.Input(
                    "dtype",
                    optional=True,
                    options=host.DTYPE_NAMES,
                    default="default",
                    tooltip="The dtype that both loaders would be set to; default is each file's own.",
                ),
            ],
            outputs=[
                io.String.Output("plan", display_name="plan", tooltip="Tables, bars and choices, as text."),
                io.Image.Output("picture", display_name="picture", tooltip="A bar for each stage of the run."),
            ],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, transformer, encoder, vae):
        chosen = {"dit": transformer, "encoder": encoder, "vae": vae}
        strange = [choice for slot, choice in chosen.items() if not host.listed(slot, choice)]
        return f"{strange[0]!r} is not among ComfyUI's model files" if strange else True

    @classmethod
    def fingerprint_inputs(cls, **inputs):
        return float("nan")  # free memory changes, so the result must never come from the cache

    @classmethod
    def execute(
        cls, transformer, encoder, vae, width, height, references=0, resolution=1024, batch=1, guided=False,
        kv_storage="auto", free_gib=0.0, dtype="default",
    ):  # fmt: skip
        from ..qwen21.checkpoint.fp8_policy import Fp8
        from ..qwen21.checkpoint.load import find_dit, find_encoder, find_vae
        from ..qwen21.inputs.images import to_pixels
        from ..qwen21.inputs.references import canvas_size, reference_size
        from ..qwen21.memory.estimate import available_ram
        from ..qwen21.memory.plan import MemoryJob, plan_memory
        from ..qwen21.memory.show import draw, plan_report
        from ..qwen21.system_memory import GIB

        check_choices(kv_storage=(kv_storage, KV_STORAGES), dtype=(dtype, host.DTYPE_NAMES))
        parts = {
            "dit": find_dit(host.find("dit", transformer)),
            "encoder": find_encoder(host.find("encoder", encoder)),
            "vae": find_vae(host.find("vae", vae)),
        }
        canvas = canvas_size([], (width, height))
        pictures = [reference_size(resolution, resolution, resolution)] * references
        job = MemoryJob.typical(pictures, (canvas.width, canvas.height), batch, branches=2 if guided else 1)
        free = int(free_gib * GIB) or host.free_on_gpu()
        fp8 = Fp8() if dtype == host.FP8 else None
        plan = plan_memory(
            parts,
            job,
            host.DTYPES.get(dtype),
            free=free,
            ram=available_ram(),
            codec=kv_storage,
            fp8=fp8,
            lays_out=False,
            computed_in={} if free_gib else host.computed_in(parts, dtype),
        )
        text = plan_report(plan)
        return io.NodeOutput(text, to_pixels(draw(plan))[None], ui=shown(text))
