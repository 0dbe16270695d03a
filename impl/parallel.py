"""How a model is spread over ranks besides dynamic CP."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Sizes of Megatron's parallel dimensions; what is left of the world is DP×CP.

    Args:
        tp_size, pp_size: tensor and pipeline parallel.
        vpp_size: model chunks per pipeline stage; 1 means that stages are not interleaved.
        static_cp_size: the CP size that Megatron is initialised with. Micro-batches have sizes of
            their own, smaller, equal or larger.
        sequence_parallel: split activations between tensor parallel layers over the TP ranks.
        recompute: every layer is computed again in the backward pass.
        distributed_optimizer: gradients and optimizer state are sharded over the DP×CP ranks.
    Raises:
        ValueError: sizes that cannot be together, by name.
    """

    tp_size: int = 1
    pp_size: int = 1
    vpp_size: int = 1
    static_cp_size: int = 1
    sequence_parallel: bool = False
    recompute: bool = False
    distributed_optimizer: bool = False

    def __post_init__(self) -> None:
        for name in ("tp_size", "pp_size", "vpp_size", "static_cp_size"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name}={size!r} must be a whole number of at least 1")
        for name in ("sequence_parallel", "recompute", "distributed_optimizer"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name}={value!r} must be true or false")
        if self.vpp_size > 1 and self.pp_size == 1:
            raise ValueError(f"vpp_size={self.vpp_size} needs pp_size of at least 2")
        if self.sequence_parallel and self.tp_size == 1:
            raise ValueError("sequence_parallel=True needs tp_size of at least 2")

    @property
    def model_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tp_size * self.pp_size

    @property
    def pack_tp_size(self) -> int:
        """What packs must divide by besides the CP size."""
        return self.tp_size if self.sequence_parallel else 1

    def num_dp_cp_ranks(self, world_size: int) -> int:
        """Ranks of a world that share the samples.

        Raises:
            ValueError: the world does not divide.
        """
        unit = self.model_size * self.static_cp_size
        if world_size % unit:
            raise ValueError(
                f"world_size={world_size} is not a multiple of tp_size={self.tp_size} * "
                f"pp_size={self.pp_size} * static_cp_size={self.static_cp_size} = {unit}"
            )
        return world_size // self.model_size

    def dp_cp_ranks(self, world_size: int) -> list[list[int]]:
        """The DP×CP ranks of every TP and PP place, in Megatron's order tp-cp-dp-pp.

        >>> ParallelLayout(tp_size=2, pp_size=2).dp_cp_ranks(8)
        [[0, 2], [1, 3], [4, 6], [5, 7]]
        """
        size = self.num_dp_cp_ranks(world_size)
        return [
            [pp * self.tp_size * size + place * self.tp_size + tp for place in range(size)]
            for pp in range(self.pp_size)
            for tp in range(self.tp_size)
        ]
