"""What model the oracle is: its sizes and its options."""

import math
from dataclasses import dataclass

NORMS = ("rmsnorm", "layernorm")
GATED = ("swiglu", "geglu_tanh", "swiglu_clamped")
ACTIVATIONS = (*GATED, "gelu", "gelu_tanh")
ROPE_SCALINGS = ("linear", "llama3", "yarn")
ROUTER_SCORES = ("softmax", "softmax_after", "sigmoid")
_SIZES = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "ffn_size",
    "vocab_size",
)
_NOT_WITH_MLA = ("window", "sinks", "attention_softcap", "qk_norm", "qkv_bias", "mrope_section")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are slowed down for sequences longer than a model was trained on.

    Attributes:
        kind: `linear` divides all of them by `factor`; `llama3` and `yarn` only the slow ones,
            with a ramp between (see `reference.rope`).
        original_length: tokens that the model was first trained on; not for `linear`.
        low_freq_factor, high_freq_factor: of `llama3`, turns in `original_length` between which
            the ramp lies.
        beta_fast, beta_slow: the same of `yarn`, the other way round.
        truncate: `yarn` rounds the ends of its ramp to whole dims.
        attention_factor: of `yarn`, what cos and sin are multiplied by.
    """

    kind: str
    factor: float
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        _check_choice("rope_scaling.kind", self.kind, ROPE_SCALINGS)
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"rope_scaling.factor={self.factor} must be at least 1 and finite")
        if self.kind != "linear" and self.original_length < 1:
            raise ValueError(
                f"rope_scaling.original_length={self.original_length} must be at least 1 "
                f"for {self.kind}"
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope_scaling.low_freq_factor={self.low_freq_factor} must be above 0 and below "
                f"high_freq_factor={self.high_freq_factor}"
            )
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                f"rope_scaling.beta_slow={self.beta_slow} must be above 0 and below "
                f"beta_fast={self.beta_fast}"
            )
        if not 0 < self.attention_factor < math.inf:
            raise ValueError(
                f"rope_scaling.attention_factor={self.attention_factor} must be positive "
                "and finite"
            )


@dataclass(frozen=True, kw_only=True)
class MLA:
    """Multi-head latent attention: keys and values from one small vector per token.

    Attributes:
        q_lora_rank: size of the vector that queries are made from; 0 makes them from the stream.
        kv_lora_rank: size of the vector that keys and values are made from.
        qk_nope_head_dim, qk_rope_head_dim: dims of a head that do not turn and that do; the
            latter part of the key is the same for all heads.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            _check_size(f"mla.{name}", getattr(self, name))
        if self.q_lora_rank < 0:
            raise ValueError(f"mla.q_lora_rank={self.q_lora_rank} must be 0 (none) or more")


@dataclass(frozen=True, kw_only=True)
class MoE:
    """A mixture of experts in place of the MLP.

    Attributes:
        ffn_size: of one expert.
        num_dense_layers: layers before this one keep their MLP.
        score: what experts are chosen by. `softmax` over all of them, of which the chosen ones
            are taken; `softmax_after`, over the chosen ones alone; `sigmoid` of each.
        normalise: the scores of the chosen experts are divided by their sum.
        num_groups, top_groups: experts are chosen from the best `top_groups` of `num_groups`
            equal groups, a group being as good as its two best experts together.
        score_bias: a bias per expert takes part in the choice, not in the weight, and has no
            gradient (DeepSeek-V3's balance without a loss).
        router_bias, expert_bias: biases of the router and of the experts' matrices.
        routed_scale: the weights of the chosen experts are multiplied by it.
        shared_ffn_size: of an expert that every token passes through besides; 0 for none.
        aux_coeff: of the balance loss over each pack (Switch Transformer). seq_aux_coeff: of the
            balance loss over each sequence. z_coeff: of the router z loss.
    """

    num_experts: int
    top_k: int
    ffn_size: int
    num_dense_layers: int = 0
    score: str = "softmax"
    normalise: bool = False
    num_groups: int = 1
    top_groups: int = 1
    score_bias: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    routed_scale: float = 1.0
    shared_ffn_size: int = 0
    aux_coeff: float = 0.0
    seq_aux_coeff: float = 0.0
    z_coeff: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "ffn_size", "num_groups", "top_groups"):
            _check_size(f"moe.{name}", getattr(self, name))
        _check_choice("moe.score", self.score, ROUTER_SCORES)
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"moe.num_experts={self.num_experts} is not a multiple of "
                f"num_groups={self.num_groups}"
            )
        if self.top_groups > self.num_groups:
            raise ValueError(
                f"moe.top_groups={self.top_groups} is more than num_groups={self.num_groups}"
            )
        reachable = self.num_experts // self.num_groups * self.top_groups
        if self.top_k > reachable:
            raise ValueError(f"moe.top_k={self.top_k} is more than the {reachable} to choose from")
        if self.num_groups > 1 and self.num_experts // self.num_groups < 2:
            raise ValueError("moe.num_groups: a group has one expert; it needs two or more")
        for name in ("aux_coeff", "seq_aux_coeff", "z_coeff", "routed_scale"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"moe.{name}={getattr(self, name)} must be 0 or more, and finite")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A pre-norm decoder language model with rotary positions.

    Attributes:
        num_kv_heads: equal to `num_heads` for multi-head attention, 1 for multi-query.
        norm: `rmsnorm`, or `layernorm` with a bias. norm_zero_centred: RMSNorm scales by 1 plus
            its weight. post_norms: what attention and MLP give is normed too (Gemma 2).
        activation: `swiglu`, `geglu_tanh` and `swiglu_clamped` (gpt-oss) are gated; `gelu`
            (exact) and `gelu_tanh` are not.
        rope_interleaved: which two dims turn together: i and i + half (Llama, GPT-NeoX) when
            False, 2i and 2i + 1 (GPT-J) when True.
        rope_fraction: the first `int(head_dim * rope_fraction)` dims turn, the others stay.
        rope_local_theta: layers with a window turn with this theta, unscaled (Gemma 3).
        mrope_section: pairs that turn with time, height and width (Qwen2-VL). A text token has
            the same position in all three.
        window: a query sees this many keys, its own being the last; 0 for all.
        full_attention_every: every so manieth layer has no window; 0 for none.
        sinks: every head has a logit that takes part in its softmax and carries no value.
        softmax_scale: scores are multiplied by it; None means 1 / sqrt(head size).
        attention_softcap, logit_softcap: x becomes cap * tanh(x / cap); 0 for no cap.
        qk_norm: RMSNorm over `head_dim` on queries and keys before they turn (Qwen3).
        embedding_scale: embeddings are multiplied by it.
        tied: the output matrix is the embedding, and there is no `lm_head.weight`.
        mla: instead of grouped-query attention; `num_kv_heads` and `head_dim` say nothing then.
        moe: instead of the MLP.
        mtp_depth: further tokens predicted by modules of their own (DeepSeek-V3), the first
            being the one after the next. mtp_coeff: of their mean loss.
    Raises:
        ValueError: an option that is unknown, or sizes that do not fit each other.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    norm: str = "rmsnorm"
    norm_eps: float = 1e-5
    norm_zero_centred: bool = False
    post_norms: bool = False
    activation: str = "swiglu"
    rope_theta: float = 10000.0
    rope_interleaved: bool = False
    rope_fraction: float = 1.0
    rope_scaling: RopeScaling | None = None
    rope_local_theta: float | None = None
    mrope_section: tuple[int, ...] = ()
    window: int = 0
    full_attention_every: int = 0
    sinks: bool = False
    softmax_scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    qk_norm: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    embedding_scale: float = 1.0
    tied: bool = False
    mla: MLA | None = None
    moe: MoE | None = None
    mtp_depth: int = 0
    mtp_coeff: float = 0.3

    @property
    def rotary_dim(self) -> int:
        """How many of a head's dims turn with the position."""
        if self.mla is not None:
            return self.mla.qk_rope_head_dim
        return int(self.head_dim * self.rope_fraction)

    def has_window(self, layer: int) -> bool:
        """Whether a layer, counted from 0, sees only `window` tokens back."""
        every = self.full_attention_every
        return self.window > 0 and not (every and (layer + 1) % every == 0)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts; those after the last are of MTP."""
        return self.moe is not None and layer >= self.moe.num_dense_layers

    def __post_init__(self) -> None:
        for name in _SIZES:
            _check_size(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}; every KV head serves equally many query heads"
            )
        _check_choice("norm", self.norm, NORMS)
        _check_choice("activation", self.activation, ACTIVATIONS)
        for name in ("norm_eps", "rope_theta", "embedding_scale"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be positive and finite")
        for name in ("softmax_scale", "rope_local_theta"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be positive and finite, or None")
        for name in ("attention_softcap", "logit_softcap", "mtp_coeff"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value} must be 0 or more, and finite")
        for name in ("window", "full_attention_every", "mtp_depth"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name}={value!r} must be an integer of at least 0")
        if self.norm_zero_centred and self.norm != "rmsnorm":
            raise ValueError("norm_zero_centred=True needs norm='rmsnorm'")
        if not 0 < self.rope_fraction <= 1:
            raise ValueError(f"rope_fraction={self.rope_fraction} must be above 0 and at most 1")
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(
                f"rope_fraction={self.rope_fraction} turns {self.rotary_dim} of "
                f"head_dim={self.head_dim} dims; dims turn in pairs, so make that even, 2 or more"
            )
        if self.mrope_section and sum(self.mrope_section) != self.rotary_dim // 2:
            raise ValueError(
                f"mrope_section={self.mrope_section} adds up to {sum(self.mrope_section)}, not "
                f"to the {self.rotary_dim // 2} pairs that turn"
            )
        if self.moe is not None and self.activation not in GATED:
            raise ValueError(f"moe needs a gated activation: one of {', '.join(GATED)}")
        if self.mla is not None:
            for name in _NOT_WITH_MLA:
                if getattr(self, name):
                    raise ValueError(f"mla has no {name}={getattr(self, name)!r}; leave it out")


def _check_size(name: str, size: object) -> None:
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"{name}={size!r} must be an integer of at least 1")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(choices)}")
