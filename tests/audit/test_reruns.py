"""Which of a model's inputs is taken for a mask when the padding is changed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.audit import audit


class Tokens(nn.Module):
    """Token embeddings under a mask and a batch norm that counts padding; it has token types as well."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.types = nn.Embedding(20, 8), nn.Embedding(2, 8)
        self.norm, self.out = nn.InstanceNorm1d(8, affine=True), nn.Linear(8, 8)

    def forward(self, ids: Tensor, types: Tensor, valid: Tensor, hidden: bool = False) -> Tensor:
        x = self.words(ids) + self.types(types)
        keep = 1 - valid if hidden else valid
        scores = (x @ x.transpose(1, 2)).masked_fill(keep[:, None] == 0, -1e9)
        return self.out(F.softmax(scores, -1) @ self.norm(x.transpose(1, 2)).transpose(1, 2))


@pytest.mark.parametrize("hidden", [False, True], ids=["ones are valid", "ones are padding"])
@pytest.mark.parametrize("by_position", [False, True])
def test_a_mask_is_told_by_what_it_holds_and_what_it_does(by_position: bool, hidden: bool) -> None:
    """Names say nothing; token types are rows of zeros and ones too, but look up an embedding."""
    torch.manual_seed(0)
    ids = torch.randint(0, 20, (2, 12))
    types, valid = torch.zeros_like(ids), torch.full_like(ids, int(not hidden))
    model = Tokens().eval()
    given = {} if by_position else {"ids": ids, "types": types, "valid": valid}
    result = audit(model, *(ids, types, valid) if by_position else (), **given, hidden=hidden)
    assert [f.where for f in result.findings if f.rule == "padding-in-statistics"] == [("norm",)]


def test_token_types_alone_are_no_mask() -> None:
    class Typed(Tokens):
        def forward(self, ids: Tensor, types: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(ids, types, torch.ones_like(ids))

    ids = torch.randint(0, 20, (2, 12), generator=torch.Generator().manual_seed(0))
    result = audit(Typed().eval(), ids=ids, types=torch.zeros_like(ids))
    assert [f for f in result.findings if f.rule == "padding-in-statistics"] == []
