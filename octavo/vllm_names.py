"""vLLM's settings that Octavo doesn't have: what becomes of those that users' scripts bring.

Each either is another name for one of ours, or changes nothing here (it is taken, with a line in the log that
says why), or asks for what there isn't (it is refused, with what to do instead). Nothing is taken silently
that would change what the user gets.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import ConfigError

logger = logging.getLogger(__name__)

SHORT = {
    "api_server_count": "-asc",
    "compilation_config": "-cc",
    "data_parallel_size": "-dp",
    "optimization_level": "-O",
    "pipeline_parallel_size": "-pp",
    "quantization": "-q",
    "tensor_parallel_size": "-tp",
}
"""vLLM's short forms of options, by setting."""

LISTS = frozenset(
    "allowed_headers allowed_methods collect_detailed_traces cuda_graph_sizes cudagraph_capture_sizes "
    "logits_processors lora_modules".split()
)
"""Options that take several words."""


@dataclass(frozen=True)
class Foreign:
    """A setting of vLLM's.

    Attributes:
        note: why it changes nothing, or what to do instead of it.
        passes: values that ask for nothing and are taken silently; None: all are taken, with the note.
        flag: on the command line, an option without a value (`--name`, `--no-name`).
        option: whether it is one on the command line at all.
        becomes: makes our settings of a value; None: it has no meaning here.
    """

    note: str
    passes: tuple[Any, ...] | None = None
    flag: bool = False
    option: bool = True
    becomes: Callable[[Any], Mapping[str, Any] | None] | None = None

    def settle(self, name: str, value: Any) -> Mapping[str, Any]:
        """Our settings in place of it.

        Raises:
            ConfigError: it asks for what there isn't.
        """
        if self.becomes is not None and (ours := self.becomes(value)) is not None:
            return ours
        if _asks_nothing(value) or (self.passes is not None and _told(value) in map(_told, self.passes)):
            return {}
        if self.passes is None:
            logger.warning("%s=%s changes nothing here: %s", name, _shown(value), self.note)
            return {}
        raise ConfigError(f"{name}={_shown(value)} is not supported: {self.note}")


def translated(table: Mapping[str, Foreign], values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, with those of vLLM's that Octavo doesn't have replaced.

    Raises:
        ConfigError: one asks for what there isn't, or says other than one of ours beside it.
    """
    ours = {name: value for name, value in values.items() if name not in table}
    for name in sorted(values.keys() & table.keys()):
        for other, value in table[name].settle(name, values[name]).items():
            beside = ours.get(other)
            if value is None:
                continue
            if isinstance(beside, Mapping) and isinstance(value, Mapping):
                agree = {**beside, **value} == {**value, **beside}
                value = {**beside, **value}
            else:
                agree = beside in (None, value)
            if not agree:
                raise ConfigError(f"{name} and {other} say two things: leave one out")
            ours[other] = value
    return ours


def _asks_nothing(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {}, "[]", "{}", "None")


def _told(value: Any) -> str:
    return str(value).lower()


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _one_of(choices: Mapping[str, Mapping[str, Any]]) -> Callable[[Any], Mapping[str, Any] | None]:
    return lambda value: choices.get(value) if isinstance(value, str) else None


def _drain_timeout(value: Any) -> Mapping[str, Any]:
    try:
        return {"drain_timeout": float(value)}
    except (TypeError, ValueError):
        raise ConfigError(f"shutdown_timeout={_shown(value)} is not valid: give seconds") from None


def _override(field: str) -> Callable[[Any], Mapping[str, Any]]:
    """For a value of the model's config.json."""

    def becomes(value: Any) -> Mapping[str, Any]:
        if _asks_nothing(value):
            return {}
        try:
            return {"hf_overrides": {field: json.loads(value) if isinstance(value, str) else value}}
        except ValueError:
            raise ConfigError(f"{field}={_shown(value)} is not JSON") from None

    return becomes


def _chunked_prefill(value: Any) -> Mapping[str, Any]:
    if value is False:
        raise ConfigError(f"enable_chunked_prefill=False is not supported: {_CHUNKS}")
    return {}


def _table(*groups: Mapping[str, Foreign]) -> dict[str, Foreign]:
    table: dict[str, Foreign] = {}
    for group in groups:
        twice = table.keys() & group.keys()
        assert not twice, twice
        table |= group
    return table


def _same(note: str, names: str) -> dict[str, Foreign]:
    """Settings that change nothing here. A name that ends in ? is a flag."""
    return {name.rstrip("?"): Foreign(note, flag=name.endswith("?")) for name in names.split()}


def _refused(note: str, names: str, *passes: Any) -> dict[str, Foreign]:
    """Settings that are refused unless they ask for nothing. A name that ends in ? is a flag."""
    return {name.rstrip("?"): Foreign(note, passes, name.endswith("?")) for name in names.split()}


def _structured_outputs(value: Any) -> Mapping[str, Any] | None:
    """`structured_outputs_config`: which library compiles forms says nothing of the forms."""
    try:
        fields = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise ConfigError(f"structured_outputs_config={_shown(value)} is not JSON: give an object") from None
    if not isinstance(fields, Mapping):
        return None
    for name, item in fields.items():
        if name != "backend" and item not in (None, False, "", "auto"):
            raise ConfigError(
                f"structured_outputs_config.{name}={_shown(item)} is not supported: set it per request, in "
                "structured_outputs; a reasoning_parser is a setting of `octavo serve`"
            )
    if fields.get("backend") not in (None, "auto", "guidance"):
        logger.warning(
            "structured_outputs_config.backend=%s changes nothing here: %s", fields["backend"], _GRAMMARS
        )
    return {}


_CHUNKS = (
    "prompts are always computed in chunks; for one step each, raise max_num_batched_tokens to max_model_len"
)
_GRAMMARS = "llguidance compiles every form of output"
_LORA = "this version serves no adapters; merge the adapter into the model's weights"
_TEXT = "this version takes text alone, and refuses requests with other parts"
_STEPS = "steps are recorded at the sizes that come; enforce_eager records none"
_EXPERTS = "experts stay where enable_expert_parallel puts them, and their kernels are chosen by the hardware"
_DRAFTS = "write it in speculative_config (`octavo serve --help-speculative` lists its fields)"
_OFFLOAD = "weights stay on the device: use a quantized checkpoint or several GPUs"
_NODES = "ranks are processes of one machine: leave it out"
_METRICS = "all of /metrics is always there"

ENGINE = _table(
    {
        "task": Foreign(
            "give runner='generate' for texts, 'pooling' for embeddings",
            ("auto",),
            becomes=_one_of(
                {
                    "generate": {"runner": "generate"},
                    "embed": {"runner": "pooling"},
                    "embedding": {"runner": "pooling"},
                }
            ),
        ),
        "convert": Foreign(
            "models become embeddings alone: give runner='pooling'",
            ("auto", "none"),
            becomes=_one_of({"embed": {"runner": "pooling"}}),
        ),
        "structured_outputs_config": Foreign(
            f"of its fields, backend changes nothing ({_GRAMMARS}); others are set per request",
            becomes=_structured_outputs,
        ),
    },
    # The checkpoint and its files.
    _same("no code of a checkpoint is run, and no family here needs any", "trust_remote_code? code_revision"),
    _same("there is one kind of tokenizer: the one that the model's files describe", "tokenizer_mode"),
    _refused("the model needs a config.json", "config_format", "auto", "hf"),
    _refused("put the config.json into the model's folder", "hf_config_path"),
    {
        "rope_scaling": Foreign("a field of hf_overrides", becomes=_override("rope_scaling")),
        "rope_theta": Foreign("a field of hf_overrides", becomes=_override("rope_theta")),
    },
    _refused("give dtype", "override_attention_dtype"),
    _same(
        "files are mapped and read ahead",
        "ignore_patterns max_parallel_loading_workers pt_load_map_location safetensors_load_strategy "
        "use_tqdm_on_load?",
    ),
    _refused("load_format has no further settings", "model_loader_extra_config"),
    _same("quantized checkpoints say how they are read", "allow_deprecated_quantization?"),
    _refused("scales are read from the checkpoint", "quantization_param_path"),
    # Parts other than text.
    _same(
        _TEXT,
        "allowed_local_media_path allowed_media_domains disable_chunked_mm_input? "
        "disable_mm_preprocessor_cache? enable_mm_processor_stats? interleave_mm_strings? "
        "language_model_only? limit_mm_per_prompt media_io_kwargs mm_encoder_attn_backend "
        "mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_tp_mode mm_hasher_algorithm "
        "mm_processor_cache_gb mm_processor_cache_type mm_processor_kwargs "
        "mm_shm_cache_max_object_size_mb skip_mm_profiling? video_pruning_rate",
    ),
    _refused(
        _TEXT,
        "ec_transfer_config enable_mm_embeds? enable_prompt_embeds? io_processor_plugin mm_encoder_only?",
    ),
    # Ranks.
    _same(
        "it is set by the backend of the ranks",
        "disable_nccl_for_dp_synchronization? ray_workers_use_nsight?",
    ),
    _refused(
        _NODES,
        "data_parallel_address data_parallel_backend data_parallel_external_lb? data_parallel_hybrid_lb? "
        "data_parallel_rank data_parallel_rpc_port data_parallel_start_rank headless? master_addr "
        "master_port worker_use_ray?",
        "mp",
    ),
    _refused(_NODES, "data_parallel_size_local nnodes", 1),
    _refused(_NODES, "node_rank", 0),
    _refused(
        "a context is not divided among ranks",
        "decode_context_parallel_size prefill_context_parallel_size",
        1,
    ),
    _same(_NODES, "cp_kv_cache_interleave_size dcp_comm_backend dcp_kv_cache_interleave_size"),
    _refused(_EXPERTS, "enable_elastic_ep? enable_eplb?"),
    _same(
        _EXPERTS,
        "all2all_backend dbo_decode_token_threshold dbo_prefill_token_threshold enable_dbo? eplb_config "
        "expert_placement_strategy moe_backend ubatch_size",
    ),
    _refused(
        "there are no plugins", "scheduler_cls worker_cls worker_extension_cls additional_config", "auto"
    ),
    _refused(
        "there are no logits processors of one's own: see docs/sampling.md for what requests may ask",
        "logits_processor_pattern logits_processors",
    ),
    # KV cache and schedule.
    {"enable_chunked_prefill": Foreign(_CHUNKS, flag=True, becomes=_chunked_prefill)},
    _refused("windows are always used: lower max_model_len to the window", "disable_sliding_window?"),
    _same("layers of all kinds share one pool", "disable_hybrid_kv_cache_manager?"),
    _refused("host memory is the one place: give kv_offloading_size", "kv_offloading_backend", "native"),
    _refused("instances exchange no KV; kv_disk_path is shared by engines", "kv_transfer_config"),
    _refused("GET /debug/kv.json tells what is cached (--enable-kv-debug)", "kv_events_config"),
    _same(
        "no served family keeps such a cache",
        "kv_sharing_fast_prefill? mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_ssm_cache_dtype",
    ),
    _same(
        "prompts share a step's budget: see long_prefill_token_threshold",
        "max_long_partial_prefills max_num_partial_prefills scheduler_delay_factor",
    ),
    _same(
        "async_scheduling overlaps steps",
        "disable_async_output_proc? multi_step_stream_outputs? num_scheduler_steps",
    ),
    _same("they come from the checkpoint, or from a text that is computed at start", "calculate_kv_scales?"),
    _same("swap_space decides what becomes of preempted requests", "preemption_mode"),
    _same("there is one block manager", "num_lookahead_slots use_v2_block_manager?"),
    _same("every token is sent as soon as it is there", "stream_interval"),
    _refused(_OFFLOAD, "cpu_offload_params offload_backend offload_group_size offload_params", "auto", "uva"),
    _same(_OFFLOAD, "offload_num_in_group offload_prefetch_step"),
    # Compilation.
    _same(
        _STEPS,
        "compilation_config cudagraph_capture_sizes cuda_graph_sizes max_cudagraph_capture_size "
        "max_seq_len_to_capture optimization_level performance_mode",
    ),
    _same("kernels are chosen by the hardware", "enable_flashinfer_autotune? kernel_config"),
    _refused("give attention_backend", "attention_config"),
    # Forms, drafts, adapters.
    _same(_GRAMMARS, "guided_decoding_backend guided_decoding_disable_fallback?"),
    _refused(
        "set it per request, in structured_outputs",
        "guided_decoding_disable_additional_properties? guided_decoding_disable_any_whitespace?",
    ),
    _refused(
        _DRAFTS,
        "ngram_prompt_lookup_max ngram_prompt_lookup_min spec_decoding_acceptance_method "
        "speculative_disable_by_batch_size speculative_draft_tensor_parallel_size speculative_max_model_len "
        "speculative_model_quantization typical_acceptance_sampler_posterior_alpha "
        "typical_acceptance_sampler_posterior_threshold",
    ),
    _refused(
        _LORA,
        "default_mm_loras enable_lora_bias? enable_prompt_adapter? fully_sharded_loras? lora_dtype "
        "lora_extra_vocab_size long_lora_scaling_factors max_cpu_loras max_lora_rank max_loras "
        "max_prompt_adapter_token max_prompt_adapters",
    ),
    _refused("log-probabilities are the model's own, before sampling", "logprobs_mode", "raw_logprobs"),
    _refused("this version doesn't tell which experts ran", "enable_return_routed_experts?"),
    # Watching it.
    _same("every engine can sleep; --enable-dev-endpoints offers it over HTTP", "enable_sleep_mode?"),
    _same(
        "requests' contents are never logged; --access-log FILE notes each request",
        "disable_log_requests? enable_log_requests?",
    ),
    _same(
        _METRICS,
        "aggregate_engine_logging? collect_detailed_traces cudagraph_metrics? enable_layerwise_nvtx_tracing? "
        "enable_logging_iteration_details? enable_mfu_metrics? kv_cache_metrics? kv_cache_metrics_sample "
        "show_hidden_metrics_for_version",
    ),
    _refused("give torch_profiler_dir, and the profiler_… settings beside it", "profiler_config"),
    _refused("weights are not exchanged while it runs", "weight_transfer_config"),
    _same("the environment is documented in docs/settings.md", "fail_on_environ_validation?"),
    {
        name: Foreign("it is a setting of `octavo serve`", option=False)
        for name in ("otlp_traces_endpoint", "reasoning_parser", "served_model_name")
    },
    _same("reasoning_parser alone turns it on", "enable_reasoning?"),
    _refused(
        "there are no plugins; --reasoning-parser names the formats there are", "reasoning_parser_plugin"
    ),
    _refused("give --device, or tokenizer_threads of `octavo serve`", "tokenizer_pool_extra_config"),
    _same("the server tokenizes on --tokenizer-threads threads", "tokenizer_pool_size tokenizer_pool_type"),
)
"""By name, for `LLM(...)`, `AsyncLLM.create(...)` and every command."""

SERVER = _table(
    {
        "shutdown_timeout": Foreign("another name of drain_timeout", becomes=_drain_timeout),
        "chat_template_content_format": Foreign(
            "templates show whether they want texts or parts", ("auto", "string", "openai")
        ),
    },
    _refused(_LORA, "lora_modules"),
    _refused("answers are the assistant's", "response_role", "assistant"),
    _refused("there are no plugins; --tool-call-parser names the formats there are", "tool_parser_plugin"),
    _refused("clients call tools, not the server", "tool_server"),
    _refused("set OCTAVO_LOG_LEVEL", "log_config_file"),
    _refused("the model's texts are never logged", "enable_log_outputs?"),
    _same("contents are never logged", "enable_log_deltas? max_log_len"),
    _same("answers always tell it", "enable_prompt_tokens_details?"),
    _refused("/metrics has them of all requests together", "enable_per_request_metrics?"),
    _same("GET /load is always there", "enable_server_load_tracking?"),
    _refused("GET /version tells the model's settings", "enable_tokenizer_info_endpoint?"),
    _same(
        "no such endpoint is served",
        "cohere_format cohere_is_reasoning_model? enable_flash_late_interaction?",
    ),
    _same("set OCTAVO_DEBUG or OCTAVO_LOG_LEVEL", "log_error_stack? uvicorn_log_level"),
    _refused("answers carry none", "fingerprint_mode fingerprint_value", "none"),
    _refused("give --host and --port", "grpc?"),
    _same(
        "requests are noted with --access-log FILE alone",
        "disable_access_log_for_endpoints disable_uvicorn_access_log?",
    ),
    _refused("keys are headers, which browsers send without it", "allow_credentials?"),
    _same("pages of allowed origins may use all methods and headers", "allowed_headers allowed_methods"),
    _refused("let a proxy ask for certificates", "ssl_ca_certs ssl_cert_reqs ssl_ciphers", 0),
    _refused("restart the server, or let a proxy hold the certificate", "enable_ssl_refresh?"),
    _refused("there are no plugins", "middleware"),
    _same("there is GET /openapi.json alone", "disable_fastapi_docs? enable_offline_docs?"),
    _same("--max-request-bytes bounds bodies", "h11_max_header_count h11_max_incomplete_event_size"),
    _same("the server is one process, the engine another", "disable_frontend_multiprocessing?"),
    _refused("the server is one process", "api_server_count", 1),
    _refused(
        _NODES,
        "data_parallel_supervisor_port dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s "
        "dp_supervisor_probe_timeout_s",
    ),
    _refused("write the settings as options", "config"),
    _refused("instances exchange no KV: leave it out", "tokens_only?"),
)
"""By name, for `octavo serve`."""

SAMPLING = _table(
    {
        "guided_decoding": Foreign(
            "another name of structured_outputs", becomes=lambda value: {"structured_outputs": value}
        ),
    },
    _refused("give n, and choose among the answers", "best_of", 1),
    _refused("there is no beam search: sample n answers, or leave it out", "use_beam_search"),
    _refused("there is no beam search: leave it out", "length_penalty", 1.0, 1),
    _refused("there is no beam search: leave it out", "early_stopping"),
    _refused("give logit_bias, allowed_token_ids, bad_words or structured_outputs", "logits_processors"),
    _refused("no extension is there to read it", "extra_args"),
    _refused("log-probabilities are lists of dictionaries", "flat_logprobs"),
    _refused("give the prompt a cache_salt of its own", "skip_reading_prefix_cache"),
    _refused("limit max_tokens", "thinking_token_budget"),
    _refused("give repetition_penalty or frequency_penalty", "repetition_detection"),
    _same("settings are never changed by a request", "skip_clone"),
)
"""By name, for `SamplingParams(...)`."""

FORMS = _table(
    _same(_GRAMMARS, "backend backend_was_auto disable_fallback"),
    _refused("write additionalProperties: false into the schema", "disable_additional_properties"),
)
"""By name, for the fields of `StructuredOutputsParams`, among them those of vLLM's GuidedDecodingParams."""

DRAFTS = _table(
    _same(
        "a draft is divided among ranks as its target is", "draft_tensor_parallel_size tensor_parallel_size"
    ),
    _same("drafts run as the engine's settings say", "attention_backend enforce_eager moe_backend"),
    _same("no code of a checkpoint is run", "code_revision"),
    _same("a draft's rows are its own, whatever others have", "disable_padded_drafter_batch"),
    _same("what a head has computed is never in the prefix cache", "disable_eagle_block_drop"),
    _same("how tokens are drawn from logits changes no draft", "use_local_argmax_reduction"),
    _same("no method here reads it", "dspark_draft_topk index_share_for_mtp_iteration"),
    _same(
        "how many tokens pay is measured: see adaptive",
        "disable_by_batch_size enable_adaptive_verification num_speculative_tokens_per_batch_size",
    ),
    _same("drafts are drawn as the model's tokens are, with the same noise", "draft_sample_method"),
    _same("log-probabilities are always the model's", "disable_logprobs"),
    _same("there is one verifier", "disable_mqa_scorer"),
    _same("metrics tell of drafts at every step", "disable_log_stats"),
    _refused("a draft's keys and values are in the dtype of the model", "kv_cache_dtype", "auto"),
    _refused("a draft is loaded as its target is", "draft_load_config"),
    _refused("a draft must have its target's vocabulary", "use_heterogeneous_vocab"),
    _refused("drafts are chains of tokens", "speculative_token_tree"),
    _refused(
        "every method here is exact",
        "acceptance_method posterior_alpha posterior_threshold",
        "rejection_sampler",
    ),
)
"""By name, for the fields of `speculative_config`."""
