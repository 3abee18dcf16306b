"""The vocabulary's two matrices, both split over ranks by tokens: embedding and output head."""

from __future__ import annotations

from functools import partial

import torch

from octavo.layers.layer import BuildContext, Layer, LoadTarget, matrix_targets
from octavo.parallel.state import TensorParallelGroup
from octavo.quantization.embedding_method import EmbeddingMethod, embedding_method
from octavo.quantization.linear_method import LinearMethod, MatrixPart, Shard


def vocab_range(vocab_size: int, group: TensorParallelGroup) -> tuple[int, int, int]:
    """Of a vocabulary padded to a multiple of the ranks: rows per rank, this rank's first token, and how many
    of its rows are real tokens (the rest, at the end, are padding). A rank's rows are a multiple of 8, which
    formats pack into a word."""
    if group.size == 1:
        return vocab_size, 0, vocab_size
    rows = -(-vocab_size // (8 * group.size)) * 8
    first = min(group.rank * rows, vocab_size)
    return rows, first, min(rows, vocab_size - first)


class VocabEmbedding(Layer):
    """Token ids int `[rows]` to vectors `[rows, hidden_size]`; a rank looks up its own tokens only.

    Args:
        scale: factor of the vectors.
    """

    method: EmbeddingMethod
    group: TensorParallelGroup

    def __init__(self, vocab_size: int, hidden_size: int, scale: float = 1.0):
        super().__init__()
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.scale = scale

    def create_weights(self, build: BuildContext, prefix: str) -> None:
        self.group = build.group
        # Rounded to the model's dtype, as Gemma is trained; Granite's factors are exact in each.
        self.scale = float(torch.tensor(self.scale, dtype=build.dtype))
        self.rows, self.first, self.real = vocab_range(self.vocab_size, build.group)
        self.method = embedding_method(build.linear_method(prefix))
        self.method.create_weights(self, self.rows, self.hidden_size, build.dtype, build.device)

    def load_targets(self, prefix: str) -> dict[str, LoadTarget]:
        part = self.method.part(prefix, self.vocab_size, self.hidden_size)
        load = partial(_load_tokens, self, part)
        return matrix_targets(prefix, part, load, [_tokens(self)], self.method.keeps)

    def process_after_load(self) -> None:
        self.method.finish_embedding(self)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        vectors = self._look_up(token_ids)
        return vectors if self.scale == 1.0 else vectors * self.scale

    def _look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return self.method.look_up(self, token_ids)
        return self.group.all_reduce(self.method.look_up_part(self, token_ids, self.first, self.rows))


class LMHead(Layer):
    """Hidden states `[rows, hidden_size]` to logits `[rows, vocab_size]`, in the hidden states' dtype.

    Args:
        tied_to: the embedding whose matrix is the output matrix too. A checkpoint that stores a head
            all the same is believed: the matrices are shared if they are equal, as Transformers
            does, and separate otherwise.
    """

    method: LinearMethod
    group: TensorParallelGroup

    def __init__(self, vocab_size: int, hidden_size: int, tied_to: VocabEmbedding | None = None):
        super().__init__()
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self._has_own = False
        # In a tuple, so that the embedding is not registered (and named) a second time.
        self._tied_to: tuple[VocabEmbedding | None] = (tied_to,)

    @property
    def tied_to(self) -> VocabEmbedding | None:
        """The embedding whose matrix this head uses, if any."""
        return self._tied_to[0]

    def tie_to(self, embedding: VocabEmbedding) -> None:
        """Use another embedding's matrix than the constructor was given, before the weights are made."""
        self._tied_to = (embedding,)

    def create_weights(self, build: BuildContext, prefix: str) -> None:
        self.group = build.group
        self.rows, self.first, self.real = vocab_range(self.vocab_size, build.group)
        self.method = build.linear_method(prefix) if self.tied_to is None else self.tied_to.method
        self._create_own = partial(
            self.method.create_weights, self, self.rows, self.hidden_size, build.dtype, build.device
        )
        if self.tied_to is None:
            self._create_own()

    def load_targets(self, prefix: str) -> dict[str, LoadTarget]:
        part = self.method.part(prefix, self.vocab_size, self.hidden_size)
        optional = self.tied_to is not None
        load = partial(self._load, part)
        return matrix_targets(prefix, part, load, [_tokens(self)], self.method.keeps, optional)

    def _load(self, part: MatrixPart, name: str, tensor: torch.Tensor) -> None:
        if self.tied_to is not None and not self._has_own:
            self._create_own()
        self._has_own = True
        _load_tokens(self, part, name, tensor)

    def process_after_load(self) -> None:
        if self.tied_to is not None:
            method = self.tied_to.method
            if not self._has_own or method.same(self, self.tied_to):
                method.share(self, self.tied_to)
        self.method.process_after_load(self)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.gather(self.local(hidden))

    def local(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of this rank's tokens, and of what pads them: `[rows, self.rows]`."""
        return self.method.apply(self, hidden, None)

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Logits of all tokens, of every rank's `local` (or what was computed of each of these alone)."""
        logits = self.group.all_gather(local)
        return logits if logits.shape[-1] == self.vocab_size else logits[..., : self.vocab_size]

    def argmax(self, local: torch.Tensor) -> torch.Tensor:
        """The likeliest token of each row, integers `[rows]`: that of `gather(local)`, which isn't made."""
        if self.real < self.rows:
            local = local[:, : self.real]
        if not self.real:  # all tokens are other ranks'
            local = torch.full((len(local), 1), float("-inf"), dtype=local.dtype, device=local.device)
        return self.group.argmax(local, self.first)


def _load_tokens(layer: VocabEmbedding | LMHead, part: MatrixPart, name: str, tensor: torch.Tensor) -> None:
    """This rank's tokens of a checkpoint's tensor; those that only pad the vocabulary are zero."""
    if layer.real < layer.rows:
        for parameter in layer.parameters(recurse=False):
            parameter[layer.real :].zero_()
    part.load_shard(layer, name, tensor, _tokens(layer))


def _tokens(layer: VocabEmbedding | LMHead) -> Shard:
    """This rank's tokens."""
    return Shard(0, layer.first, layer.real, 0, layer.hidden_size)
