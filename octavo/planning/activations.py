"""The most memory that one step's tensors take at once, by formula."""

from __future__ import annotations

from octavo.models.config import ModelConfig
from octavo.sampling.logprobs import SLICE_ELEMENTS

# Of a slice of logits that is sorted for top_p: copies in float32 (2), sorted values (1), and of these in
# float64 their distances, exponentials and sums (`octavo.sampling.filters.device_thresholds`).
_SAMPLER_BYTES = 4 * 3 + 8 * 4


def step_bytes(
    model: ModelConfig,
    rows: int,
    requests: int,
    itemsize: int,
    ranks: int = 1,
    whole_experts: bool = False,
) -> int:
    """Bytes of the largest step, all its rows prompt tokens, each request sampled with top_p.

    The residual stream and the normed rows are there throughout; beside them either attention's or the
    feed-forward's tensors, and at the end logits and what the sampler makes of them.

    Args:
        rows: tokens of the step.
        requests: rows that are sampled.
        itemsize: bytes of an activation.
        ranks: tensor-parallel ranks, over which heads and inner sizes are split.
        whole_experts: whether routed experts are not: then all of a row's may be one rank's.
    """
    hidden = model.hidden_size
    stream = 3 * hidden
    width = max(_attention(model, ranks), _feed_forward(model, ranks, whole_experts))
    forward = rows * (stream + width) * itemsize
    logits = requests * model.vocab_size
    sampler = logits * itemsize + min(logits, SLICE_ELEMENTS) * _SAMPLER_BYTES
    return max(forward, sampler + rows * 2 * hidden * itemsize)


def expanded_bytes(model: ModelConfig, itemsize: int, ranks: int = 1) -> int:
    """Bytes of a layer's largest matrix in the activations' type: many rows are multiplied with weights of 8
    or 4 bits, beside activations that keep theirs, by expanding them on a GPU, one matrix at a time.

    Args:
        itemsize: bytes of an activation.
        ranks: as for `step_bytes`.
    """
    heads = model.num_heads + 2 * model.num_kv_heads
    inner = [2 * model.intermediate_size, heads * model.head_dim]
    if model.moe is not None:
        inner += [2 * model.moe.shared_size, 2 * model.moe.expert_size]
    return -(-max(inner) // ranks) * model.hidden_size * itemsize


def recorded_bytes(model: ModelConfig, rows: int, itemsize: int, ranks: int = 1) -> int:
    """Bytes of the tensors of a CPU's recorded decode steps, which share them: those of the largest.

    Args:
        rows: of the largest.
        itemsize: bytes of an activation.
        ranks: as for `step_bytes`.
    """
    width = max(_attention(model, ranks), _feed_forward(model, ranks, False))
    hidden = model.hidden_size
    return rows * max(3 * hidden + width, 2 * hidden + model.vocab_size) * itemsize


def _attention(model: ModelConfig, ranks: int) -> int:
    """Elements per row of projections, attention's output and its projection."""
    heads = -(-model.num_heads // ranks)
    if model.latent is not None:
        latent = model.latent
        stored = latent.kv_rank + latent.rope_dim
        # Queries, those taken into the latent space, attended vectors there, and values.
        per_head = latent.nope_dim + latent.rope_dim + stored + latent.kv_rank + latent.value_dim
        return heads * per_head + stored + (latent.q_rank or 0) + model.hidden_size
    kv_heads = max(1, model.num_kv_heads // ranks)
    return (2 * heads + 2 * kv_heads) * model.head_dim + model.hidden_size


def _feed_forward(model: ModelConfig, ranks: int, whole_experts: bool) -> int:
    """Elements per row of gate and up, their product, and what comes out."""
    inner = 3 * -(-model.intermediate_size // ranks) + model.hidden_size
    if model.moe is None:
        return inner
    moe = model.moe
    routed = moe.top_k * (3 * -(-moe.expert_size // (1 if whole_experts else ranks)) + model.hidden_size)
    shared = 3 * -(-moe.shared_size // ranks)
    return max(routed + shared + model.hidden_size, inner if len(moe.layers) < model.num_layers else 0)
