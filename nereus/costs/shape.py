"""The sizes of a language model that time and memory depend on: Shape, its parameters, its matrices.

A Shape says less than a ModelSpec (no names, no types) and covers more: multi-head latent attention, shared experts and
dense first layers, which the planner must price even where the engines do not run them.
"""

from __future__ import annotations

from dataclasses import dataclass

from nereus.config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a decoder model. `ffn` is the dense MLP's width; experts have `expert_ffn`.

    `gated`: three MLP matrices instead of two. `positions`: rows of a learned position table (GPT, MPT). With
    `kv_latent_dim` the attention is DeepSeek's latent attention: keys and values are made from that many numbers plus
    `rope_dim` of rotated key. The first `dense_layers` layers of a model with experts have the dense MLP.

    Example: Shape(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256).
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    position_rows: int = 0
    expert_count: int = 0
    active_expert_count: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    q_latent_dim: int = 0
    kv_latent_dim: int = 0
    rope_dim: int = 0

    @property
    def expert_layers(self) -> int:
        """How many layers have experts."""
        return self.layers - self.dense_layers if self.expert_count else 0

    @property
    def query_dim(self) -> int:
        """Width of the attention's output over all heads."""
        return self.heads * self.head_dim

    @property
    def key_dim(self) -> int:
        """Width of the keys (or values) over all key heads."""
        return self.kv_heads * self.head_dim

    def attention_matrices(self, tp: int = 1) -> tuple[tuple[int, int], ...]:
        """(output, input) widths of a layer's attention projections on one of `tp` ranks."""
        if not self.kv_latent_dim:
            queries = self.query_dim // tp
            keys = max(self.key_dim // tp, self.head_dim)  # a key head is never cut: above kv_heads it is repeated
            return ((queries + 2 * keys, self.hidden), (self.hidden, queries))
        heads, down = self.heads // tp, self.kv_latent_dim + self.rope_dim
        turned = heads * (self.head_dim + self.rope_dim)
        ups = ((turned, self.q_latent_dim),) if self.q_latent_dim else ((turned, self.hidden),)
        first = (self.q_latent_dim + down, self.hidden) if self.q_latent_dim else (down, self.hidden)
        return (first, *ups, (2 * heads * self.head_dim, self.kv_latent_dim), (self.hidden, heads * self.head_dim))

    def mlp_matrices(self, width: int, tp: int = 1) -> tuple[tuple[int, int], ...]:
        """(output, input) widths of an MLP of this width on one of `tp` ranks."""
        up = (2 if self.gated else 1) * width // tp
        return ((up, self.hidden), (self.hidden, width // tp))

    @property
    def attention_parameters_count(self) -> int:
        """Parameters of a layer's attention."""
        return sum(out * into for out, into in self.attention_matrices())

    @property
    def dense_mlp_parameters_count(self) -> int:
        """Parameters of a dense layer's MLP."""
        return sum(out * into for out, into in self.mlp_matrices(self.ffn))

    @property
    def expert_parameters_count(self) -> int:
        """Parameters of one expert."""
        return sum(out * into for out, into in self.mlp_matrices(self.expert_ffn))

    @property
    def shared_parameters_count(self) -> int:
        """Parameters of an expert layer outside its routed experts' MLPs and its attention: shared expert, router."""
        shared = sum(out * into for out, into in self.mlp_matrices(self.shared_ffn)) if self.shared_ffn else 0
        return shared + self.hidden * self.expert_count

    @property
    def embedding_parameters_count(self) -> int:
        """Parameters of the token and position embeddings."""
        return (self.vocab + self.position_rows) * self.hidden

    @property
    def head_parameters_count(self) -> int:
        """Parameters of an output head of its own; 0 when tied to the embedding."""
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def parameters_count(self) -> int:
        """All parameters (norms, biases left out: below one in a thousand)."""
        return (
            self.embedding_parameters_count
            + self.head_parameters_count
            + self.layers * self.attention_parameters_count
            + (self.layers - self.expert_layers) * self.dense_mlp_parameters_count
            + self.expert_layers * (self.expert_count * self.expert_parameters_count + self.shared_parameters_count)
        )

    @property
    def active_parameters_count(self) -> int:
        """Parameters that a token meets in matrix products (the embedding table is looked up, the head is not)."""
        return (
            self.vocab * self.hidden
            + self.layers * self.attention_parameters_count
            + (self.layers - self.expert_layers) * self.dense_mlp_parameters_count
            + self.expert_layers
            * (self.active_expert_count * self.expert_parameters_count + self.shared_parameters_count)
        )


def shape_of(config: ModelConfig) -> Shape:
    """The shape of a configured model. Layers without experts are taken to come first, however they are spread."""
    return Shape(
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        ffn=config.ffn,
        vocab=config.vocab,
        tied=config.tie_embeddings,
        expert_count=config.experts,
        active_expert_count=config.experts_per_token,
        expert_ffn=config.expert_ffn,
        dense_layers=len(config.dense_layers) if config.experts else 0,
    )


def dense(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, *, head_dim: int = 0) -> Shape:
    """A Llama-like model: gated MLP, untied head."""
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        ffn=ffn,
        vocab=vocab,
    )


def gpt(layers: int, hidden: int, heads: int, vocab: int, *, position_rows: int = 0) -> Shape:
    """A GPT-3-like model: plain MLP of four times the width, tied head."""
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocab=vocab,
        gated=False,
        tied=True,
        position_rows=position_rows,
    )
