"""Settings that vLLM's users bring: each is ours, or changes nothing and says so, or is refused."""

from __future__ import annotations

import argparse
import logging
from dataclasses import fields

import pytest

from octavo.cli.arguments import normalized
from octavo.cli.main import build_parser, main
from octavo.config import EngineConfig, make_config
from octavo.config_options import config_from_args
from octavo.errors import ConfigError, RequestError
from octavo.sampling_params import SamplingParams
from octavo.server.config import ServerConfig
from octavo.structured_outputs import StructuredOutputsParams
from octavo.vllm_names import ENGINE, SERVER

# The fields of vLLM's EngineArgs (0.6 to 0.14) and FrontendArgs. `distributed_executor_backend` and others
# that Octavo has are among them.
ENGINE_ARGS = """
model served_model_name tokenizer hf_config_path runner convert task skip_tokenizer_init enable_prompt_embeds
tokenizer_mode trust_remote_code allowed_local_media_path allowed_media_domains download_dir
safetensors_load_strategy load_format config_format dtype kv_cache_dtype seed max_model_len cuda_graph_sizes
cudagraph_capture_sizes max_cudagraph_capture_size pipeline_parallel_size master_addr
master_port nnodes node_rank distributed_timeout_seconds tensor_parallel_size prefill_context_parallel_size
decode_context_parallel_size dcp_comm_backend dcp_kv_cache_interleave_size cp_kv_cache_interleave_size
data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address
data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb data_parallel_backend
enable_expert_parallel moe_backend all2all_backend enable_elastic_ep enable_dbo ubatch_size
dbo_decode_token_threshold dbo_prefill_token_threshold disable_nccl_for_dp_synchronization eplb_config
enable_eplb expert_placement_strategy max_parallel_loading_workers block_size enable_prefix_caching
prefix_caching_hash_algo disable_sliding_window disable_cascade_attn swap_space cpu_offload_gb
cpu_offload_params gpu_memory_utilization kv_cache_memory_bytes max_num_batched_tokens
max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold max_num_seqs max_logprobs
logprobs_mode disable_log_stats aggregate_engine_logging revision code_revision hf_token hf_overrides
rope_scaling rope_theta tokenizer_revision quantization allow_deprecated_quantization enforce_eager
max_seq_len_to_capture disable_custom_all_reduce language_model_only limit_mm_per_prompt enable_mm_embeds
interleave_mm_strings media_io_kwargs mm_processor_kwargs disable_mm_preprocessor_cache mm_processor_cache_gb
mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode
mm_encoder_attn_backend io_processor_plugin skip_mm_profiling video_pruning_rate enable_lora max_loras
max_lora_rank default_mm_loras fully_sharded_loras max_cpu_loras lora_dtype lora_extra_vocab_size
enable_lora_bias ray_workers_use_nsight num_gpu_blocks_override num_lookahead_slots
model_loader_extra_config ignore_patterns preemption_mode scheduler_delay_factor enable_chunked_prefill
disable_chunked_mm_input disable_hybrid_kv_cache_manager structured_outputs_config guided_decoding_backend
guided_decoding_disable_fallback guided_decoding_disable_any_whitespace
guided_decoding_disable_additional_properties logits_processor_pattern reasoning_parser
reasoning_parser_plugin speculative_config speculative_model num_speculative_tokens
show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces kv_cache_metrics
kv_cache_metrics_sample cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics
enable_logging_iteration_details enable_mm_processor_stats scheduling_policy scheduler_cls pooler_config
compilation_config attention_config kernel_config enable_flashinfer_autotune worker_cls worker_extension_cls
profiler_config kv_transfer_config kv_events_config ec_transfer_config generation_config enable_sleep_mode
override_generation_config model_impl override_attention_dtype attention_backend calculate_kv_scales
mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode additional_config use_tqdm_on_load
pt_load_map_location logits_processors async_scheduling stream_interval kv_sharing_fast_prefill
optimization_level performance_mode kv_offloading_size kv_offloading_backend weight_transfer_config
fail_on_environ_validation use_v2_block_manager num_scheduler_steps multi_step_stream_outputs
disable_async_output_proc disable_log_requests enable_log_requests quantization_param_path
tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config enable_prompt_adapter enable_reasoning
device
""".split()
FRONTEND_ARGS = """
lora_modules chat_template chat_template_content_format trust_request_chat_template
default_chat_template_kwargs response_role return_tokens_as_token_ids enable_auto_tool_choice
exclude_tools_when_tool_choice_none tool_call_parser tool_parser_plugin tool_server log_config_file
max_log_len enable_prompt_tokens_details enable_per_request_metrics enable_server_load_tracking
enable_force_include_usage enable_tokenizer_info_endpoint enable_log_outputs enable_log_deltas
cohere_is_reasoning_model cohere_format log_error_stack tokens_only fingerprint_mode fingerprint_value host
port data_parallel_supervisor_port dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s
dp_supervisor_probe_failure_threshold uds uvicorn_log_level disable_uvicorn_access_log
disable_access_log_for_endpoints allow_credentials allowed_origins allowed_methods allowed_headers api_key
ssl_keyfile ssl_certfile ssl_ca_certs enable_ssl_refresh ssl_cert_reqs ssl_ciphers root_path middleware
enable_request_id_headers disable_fastapi_docs h11_max_incomplete_event_size h11_max_header_count
enable_offline_docs enable_flash_late_interaction disable_frontend_multiprocessing api_server_count headless
config shutdown_timeout
""".split()


def names(cls: type) -> set[str]:
    return {spec.name for spec in fields(cls)}


def served(*words: str) -> tuple[EngineConfig, ServerConfig]:
    args = build_parser("serve").parse_args(["serve", *words])
    return config_from_args(args, EngineConfig), config_from_args(args, ServerConfig)


def test_every_name_is_known_once():
    engine, server = names(EngineConfig), names(ServerConfig)
    assert not ENGINE.keys() & SERVER.keys()
    assert not engine & ENGINE.keys() and not server & SERVER.keys()  # what has become ours is taken as such
    assert [n for n in ENGINE_ARGS if n not in engine | ENGINE.keys()] == []
    everywhere = engine | server | ENGINE.keys() | SERVER.keys()
    assert [n for n in FRONTEND_ARGS if n not in everywhere] == []
    flags = {
        flag
        for action in build_parser("serve")._subparsers._group_actions[0].choices["serve"]._actions
        for flag in action.option_strings
    }
    options = [n for n in ENGINE_ARGS + FRONTEND_ARGS if "--" + n.replace("_", "-") not in flags]
    assert options == []


def test_what_changes_nothing_is_taken_and_said(caplog):
    with caplog.at_level(logging.WARNING):
        config = make_config(
            EngineConfig,
            dict(
                trust_remote_code=True,
                tokenizer_mode="auto",
                compilation_config={"level": 3},
                guided_decoding_backend="xgrammar",
                structured_outputs_config={"backend": "outlines"},
                max_seq_len_to_capture=8192,
                disable_log_requests=True,
                ray_workers_use_nsight=True,
                limit_mm_per_prompt={"image": 0},
                served_model_name="m",
            ),
        )
    assert config == EngineConfig()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 10
    assert any(line.startswith("trust_remote_code=True changes nothing here: no code") for line in told)
    assert all("\n" not in line and " changes nothing here: " in line for line in told)


def test_what_asks_for_nothing_is_taken_silently(caplog):
    nothing = dict(
        quantization=None, hf_overrides={}, rope_scaling=None, enable_expert_parallel=False, task="auto",
        convert="none", config_format="hf", enable_chunked_prefill=True, nnodes=1, node_rank=0,
        trust_remote_code=False, max_loras=None, enable_elastic_ep=False, kv_transfer_config=None,
        logprobs_mode="raw_logprobs",
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        assert make_config(EngineConfig, nothing) == EngineConfig()
    assert not caplog.records


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (dict(hf_overrides="[1]"), "hf_overrides='[1]' is not valid: give a JSON object"),
        (dict(rope_theta=1e4, hf_overrides={"rope_theta": 2}), "rope_theta and hf_overrides say two things"),
        (dict(enable_chunked_prefill=False), "raise max_num_batched_tokens to max_model_len"),
        (dict(kv_transfer_config='{"kv_role": "kv_both"}'), "instances exchange no KV"),
        (dict(max_lora_rank=8), "max_lora_rank=8 is not supported: this version serves no adapters"),
        (dict(task="classify"), "task=classify is not supported: give runner='generate'"),
        (dict(nnodes=2), "nnodes=2 is not supported: ranks are processes of one machine"),
        (dict(task="embed", runner="generate"), "task and runner say two things: leave one out"),
        (dict(structured_outputs_config="{"), "structured_outputs_config={ is not JSON"),
        (dict(structured_outputs_config={"disable_any_whitespace": True}), "set it per request"),
        (dict(scheduler_cls="my.Scheduler"), "there are no plugins"),
        (dict(no_such_setting=1), "there is no setting no_such_setting"),
    ],
)
def test_what_there_is_not_is_refused_with_a_remedy(values, told):
    with pytest.raises(ConfigError) as caught:
        make_config(EngineConfig, values)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_other_names_of_ours():
    assert make_config(EngineConfig, {"task": "embed"}).runner == "pooling"
    assert make_config(EngineConfig, {"task": "embedding", "runner": "pooling"}).runner == "pooling"
    assert make_config(EngineConfig, {"convert": "embed"}).runner == "pooling"
    both = make_config(EngineConfig, {"rope_theta": 5.0, "rope_scaling": '{"factor": 2}'})
    assert both.hf_overrides == {"rope_theta": 5.0, "rope_scaling": {"factor": 2}}
    assert served("m", "--shutdown-timeout", "5")[1].drain_timeout == 5


def test_a_script_s_command_line():
    engine, server = served(
        "some/model", "-tp", "1", "-pp", "1", "-dp", "1", "-q", "fp8", "--max_model_len", "8k", "-O3",
        "--gpu_memory_utilization=0.8", "--no-enable-prefix-caching", "--enable-chunked-prefill",
        "--trust-remote-code", "--disable-log-requests", "--tokenizer-mode", "auto",
        "--structured-outputs-config.backend", "xgrammar", "--compilation-config", '{"level": 3}',
        "--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens=3",
        "--allowed-origins", '["https://a.example"]', "--served-model-name", "a", "b",
        "--uvicorn-log-level", "warning", "--default-chat-template-kwargs", '{"enable_thinking": false}',
        "--cuda-graph-sizes", "1", "2", "4", "--api-server-count", "1",
    )  # fmt: skip
    assert engine.model == "some/model" and engine.quantization == "fp8" and engine.max_model_len == 8000
    assert engine.gpu_memory_utilization == 0.8 and not engine.enable_prefix_caching
    assert engine.speculative is not None and engine.speculative.num_speculative_tokens == 3
    assert server.allowed_origins == ["https://a.example"] and server.served_model_name == ["a", "b"]
    assert server.default_chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--lora-modules", "a=b", "c=d"], "lora_modules"),
        (
            ["--no-enable-chunked-prefill"],
            "enable_chunked_prefill=False is not supported: prompts are always",
        ),
        (["--grpc"], "grpc=True is not supported: give --host and --port"),
        (["--enable-lora"], "enable_lora=True is not supported"),
        (["--allowed-origins", "[1]"], "allowed_origins='[1]' is not valid"),
    ],
)
def test_a_command_line_is_refused_in_one_line(words, told, capsys):
    assert main(["serve", "no/model", *words]) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1


def test_a_misspelt_option_is_told_the_nearest(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "no/model", "--max_modle_len", "5"])
    assert "did you mean --max-model-len?" in capsys.readouterr().err


def test_no_foreign_option_is_shown(capsys):
    with pytest.raises(SystemExit):
        build_parser("serve").parse_args(["serve", "--help"])
    shown = capsys.readouterr().out
    assert "--tensor-parallel-size" in shown and "-tp" in shown
    assert "--compilation-config" not in shown and "SUPPRESS" not in shown


def test_words_that_are_no_options_stay():
    options = {"--max-model-len", "--speculative-config", "--a_b"}
    assert normalized(["serve", "a_b", "--a_b", "--max_model_len=1_0", "--", "--max_model_len"], options) == [
        "serve", "a_b", "--a_b", "--max-model-len=1_0", "--", "--max_model_len",
    ]  # fmt: skip
    assert normalized(
        ["--speculative_config.a.b", "1", "x", "--speculative-config.a.c=y", "--speculative-config.on"],
        options,
    ) == ["--speculative-config", '{"a": {"b": 1, "c": "y"}, "on": true}', "x"]
    assert normalized(["--other.a", "1", "-m_x"], options) == ["--other.a", "1", "-m_x"]


def test_every_command_takes_them():
    for command in ("generate", "chat", "eval", "plan", "run-batch"):
        parser = build_parser(command)
        assert isinstance(parser, argparse.ArgumentParser)
    assert main(["plan", "no/such", "--max-lora-rank", "8"]) == 2


# The fields of vLLM's SamplingParams, 0.6 to 0.14.
SAMPLING = """
n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop stop_token_ids
ignore_eos max_tokens min_tokens logprobs prompt_logprobs detokenize skip_special_tokens
spaces_between_special_tokens include_stop_str_in_output truncate_prompt_tokens output_kind structured_outputs
logit_bias allowed_token_ids extra_args bad_words best_of use_beam_search length_penalty early_stopping
logits_processors guided_decoding flat_logprobs skip_reading_prefix_cache thinking_token_budget
repetition_detection skip_clone
""".split()


def test_every_sampling_setting_is_known():
    assert (
        SamplingParams(**dict.fromkeys(set(SAMPLING) - {"max_tokens"} - set(names_with_values()))) is not None
    )


def names_with_values() -> list[str]:
    """Fields that vLLM, too, doesn't take None for."""
    return [n for n in SAMPLING if getattr(SamplingParams(), n, None) is not None]


def test_sampling_settings_that_ask_for_nothing():
    params = SamplingParams(
        best_of=1, use_beam_search=False, length_penalty=1.0, early_stopping=False, logits_processors=None,
        extra_args={}, flat_logprobs=False, temperature=0.5, spaces_between_special_tokens=True,
    )  # fmt: skip
    assert params == SamplingParams(temperature=0.5)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (dict(best_of=3), "best_of=3 is not supported: give n, and choose among the answers"),
        (dict(use_beam_search=True), "there is no beam search"),
        (dict(logits_processors=[len]), "give logit_bias, allowed_token_ids"),
        (dict(extra_args={"a": 1}), "extra_args={'a': 1} is not supported"),
        (dict(temprature=1), "SamplingParams has no field temprature: did you mean temperature?"),
        (dict(truncate_prompt_tokens=0), "truncate_prompt_tokens=0 is not valid"),
        (dict(guided_decoding={"json": {}, "regex": "a"}), "structured_outputs has json and regex"),
        (dict(guided_decoding={"regex": "a"}, structured_outputs={"regex": "b"}), "say two things"),
    ],
)
def test_sampling_settings_that_are_refused(fields, told):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_sampling_settings_come_by_name():
    with pytest.raises(RequestError, match="give its fields by name"):
        SamplingParams(0.5)


def test_the_earlier_name_of_structured_outputs(caplog):
    from octavo import GuidedDecodingParams

    with caplog.at_level(logging.WARNING):
        form = GuidedDecodingParams(regex="a+", backend="xgrammar", whitespace_pattern=None)
    assert form == StructuredOutputsParams(regex="a+")
    assert "backend=xgrammar changes nothing here" in caplog.text
    assert SamplingParams(guided_decoding=form).structured_outputs == form
    with pytest.raises(RequestError, match="additionalProperties: false"):
        GuidedDecodingParams(json={}, disable_additional_properties=True)


def test_engine_args():
    from dataclasses import asdict

    from octavo import AsyncEngineArgs, EngineArgs

    args = EngineArgs("m", max_model_len=128, trust_remote_code=True)
    assert isinstance(args, EngineConfig) and args.max_model_len == 128
    assert EngineConfig(**asdict(args)) == EngineConfig(**asdict(EngineArgs(model="m", max_model_len="128")))
    parser = AsyncEngineArgs.add_cli_args(argparse.ArgumentParser())
    read = AsyncEngineArgs.from_cli_args(
        parser.parse_args(["--model", "m", "--max-model-len", "9", "-tp", "1"])
    )
    assert isinstance(read, AsyncEngineArgs) and (read.model, read.max_model_len) == ("m", 9)
    with pytest.raises(ConfigError, match="did you mean max_model_len"):
        EngineArgs(max_modle_len=5)


def test_names_that_are_not_there_say_what_is():
    with pytest.raises(
        ImportError, match="octavo has no LLMEngine: use LLM for results at once, or AsyncLLM"
    ):
        from octavo import LLMEngine  # noqa: F401
