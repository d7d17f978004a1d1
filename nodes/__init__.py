"""ComfyUI nodes for Qwen-Image 2.1: thin adapters of the library, one file per stage."""

from comfy_api.latest import ComfyExtension, io

from .encode import Qwen21EncodePrompt
from .latent import Qwen21EmptyLatent, Qwen21Schedule
from .load import Qwen21LoadDiT, Qwen21LoadEncoder, Qwen21LoadVAE
from .lora import Qwen21LoadLoRA
from .plan import Qwen21MemoryPlan
from .prefix_cache import Qwen21PrefixCache
from .references import Qwen21AddReference, Qwen21SpliceReferences
from .sample import Qwen21Sampler

NODES: list[type[io.ComfyNode]] = [
    Qwen21LoadDiT,
    Qwen21LoadEncoder,
    Qwen21LoadVAE,
    Qwen21LoadLoRA,
    Qwen21AddReference,
    Qwen21EncodePrompt,
    Qwen21SpliceReferences,
    Qwen21EmptyLatent,
    Qwen21Schedule,
    Qwen21Sampler,
    Qwen21PrefixCache,
    Qwen21MemoryPlan,
]


class Qwen21Extension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES
