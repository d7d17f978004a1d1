"""From a prompt and references to RGBA pictures: the whole flow, one call per stage.

    references -> text states and slots -> reference latents -> prefix -> denoised latent -> pictures

`generate` reads top to bottom. Everything that can be refused is refused before a weight is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from . import images, tiling
from .checkpoint import load
from .checkpoint.lora import Lora
from .checkpoint.lora_apply import apply_loras
from .dit import DiT
from .errors import UserError
from .manifest import build_manifest
from .prefix import Prefix, placement, prefix_bytes
from .prompt import layout_tokens
from .request import Plan, Request, make_plan
from .sampler import Start, draw_noise, sample
from .sequence import PrefixLayout

if TYPE_CHECKING:
    from .encoder import TextStates


@dataclass(frozen=True)
class PrefixFacts:
    """What a report says of a prefix, without keeping its tensors alive."""

    layout: PrefixLayout
    nbytes: int


@dataclass(frozen=True)
class Result:
    """Pictures, their latents [B, 64, h, w] (normalised, fp32), and the manifest of the run."""

    images: list[Image.Image]
    latents: Tensor
    manifest: dict[str, Any]


@dataclass
class Watch:
    """What a caller wants to hear of a run, and its way to stop one."""

    check_cancel: Callable[[], None] = lambda: None
    on_step: Callable[[int, int, Tensor], None] = lambda i, n, latent: None
    on_stage: Callable[[str], None] = lambda stage: None


@dataclass
class Pipeline:
    """The three networks of a model, each loaded when its stage comes.

    With `keep_loaded` they stay for the next run; otherwise encoder and transformer are dropped after their stage, so
    that the largest network alone must fit.
    """

    files: load.ModelFiles
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    kv_device: str = "auto"
    keep_loaded: bool = False
    loras: Sequence[tuple[Lora, float]] = ()  # with their strengths
    _loaded: dict[str, Any] = field(default_factory=dict, repr=False)

    @torch.inference_mode()
    def generate(self, request: Request, watch: Watch | None = None) -> Result:
        """Paint. Raises `UserError` for what cannot be done, before loading wherever that is possible."""
        watch = watch or Watch()
        plan = make_plan(request, self.files)
        watch.on_stage("checking the files")
        self.files.check(encodes=bool(plan.references) or request.init_image is not None)
        texts, negative = self._encode_prompts(plan, watch)
        self._release("encoder")
        latents = self._encode_references(plan, watch)
        start = self._encode_start(plan, watch)
        latent, prefixes = self._sample(plan, texts, negative, latents, start, watch)
        self._release("dit")
        pictures = self._decode(latent, watch)
        self._release("vae")
        return Result(pictures, latent, build_manifest(self, plan, texts, prefixes))

    def _encode_prompts(self, plan: Plan, watch: Watch) -> tuple[list[TextStates], TextStates | None]:
        """States of each different prompt, and of the negative where a step is guided."""
        from .tokenizer import load_tokenizer

        watch.on_stage("reading the encoder")
        tokenizer = load_tokenizer(self.files.tokenizer)
        grids = [(1, reference.height, reference.width) for reference in plan.references]
        for prompt in (*plan.request.prompt_list, *([plan.request.negative] if plan.guided else [])):
            layout_tokens(prompt, tokenizer, grids)  # refuses what cannot be encoded before weights are read
        encoder = self._network("encoder")
        watch.on_stage("encoding the prompt")
        vision: dict[str, Any] = {}  # features of each reference, shared by all prompts of the run

        def encode(prompt: str) -> TextStates:
            text = encoder.encode(
                tokenizer,
                prompt,
                plan.references,
                device=self.device,
                features=vision,
                check_cancel=watch.check_cancel,
            )
            if not bool(torch.isfinite(text.states).all()):
                raise UserError(
                    f"{self.files.encoder.checkpoint.path.name}: the text states are not finite; the checkpoint holds "
                    "NaN or overflows in this dtype, try --dtype bf16 or fp32"
                )
            return text

        states = {prompt: encode(prompt) for prompt in dict.fromkeys(plan.request.prompt_list)}
        negative = encode(plan.request.negative) if plan.guided else None
        return [states[prompt] for prompt in plan.request.prompt_list], negative

    def _encode_references(self, plan: Plan, watch: Watch) -> list[Tensor]:
        """Normalised latents [64, h, w] of the references."""
        if not plan.references:
            return []
        watch.on_stage("encoding the references")
        return [self._encode_picture(reference.image, watch)[0] for reference in plan.references]

    def _encode_start(self, plan: Plan, watch: Watch) -> Start | None:
        """The picture to start from, and the mask of what may change."""
        if plan.request.init_image is None:
            return None
        picture = images.fit(plan.request.init_image, plan.size)
        latent = self._encode_picture(picture, watch).float().to(self.device)
        mask = plan.request.mask
        return Start(latent, None if mask is None else images.latent_mask(mask, plan.grid).to(self.device))

    def _encode_picture(self, picture: Image.Image, watch: Watch) -> Tensor:
        """[1, 64, h, w], normalised, in the VAE's dtype."""
        vae = self._network("vae")
        pixels = images.to_vae_pixels(picture).to(self.device, self._vae_dtype)
        return vae.normalise(tiling.encode(vae, pixels, budget=self._free_bytes(), check_cancel=watch.check_cancel))

    def _sample(
        self,
        plan: Plan,
        texts: list[TextStates],
        negative: TextStates | None,
        references: list[Tensor],
        start: Start | None,
        watch: Watch,
    ) -> tuple[Tensor, list[PrefixFacts]]:
        """The denoised latent [B, 64, h, w] and facts of the positive prefixes it was denoised behind."""
        watch.on_stage("reading the transformer")
        dit: DiT = self._network("dit")
        branch = Branch(dit, texts, references, self, plan.request.prefix_cache, watch.check_cancel)
        unguided = None
        watch.on_stage("prefilling")
        facts = branch.facts()
        if negative is not None:
            unguided = Branch(
                dit, [negative] * len(texts), references, self, plan.request.prefix_cache, watch.check_cancel
            )
        noise = draw_noise((len(texts), self.files.dit.config.in_channels, *plan.grid), plan.noise_seed)
        watch.on_stage("denoising")
        latent = sample(
            branch.velocity,
            noise.to(self.device),
            plan.schedule.sigmas,
            negative=unguided and unguided.velocity,
            cfg=plan.cfg,
            start=start,
            check_cancel=watch.check_cancel,
            on_step=watch.on_step,
        )
        # Facts, not the prefixes: those would stay on the device while the picture is decoded.
        return latent, facts

    def _decode(self, latent: Tensor, watch: Watch) -> list[Image.Image]:
        """Latents [B, 64, h, w] to RGBA pictures, one after another."""
        watch.on_stage("decoding")
        vae = self._network("vae")
        pictures = []
        for row in latent.to(self._vae_dtype).split(1):
            watch.check_cancel()
            pixels = tiling.decode(
                vae, vae.denormalise(row), budget=self._free_bytes(), check_cancel=watch.check_cancel
            )
            pictures += images.from_vae_pixels(pixels)
        return pictures

    def _network(self, name: str) -> Any:
        if name not in self._loaded:
            dtype = self._vae_dtype if name == "vae" else self.dtype
            network = load.load(getattr(self.files, name), dtype, self.device)
            if name == "dit":
                apply_loras(network, self.loras)
            self._loaded[name] = network
        return self._loaded[name]

    def _release(self, name: str) -> None:
        if not self.keep_loaded:
            self._loaded.pop(name, None)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    @property
    def _vae_dtype(self) -> torch.dtype:
        """The VAE's values can exceed what fp16 holds, so fp16 runs decode in fp32."""
        return torch.float32 if self.dtype == torch.float16 else self.dtype

    def kv_storage_device(self, text_tokens: int, references: Sequence[Tensor]) -> torch.device:
        """Where the prefix of such a text and references is kept."""
        c = self.files.dit.config
        tokens = text_tokens + sum(r.shape[-2] * r.shape[-1] for r in references)
        needed = prefix_bytes(tokens, c.layers, c.heads, c.head_dim, self.dtype)
        return placement(self.kv_device, self.device, needed, self._free_bytes())

    def _free_bytes(self) -> int | None:
        """Free memory of the device, what PyTorch keeps for reuse included; None where nothing is known."""
        if self.device.type != "cuda":
            return None
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + kept


class Branch:
    """One side of the guidance: a prefix per different prompt, and the velocity of a batch behind them."""

    def __init__(
        self,
        dit: DiT,
        texts: Sequence[TextStates],
        references: Sequence[Tensor],
        pipeline: Pipeline,
        cached: bool,
        check_cancel: Callable[[], None],
    ) -> None:
        self.dit = dit
        self.texts = texts
        self.references = [r.to(pipeline.device, pipeline.dtype) for r in references]
        self.pipeline = pipeline
        self.cached = cached
        self.check_cancel = check_cancel
        self._prefixes: dict[int, Prefix] = {}

    def facts(self) -> list[PrefixFacts]:
        """Facts of each different prompt's prefix, computing those that are missing."""
        prefixes = {id(text): self._prefix(text) for text in self.texts}
        return [PrefixFacts(prefix.layout, prefix.nbytes) for prefix in prefixes.values()]

    def velocity(self, x: Tensor, sigma: float) -> Tensor:
        """v [B, C, h, w]. Rows of one prompt run as one batch, different prompts one after another."""
        if not self.cached:
            self._prefixes.clear()
        result = torch.empty_like(x)
        for text in {id(text): text for text in self.texts}.values():
            rows = [i for i, other in enumerate(self.texts) if other is text]
            result[rows] = self.dit.denoise(x[rows].to(self.pipeline.dtype), sigma, self._prefix(text)).float()
        return result

    def _prefix(self, text: TextStates) -> Prefix:
        if id(text) not in self._prefixes:
            states = text.states.to(self.pipeline.device, self.pipeline.dtype)
            self._prefixes[id(text)] = self.dit.prefill(
                states,
                self.references,
                text.image_slots,
                storage=self.pipeline.kv_storage_device(len(states), self.references),
                check_cancel=self.check_cancel,
            )
        return self._prefixes[id(text)]
