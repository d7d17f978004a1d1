"""From a prompt and references to RGBA pictures: the whole flow, one call per stage.

    references -> text states and slots -> reference latents -> prefix -> denoised latent -> pictures

`Pipeline.generate` reads top to bottom. Whatever can be refused is refused before a weight is loaded.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from .checkpoint.fp8_policy import Fp8
from .checkpoint.load import ModelFiles
from .encode_cache import EncodedPrompt, EncodedReference, LRUCache, ReferenceContexts
from .errors import UserError
from .guidance_branch import GuidanceBranch
from .inputs import images
from .inputs.prompt import layout_tokens
from .inputs.references import Reference
from .lora.read import Lora
from .manifest import RunFacts, build_manifest
from .memory import estimate
from .models import vae_tiling
from .models.dit import DiT
from .models.flex_prefill import FlexPrefill
from .networks import Networks, free_bytes
from .ops import backend
from .ops.attention import AttentionFunction, sdpa
from .ops.attention_backends import Shape, choose_attention
from .ops.pointwise import EAGER, CompiledKernels, Kernels
from .ops.pointwise_kitchen import uncompiled
from .prefix import KVBlock, ModelIdentity, Placement, PrefixFacts, PrefixService, RunLocal, Store, text_origin
from .prefix.placement import RAM, ineffective_flags
from .request import Request, ResolvedRequest, resolve_request
from .sampling import cuda_graph as graph
from .sampling.euler import Start, draw_noise, sample
from .sampling.few_steps import Distilled
from .watch import Watch


@dataclass(frozen=True)
class Result:
    """The pictures of a run, their latents [B, 64, h, w] (normalised, fp32), its manifest, and facts of its prefixes,
    the positive ones first."""

    images: list[Image.Image]
    latents: Tensor
    manifest: dict[str, Any]
    prefixes: list[PrefixFacts]


@dataclass
class Pipeline:
    """A model's three networks, each loaded when its stage comes, and the results that later runs reuse.

    With `keep_loaded` the networks stay for the next run; otherwise each is dropped after its stage, so that only the
    largest must fit. Text states, reference latents and the prefixes in `store` are kept in both cases, so that a run
    computes only what no earlier run has computed.
    """

    files: ModelFiles
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    kv_device: str = "auto"
    codec: str = "auto"
    keep_loaded: bool = False
    loras: Sequence[tuple[Lora, float]] = ()  # each with its strength
    fp8: Fp8 | None = None  # linear layers of blocks that are not quantized yet are stored in fp8
    kernels: Kernels | None = None  # None: those of the back end, else the fastest that need no compiler
    attention: str = "auto"  # a name that `ops.attention_backends.choose_attention` takes
    prefill: str = "segments"  # or flex, with compiled kernels; see `models/flex_prefill.py`
    cuda_graph: bool = False  # replay steps that are bound by launches; see `sampling/cuda_graph.py`
    notes: Sequence[str] = ()  # warnings about the setup, repeated in every run
    store: Store = field(default_factory=lambda: Store(estimate.store_budget()))
    networks: Networks | None = field(default=None, repr=False)  # None: built from the fields above
    _attend: tuple[str, AttentionFunction] | None = field(default=None, repr=False)
    # An encoded prompt takes a few MiB at most.
    _prompts: LRUCache[EncodedPrompt] = field(default_factory=lambda: LRUCache(32), repr=False)
    # The name of the encoder that made the contexts, and the contexts.
    _contexts: tuple[str, ReferenceContexts] = field(default_factory=lambda: ("", ReferenceContexts()), repr=False)
    _references: LRUCache[EncodedReference] = field(default_factory=lambda: LRUCache(64), repr=False)

    def __post_init__(self) -> None:
        default = backend.default_backend()
        if self.kernels is None:
            self.kernels = uncompiled(self.device) if default.kernels is EAGER else default.kernels
        if self.networks is None:
            self.networks = Networks(
                self.files, self.dtype, self.device, self.fp8, self.loras, self.keep_loaded, self._reserve
            )

    @torch.inference_mode()
    def generate(self, request: Request, watch: Watch | None = None) -> Result:
        """Paint `request`. Raises `UserError` for what cannot be done, before weights are loaded where possible."""
        watch = watch or Watch()
        resolved = resolve_request(request, self.files, self._distilled)
        watch.on_stage("checking the files")
        self.files.check(encodes=request.encodes, reads=bool(request.references))
        for warning in self.warnings(resolved):
            watch.on_warning(warning)
        prompts, negative = self._encode_prompts(resolved, watch)
        self.networks.release("encoder")
        references = self._encode_references(resolved, watch)
        start = self._encode_start(resolved, watch)
        latent, prefixes = self._sample(resolved, prompts, negative, references, start, watch)
        self.networks.release("dit")
        pictures = images.kept_outside(self._decode(latent, watch), request.init_image, request.mask)
        self.networks.release("vae")
        manifest = build_manifest(self._run_facts(resolved), resolved, prompts[0].text.image_slots, prefixes)
        return Result(pictures, latent, manifest, prefixes)

    def _run_facts(self, resolved: ResolvedRequest) -> RunFacts:
        attention, kernels, warnings = self.attention_name, self.kernels.name, self.warnings(resolved)
        return RunFacts(
            self.files, self.dtype, self.device, self.fp8, attention, kernels, self.prefill, self.loras, warnings
        )

    def _encode_prompts(
        self, resolved: ResolvedRequest, watch: Watch
    ) -> tuple[list[EncodedPrompt], EncodedPrompt | None]:
        """The encoded prompt of each picture, and the encoded negative prompt, None where no step is guided."""
        from .inputs.tokenizer import load_tokenizer

        watch.on_stage("reading the prompt")
        tokenizer = load_tokenizer(self.files.tokenizer)
        grids = [(1, reference.height, reference.width) for reference in resolved.references]
        prompts = dict.fromkeys(
            (*resolved.request.prompt_list, *([resolved.request.negative] if resolved.guided else []))
        )
        # Done before weights are read, because this refuses prompts that cannot be encoded.
        ids = {prompt: layout_tokens(prompt, tokenizer, grids).ids for prompt in prompts}
        digests = tuple(reference.digest for reference in resolved.references)
        vision: dict[str, Any] = {}  # vision features of each reference, shared by all prompts of the run

        def encode(prompt: str) -> EncodedPrompt:
            encoder = self.networks.get("encoder")
            watch.on_stage("encoding the prompt")
            text = encoder.encode(
                tokenizer,
                prompt,
                resolved.references,
                device=self.device,
                features=vision,
                contexts=self._current_contexts(),
                check_cancel=watch.check_cancel,
            )
            if not bool(torch.isfinite(text.states).all()):
                raise UserError(
                    f"{self.files.encoder.checkpoint.path.name}: the text states are not finite; the checkpoint holds "
                    "NaN or overflows in this dtype, try --dtype bf16 or fp32"
                )
            return EncodedPrompt(text, text_origin(text, self.networks.made_by("encoder")))

        def key(prompt: str) -> Hashable:
            return ids[prompt], digests, self.networks.made_by("encoder")

        made = {prompt: self._prompts.made(partial(key, prompt), partial(encode, prompt)) for prompt in prompts}
        if self._contexts[1]:
            self._contexts[1].keep_only(digests if self.keep_loaded else ())
        negative = made[resolved.request.negative] if resolved.guided else None
        return [made[prompt] for prompt in resolved.request.prompt_list], negative

    def _current_contexts(self) -> ReferenceContexts:
        """The stored reference contexts, emptied where another encoder made them."""
        if self._contexts[0] != (made_by := self.networks.made_by("encoder")):
            self._contexts = made_by, ReferenceContexts()
        return self._contexts[1]

    def _encode_references(self, resolved: ResolvedRequest, watch: Watch) -> list[EncodedReference]:
        if not resolved.references:
            return []
        watch.on_stage("encoding the references")

        def name(reference: Reference) -> str:
            return f"{reference.digest} {self.networks.made_by('vae')}"

        def encode(reference: Reference) -> EncodedReference:
            latent = self._encode_picture(reference.image, watch)[0]
            return EncodedReference(latent, name(reference))

        return [self._references.made(partial(name, each), partial(encode, each)) for each in resolved.references]

    def _encode_start(self, resolved: ResolvedRequest, watch: Watch) -> Start | None:
        """The latent of the init image and the mask of what may change; None without an init image."""
        if resolved.request.init_image is None:
            return None
        picture = images.fit(resolved.request.init_image, resolved.size)
        latent = self._encode_picture(picture, watch).float().to(self.device)
        mask = resolved.request.mask
        return Start(latent, None if mask is None else images.latent_mask(mask, resolved.grid).to(self.device))

    def _encode_picture(self, picture: Image.Image, watch: Watch) -> Tensor:
        """The normalised latent [1, 64, h, w] of `picture`, in the VAE's dtype."""
        vae = self.networks.get("vae")
        pixels = images.to_vae_pixels(picture).to(self.device, self.networks.vae_dtype)
        self._reserve_for_vae(picture.size, decode=False)
        return vae.normalise(
            vae_tiling.encode(vae, pixels, budget=self.networks.room(), check_cancel=watch.check_cancel)
        )

    def _sample(
        self,
        resolved: ResolvedRequest,
        prompts: list[EncodedPrompt],
        negative: EncodedPrompt | None,
        references: list[EncodedReference],
        start: Start | None,
        watch: Watch,
    ) -> tuple[Tensor, list[PrefixFacts]]:
        """The denoised latent [B, 64, h, w], and facts of the prefixes it was denoised behind, positive ones first."""
        watch.on_stage("reading the transformer")
        dit: DiT = self.networks.get("dit")
        self._speed_up(dit, resolved, watch)
        watch.on_stage("prefilling")
        graphs = graph.StepGraphs() if self.cuda_graph and not self._ineffective_cuda_graph(resolved) else None

        prefiller = dit if self.prefill == "segments" else FlexPrefill(dit)
        identity = partial(self._prefix_identity, resolved)
        lays_out = self.networks.backend.lays_out

        def service(working: int) -> PrefixService:
            return PrefixService(prefiller, self.placement(working), self.codec, identity, lays_out)

        branch = partial(
            GuidanceBranch,
            dit,
            references=references,
            resolved=resolved,
            service=service,
            dtype=self.dtype,
            device=self.device,
            fused=self.networks.fuses,
            check_cancel=watch.check_cancel,
            graphs=graphs,
        )
        guided = branch(prompts=prompts)
        unguided = None if negative is None else branch(prompts=[negative] * len(prompts))
        facts = guided.facts() + (unguided.facts() if unguided else [])
        noise = draw_noise((len(prompts), self.files.dit.config.in_channels, *resolved.grid), resolved.noise_seed)
        watch.on_stage("denoising")
        latent = sample(
            guided.velocity,
            noise.to(self.device),
            resolved.schedule.sigmas,
            negative=unguided and unguided.velocity,
            cfg=resolved.cfg,
            start=start,
            check_cancel=watch.check_cancel,
            on_step=watch.on_step,
        )
        for warning in graphs.warnings() if graphs else ():
            watch.on_warning(warning)
        # The facts do not hold the prefixes, which would stay on the device while the picture is decoded.
        return latent, facts

    def _speed_up(self, dit: DiT, resolved: ResolvedRequest, watch: Watch) -> None:
        """Set the pointwise kernels and the attention function of `dit`, chosen once for all runs."""
        if not self.kernels.ready:
            watch.on_stage("compiling")
            self.kernels.prepare(dit.config, self.dtype, self.device, fp8=dit.multiplies_fp8)
        if self._attend is None:
            tokens = resolved.grid[0] * resolved.grid[1]
            references = sum(reference.width * reference.height for reference in resolved.references)
            shape = Shape(tokens, tokens + references, dit.config.heads, dit.config.head_dim)
            compiles = isinstance(self.kernels, CompiledKernels)
            default = self.networks.backend.attend
            if self.attention == "auto" and default is not sdpa:
                self._attend = "sdpa", default
        if self._attend is None:
            self._attend = choose_attention(self.attention, shape, self.dtype, self.device, may_compile=compiles)
        dit.kernels, dit.attend = self.kernels, self._attend[1]

    def _decode(self, latent: Tensor, watch: Watch) -> list[Image.Image]:
        """RGBA pictures of `latent` [B, 64, h, w], decoded one after another."""
        watch.on_stage("decoding")
        vae = self.networks.get("vae")
        pictures = []
        for row in latent.to(self.networks.vae_dtype).split(1):
            watch.check_cancel()
            self._reserve_for_vae((row.shape[-1] * vae.factor, row.shape[-2] * vae.factor), decode=True)
            pixels = vae_tiling.decode(
                vae, vae.denormalise(row), budget=self.networks.room(), check_cancel=watch.check_cancel
            )
            pictures += images.from_vae_pixels(pixels)
        return pictures

    @property
    def _distilled(self) -> list[Distilled]:
        """The active LoRAs that were made for few steps."""
        return [lora.distilled for lora, strength in self.loras if strength and lora.distilled]

    def warnings(self, resolved: ResolvedRequest) -> list[str]:
        """Warnings about the setup, the resolved request, the LoRAs and flags that have no effect."""
        return [
            *self.notes,
            *resolved.warnings,
            *(line for lora, _ in self.loras for line in lora.warnings),
            *ineffective_flags(self.kv_device, self.device.type != "cpu"),
            *self._ineffective_cuda_graph(resolved),
        ]

    def _ineffective_cuda_graph(self, resolved: ResolvedRequest) -> list[str]:
        """A warning where `cuda_graph` is set but no step of the run will be recorded."""
        if not self.cuda_graph:
            return []
        gpu = self.device.type == "cuda"
        return graph.ineffective_flags(gpu, resolved.schedule.steps, resolved.request.prefix_cache, self.attention)

    def _prefix_identity(self, resolved: ResolvedRequest, codec: str) -> ModelIdentity | RunLocal:
        """The identity under which other runs may reuse this run's prefixes, or why none may."""
        if not resolved.request.prefix_cache:
            return RunLocal("off", "the prefix cache is off")
        return self.identity(codec)

    def identity(self, codec: str) -> ModelIdentity:
        """The identity of the model that makes K and V: all they depend on besides a prefix's inputs."""
        patches = ", ".join(sorted(f"{lora.digest} at {strength}" for lora, strength in self.loras if strength))
        made_by = self.networks.made_by("dit")
        return ModelIdentity(made_by, str(self.dtype), codec, patches, self.device.type, self.prefill)

    def placement(self, working: int) -> Placement:
        """The placement of prefixes beside `working` bytes of activations."""
        free, ram = partial(free_bytes, self.device), estimate.available_ram
        return Placement(self.kv_device, self.device, working, self.store, free, ram, self._evict)

    @property
    def attention_name(self) -> str:
        """The name of the attention kernel of the last run, or of the setting before the first run."""
        return self.attention if self._attend is None else self._attend[0]

    def _reserve(self, nbytes: int) -> None:
        """Evict stored prefixes from the device until `nbytes` are free there."""
        if self.device.type != "cpu" and (lacking := nbytes - free_bytes(self.device)) > 0:
            self._evict(lacking)

    def _evict(self, nbytes: int, exclude: Sequence[KVBlock] = ()) -> int:
        """Move at least `nbytes` of stored prefixes from the device to RAM, oldest first; returns the bytes moved."""
        return self.store.release(nbytes, self.device, "memory was short", to=RAM, exclude=exclude)

    def _reserve_for_vae(self, size: tuple[int, int], decode: bool) -> None:
        peak = vae_tiling.peak_bytes(self.files.vae.config, *size, self.networks.vae_dtype, decode=decode)
        self._reserve(int(peak * vae_tiling.WORKSPACE))
