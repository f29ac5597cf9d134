"""MiniLM's sentence embeddings before and after a swap: cosine distances and time per batch, in interleaved rounds.

Run: python benchmarks/swap_minilm.py
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor, nn

import normkit
from normkit.audit.load import load
from normkit.audit.load import transformers as offline_transformers

ROUNDS = 9
SUBJECTS = ("The norm", "A residual stream", "This layer", "Every token", "The gradient", "A small model", "The cat",
            "My neighbour", "An old clock", "The river")  # fmt: skip
ENDS = ("divides by a statistic.", "was measured twice before anyone believed it.", "sits on the mat.",
        "moves slowly, and then all at once, towards the place where it began.", "needs no bias.",
        "is faster than it looks on paper.", "forgets the mean of what came before it.", "sleeps.",
        "keeps its promise to the last bit, which is more than can be said of most.", "ends here.")  # fmt: skip
SENTENCES = [f"{subject} {end}" for subject in SUBJECTS for end in ENDS]


def tokens(model: nn.Module) -> dict[str, Tensor]:
    """The hundred sentences as the model's tokenizer reads them."""
    folder = model.config._name_or_path
    tokenizer = offline_transformers().AutoTokenizer.from_pretrained(folder)
    return dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))


@torch.no_grad()
def embed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean-pooled, as sentence-transformers does."""
    found = model(**batch, output_hidden_states=True)
    hidden = getattr(found, "last_hidden_state", None)
    hidden = found.hidden_states[-1] if hidden is None else hidden
    mask = batch["attention_mask"][..., None].to(hidden.dtype)
    return (hidden * mask).sum(1) / mask.sum(1)


def cosine_distances(a: Tensor, b: Tensor) -> Tensor:
    """1 - cos, in float64."""
    return 1 - nn.functional.cosine_similarity(a.double(), b.double(), dim=-1)


def main() -> None:
    model = load("minilm").model.eval()
    batch = tokens(model)
    print(f"{len(SENTENCES)} sentences, {tuple(batch['input_ids'].shape)} tokens, {torch.get_num_threads()} threads")
    before = embed(model, batch)
    old = {m: type(m) for m in model.modules()}
    receipt = normkit.swap(model, **batch, rounds=0, only_faster=False)  # all of them, for the distances
    receipt.show()
    print(f"largest cosine distance: {float(cosine_distances(embed(model, batch), before).max()):.1e}")
    new = {m: type(m) for m in model.modules()}
    seconds: dict[str, list[float]] = {"before": [], "after": []}
    for turn in range(ROUNDS + 1):
        for when, types in (("before", old), ("after", new)):
            for module, kind in types.items():
                if type(module) is not kind:
                    module.__class__ = kind
            started = time.perf_counter()
            embed(model, batch)
            if turn:
                seconds[when].append(time.perf_counter() - started)
    a, b = (statistics.median(seconds[k]) for k in ("before", "after"))
    print(f"time per batch: {a * 1e3:.1f} ms before, {b * 1e3:.1f} ms after ({a / b:.3f}x)")
    receipt.undo()
    print(f"after undo, equal bits: {torch.equal(embed(model, batch), before)}")


if __name__ == "__main__":
    main()
