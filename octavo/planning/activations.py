"""The most memory that one step's tensors take at once, by formula."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models.config import ModelConfig
from octavo.quantization.linear_method import ProductMemory
from octavo.sampling.filters import HOST_ELEMENTS
from octavo.sampling.logprobs import SLICE_ELEMENTS
from octavo.worker.model_runner import LENT_ROWS

# Of a slice of logits that is sorted for top_p: copies in float32 (2), sorted values (1), and of these in
# float64 their distances, exponentials and sums (`octavo.sampling.filters.device_thresholds`).
_SAMPLER_BYTES = 4 * 3 + 8 * 4
# On a CPU copies in float32 (processed, and scaled), and of the rows that are drawn at once much more.
_HOST_COPIES, _HOST_DRAW_BYTES = 4 * 2, 64


@dataclass(frozen=True)
class StepSize:
    """What the tensors of a model's steps depend on, beside the numbers of rows.

    Attributes:
        itemsize: bytes of an activation.
        ranks: tensor-parallel ranks, over which heads and inner sizes are split.
        whole_experts: whether routed experts are not: then all of a row's may be one rank's.
        products: what the layers' products need.
        on_cpu: whether the CPU's kernels run them.
    """

    model: ModelConfig
    itemsize: int
    ranks: int = 1
    whole_experts: bool = False
    products: ProductMemory = ProductMemory()
    on_cpu: bool = False

    def step_bytes(self, rows: int, requests: int) -> int:
        """Bytes of the largest step, all its rows prompt tokens, each request sampled with top_p.

        The residual stream and the normed rows are there throughout; beside them either attention's or the
        feed-forward's tensors, and at the end logits and what the sampler makes of them.

        Args:
            rows: tokens of the step.
            requests: rows that are sampled.
        """
        forward = self.layers_bytes(rows) + self._code_bytes(rows)
        logits = requests * self.model.vocab_size
        sampler = logits * self.itemsize
        if not self.on_cpu:
            sampler += min(logits, SLICE_ELEMENTS) * _SAMPLER_BYTES
            return max(forward, sampler + rows * 2 * self.model.hidden_size * self.itemsize)
        sampler += min(logits, SLICE_ELEMENTS) * _HOST_COPIES
        sampler += min(logits, max(HOST_ELEMENTS, self.model.vocab_size)) * _HOST_DRAW_BYTES
        # Tensors of many rows keep their memory for the next step.
        return forward + sampler if rows >= LENT_ROWS else max(forward, sampler)

    def expanded_bytes(self) -> int:
        """Bytes of a layer's largest matrix in the activations' type: many rows are multiplied with weights
        of 8 or 4 bits, beside activations that keep theirs, by expanding them on a GPU, one matrix at a time.
        """
        model = self.model
        heads = model.num_heads + 2 * model.num_kv_heads
        inner = [2 * model.intermediate_size, heads * model.head_dim]
        if model.moe is not None:
            inner += [2 * model.moe.shared_size, 2 * model.moe.expert_size]
        return -(-max(inner) // self.ranks) * model.hidden_size * self.itemsize

    def recorded_bytes(self, rows: int) -> int:
        """Bytes of the tensors of a CPU's recorded decode steps, which share them: those of the largest, of
        so many rows."""
        head = 2 * self.model.hidden_size + self.model.vocab_size
        return max(self.layers_bytes(rows), rows * head * self.itemsize)

    def layers_bytes(self, rows: int) -> int:
        """Bytes of the layers' tensors that are there at once in a step of so many rows."""
        if self.on_cpu and self.model.latent is None and self.model.moe is None:
            return rows * self._cpu_layers(rows) * self.itemsize
        # The stream, what was added to it last and is added next, and the normed rows.
        width = 3 * self.model.hidden_size + max(self._attention(), self._feed_forward(rows))
        return rows * width * self.itemsize

    def _code_bytes(self, rows: int) -> int:
        """Bytes of so many rows as products have them. On a CPU they are kept for the widest, and the
        allocator keeps what they outgrew."""
        inner = -(-self.model.intermediate_size // self.ranks)
        others = max(self.model.hidden_size, self._heads()[0])
        kept = others if self.on_cpu and inner > others else 0
        return rows * (kept + max(inner, others)) * self.products.codes

    def _heads(self) -> tuple[int, int]:
        """Elements per row of queries, and of keys."""
        model = self.model
        keys = max(1, model.num_kv_heads // self.ranks)
        return -(-model.num_heads // self.ranks) * model.head_dim, keys * model.head_dim

    def _cpu_layers(self, rows: int) -> int:
        """Elements per row that a CPU's layers reach where each tensor takes the first gap that is large
        enough (`octavo.kernels.cpu.step_memory`), in the order in which two layers make and leave them."""
        hidden, (queries, keys) = self.model.hidden_size, self._heads()
        inner, copies = -(-self.model.intermediate_size // self.ranks), self._gate_copies(rows)
        row = _Row()
        row.make(stream=hidden)
        for _ in range(2):
            row.make(normed=hidden, product=queries + 2 * keys)
            row.leave("normed")
            if self.model.qk_norm:
                row.make(queries=queries, keys=keys)
                row.leave("keys")
            row.make(attended=queries)
            row.leave("queries")
            row.make(added=hidden)
            row.leave("product", "attended")
            row.make(normed=hidden)
            if copies == 4:
                row.make(pieces=2 * inner)
            if copies >= 3:
                row.make(gates=2 * inner)
                row.leave("pieces")
            row.make(inner=inner)
            row.leave("gates", "normed")
            row.make(next=hidden)
            row.leave("inner", "added", "last")
            row.rename("next", "last")
        return row.reached

    def _attention(self) -> int:
        """Elements per row of projections, attention's output and its projection."""
        model = self.model
        heads = -(-model.num_heads // self.ranks)
        if model.latent is not None:
            latent = model.latent
            stored = latent.kv_rank + latent.rope_dim
            # Queries, those taken into the latent space, attended vectors there, and values.
            per_head = latent.nope_dim + latent.rope_dim + stored + latent.kv_rank + latent.value_dim
            return heads * per_head + stored + (latent.q_rank or 0) + model.hidden_size
        kv_heads = max(1, model.num_kv_heads // self.ranks)
        return (2 * heads + 2 * kv_heads) * model.head_dim + model.hidden_size

    def _gate_copies(self, rows: int) -> int:
        """See `ProductMemory.gate_copies`; 4 where gate and up are there twice."""
        copies = self.products.gate_copies
        return 4 if copies == 3 and rows > self.products.joined_rows else copies

    def _feed_forward(self, rows: int) -> int:
        """Elements per row of gate and up, their product, and what comes out."""
        model, ranks = self.model, self.ranks
        inner = self._gate_copies(rows) * -(-model.intermediate_size // ranks) + model.hidden_size
        if model.moe is None:
            return inner
        moe = model.moe
        split = 1 if self.whole_experts else ranks
        routed = moe.top_k * (3 * -(-moe.expert_size // split) + model.hidden_size)
        shared = 3 * -(-moe.shared_size // ranks)
        dense = inner if len(moe.layers) < model.num_layers else 0
        return max(routed + shared + model.hidden_size, dense)


class _Row:
    """Where tensors lie that each take the first gap that is large enough; sizes are numbers of a row."""

    def __init__(self) -> None:
        self._pieces: dict[str, tuple[int, int]] = {}  # by name: first number, and the one behind the last
        self.reached = 0

    def make(self, **sizes: int) -> None:
        """Make tensors of these sizes, one after the other."""
        for name, size in sizes.items():
            first = 0
            for begin, end in sorted(self._pieces.values()):
                if begin - first >= size:
                    break
                first = max(first, end)
            self._pieces[name] = first, first + size
            self.reached = max(self.reached, first + size)

    def leave(self, *names: str) -> None:
        """Leave tensors, if they are there."""
        for name in names:
            self._pieces.pop(name, None)

    def rename(self, old: str, new: str) -> None:
        """Call a tensor by another name."""
        self._pieces[new] = self._pieces.pop(old)
