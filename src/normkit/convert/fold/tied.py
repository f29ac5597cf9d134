"""Tied weights: giving a linear map that shares its weight a copy of its own."""

from __future__ import annotations

from dataclasses import dataclass

from normkit.convert.edit import Edit, Editor


@dataclass(frozen=True)
class Tie:
    """A place that holds a shared parameter, and the other places that do."""

    target: str
    others: tuple[str, ...]


def untie_edit(tie: Tie) -> Edit:
    """Give the target a copy; a config that would tie it again on loading says so no longer."""

    def edit(editor: Editor) -> None:
        editor.set_parameter(tie.target, editor.tensor(tie.target))
        editor.touched.update(tie.others)  # their gradients were sums over all uses
        config = getattr(editor.model, "config", None)
        if getattr(config, "tie_word_embeddings", False) is True:
            editor.set_attribute(config, "tie_word_embeddings", False)

    return edit


def untie_note(tie: Tie) -> str:
    """For the receipt."""
    return f"{tie.target} was untied from {', '.join(tie.others)}: it is saved on its own"
