"""Make models of transformers calculate in float64 throughout.

Their modules cast to float32 inside (norms, softmax, rotary angles), which leaves an error of
about 1e-7 in a model that is float64 otherwise.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

import torch


class _TorchWithoutFloat32:
    """`torch`, except that `float32` and `float` mean float64."""

    float32 = torch.float64
    float = torch.float64

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


@contextmanager
def float64_everywhere(modeling: ModuleType) -> Iterator[None]:
    """Build and run a model of `modeling` inside this.

    Building counts too: rotary frequencies are rounded to float32 when they are made.
    """
    from transformers import modeling_rope_utils

    default = torch.get_default_dtype()
    exact = _TorchWithoutFloat32()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            mock.patch.object(modeling, "torch", exact),
            mock.patch.object(modeling_rope_utils, "torch", exact),
            mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        ):
            yield
    finally:
        torch.set_default_dtype(default)
