"""How far two results are apart, named so that a failure says where."""

from torch import Tensor

from reference import Result


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest expected value; 0 where both are zero."""
    assert actual.shape == expected.shape, f"{actual.shape} is not {expected.shape}"
    difference = float((actual - expected).abs().max())
    return difference / float(expected.abs().max()) if difference else 0.0


def errors(actual: Result, expected: Result) -> dict[str, float]:
    """The relative error of every output of every sequence, and of every gradient."""
    assert actual.gradients.keys() == expected.gradients.keys()
    found = {"loss": relative_error(actual.loss, expected.loss)}
    for output in ("logits", "logprobs", "entropy"):
        pairs = zip(getattr(actual, output), getattr(expected, output), strict=True)
        for sequence, pair in enumerate(pairs):
            found[f"{output} of sequence {sequence}"] = relative_error(*pair)
    for name, gradient in expected.gradients.items():
        found[f"gradient of {name}"] = relative_error(actual.gradients[name], gradient)
    return found


def assert_agree(actual: Result, expected: Result, *, budget: float) -> None:
    """Every error is within `budget`; the message names the worst."""
    found = errors(actual, expected)
    worst = max(found, key=found.__getitem__)
    assert found[worst] <= budget, f"{worst}: relative error {found[worst]:.1e}, allowed {budget}"
