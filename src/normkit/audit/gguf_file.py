"""What a GGUF file says of its norms where no model can be built from it: architecture, eps, the stored gains."""

from __future__ import annotations

from pathlib import Path

_EPS = "epsilon"
"""How the format's keys for an eps end: ``llama.attention.layer_norm_rms_epsilon``."""


def summary(path: Path) -> str:
    """Half a sentence for a refusal; empty where the file cannot be read either."""
    from gguf import GGMLQuantizationType, GGUFReader

    try:
        reader = GGUFReader(path)
        architecture = reader.fields["general.architecture"].contents()
        eps = sorted({f"{float(field.contents()):.3g}" for name, field in reader.fields.items() if name.endswith(_EPS)})
        gains = [tensor for tensor in reader.tensors if tensor.name.endswith("norm.weight")]
        read = [t for t in gains if t.tensor_type == GGMLQuantizationType.F32]
        means = [float(tensor.data.mean()) for tensor in read]
    except Exception:  # any bytes may stand in it
        return ""
    said = [f"its architecture is {architecture!r}"]
    if eps:
        said.append(f"eps {', '.join(eps)}")
    if gains:
        values = f", of means {min(means):.3g} to {max(means):.3g}" if means else ""
        said.append(f"{len(gains)} gains such as {gains[0].name}{values}")
    return f" ({'; '.join(said)})"
