"""Peak FLOP/s of devices, from their data sheets."""

from __future__ import annotations

# Dense TFLOP/s of 16-bit matrix products with 32-bit accumulation. Specific names precede general ones.
_DENSE_16_BIT = {
    "B200": 2250.0,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.5,
    "H100": 989.4,
    "A100": 312.0,
    "L40S": 362.05,
    "L4": 121.0,
    "A10": 125.0,
    "V100": 125.0,
    "T4": 65.0,
    "MI300X": 1307.4,
    "MI250X": 383.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}
_NO_BF16 = ("V100", "T4")


def peak_flops(name: str, precision: str) -> float | None:
    """Return the peak operations per second of a device, or None if unknown.

    Args:
        name: The device name in PyTorch, such as "NVIDIA H100 80GB HBM3".
        precision: "fp32", "bf16", "fp16" or "fp8"; only 16-bit peaks are known.

    >>> peak_flops("NVIDIA H100 80GB HBM3", "bf16"), peak_flops("NVIDIA H100 PCIe", "bf16"), peak_flops("cpu", "bf16")
    (989400000000000.0, 756000000000000.0, None)
    """
    if precision not in ("bf16", "fp16"):
        return None
    words = set(name.replace("-", " ").split())
    if "Laptop" in words:  # a slower chip under the same name
        return None
    for model, peak in _DENSE_16_BIT.items():
        if words.issuperset(model.split()):
            return None if precision == "bf16" and model in _NO_BF16 else peak * 1e12
    return None
