"""Every engine setting, once: typed, documented, validated.

`LLM(...)`, the command line and the documentation are generated from `EngineConfig`; nothing else
names a setting's default or help. A setting that this version cannot honour is listed with the
values that it can (`only=`) and refused by name otherwise.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.errors import ConfigError
from octavo.generation_defaults import read_override
from octavo.setting_values import has_type, json_object, listing, members_of, parse_amount, type_name
from octavo.vllm_names import ENGINE, Foreign, translated

if TYPE_CHECKING:
    from octavo.speculative_config import SpeculativeConfig


def setting(
    default: Any,
    help: str,  # noqa: A002 (argparse's own word)
    *,
    choices: tuple[Any, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
    aliases: Mapping[str, str] | None = None,
    only: tuple[Any, ...] | None = None,
    unit: str | None = None,
    positional: bool = False,
    secret: bool = False,
) -> Any:
    """Declare one setting.

    Args:
        default: its value when the user gives none.
        help: one or two sentences for `--help` and the documentation.
        choices: the allowed values.
        aliases: other words for some of them, which vLLM's users write.
        low, high: inclusive bounds of a number.
        only: values that this version supports of a setting whose other values come later.
        unit: "bytes" or "tokens": accepts suffixes (8k, 4GiB) on the command line and in strings.
        positional: a positional argument of the command.
        secret: is left out where the settings are shown.
    """
    meta = dict(help=help, choices=choices, aliases=aliases or {}, low=low, high=high)
    meta |= dict(only=only, unit=unit, positional=positional)
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=meta)
    return field(default=default, metadata=meta, repr=not secret)


@dataclass
class EngineConfig:
    """Settings of one engine. Field names are vLLM's where vLLM has them.

    Attributes:
        foreign: what becomes of vLLM's others.
    """

    foreign: ClassVar[Mapping[str, Foreign]] = ENGINE

    model: str | None = setting(
        None,
        "Folder in Hugging Face's layout, GGUF file (of a split model any part), or hub id (`org/name`; for "
        "GGUF files `org/name:Q4_K_M` or `org/name/file.gguf`). Without one, the default model that "
        "`octavo pull` brings.",
        positional=True,
    )
    tokenizer: str | None = setting(
        None, "Folder, GGUF file or hub id to read the tokenizer from, if not the model's."
    )
    revision: str | None = setting(
        None, "Branch, tag or commit of a model from the hub; by default its main branch."
    )
    tokenizer_revision: str | None = setting(None, "Branch, tag or commit of a tokenizer from the hub.")
    download_dir: str | None = setting(
        None, "Folder that models from the hub are kept in, instead of the hub's own cache (HF_HUB_CACHE)."
    )
    hf_token: str | None = setting(
        None,
        "Token for the hub's private and gated models; by default HF_TOKEN, or the login that the hub's own "
        "tools stored.",
        secret=True,
    )
    skip_tokenizer_init: bool = setting(False, "Work with token ids only: no tokenizer is loaded.")
    hf_overrides: dict[str, Any] | str | None = setting(
        None,
        "What the model's config.json should say otherwise, as JSON: for example "
        '`{"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}}`. '
        "An object's values replace those of the same names.",
    )
    model_impl: str = setting(
        "auto",
        "Whose code runs the model: Octavo's own families (octavo), or that of the transformers package on "
        "Octavo's paged attention (transformers); auto takes the second where no family knows the model.",
        choices=("auto", "octavo", "transformers"),
    )
    runner: str = setting(
        "auto",
        "What the model is for: texts (generate) or embeddings (pooling); auto goes by its files.",
        choices=("auto", "generate", "pooling"),
    )
    pooler_config: dict[str, Any] | str | None = setting(
        None,
        "How token vectors become an embedding, as JSON: `pooling_type` (LAST, MEAN or CLS) and `normalize`; "
        "what it leaves out is as the model's sentence-transformers files say.",
    )
    load_format: str = setting(
        "auto",
        "Where weights come from: by the files found (auto), safetensors, PyTorch's own files (pt; read "
        "without running what they hold), a GGUF file, or the config alone for random weights (dummy).",
        choices=("auto", "safetensors", "pt", "gguf", "dummy"),
    )
    dtype: str = setting(
        "auto",
        "Type of weights and activations; auto takes the checkpoint's (float32 on a CPU that has no fast "
        "bfloat16, and where float16 is slow).",
        choices=("auto", "float32", "bfloat16", "float16"),
        aliases={"half": "float16", "float": "float32"},
    )
    quantization: str | None = setting(
        None,
        "How weights are stored: rounded while they are loaded, to FP8 with a scale for each channel (fp8, "
        "fp8_per_channel), tensor or block of 128 x 128, to 8-bit or 4-bit integers (int8, int8_weight_only, "
        "int4_weight_only); as a GGUF file encodes them, and computed on in that form (gguf, on a CPU); or "
        "expanded to `dtype` (none). By default a GGUF file's encodings are kept where the CPU has kernels "
        "for them (AVX2), and nothing else is quantized. A quantized checkpoint is kept as it is where the "
        "device has kernels for it; its format may be named, and none expands it.",
        choices=(
            None,
            "none",
            "gguf",
            "int8",
            "int8_weight_only",
            "int4_weight_only",
            "fp8",
            "fp8_per_tensor",
            "fp8_per_channel",
            "fp8_per_block",
            "compressed-tensors",
            "gptq",
            "awq",
            "bitsandbytes",
        ),
        aliases={"gptq_marlin": "gptq", "awq_marlin": "awq"},
    )
    quantization_strict: bool = setting(
        False,
        "Refuse a quantized checkpoint, or weights to be quantized while loading, where the hardware would "
        "compute something else than is asked for.",
    )
    kv_cache_dtype: str = setting(
        "auto",
        "Type of the KV cache: auto (the model's, or that for which a quantized checkpoint has scales), "
        "bfloat16, or half its bytes: fp8 (e4m3), fp8_e5m2, int8.",
        choices=("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"),
    )
    device: str = setting(
        "auto", "auto, cpu, cuda or cuda:N. auto takes the first visible GPU, else the CPU."
    )
    seed: int = setting(0, "Seeds dummy weights and the requests that bring no seed of their own.")
    max_model_len: int | str | None = setting(
        None,
        "Longest context, prompt and output together, in tokens; by default the model's own, `auto` (or -1) "
        "the longest whose KV fits the cache.",
        unit="tokens",
    )
    max_num_seqs: int = setting(256, "Most requests that run at once.", low=1, high=8192)
    max_num_batched_tokens: int | None = setting(
        None,
        "Most tokens computed in one step; by default 8192 on a GPU and 2048 on a CPU, of an encoder 16384 "
        "and 1024.",
        low=1,
        unit="tokens",
    )
    long_prefill_token_threshold: int = setting(
        0, "Most tokens of one prompt in a step; 0: as many as the step's budget has room for.", low=0
    )
    block_size: int = setting(16, "Tokens in one block of KV cache.", choices=(8, 16, 32, 64, 128))
    gpu_memory_utilization: float = setting(
        0.9, "Share of the GPU's memory that weights, activations and KV cache may take.", low=0.01, high=1.0
    )
    cpu_memory_utilization: float = setting(
        0.3,
        "On a CPU, share of the memory that is free after loading that the KV cache may take.",
        low=0.001,
        high=0.95,
    )
    kv_cache_memory_bytes: int | None = setting(
        None, "Exact size of the KV cache, instead of a share of memory.", low=1, unit="bytes"
    )
    num_gpu_blocks_override: int | None = setting(
        None,
        "Exact number of blocks of the KV cache, on a GPU or not, instead of a share of memory; what they "
        "take must be free. For tests, of preemption say.",
        low=1,
    )
    swap_space: float = setting(
        0,
        "GiB of host memory, per rank, for KV that leaves the device: preempted requests' and evicted blocks "
        "of the prefix cache.",
        low=0,
    )
    kv_offloading_size: float | None = setting(None, "Another name for swap_space.", low=0)
    kv_disk_path: str | None = setting(
        None,
        "Folder for KV blocks that leave host memory; it survives a restart, and engines may share it. Its "
        "blocks are as private as the texts they were made from. Needs kv_disk_size and swap_space.",
    )
    kv_disk_size: float = setting(
        0,
        "GiB of KV blocks kept in kv_disk_path, whoever wrote them; the least recently used go first.",
        low=0,
    )
    cpu_offload_gb: float = setting(0, "GiB of weights kept in host memory.", only=(0,))
    enable_prefix_caching: bool = setting(True, "Reuse KV blocks of equal beginnings.")
    prefix_caching_hash_algo: str = setting(
        "sha256",
        "How block keys are computed; sha256_cbor can be recomputed by programs in other languages.",
        choices=("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"),
    )
    scheduling_policy: str = setting(
        "fcfs", "Order of waiting requests: by arrival, or by priority first.", choices=("fcfs", "priority")
    )
    look_ahead_admission: bool = setting(
        True,
        "Let a request begin when the KV blocks that running ones are expected to need leave room for it, so "
        "that few are preempted; off: when its prompt fits.",
    )
    async_scheduling: bool | None = setting(
        None,
        "Schedule a step while the one before runs; by default on a GPU, where steps can overlap, and with "
        "pipeline stages.",
    )
    enforce_eager: bool = setting(
        False,
        "Launch every kernel by itself: record no decode steps (as CUDA graphs, or to run again on a CPU).",
    )
    batch_invariant: bool = setting(
        False,
        "Compute every token so that nothing else in the batch changes a bit of it: the same answer alone, "
        "batched, in chunks, after a prefix hit. Slower; on NVIDIA GPUs.",
    )
    attention_backend: str = setting(
        "auto", "Implementation of paged attention.", choices=("auto", "torch", "cpu", "triton")
    )
    disable_cascade_attn: bool = setting(
        False,
        "Let every request of a step read the beginning that all of them share, instead of reading it once "
        "for all where that is faster (Triton attention).",
    )
    num_threads: int | None = setting(
        None, "CPU threads of the model; by default the physical cores.", low=1, high=1024
    )
    tensor_parallel_size: int = setting(
        1, "Ranks that share each layer, each a process with a device of its own.", low=1, high=1024
    )
    pipeline_parallel_size: int = setting(
        1,
        "Stages that have the layers in turn, each of tensor_parallel_size ranks; as many steps are under "
        "way at once.",
        low=1,
        high=1024,
    )
    pp_layer_partition: str | None = setting(
        None,
        "Layers of each pipeline stage, such as 17,15; by default as many as make the stages' weights about "
        "equal, the output head among the last one's.",
    )
    data_parallel_size: int = setting(1, "Replicas of the engine.", only=(1,))
    enable_expert_parallel: bool = setting(
        False,
        "In a mixture of experts, give each tensor-parallel rank whole experts instead of a slice of each; "
        "without experts, or with one rank, it changes nothing.",
    )
    distributed_executor_backend: str | None = setting(
        None,
        "Where ranks run: each in a process of its own (mp; by default with more than one), or the only one "
        "in the engine's (uni).",
        choices=(None, "mp", "uni"),
    )
    disable_custom_all_reduce: bool = setting(
        False,
        "Let NCCL add up over tensor-parallel ranks always, instead of a kernel that writes into the other "
        "GPUs' memory where rows are few.",
    )
    distributed_timeout_seconds: int = setting(
        300,
        "Seconds that ranks may take for a step, or for an operation of all of them, before the engine ends.",
        low=1,
    )
    distributed_heartbeat_seconds: int = setting(
        10, "Seconds without a sign of life from a rank after which the engine ends.", low=3
    )
    speculative_config: dict[str, Any] | str | None = setting(
        None,
        "Speculative decoding: a JSON object, or the path of a file of one, such as "
        '{"method": "ngram", "num_speculative_tokens": 5}; `octavo serve --help-speculative` lists all.',
    )
    speculative_model: str | None = setting(
        None, "Draft model: the field `model` of speculative_config, whose method is draft_model then."
    )
    num_speculative_tokens: int | None = setting(
        None, "Most tokens drafted for a request and step: the field of speculative_config.", low=1
    )
    speculative_synthetic_acceptance: str | None = setting(
        None,
        "For benchmarks: how likely each draft is to stand if all before it do, such as 0.8,0.6,0.4 (the "
        "field synthetic_acceptance of speculative_config). Answers aren't the model's then, and are marked.",
    )
    enable_lora: bool = setting(False, "Serve LoRA adapters.", only=(False,))
    generation_config: str = setting(
        "auto",
        "Take default sampling settings from the generation_config.json (auto), or Octavo's own (none).",
        choices=("auto", "none"),
        aliases={"vllm": "none"},
    )
    override_generation_config: dict[str, Any] | str | None = setting(
        None,
        "What the generation_config.json should say otherwise (with generation_config=none, all it says), "
        "as JSON or the path of a file of it: temperature, top_p, top_k, min_p, repetition_penalty, and "
        "max_new_tokens, which no answer of the server exceeds. null: as if the model stated nothing.",
    )
    chat_template: str | None = setting(None, "File with a Jinja chat template, or the template itself.")
    max_logprobs: int = setting(
        20, "Most log-probabilities per token that a request may ask for; -1: no limit.", low=-1
    )
    torch_profiler_dir: str | None = setting(
        None,
        "Folder for profiler traces, viewable in Perfetto. With it `octavo serve` has POST /start_profile "
        "and /stop_profile: for development, since a profile slows all requests.",
    )
    profiler_max_iterations: int = setting(64, "Steps after which a profile ends by itself.", low=1)
    profiler_delay_iterations: int = setting(0, "Steps that a profile lets pass before it records.", low=0)
    disable_log_stats: bool = setting(False, "Do not log throughput and cache use every few seconds.")
    check_invariants: bool = setting(
        False, "Check the scheduler's and the block pool's bookkeeping after every step (slow; for tests)."
    )

    def __post_init__(self) -> None:
        validate(self)
        if self.kv_cache_dtype == "fp8_e4m3":  # two names of one type
            self.kv_cache_dtype = "fp8"
        if self.max_model_len in ("auto", -1):
            self.max_model_len = "auto"
        elif self.max_model_len is not None and (
            not isinstance(self.max_model_len, int) or self.max_model_len < 2
        ):
            raise ConfigError(
                f"max_model_len={self.max_model_len!r} is not valid: give at least 2 tokens, or auto"
            )
        if self.device.partition(":")[0] not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"device={self.device!r} is not known: give auto, cpu, cuda or cuda:N")
        if self.batch_invariant and self.device == "cpu":
            raise ConfigError("batch_invariant needs an NVIDIA GPU: leave it out, or use device='cuda'")
        if self.batch_invariant and self.attention_backend != "auto":
            raise ConfigError(
                f"batch_invariant has an attention of its own, not {self.attention_backend!r}: leave "
                "attention_backend out"
            )
        self.hf_overrides = json_object("hf_overrides", self.hf_overrides)
        self.override_generation_config = read_override(self.override_generation_config)
        self._settle_kv_tiers()
        if self.num_gpu_blocks_override is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError(
                f"num_gpu_blocks_override={self.num_gpu_blocks_override} and kv_cache_memory_bytes="
                f"{self.kv_cache_memory_bytes} both state the KV cache's size: leave one out"
            )
        _ = self.speculative  # refused here if it is wrong
        if self.pp_layer_partition is not None and self.pipeline_parallel_size == 1:
            raise ConfigError(
                f"pp_layer_partition={self.pp_layer_partition!r} divides layers among pipeline stages: give "
                "pipeline_parallel_size, or leave it out"
            )
        if self.runs_ranks:
            from octavo.parallel.refusals import check_ranks

            check_ranks(self)

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """The settings of speculative decoding; None: off.

        Raises:
            ConfigError: they are wrong.
        """
        from octavo.speculative_config import read_speculative_config

        return read_speculative_config(
            self.speculative_config,
            self.speculative_model,
            self.num_speculative_tokens,
            self.speculative_synthetic_acceptance,
        )

    @property
    def synthetic_acceptance(self) -> list[float] | None:
        """How likely drafts are to stand, whatever the model says of them (benchmarks); None: it decides."""
        speculative = self.speculative
        rates = None if speculative is None else speculative.synthetic_acceptance
        assert not isinstance(rates, str)  # settled by then
        return rates

    @property
    def num_ranks(self) -> int:
        """Parallel ranks of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def runs_ranks(self) -> bool:
        """Whether workers run in processes of their own."""
        return self.num_ranks > 1 or self.distributed_executor_backend == "mp"

    def _settle_kv_tiers(self) -> None:
        """One value for swap_space under both its names; a disk tier that can work, or none."""
        other = self.kv_offloading_size
        if other is not None and self.swap_space not in (0, other):
            raise ConfigError(
                f"swap_space={self.swap_space:g} and kv_offloading_size={other:g} are two names of one "
                "setting: leave one out"
            )
        self.swap_space = self.swap_space or other or 0
        path, size = self.kv_disk_path, self.kv_disk_size
        if path is None:
            if size:
                raise ConfigError(f"kv_disk_size={size:g} needs a folder: give kv_disk_path, or leave it out")
            return
        if not size:
            raise ConfigError(f"kv_disk_path={path!r} needs its size in GiB: give kv_disk_size")
        if not self.swap_space:
            raise ConfigError(
                f"kv_disk_path={path!r} needs swap_space: blocks reach the disk through host memory"
            )
        if not self.enable_prefix_caching:
            raise ConfigError(
                f"kv_disk_path={path!r} keeps blocks of the prefix cache: leave enable_prefix_caching on"
            )
        if self.prefix_caching_hash_algo.startswith("xxhash"):
            raise ConfigError(
                f"prefix_caching_hash_algo={self.prefix_caching_hash_algo!r} can be forged, and kv_disk_path "
                "is shared: choose sha256 or sha256_cbor"
            )


def validate(config: Any) -> None:
    """Check every field of a settings dataclass against its declaration (types, bounds, choices).

    Raises:
        ConfigError: names the setting, its value and what is allowed.
    """
    hints = typing.get_type_hints(type(config))
    for spec in fields(config):
        value, meta = getattr(config, spec.name), spec.metadata
        if meta["unit"] and isinstance(value, str):
            value = parse_amount(value, meta["unit"])
            setattr(config, spec.name, value)
        if isinstance(value, str) and value in meta["aliases"]:
            value = meta["aliases"][value]
            setattr(config, spec.name, value)
        if not has_type(value, hints[spec.name]):
            wanted = " or ".join(type_name(t) for t in members_of(hints[spec.name]))
            raise ConfigError(f"{spec.name}={value!r} is not valid: give {wanted}")
        if meta["choices"] and value not in meta["choices"]:
            near = difflib.get_close_matches(str(value), [str(c) for c in meta["choices"]], 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(f"{spec.name}={value!r} is not known: choose {listing(meta['choices'])}{hint}")
        if meta["only"] is not None and value not in meta["only"]:
            # None and False are "without it": naming them as what runs says nothing.
            kept = f"this version runs {listing(meta['only'])}" if meta["only"][0] else "leave it out"
            raise ConfigError(f"{spec.name}={value!r} is not supported by this version: {kept}")
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise ConfigError(f"{spec.name}={value!r:.80} is out of range: give an integer of 64 bits")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            low, high = meta["low"], meta["high"]
            if (low is not None and not value >= low) or (high is not None and not value <= high):
                bounds = f"at least {low}" if high is None else f"from {low} to {high}"
                raise ConfigError(f"{spec.name}={value!r} is out of range: give {bounds}")


def make_config(cls: type, values: dict[str, Any]) -> Any:
    """Build a settings dataclass from keyword arguments; unknown names are an error with the nearest known.

    Raises:
        ConfigError: an unknown setting or a bad value.
    """
    known = {spec.name for spec in fields(cls)}
    values = translated(foreign_settings(cls), values)
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f": did you mean {near[0]}?" if near else "; see `octavo serve --help` for the settings"
            raise ConfigError(f"there is no setting {name}{hint}")
    return cls(**values)


def foreign_settings(cls: type) -> Mapping[str, Foreign]:
    """vLLM's settings that a settings dataclass doesn't have."""
    own = {spec.name for spec in fields(cls)}
    return {name: foreign for name, foreign in getattr(cls, "foreign", {}).items() if name not in own}
