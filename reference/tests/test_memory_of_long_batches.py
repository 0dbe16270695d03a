"""Memory grows with the longest sequence, not with its square."""

import subprocess
import sys

BATCH_OF_16K_TOKENS = """
import resource, torch
from reference import Batch, Loss, ModelConfig, evaluate, random_weights

torch.set_num_threads(1)
config = ModelConfig(num_layers=4, hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=32,
                     ffn_size=256, vocab_size=512)
seqlens = (8192, 1, *[1024] * 7, 1023)
assert sum(seqlens) == 16 * 1024
batch = Batch(
    tuple(torch.randint(512, (n,)) for n in seqlens),
    tuple(torch.rand(n) < 0.7 for n in seqlens),
    (1.0,) * len(seqlens),
)
result = evaluate(config, random_weights(config, seed=0), batch, Loss())
assert all(gradient.abs().max() > 0 for gradient in result.gradients.values())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
GIB = 2**30


def test_16k_tokens_with_gradients_fit_in_3_gib() -> None:
    kept_scores = 4 * 4 * (8192**2 / 2) * 8  # layers, heads, causal pairs, bytes
    assert kept_scores > 3 * GIB, "a model that keeps its scores must not pass this test"
    command = [sys.executable, "-c", BATCH_OF_16K_TOKENS]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr
    peak = int(run.stdout)
    assert peak < 3 * GIB, f"peak memory {peak / GIB:.1f} GiB"
