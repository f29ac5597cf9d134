"""Inputs that nobody gave: by names, by what a forward's documentation says, by what the model then asks for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normkit.audit.inputs import InputError, guess_inputs, helped, placed, runs
from normkit.audit.layouts import BATCH, LENGTH, layouts


class Documented(nn.Module):
    """Its inputs are known from nowhere but its forward's text."""

    def forward(self, spectrum: Tensor, lags: Tensor, flags: Tensor | None = None) -> Tensor:
        """Args:
        spectrum (`torch.FloatTensor` of shape `(batch_size, num_bands, 7)`):
            Energies.
        lags (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            Shifts.
        flags (`torch.BoolTensor` of shape `(batch_size, unheard_of)`, *optional*):
            Nothing.
        """
        return spectrum.sum() + lags.sum()


def test_documented_shapes_take_sizes_from_the_config() -> None:
    config = SimpleNamespace(num_bands=5)
    given = guess_inputs(Documented(), config)
    assert {name: (tuple(t.shape), t.dtype) for name, t in given.items()} == {
        "spectrum": ((BATCH, 5, 7), torch.float32), "lags": ((BATCH, LENGTH), torch.int64)
    }  # fmt: skip
    assert layouts("flags", config, Documented()) == []  # a size that is nowhere


def test_a_size_of_a_part_and_one_that_is_no_number() -> None:
    part = SimpleNamespace(image_size=[48, 40], num_channels=2, in_channels=[3, 4], patch_size=(8, 8))
    shapes = [tuple(t.shape) for t in layouts("pixel_values", SimpleNamespace(vision_config=part))]
    assert shapes[0] == (BATCH, 2, 48, 40)


class Asks(nn.Module):
    """Complains of what it lacks, one thing after the other, by message and by a None that it uses."""

    main_input_name = "input_ids"

    def forward(
        self, input_ids: Tensor, visual_feats: Tensor | None = None, bbox: Tensor | None = None, mode: str = ""
    ) -> Tensor:
        if visual_feats is None:
            raise ValueError("`visual_feats` cannot be `None`")
        return input_ids.sum() + visual_feats.sum() + bbox.sum()  # type: ignore[union-attr]


def test_what_a_model_asks_for_is_given() -> None:
    given = guess_inputs(Asks(), SimpleNamespace(vocab_size=50))
    assert set(given) == {"input_ids"}
    more = helped(Asks(), SimpleNamespace(vocab_size=50), given)
    assert set(more) == {"input_ids", "visual_feats", "bbox"}
    assert runs(Asks(), more)


def test_a_complaint_that_nothing_answers_changes_nothing() -> None:
    class Never(Asks):
        def forward(self, input_ids: Tensor, bbox: Tensor | None = None) -> Tensor:  # type: ignore[override]
            raise ValueError("bbox is never right")

    given = {"input_ids": torch.ones(2, 3, dtype=torch.int64)}
    assert helped(Never(), SimpleNamespace(), given) == given


class TwoTowers(nn.Module):
    """Puts an image's features where its token stands, and counts them."""

    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.see, self.embed = nn.Conv2d(3, 6, 4, 4), nn.Embedding(20, 6)

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        return self.see(pixel_values).flatten(2).transpose(1, 2)

    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        if pixel_values is not None:
            features = self.get_image_features(pixel_values)
            places = input_ids == 7
            if int(places.sum()) != features[..., 0].numel():
                raise ValueError("image tokens and features do not match")
            x = x.masked_scatter(places[..., None], features)
        return x


def test_as_many_tokens_as_an_image_has_pieces() -> None:
    text, vision = SimpleNamespace(hidden_size=6, vocab_size=20), SimpleNamespace(image_size=16, patch_size=4)
    config = SimpleNamespace(text_config=text, vision_config=vision, image_token_id=7)
    given = guess_inputs(TwoTowers(), config)
    assert tuple(given["input_ids"].shape) == (BATCH, 16)
    assert bool((given["input_ids"] == 7).all())
    assert runs(TwoTowers(), given)


@pytest.mark.parametrize(("names", "device"), [(("pixel_values", "input_ids"), "cpu"), (("input_ids",), "meta")])
def test_whole_numbers_keep_their_values_beside_an_image(names: tuple[str, ...], device: str) -> None:
    made = {"pixel_values": torch.ones(2, 3), "input_ids": torch.ones(2, 3, dtype=torch.int64)}
    found: dict[str, Any] = placed({name: made[name] for name in names}, "meta")
    assert found["input_ids"].device.type == device
    assert "pixel_values" not in found or found["pixel_values"].is_meta


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_that_counts_its_image_tokens_runs_on_meta(device: str) -> None:
    text, vision = SimpleNamespace(hidden_size=6, vocab_size=20), SimpleNamespace(image_size=16, patch_size=4)
    config = SimpleNamespace(text_config=text, vision_config=vision, image_token_id=7)
    model = TwoTowers().to(device)
    assert set(guess_inputs(model, config)) == {"input_ids", "pixel_values"}
    assert runs(model, guess_inputs(model, config))


def test_where_an_image_cannot_be_had_the_text_is_taken_alone() -> None:
    class Blind(TwoTowers):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(text_config=SimpleNamespace(vocab_size=20), vision_config=SimpleNamespace())

        def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:
            if pixel_values is not None:
                raise RuntimeError("no kernel")
            return self.embed(input_ids)

    model = Blind()
    given = guess_inputs(model, model.config)
    assert set(given) == {"input_ids"} and runs(model, given)


def test_no_guess_is_said_with_what_to_give() -> None:
    class Odd(nn.Module):
        def forward(self, thing: Tensor) -> Tensor:
            return thing

    with pytest.raises(InputError, match=r"no guess for the inputs of Odd .*--inputs"):
        guess_inputs(Odd(), SimpleNamespace())
