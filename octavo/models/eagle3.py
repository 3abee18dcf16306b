"""EAGLE-3 (Li et al., 2025, https://arxiv.org/abs/2503.01840): one layer that drafts from its target's hidden
states.

A row of position p reads the token of p + 1 and a hidden state of p: the target's, where it has computed it,
else what the head itself made of the row before. It predicts the token of p + 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from octavo.errors import ModelError
from octavo.layers.attention import AttentionMetadata
from octavo.layers.embedding import LMHead, VocabEmbedding
from octavo.layers.layer import BuildContext, Layer, LoadTarget
from octavo.layers.linear import QKVParallelLinear, ReplicatedLinear
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import RotaryEmbedding
from octavo.layers.sublayer import DecoderLayer
from octavo.models.aliases import AliasTargets
from octavo.models.config import ModelConfig
from octavo.models.eagle3_config import Eagle3Config
from octavo.models.interface import CausalLM
from octavo.models.llama import LlamaAttention, LlamaMLP, rms_norm
from octavo.models.targets import Targets
from octavo.quantization.stored_tensor import INTEGERS


class DraftVocabulary(Layer):
    """Which of the target's tokens the head's logits stand for: `target_ids`, int64 `[draft_vocab_size]`.

    A checkpoint has the differences of the two ids (`d2t`), and none where it drafts all tokens. What else it
    says of them (`t2d`) follows.
    """

    target_ids: torch.Tensor

    def __init__(self, draft_size: int, target_size: int):
        super().__init__()
        self.draft_size, self.target_size = draft_size, target_size

    @property
    def whole(self) -> bool:
        """Whether it drafts all of the target's tokens, under the same ids."""
        return self.draft_size == self.target_size

    def create_weights(self, build: BuildContext, prefix: str) -> None:
        self.register_buffer("target_ids", torch.arange(self.draft_size, device=build.device))

    def load_targets(self, prefix: str) -> dict[str, LoadTarget]:
        load = self._pass if self.whole else self._load
        zeros: torch.dtype = torch.int64
        d2t = LoadTarget(
            (self.draft_size,), load, self.whole, dtypes=INTEGERS, dummy=lambda x, std: (x * 0).to(zeros)
        )
        t2d = LoadTarget((self.target_size,), self._pass, True, dtypes=INTEGERS | {torch.bool, torch.uint8})
        return {"d2t": d2t, "t2d": t2d}

    def _pass(self, tensor: torch.Tensor) -> None:
        """Nothing that isn't known."""

    def _load(self, tensor: torch.Tensor) -> None:
        ids = torch.arange(self.draft_size) + tensor.cpu().long()
        bad = (ids < 0) | (ids >= self.target_size)
        if bool(bad.any()):
            place = int(bad.nonzero()[0, 0])
            raise ModelError(
                f"weights: d2t makes draft token {place} the target's {int(ids[place])}, and that has "
                f"{self.target_size} tokens: use a head for this model"
            )
        if len(ids.unique()) < len(ids):
            raise ModelError("weights: d2t gives one target token to two draft tokens: fetch the head again")
        self.target_ids.copy_(ids)


class Eagle3Attention(LlamaAttention):
    """Grouped-query self-attention over embedding and hidden state, `[rows, 2 * hidden_size]`."""

    def __init__(self, config: ModelConfig, layer: int, rotary: RotaryEmbedding):
        super().__init__(config, layer, rotary)
        self.qkv_proj = QKVParallelLinear(
            2 * config.hidden_size,
            config.head_dim,
            config.num_heads,
            config.num_kv_heads,
            bias=config.attention_bias,
        )


class Eagle3Layer(DecoderLayer):
    """The head's only layer."""

    is_last = True

    def __init__(self, config: Eagle3Config, rotary: RotaryEmbedding):
        super().__init__()
        self.input_layernorm = rms_norm(config)
        self.hidden_norm = rms_norm(config)
        self.self_attn = Eagle3Attention(config, 0, rotary)
        self.post_attention_layernorm = rms_norm(config)
        self.mlp = LlamaMLP(config)
        self.norm_before_residual = config.norm_before_residual

    def forward(
        self,
        embedding: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        meta: Sequence[AttentionMetadata],
    ) -> torch.Tensor:
        normal = self.hidden_norm(hidden)
        both = torch.cat((self.input_layernorm(embedding), normal), dim=-1)
        residual = self.narrow(normal if self.norm_before_residual else hidden, meta)
        x = self.narrow(self.self_attn(both, positions, cache, meta), meta)
        x, residual = self.mlp.after(self.post_attention_layernorm, x, residual)
        return x + residual


class Eagle3Head(CausalLM):
    """The head: `combine` makes rows of the target's hidden states, `forward` runs the layer over rows."""

    narrows = True
    config: Eagle3Config

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.config = config
        size = config.target_hidden_size
        self.input_norm = RMSNorm(3 * size, config.rms_norm_eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(
            RMSNorm(size, config.rms_norm_eps) for _ in range(3 if config.fc_norm else 0)
        )
        self.fc = ReplicatedLinear(3 * size, config.hidden_size)
        self.rotary_emb = RotaryEmbedding(config.rope, config.max_position_embeddings)
        self.midlayer = Eagle3Layer(config, self.rotary_emb)
        self.norm = rms_norm(config)
        self.lm_head = LMHead(config.draft_vocab_size, config.hidden_size)
        self.vocabulary = DraftVocabulary(config.draft_vocab_size, config.vocab_size)
        self.embed_tokens: VocabEmbedding | None = None
        if config.own_embedding:
            self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size)
        # In a tuple, so that the target's is not registered here, too.
        self._embedding: tuple[VocabEmbedding | None] = (self.embed_tokens,)

    def share_embedding(self, embedding: VocabEmbedding) -> None:
        """Use the target's embedding, unless the head has one."""
        if self.embed_tokens is None:
            self._embedding = (embedding,)

    def combine(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Hidden states `[rows, hidden_size]` of the target's three, `[rows, target_hidden_size]` each."""
        if self.fc_norm:
            states = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
        joined = torch.cat(tuple(states), dim=-1)
        return self.fc(joined if self.input_norm is None else self.input_norm(joined))

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        meta: Sequence[AttentionMetadata],
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What the layer makes of rows, before the norm: `[rows, hidden_size]`, of all or those wanted.

        Args:
            token_ids: of the position after each row's.
            hidden: `[rows, hidden_size]`, of `combine` or of an earlier row (`fed_back`); may be overwritten.
        """
        (embedding,) = self._embedding
        assert embedding is not None and hidden is not None
        return self.midlayer(embedding(token_ids), hidden, positions, kv_caches[0], meta)

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[rows, draft_vocab_size]` of what `forward` returned, of the tokens
        `vocabulary.target_ids`."""
        return self.lm_head(self.norm(hidden) if self.config.norms_logits else hidden)

    def fed_back(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden state of the next row."""
        return self.norm(hidden) if self.config.feeds_norm else hidden

    def checkpoint_targets(self, targets: dict[str, LoadTarget]) -> Targets:
        """Under EAGLE's names, or speculators', with or without `model.` before them."""

        def rename(name: str, known: dict[str, LoadTarget]) -> str:
            name = name.removeprefix("model.")
            return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name

        return AliasTargets(targets, rename)
