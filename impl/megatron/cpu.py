"""Megatron exact in float64, and without a GPU: what it asks of CUDA is answered, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import optimizer, utils
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import random
from torch import Tensor
from torch.overrides import TorchFunctionMode


@contextmanager
def cpu_mode() -> Iterator[None]:
    """Inside, the current CUDA device is the CPU; outside, all is as it was.

    Megatron moves its RoPE frequencies to `torch.cuda.current_device()` at the first forward.
    """
    with patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")):
        yield


@contextmanager
def training_mode(device: torch.device) -> Iterator[None]:
    """Inside, Megatron trains exactly in float64, on a GPU or on the CPU.

    The default dtype is float64, in which the divisor of per-token gradients is computed. Where
    Megatron goes down to float32 it stays float64: `Tensor.float`, which the distributed optimizer
    calls on gradients (`_copy_model_grads_to_main_grads` in optimizer/distrib_optimizer.py), and
    float32 tensors made on the GPU, such as the norm of the gradients and its sum over ranks
    (`local_multi_tensor_l2_norm` in utils.py and `get_grad_norm_fp32` in optimizer/clip_grads.py).

    On the CPU, what schedules, gradient buffers and recomputation ask of CUDA is answered for it.
    """
    on_cpu = device.type == "cpu"
    dtype = torch.get_default_dtype()
    with ExitStack() as patches:
        if on_cpu:
            patches.enter_context(cpu_mode())
        patches.enter_context(_Float64(on_cpu=on_cpu))
        for module, name, answer in (*_FLOAT64_ANSWERS, *(_CPU_ANSWERS if on_cpu else ())):
            if hasattr(module, name):
                patches.enter_context(patch.object(module, name, answer))
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def cpu_training_mode() -> AbstractContextManager[None]:
    """`training_mode` of the CPU."""
    return training_mode(torch.device("cpu"))


class _NoStream:
    """A stream and an event on which everything is done at once."""

    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record(self, *_: Any) -> None: ...
    def record_event(self, *_: Any) -> _NoStream:
        return self


class _NoRandomness:
    """Megatron's tracker of random states, for models without dropout."""

    def is_initialized(self) -> bool:
        return True

    def fork(self, *_: Any) -> nullcontext[None]:
        return nullcontext()

    def get_states(self) -> dict[str, Tensor]:
        return {}

    def set_states(self, _: Any) -> None: ...


_Answers = tuple[tuple[Any, str, Any], ...]

# Each is a function of its own: dynamo, if it is imported meanwhile, refuses one for two.
_CPU_ANSWERS: _Answers = (
    (
        torch.cuda,
        "synchronize",
        lambda *_, **__: None,
    ),  # exchange of shapes between pipeline stages
    (torch.cuda, "is_current_stream_capturing", lambda: False),
    (torch.cuda, "current_stream", lambda *_, **__: _NoStream()),  # reduction of gradients
    (torch.cuda, "Stream", lambda *_, **__: _NoStream()),
    (torch.cuda, "Event", lambda *_, **__: _NoStream()),
    (torch.cuda, "stream", lambda _: nullcontext()),
    (torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),  # recomputation
    (torch.cuda, "set_rng_state", lambda *_, **__: None),
    (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
    (random, "_set_cuda_rng_state", lambda *_, **__: None),
)
_FLOAT64_ANSWERS: _Answers = (
    (random, "_CUDA_RNG_STATE_TRACKER", _NoRandomness()),  # sequence parallelism
    (random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True),
    # Where Transformer Engine or Apex is installed, optimizer/__init__.py and clip_grads.py take
    # their fused kernels, which have no float64 and need a GPU. These are Megatron's own way
    # without them.
    (optimizer, "USING_PYTORCH_OPTIMIZER", True),
    (optimizer, "SGD", torch.optim.SGD),
    (clip_grads, "multi_tensor_applier", utils.local_multi_tensor_applier),
    (clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm),
    (clip_grads, "multi_tensor_scale_impl", utils.local_multi_tensor_scale),
    (clip_grads, "multi_tensor_scale_tensor_impl", None),  # from 0.17 on
)


class _Float64(TorchFunctionMode):
    def __init__(self, *, on_cpu: bool) -> None:
        super().__init__()
        self.on_cpu = on_cpu

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        if func is Tensor.cuda and self.on_cpu:
            return args[0]
        kwargs = dict(kwargs or {})
        if func is Tensor.type and len(args) == 1 and not kwargs and args[0].is_floating_point():
            return "torch.cuda.FloatTensor"  # the distributed optimizer compares names
        if str(kwargs.get("device", "")).startswith("cuda"):
            if kwargs.get("dtype") is torch.float32:  # a rank without gradients adds a zero to the
                kwargs["dtype"] = torch.float64  # norm, in the dtype that the others have
            if self.on_cpu:
                kwargs["device"] = "cpu"
        if self.on_cpu:
            kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)
