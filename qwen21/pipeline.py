"""From a prompt and references to RGBA pictures: the whole flow, one call per stage.

    references -> text states and slots -> reference latents -> prefix -> denoised latent -> pictures

`generate` reads top to bottom. Everything that can be refused is refused before a weight is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from . import graph, images, memory, tiling
from .attention import AttentionFunction
from .backends import Shape, choose
from .branch import Branch, PrefixFacts
from .checkpoint import load
from .checkpoint.lora import Lora
from .checkpoint.lora_apply import apply_loras
from .dit import DiT
from .encoded import EncodedPrompt, EncodedReference, KeptHeads, Remembered
from .errors import UserError
from .fused import fuse
from .kernels import EAGER, CompiledKernels, Kernels
from .manifest import build_manifest
from .prefix import ModelIdentity, Placement, Store, Unit, text_origin
from .prefix.placement import RAM, without_effect
from .prompt import layout_tokens
from .request import Plan, Request, make_plan
from .sampler import Start, draw_noise, sample
from .schedule import turbo_warnings

if TYPE_CHECKING:
    from .checkpoint.quant import Fp8
    from .prompt import Reference


@dataclass(frozen=True)
class Result:
    """Pictures, their latents [B, 64, h, w] (normalised, fp32), the manifest of the run, and what became of its
    prefixes, the positive ones first."""

    images: list[Image.Image]
    latents: Tensor
    manifest: dict[str, Any]
    prefixes: list[PrefixFacts]


@dataclass
class Watch:
    """What a caller wants to hear of a run, and its way to stop one."""

    check_cancel: Callable[[], None] = lambda: None
    on_step: Callable[[int, int, Tensor], None] = lambda i, n, latent: None
    on_stage: Callable[[str], None] = lambda stage: None
    on_warning: Callable[[str], None] = lambda warning: None  # of what was not as asked, mostly before the work starts


@dataclass
class Pipeline:
    """The three networks of a model, each loaded when its stage comes, and what runs leave for the next.

    With `keep_loaded` networks stay for the next run; otherwise each is dropped after its stage, so that the largest
    alone must fit. Text states, reference latents and, in the `store`, prefixes stay either way: a run pays only for
    what no earlier one has made.
    """

    files: load.ModelFiles
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    kv_device: str = "auto"
    codec: str = "auto"
    keep_loaded: bool = False
    loras: Sequence[tuple[Lora, float]] = ()  # with their strengths
    fp8: Fp8 | None = None  # block linears that are not quantized yet are kept in fp8
    kernels: Kernels = EAGER
    attention: str = "auto"  # see `backends.choose`
    cuda_graph: bool = False  # replay steps whose launches hold the GPU up; see `graph.py`
    notes: Sequence[str] = ()  # of how it was set up, to be told of each run
    store: Store = field(default_factory=lambda: Store(memory.store_budget()))
    _attend: tuple[str, AttentionFunction] | None = field(default=None, repr=False)
    _loaded: dict[str, tuple[Any, str]] = field(default_factory=dict, repr=False)
    # A few MiB each at most.
    _prompts: Remembered[EncodedPrompt] = field(default_factory=lambda: Remembered(32), repr=False)
    _heads: tuple[str, KeptHeads] = field(default_factory=lambda: ("", KeptHeads()), repr=False)  # and what made them
    _references: Remembered[EncodedReference] = field(default_factory=lambda: Remembered(64), repr=False)

    @torch.inference_mode()
    def generate(self, request: Request, watch: Watch | None = None) -> Result:
        """Paint. Raises `UserError` for what cannot be done, before loading wherever that is possible."""
        watch = watch or Watch()
        plan = make_plan(request, self.files)
        watch.on_stage("checking the files")
        self.files.check(encodes=request.encodes)
        for warning in self.warnings(plan):
            watch.on_warning(warning)
        prompts, negative = self._encode_prompts(plan, watch)
        self._release("encoder")
        references = self._encode_references(plan, watch)
        start = self._encode_start(plan, watch)
        latent, prefixes = self._sample(plan, prompts, negative, references, start, watch)
        self._release("dit")
        pictures = images.kept_outside(self._decode(latent, watch), request.init_image, request.mask)
        self._release("vae")
        return Result(pictures, latent, build_manifest(self, plan, prompts[0].text, prefixes), prefixes)

    def _encode_prompts(self, plan: Plan, watch: Watch) -> tuple[list[EncodedPrompt], EncodedPrompt | None]:
        """Each different prompt, and the negative where a step is guided."""
        from .tokenizer import load_tokenizer

        watch.on_stage("reading the prompt")
        tokenizer = load_tokenizer(self.files.tokenizer)
        grids = [(1, reference.height, reference.width) for reference in plan.references]
        prompts = dict.fromkeys((*plan.request.prompt_list, *([plan.request.negative] if plan.guided else [])))
        # Before weights are read, for this refuses what cannot be encoded.
        ids = {prompt: layout_tokens(prompt, tokenizer, grids).ids for prompt in prompts}
        digests = tuple(reference.digest for reference in plan.references)
        vision: dict[str, Any] = {}  # features of each reference, shared by all prompts of the run

        def encode(prompt: str) -> EncodedPrompt:
            encoder = self._network("encoder")
            watch.on_stage("encoding the prompt")
            text = encoder.encode(
                tokenizer,
                prompt,
                plan.references,
                device=self.device,
                features=vision,
                heads=self._heads_now(),
                check_cancel=watch.check_cancel,
            )
            if not bool(torch.isfinite(text.states).all()):
                raise UserError(
                    f"{self.files.encoder.checkpoint.path.name}: the text states are not finite; the checkpoint holds "
                    "NaN or overflows in this dtype, try --dtype bf16 or fp32"
                )
            return EncodedPrompt(text, text_origin(text, self._made_by("encoder")))

        def key(prompt: str) -> Hashable:
            return ids[prompt], digests, self._made_by("encoder")

        made = {prompt: self._prompts.get(partial(key, prompt), partial(encode, prompt)) for prompt in prompts}
        if self._heads[1]:
            self._heads[1].settle(digests if self.keep_loaded else ())
        negative = made[plan.request.negative] if plan.guided else None
        return [made[prompt] for prompt in plan.request.prompt_list], negative

    def _heads_now(self) -> KeptHeads:
        """Those of the encoder as it is loaded."""
        if self._heads[0] != (made_by := self._made_by("encoder")):
            self._heads = made_by, KeptHeads()
        return self._heads[1]

    def _encode_references(self, plan: Plan, watch: Watch) -> list[EncodedReference]:
        if not plan.references:
            return []
        watch.on_stage("encoding the references")

        def name(reference: Reference) -> str:
            return f"{reference.digest} {self._made_by('vae')}"

        def encode(reference: Reference) -> EncodedReference:
            latent = self._encode_picture(reference.image, watch)[0]
            return EncodedReference(latent, name(reference))

        return [self._references.get(partial(name, each), partial(encode, each)) for each in plan.references]

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
        self._make_room_for_vae(picture.size, decode=False)
        return vae.normalise(tiling.encode(vae, pixels, budget=self._vae_budget, check_cancel=watch.check_cancel))

    def _sample(
        self,
        plan: Plan,
        prompts: list[EncodedPrompt],
        negative: EncodedPrompt | None,
        references: list[EncodedReference],
        start: Start | None,
        watch: Watch,
    ) -> tuple[Tensor, list[PrefixFacts]]:
        """The denoised latent [B, 64, h, w] and facts of the prefixes behind which it was denoised, positive first."""
        watch.on_stage("reading the transformer")
        dit: DiT = self._network("dit")
        self._speed_up(dit, plan, watch)
        watch.on_stage("prefilling")
        graphs = graph.StepGraphs() if self.cuda_graph and not self._graphs_in_vain(plan) else None

        def branch(sides: list[EncodedPrompt]) -> Branch:
            return Branch(dit, sides, references, self, plan, watch.check_cancel, graphs)

        guided = branch(prompts)
        unguided = None if negative is None else branch([negative] * len(prompts))
        facts = guided.facts() + (unguided.facts() if unguided else [])
        noise = draw_noise((len(prompts), self.files.dit.config.in_channels, *plan.grid), plan.noise_seed)
        watch.on_stage("denoising")
        latent = sample(
            guided.velocity,
            noise.to(self.device),
            plan.schedule.sigmas,
            negative=unguided and unguided.velocity,
            cfg=plan.cfg,
            start=start,
            check_cancel=watch.check_cancel,
            on_step=watch.on_step,
        )
        for warning in graphs.warnings() if graphs else ():
            watch.on_warning(warning)
        # Facts, not the prefixes: those would stay on the device while the picture is decoded.
        return latent, facts

    def _speed_up(self, dit: DiT, plan: Plan, watch: Watch) -> None:
        """Give a transformer its kernels, once for all runs."""
        if not self.kernels.ready:
            watch.on_stage("compiling")
            self.kernels.prepare(dit.config, self.dtype, self.device, fp8=dit.multiplies_fp8)
        if self._attend is None:
            tokens = plan.grid[0] * plan.grid[1]
            references = sum(reference.width * reference.height for reference in plan.references)
            shape = Shape(tokens, tokens + references, dit.config.heads, dit.config.head_dim)
            compiles = isinstance(self.kernels, CompiledKernels)
            self._attend = choose(self.attention, shape, self.dtype, self.device, may_compile=compiles)
        dit.kernels, dit.attend = self.kernels, self._attend[1]

    def _decode(self, latent: Tensor, watch: Watch) -> list[Image.Image]:
        """Latents [B, 64, h, w] to RGBA pictures, one after another."""
        watch.on_stage("decoding")
        vae = self._network("vae")
        pictures = []
        for row in latent.to(self._vae_dtype).split(1):
            watch.check_cancel()
            self._make_room_for_vae((row.shape[-1] * vae.factor, row.shape[-2] * vae.factor), decode=True)
            pixels = tiling.decode(vae, vae.denormalise(row), budget=self._vae_budget, check_cancel=watch.check_cancel)
            pictures += images.from_vae_pixels(pixels)
        return pictures

    def _network(self, name: str) -> Any:
        if name not in self._loaded:
            dtype = self._vae_dtype if name == "vae" else self.dtype
            part = getattr(self.files, name)
            self._make_room(memory.weight_bytes(part, dtype, self.fp8))
            network = load.load(part, dtype, self.device, fp8=self.fp8)
            if name == "dit":
                apply_loras(network, self.loras)
                if self.fuses:
                    fuse(network)
            self._loaded[name] = network, self._made_with(name, network.made_of)
        return self._loaded[name][0]

    def _release(self, name: str) -> None:
        if not self.keep_loaded:
            self._loaded.pop(name, None)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _made_by(self, name: str) -> str:
        """A name of a network's weights and dtype: as loaded, else as its files are now."""
        if name in self._loaded:
            return self._loaded[name][1]
        return self._made_with(name, getattr(self.files, name).stamp())

    def _made_with(self, name: str, stamp: str) -> str:
        return f"{stamp} {self._vae_dtype if name == 'vae' else self.dtype} {self.fp8}"

    def warnings(self, plan: Plan) -> list[str]:
        """What of a plan, of the LoRAs or of the prefix's place was not as asked."""
        turbo = [(lora.name, lora.turbo) for lora, strength in self.loras if strength and lora.turbo]
        unfit = turbo_warnings(plan.schedule.kind, plan.schedule.steps, 1.0, turbo)
        vain = [*without_effect(self.kv_device, self.device.type != "cpu"), *self._graphs_in_vain(plan)]
        return [*self.notes, *plan.warnings, *unfit, *(line for lora, _ in self.loras for line in lora.warnings), *vain]

    def _graphs_in_vain(self, plan: Plan) -> list[str]:
        """Why a run that shall record steps will not."""
        if not self.cuda_graph:
            return []
        gpu = self.device.type == "cuda"
        return graph.without_effect(gpu, plan.schedule.steps, plan.request.prefix_cache, self.attention)

    def identity(self, codec: str) -> ModelIdentity:
        """What the K and V of this pipeline's prefixes depend on besides their inputs."""
        patches = ", ".join(sorted(f"{lora.digest} at {strength}" for lora, strength in self.loras if strength))
        return ModelIdentity(self._made_by("dit"), str(self.dtype), codec, patches, self.device.type)

    def placement(self, working: int) -> Placement:
        """Where prefixes are kept beside `working` bytes of activations."""
        free, ram = self._free_bytes, memory.available_ram
        return Placement(self.kv_device, self.device, working, self.store, free, ram, self._give_up)

    def fits_together(self) -> bool:
        """Whether all three networks may stay loaded: they take at most half of the free memory."""
        total = sum(memory.weight_bytes(part, self.dtype, self.fp8) for part in self.files.parts)
        free = self._free_bytes()
        return total <= (memory.available_ram() if free is None else free) // 2

    @property
    def fuses(self) -> bool:
        """Whether products of the transformer are fused: on a CPU it brings nothing."""
        return self.device.type == "cuda"

    @property
    def attention_name(self) -> str:
        """The kernel that the last run attended with."""
        return self.attention if self._attend is None else self._attend[0]

    @property
    def _vae_dtype(self) -> torch.dtype:
        """The VAE's values can exceed what fp16 holds, so fp16 runs decode in fp32."""
        return torch.float32 if self.dtype == torch.float16 else self.dtype

    def _make_room(self, nbytes: int) -> None:
        """Have stored prefixes leave the device, as far as it lacks so much free memory."""
        if self.device.type != "cpu" and (lacking := nbytes - self._free_bytes()) > 0:
            self._give_up(lacking)

    def _give_up(self, nbytes: int, sparing: Sequence[Unit] = ()) -> int:
        """Move so many bytes of stored prefixes from the device to RAM, older ones first; returns how many."""
        return self.store.release(nbytes, self.device, "memory was short", to=RAM, sparing=sparing)

    def _make_room_for_vae(self, size: tuple[int, int], decode: bool) -> None:
        peak = tiling.peak_bytes(self.files.vae.config, *size, self._vae_dtype, decode=decode)
        self._make_room(int(peak * tiling.WORKSPACE))

    @property
    def _vae_budget(self) -> int:
        free = self._free_bytes()
        return memory.available_ram() if free is None else free

    def _free_bytes(self) -> int | None:
        """Free memory of the device, what PyTorch keeps for reuse included; None where nothing is known."""
        if self.device.type != "cuda":
            return None
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + kept
