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


class Parts(nn.Module):
    """Only its parts are ever called."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse, self.fine = nn.Linear(3, 3), nn.Linear(3, 3)


def test_a_model_without_a_forward_names_its_parts() -> None:
    with pytest.raises(InputError, match=r"Parts has no forward of its own: audit its parts \(coarse, fine\)"):
        guess_inputs(Parts(), SimpleNamespace(vocab_size=50))


class Codebooks(nn.Module):
    """A decoder that takes a row of tokens for each codebook of each sample."""

    main_input_name = "input_ids"

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor | None = None) -> Tensor:
        """Args:
        decoder_input_ids (`torch.LongTensor` of shape `(batch_size * num_codebooks, target_sequence_length)`):
            Codes.
        """
        assert decoder_input_ids is not None
        return decoder_input_ids.reshape(input_ids.shape[0], 4, -1).sum()


def test_a_decoder_of_several_codebooks_gets_a_row_for_each() -> None:
    config = SimpleNamespace(vocab_size=50, is_encoder_decoder=True, decoder=SimpleNamespace(num_codebooks=4))
    given = guess_inputs(Codebooks(), config)
    assert given["decoder_input_ids"].shape[0] == 4 * BATCH
    assert runs(Codebooks(), given)


class Places(nn.Module):
    """Features of an image replace the tokens that a mask names, as many as there are."""

    main_input_name = "pixel_values"

    def __init__(self) -> None:
        super().__init__()
        self.table, self.features = nn.Embedding(50, 8), nn.Linear(16, 8)
        self.config = SimpleNamespace(text_config=SimpleNamespace(hidden_size=8), vision_config=SimpleNamespace())

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        return self.features(pixel_values.flatten(2).transpose(1, 2)[..., :16])

    def forward(
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        image_embeds_position_mask: Tensor | None = None,
    ) -> Tensor:
        if pixel_values is None:
            raise ValueError("You have to specify `pixel_values`")
        words, features = self.table(input_ids), self.get_image_features(pixel_values)
        words[image_embeds_position_mask] = features.reshape(-1, 8)
        return words


def test_as_many_places_as_features() -> None:
    sizes = SimpleNamespace(image_size=4, num_channels=16)
    config = SimpleNamespace(text_config=SimpleNamespace(hidden_size=8, vocab_size=50), vision_config=sizes)
    given = guess_inputs(Places(), config)
    assert runs(Places(), given)
    assert given["image_embeds_position_mask"].shape == given["input_ids"].shape == (BATCH, 16)
    assert given["image_embeds_position_mask"].dtype == torch.bool


class Never(nn.Module):
    """Runs on nothing, but goes further with an image."""

    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(text_config=SimpleNamespace(), vision_config=SimpleNamespace())

    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:
        if pixel_values is None:
            raise ValueError("text alone means nothing")
        raise ValueError(f"out of {(pixel_values + 1).sum()} reasons, one")


def test_where_text_alone_does_not_run_either_the_fuller_inputs_are_kept() -> None:
    given = guess_inputs(Never(), SimpleNamespace(vocab_size=50, image_size=8))
    assert {"input_ids", "pixel_values"} <= given.keys()


def test_flattened_patches_begin_with_their_places() -> None:
    (patches,) = layouts("flattened_patches", SimpleNamespace(patch_embed_hidden_size=12))
    assert patches.shape == (BATCH, LENGTH, 14)
    assert patches[0, :, 0].tolist() == list(range(LENGTH))


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("musicgen", "MusicgenForConditionalGeneration"),  # its decoder alone is listed as a causal model
        ("pix2struct", "Pix2StructForConditionalGeneration"),
        ("vitpose", "VitPoseForPoseEstimation"),
        ("llama", "LlamaForCausalLM"),
        ("vit", "ViTForImageClassification"),
    ],
)
def test_the_class_takes_the_config_itself(kind: str, found: str) -> None:
    from normkit.audit.load import _model_class, default_config

    config = default_config(kind)
    assert _model_class(config)._model_mapping[type(config)].__name__ == found


def test_a_backbone_that_is_cut_keeps_its_outputs() -> None:
    from normkit.audit.load import default_config
    from normkit.audit.shallow import shallow

    whole, cut = default_config("mask2former").backbone_config, shallow("mask2former", 1).backbone_config
    assert (cut.out_features, sum(cut.depths)) == (whole.out_features, len(whole.depths))


class Hears(nn.Module):
    """A spectrum by frames, and a mask that is true where there is none."""

    main_input_name = "audio_mel"

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 3)

    def forward(self, audio_mel: Tensor, audio_mel_mask: Tensor) -> Tensor:
        return self.up(audio_mel).masked_fill(audio_mel_mask[..., None], 0.0)


def test_a_spectrum_and_the_mask_of_what_is_no_sound() -> None:
    given = guess_inputs(Hears(), SimpleNamespace(input_feat_size=7))
    assert given["audio_mel"].shape[2] == 7 and not given["audio_mel_mask"].any()
    assert runs(Hears(), given)
