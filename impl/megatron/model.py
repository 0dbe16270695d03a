"""A GPTModel in float64 from a plain description, with exact attention in its layer specs."""

from __future__ import annotations

from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from ..parallel import ParallelLayout
from .gpt_config import GPTConfig
from .mla import check_mla_layout, knowing_of_te, make_mla_exact
from .mtp import add_mtp, check_mtp_layout
from .rope import rope_frequencies
from .settings import transformer_config
from .specs import block_spec

__all__ = ["GPTConfig", "build_gpt_chunks", "build_gpt_model", "check_divisible"]


def build_gpt_model(config: GPTConfig, *, max_seqlen: int) -> GPTModel:
    """The whole model on every rank; see `build_gpt_chunks`."""
    return build_gpt_chunks(config, max_seqlen=max_seqlen, layout=ParallelLayout())[0]


def build_gpt_chunks(
    config: GPTConfig, *, max_seqlen: int, layout: ParallelLayout
) -> list[GPTModel]:
    """This rank's model chunks on the CPU, one for each virtual pipeline stage.

    Every parameter, buffer and RoPE frequency is float64. Weights are not initialised to anything
    of use; `impl.megatron.weights` fills them. Call it inside `cpu_mode` and `model_parallel`; all
    chunks share one `TransformerConfig`.

    Raises:
        ValueError: sizes that do not divide evenly.
    """
    check_divisible(config, layout)
    settings = transformer_config(config, layout)
    stages = range(layout.vpp_size) if layout.vpp_size > 1 else (None,)
    return [_chunk(config, settings, max_seqlen, vp_stage) for vp_stage in stages]


def check_divisible(config: GPTConfig, layout: ParallelLayout) -> None:
    """Whether layers divide evenly over stages and chunks, and all else over TP ranks.

    Raises:
        ValueError: the first size that does not, by name; MLA or multi-token prediction in a
            layout without them.
    """
    check_mla_layout(config, layout)
    check_mtp_layout(config, layout)
    chunks = layout.pp_size * layout.vpp_size
    if config.num_layers % chunks:
        raise ValueError(
            f"num_layers={config.num_layers} is not a multiple of pp_size={layout.pp_size} * "
            f"vpp_size={layout.vpp_size}"
        )
    for name in ("num_heads", "num_kv_heads", "ffn_size", "vocab_size"):
        if getattr(config, name) % layout.tp_size:
            raise ValueError(
                f"{name}={getattr(config, name)} is not a multiple of tp_size={layout.tp_size}"
            )


def _chunk(
    config: GPTConfig, settings: TransformerConfig, max_seqlen: int, vp_stage: int | None
) -> GPTModel:
    place = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    with knowing_of_te():
        model = GPTModel(
            settings,
            block_spec(config, settings, vp_stage),
            vocab_size=config.vocab_size,
            max_sequence_length=max_seqlen,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            position_embedding_type="rope",
            rotary_base=config.rope_theta,
            rotary_percent=config.rope_fraction,
            share_embeddings_and_output_weights=config.tied,
            parallel_output=True,
            vp_stage=vp_stage,
        )
        if config.mtp_depth:
            add_mtp(model, config)
    model.double()
    if config.mla is None:
        model.rotary_pos_emb.inv_freq = rope_frequencies(config)
    make_mla_exact(model, config)
    model.model_type = ModelType.encoder_or_decoder
    return model
