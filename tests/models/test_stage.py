"""A model in pipeline stages, one after the other in one process, against Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo.models.interface import CausalLM
from octavo.models.loader import iterate_weights, load_model_config
from octavo.models.loading import build_model, load_targets, load_weights
from octavo.models.locate import find_model
from octavo.models.stage import stage_part
from octavo.models.targets import canonical
from octavo.parallel.stages import divide_layers, read_partition
from octavo.worker.weight_bytes import kept_weight_bytes
from tests import tiny
from tests.models.parity import check


class Chain:
    """Stages that look like one model: what `tests.models.paged` asks of one."""

    def __init__(self, stages: list[CausalLM]):
        self.stages = stages

    def attention_layers(self) -> list[Any]:
        return [layer for stage in self.stages for layer in stage.attention_layers()]

    def kv_groups(self) -> list[Any]:
        return self.stages[0].kv_groups()

    def parameters(self) -> Any:
        return self.stages[0].parameters()

    def plan_attention(self, meta: Any) -> None:
        """Each stage plans for itself, before its own forward pass."""

    def __call__(self, rows: torch.Tensor, positions: torch.Tensor, caches: Any, meta: Any) -> torch.Tensor:
        for stage in self.stages:
            own, caches = caches[: len(stage.attention_layers())], caches[len(stage.attention_layers()) :]
            stage.plan_attention(meta)
            rows = stage(rows, positions, own, meta)
        assert not caches
        return rows

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.stages[-1].compute_logits(hidden)


def chain(path: Any, stages: int, partition: str | None = None) -> Chain:
    """The float32 stages of a folder or GGUF file; a parameter that nothing fills is NaN."""
    source = find_model(str(path))
    config = load_model_config(source)
    values: dict[str, Any] = dict(
        dtype=torch.float32, attention_backend="torch", max_model_len=tiny.CONTEXT, block_size=8
    )
    whole = build_model(config, device="meta", **values)
    models = []
    for number in range(stages):
        part = stage_part(whole, number, stages, partition)
        model = build_model(config, device="cpu", part=part, **values)
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        targets = load_targets(model)
        load_weights(
            model, iterate_weights(source, config, targets, "auto", torch.float32, "cpu", progress=False)
        )
        assert len(model.attention_layers()) == len(part.stage.layers)
        models.append(model)
    return Chain(models)


@pytest.mark.parametrize("variant", sorted(tiny.VARIANTS))
def test_hidden_states_through_stages_are_those_of_one(variant: str) -> None:
    layers = load_model_config(find_model(str(tiny.checkpoint(variant)))).num_layers
    check(chain(tiny.checkpoint(variant), 2), variant, chunk=17)  # type: ignore[arg-type]
    check(chain(tiny.checkpoint(variant), layers), variant)  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", ["llama", "gemma3", "qwen3-tied"])
def test_gguf_files_in_stages(variant: str, tmp_path: Any) -> None:
    file = tiny.gguf_file(variant, tmp_path / "tiny.gguf")
    check(chain(file, 2, "1,2"), variant)  # type: ignore[arg-type]


def test_a_stage_holds_no_more_than_its_own() -> None:
    whole = chain(tiny.checkpoint("llama"), 1).stages[0]
    first, last = chain(tiny.checkpoint("llama"), 2).stages
    names = [set(canonical(load_targets(model))) for model in (whole, first, last)]
    assert names[1] | names[2] == names[0]
    assert not names[1] & names[2]
    assert "lm_head.weight" in names[2] and "model.embed_tokens.weight" in names[1]
    sizes = [sum(kept_weight_bytes(model).values()) for model in (whole, first, last)]
    rotary = first.get_buffer("model.rotary_emb.cos_sin").nbytes  # which both need
    assert sizes[1] + sizes[2] == sizes[0] + rotary
    tied = chain(tiny.checkpoint("llama-tied"), 2).stages[1]
    assert "model.embed_tokens.weight" in canonical(load_targets(tied))


def test_a_tensor_of_a_stage_that_is_missing_is_missed_there_alone(tmp_path: Any) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    from octavo.errors import ModelError

    folder = tmp_path / "model"
    shutil.copytree(tiny.checkpoint("llama"), folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    del tensors["model.layers.2.mlp.down_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"model\.layers\.2\.mlp\.down_proj\.weight"):
        chain(folder, 2)
    tensors["model.layers.2.mlp.down_proj.weight"] = torch.zeros(64, 96)
    tensors["model.layers.7.mlp.down_proj.weight"] = torch.zeros(64, 96)
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"model\.layers\.7\.mlp\.down_proj\.weight.* has no place"):
        chain(folder, 2)


def test_models_that_run_other_code_are_refused() -> None:
    source = find_model(str(tiny.checkpoint("llama")))
    config = load_model_config(source, "transformers")
    whole = build_model(config, dtype=torch.float32, device="meta", attention_backend="torch")
    with pytest.raises(ConfigError, match="LlamaForCausalLM through Transformers' code cannot be divided"):
        stage_part(whole, 0, 2, None)


@pytest.mark.parametrize(
    "costs, head, stages, bounds",
    [
        ([1.0] * 4, 0.0, 2, (0, 2, 4)),
        ([1.0] * 32, 2.4, 2, (0, 17, 32)),  # Llama 3 8B: the head reads as much as 2.4 layers
        ([1.0] * 30, 8.0, 2, (0, 19, 30)),
        ([1.0] * 5, 0.0, 2, (0, 3, 5)),
        ([1.0] * 7, 0.0, 3, (0, 3, 5, 7)),
        ([1.0, 5.0, 1.0, 1.0], 0.0, 2, (0, 2, 4)),
        ([1.0] * 3, 100.0, 3, (0, 1, 2, 3)),
        ([1.0] * 3, 0.0, 1, (0, 3)),
    ],
)
def test_layers_are_divided_by_what_they_cost(costs: Any, head: float, stages: int, bounds: Any) -> None:
    assert divide_layers(costs, head, stages) == bounds


def test_divisions_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size=4 is more than the model's 3 layers"):
        divide_layers([1.0] * 3, 0.0, 4)
    assert read_partition("9, 7", 16, 2) == (0, 9, 16)
    for text, words in {
        "9,x": "give each stage's number of layers",
        "9,-7": "give each stage's number of layers",
        "0,16": "give each stage's number of layers",
        "": "give each stage's number of layers",
        "4,4,8": "names 3 stages and pipeline_parallel_size=2",
        "9,9": "has 18 layers and the model 16",
    }.items():
        with pytest.raises(ConfigError, match=words):
            read_partition(text, 16, 2)


@pytest.mark.parametrize(("requests", "context", "bounds"), [
    (0, 8192, (0, 17, 32)), (256, 8192, (0, 17, 32)), (512, 8192, (0, 16, 32)), (512, 64, (0, 17, 32)),
])  # fmt: skip
def test_what_steps_read_of_caches_counts(requests: int, context: int, bounds: tuple[int, ...]) -> None:
    """Llama 3 8B: 436 MB of weights a layer and 1051 of the head, 4 KiB a token and layer."""
    shape = Path(__file__).parents[2] / "benchmarks" / "shapes" / "llama-8b"
    config = load_model_config(find_model(str(shape)))
    whole = build_model(config, dtype=torch.bfloat16, device="meta", attention_backend="torch", block_size=16)
    assert stage_part(whole, 0, 2, None, requests, context).stage.bounds == bounds
