"""The models that are measured, and what a training step of one cannot do without."""

from collections import namedtuple

# A Llama has as many heads of keys and values as kv_heads says, and an MLP that is `inner` wide; a GPT says neither.
Config = namedtuple("Config", "layers heads width batch sequence vocabulary kv_heads inner", defaults=(None, None))

CONFIGS = {
    "char": Config(4, 4, 128, 12, 64, 65),
    "baby": Config(6, 6, 384, 16, 256, 65),
    "gpt2_64": Config(12, 12, 768, 4, 64, 50304),
    "gpt2_256": Config(12, 12, 768, 4, 256, 50304),
    "llama": Config(6, 6, 384, 16, 256, 4096, 2, 1024),
}
GPTS = [name for name, c in CONFIGS.items() if not c.inner]

# AdamW reads weight, gradient and two moments and writes all but the gradient; the gradient's norm is read before.
OPTIMIZER_BYTES_PER_PARAMETER = 7 * 4 + 4


def layer_weights(c):
    """Weights of a layer's matrix products."""
    if not c.inner:
        return 12 * c.width**2
    return 2 * c.width**2 + 2 * c.width * c.kv_heads * c.width // c.heads + 3 * c.width * c.inner


def parameters(c):
    """Weights without biases. A GPT's head shares the token embedding's table, a Llama has no positions to learn."""
    table = (2 * c.vocabulary if c.inner else c.vocabulary + c.sequence) * c.width
    return table + c.layers * (layer_weights(c) + 2 * c.width) + c.width


def operations(c):
    """Floating point operations of a step: 2 forward and 4 backward per weight and token, and causal attention."""
    tokens = c.batch * c.sequence
    products = 6 * tokens * (c.layers * layer_weights(c) + c.vocabulary * c.width)
    attention = 6 * c.layers * tokens * c.sequence * c.width  # QK' and PV, half of them masked, and twice that backward
    return products + attention


def floor_ms(c, dtype, machine):
    """Milliseconds on a machine whose matrix products and memory always run at their peak."""
    compute = operations(c) / (machine[dtype + "_gflops"] * 1e9)
    memory = parameters(c) * OPTIMIZER_BYTES_PER_PARAMETER / (machine["bandwidth_gb_s"] * 1e9)
    return (compute + memory) * 1e3
