"""Loader nodes: from a file or a whole-model folder to a model."""

from comfy_api.latest import io

from .bridge import host
from .common import CATEGORY, Encoder, check_choices
from .titles import ENCODE_PROMPT, LOAD_DIT, LOAD_ENCODER, LOAD_VAE, SAMPLER

DTYPE_HELP = (
    "Precision the weights are kept in; default is the file's own. fp8 keeps the blocks' linear layers in half the"
    " memory. Layers that the file holds quantized stay so."
)

FILE_HELP = "A .safetensors file, or a whole model in the diffusers layout (names that end in a slash)."
GGUF_HELP = "A .safetensors or .gguf file, or a whole model in the diffusers layout (names that end in a slash)."

ENCODER_DEVICES = ["default", "cpu"]
VAE_DTYPES = ["default", "bf16", "fp16", "fp32"]
ALPHAS = ["auto", "keep", "over white"]


def keep_input(example):
    return io.String.Input(
        "keep",
        optional=True,
        default="",
        tooltip=f"For dtype fp8: layers that keep their precision, by pieces of their names, such as {example}.",
    )


class Qwen21LoadDiT(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="Qwen21LoadDiT",
            display_name=LOAD_DIT,
            category=CATEGORY,
            description="Loads the diffusion transformer, base or Turbo, as a MODEL that any sampler takes.",
            inputs=[
                io.Combo.Input(
                    "file",
                    options=host.choices("dit"),
                    tooltip=f"{GGUF_HELP} From models/diffusion_models, models/unet or models/diffusers.",
                ),
                io.Combo.Input(
                    "dtype",
                    options=host.DTYPE_NAMES,
                    default="default",
                    tooltip=DTYPE_HELP,
                ),
                keep_input("img_mlp, blocks.3.attn"),
            ],
            outputs=[
                io.Model.Output(
                    "model",
                    display_name="model",
                    tooltip=f"The transformer, for '{SAMPLER}', KSampler and LoRA loaders.",
                )
            ],
        )

    @classmethod
    def validate_inputs(cls, file):
        return True if host.listed("dit", file) else f"{file!r} is not in models/diffusion_models or models/diffusers"

    @classmethod
    def execute(cls, file, dtype, keep=""):
        from .bridge.model import load_model

        check_choices(dtype=(dtype, host.DTYPE_NAMES))
        return io.NodeOutput(load_model(str(host.find("dit", file)), dtype, keep))


class Qwen21LoadEncoder(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="Qwen21LoadEncoder",
            display_name=LOAD_ENCODER,
            category=CATEGORY,
            description="Loads Qwen3-VL-8B, which reads prompts and references. The tokenizer is found by itself.",
            inputs=[
                io.Combo.Input(
                    "file",
                    options=host.choices("encoder"),
                    tooltip=f"{GGUF_HELP} From models/text_encoders or models/diffusers.",
                ),
                io.Combo.Input(
                    "dtype",
                    options=host.DTYPE_NAMES,
                    default="default",
                    tooltip=DTYPE_HELP,
                ),
                io.Combo.Input(
                    "device",
                    options=ENCODER_DEVICES,
                    default="default",
                    tooltip="cpu reads prompts slowly and leaves the GPU to the transformer.",
                ),
                keep_input("mlp, layers.0"),
                io.Combo.Input(
                    "mmproj",
                    options=host.mmproj_choices(),
                    default=host.AUTO,
                    optional=True,
                    tooltip="The vision tower of an encoder in GGUF, which references need; auto is the one beside it.",
                ),
            ],
            outputs=[Encoder.Output("encoder", display_name="encoder", tooltip=f"The encoder, for '{ENCODE_PROMPT}'.")],
        )

    @classmethod
    def validate_inputs(cls, file):
        return True if host.listed("encoder", file) else f"{file!r} is not in models/text_encoders or models/diffusers"

    @classmethod
    def execute(cls, file, dtype, device, keep="", mmproj=host.AUTO):
        from .bridge.encoder import load_encoder

        check_choices(dtype=(dtype, host.DTYPE_NAMES), device=(device, ENCODER_DEVICES))
        tower = host.find_mmproj(mmproj)
        path = str(host.find("encoder", file))
        return io.NodeOutput(load_encoder(path, dtype, device, keep, None if tower is None else str(tower)))


class Qwen21LoadVAE(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="Qwen21LoadVAE",
            display_name=LOAD_VAE,
            category=CATEGORY,
            description="Loads the RGBA VAE. Tiles are exact, so large pictures decode without seams.",
            inputs=[
                io.Combo.Input(
                    "file", options=host.choices("vae"), tooltip=f"{FILE_HELP} From models/vae or models/diffusers."
                ),
                io.Combo.Input(
                    "dtype",
                    options=VAE_DTYPES,
                    default="default",
                    tooltip="Precision; in fp16 this VAE may overflow, and then computes once more in fp32.",
                ),
                io.Combo.Input(
                    "alpha",
                    options=ALPHAS,
                    default="auto",
                    tooltip=(
                        "auto gives RGB where the picture is opaque everywhere, else RGBA; keep is always RGBA; over"
                        " white flattens."
                    ),
                ),
            ],
            outputs=[
                io.Vae.Output(
                    "vae", display_name="vae", tooltip=f"The VAE, for VAE Decode, VAE Encode and '{ENCODE_PROMPT}'."
                )
            ],
        )

    @classmethod
    def validate_inputs(cls, file):
        return True if host.listed("vae", file) else f"{file!r} is not in models/vae or models/diffusers"

    @classmethod
    def execute(cls, file, dtype, alpha):
        from .bridge.vae import load_vae

        check_choices(dtype=(dtype, VAE_DTYPES), alpha=(alpha, ALPHAS))
        return io.NodeOutput(load_vae(str(host.find("vae", file)), dtype, alpha))
