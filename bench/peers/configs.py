"""The models that are measured, and what a training step of one cannot do without."""

from collections import namedtuple

Config = namedtuple("Config", "layers heads width batch sequence vocabulary")

CONFIGS = {
    "char": Config(4, 4, 128, 12, 64, 65),
    "baby": Config(6, 6, 384, 16, 256, 65),
    "gpt2_64": Config(12, 12, 768, 4, 64, 50304),
    "gpt2_256": Config(12, 12, 768, 4, 256, 50304),
}

# AdamW reads weight, gradient and two moments and writes all but the gradient; the gradient's norm is read before.
OPTIMIZER_BYTES_PER_PARAMETER = 7 * 4 + 4


def parameters(c):
    """Weights without biases; the head shares the token embedding's table."""
    return (c.vocabulary + c.sequence) * c.width + c.layers * (12 * c.width**2 + 2 * c.width) + c.width


def operations(c):
    """Floating point operations of a step: 2 forward and 4 backward per weight and token, and causal attention."""
    tokens = c.batch * c.sequence
    products = 6 * tokens * (12 * c.layers * c.width**2 + c.vocabulary * c.width)
    attention = 6 * c.layers * tokens * c.sequence * c.width  # QK' and PV, half of them masked, and twice that backward
    return products + attention


def floor_ms(c, dtype, machine):
    """Milliseconds on a machine whose matrix products and memory always run at their peak."""
    compute = operations(c) / (machine[dtype + "_gflops"] * 1e9)
    memory = parameters(c) * OPTIMIZER_BYTES_PER_PARAMETER / (machine["bandwidth_gb_s"] * 1e9)
    return (compute + memory) * 1e3
