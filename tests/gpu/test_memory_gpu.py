"""The memory plan against what a GPU holds, for models of real sizes with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.config import EngineConfig
from octavo.models.locate import configured_model
from octavo.planning.ledger import DEVICE_KINDS
from octavo.planning.machines import planned_machine
from octavo.planning.plan import Planner
from octavo.sampling_params import SamplingParams
from octavo.worker.worker import Worker

pytestmark = pytest.mark.gpu
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_QWEN = {
    **_LLAMA,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("shape", [_LLAMA, _QWEN], ids=["llama-8b", "qwen3-0.6b"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_the_plan_is_within_3_percent(shape: dict[str, Any], kv_cache_dtype: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = EngineConfig(
        model=str(tmp_path),
        load_format="dummy",
        skip_tokenizer_init=True,
        device="cuda",
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=64,
    )
    torch.cuda.init()  # so that what the driver takes is there before either looks
    torch.zeros(1, device="cuda")
    plan = Planner(configured_model(config)).plan(config, planned_machine("cuda", None))
    worker = Worker(config)
    try:
        measured = worker.facts.memory
        total = measured["total"]
        print({kind: (plan.ledger.held.get(kind), measured.get(kind)) for kind in DEVICE_KINDS})
        assert sum(measured.get(kind, 0) for kind in DEVICE_KINDS) == total
        assert plan.ledger.held["weights"] == pytest.approx(measured["weights"], rel=0.03)
        assert plan.ledger.held["kv_cache"] == pytest.approx(measured["kv_cache"], rel=0.03)
        assert plan.ledger.held["tables"] == pytest.approx(measured["tables"], rel=0.03)
        assert plan.fit.num_blocks == pytest.approx(worker.facts.num_blocks, rel=0.03)
        for kind in ("activations", "other", "graphs"):  # small ones by their share of the device
            assert abs(plan.ledger.held[kind] - measured.get(kind, 0)) <= 0.03 * total, kind
        # A few recorded sizes take what they take; the plan has all of them.
        for requests in (1, 8, 64):
            step, _ = worker.first_step(np.ones(requests, np.int32), SamplingParams(max_tokens=4))
            for _ in range(2):
                worker.execute(step).wait()
                step.admissions = []
        print("graphs", worker.graph_bytes, "planned for all sizes", plan.ledger.held["graphs"])
        assert 0 < worker.graph_bytes <= max(2 * plan.ledger.held["graphs"], 0.03 * total)
    finally:
        worker.close()
