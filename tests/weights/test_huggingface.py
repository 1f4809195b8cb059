"""transformers as the oracle: its files load here, ours load strictly there, the logits agree."""

import pytest
import torch
from transformers import (
    BitConfig,
    BitForImageClassification,
    DeiTConfig,
    DeiTForImageClassification,
    Dinov2Config,
    Dinov2ForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)
from transformers.utils import logging

import vitrail
from tests.models import attentive, noisy, small

logging.disable_progress_bar()

TINY = {
    "hidden_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 768,
    "image_size": 64,
    "patch_size": 16,
}
LABELS = {
    "id2label": dict(enumerate("abcdefg")),
    "label2id": {x: i for i, x in enumerate("abcdefg")},
}


def classifier(**options) -> ViTForImageClassification:
    return noisy(ViTForImageClassification(ViTConfig(**TINY | LABELS | options)))


def bit(width: int) -> BitForImageClassification:
    sizes = [256 * width, 512 * width, 1024 * width, 2048 * width]
    config = BitConfig(
        depths=[1, 2, 1, 1], hidden_sizes=sizes, embedding_size=64 * width, num_labels=7
    )
    return noisy(BitForImageClassification(config))


def largest_difference(ours, theirs, *shape: int) -> float:
    images = torch.randn(3, *shape)
    with torch.inference_mode():
        return (ours.eval()(images) - theirs.eval()(images).logits).abs().max().item()


@pytest.mark.parametrize(
    "options",
    [{}, {"num_attention_heads": 6}, {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-3}],
)
def test_a_saved_classifier_gives_its_logits(options, tmp_path):
    theirs = classifier(**options)
    theirs.save_pretrained(tmp_path)
    ours = vitrail.load(tmp_path)
    assert largest_difference(ours, theirs, 3, 64, 64) < 1e-5
    assert ours.labels == tuple("abcdefg")
    assert ours.preprocess.size == (64, 64)


def test_weights_in_several_files_are_put_together(tmp_path):
    theirs = classifier()
    theirs.save_pretrained(tmp_path, max_shard_size="1MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert largest_difference(vitrail.load(tmp_path), theirs, 3, 64, 64) < 1e-5
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))
    with pytest.raises(vitrail.VitrailError, match="outside its folder"):
        vitrail.load(tmp_path)


def test_a_rectangle_and_the_names_in_memory_are_known(tmp_path):
    theirs = classifier(image_size=(64, 96))
    torch.save(theirs.state_dict(), tmp_path / "state.pth")
    ours = vitrail.load(tmp_path / "state.pth", size=(64, 96))
    assert largest_difference(ours, theirs, 3, 64, 96) < 1e-5


def test_the_pooler_is_the_papers_hidden_layer(tmp_path):
    theirs = noisy(ViTModel(ViTConfig(**TINY)))
    theirs.save_pretrained(tmp_path)
    ours = vitrail.load(tmp_path)
    images = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        output = theirs(images)
        assert (ours(images) - output.pooler_output).abs().max() < 1e-5
        assert (ours.tokens(images) - output.last_hidden_state).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["vit", "vit-b"])
def test_our_folder_loads_strictly_in_transformers_and_gives_our_logits(kind, tmp_path):
    ours = small(kind, gelu="erf", eps=1e-12)
    ours.labels = tuple("abcdefg")
    vitrail.save(ours, tmp_path / "ours", to="huggingface")
    theirs, report = ViTForImageClassification.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values()), report
    assert theirs.config.id2label == dict(enumerate("abcdefg"))
    assert largest_difference(ours, theirs, 3, 64, 64) < 1e-5


def test_a_class_token_without_a_position_gets_a_zero_one(tmp_path):
    ours = small("vit", class_slot=False, gelu="erf", eps=1e-12)
    vitrail.save(ours, tmp_path / "ours", to="huggingface")
    theirs = ViTForImageClassification.from_pretrained(tmp_path / "ours")
    assert not theirs.vit.embeddings.position_embeddings[:, 0].any()
    assert largest_difference(ours, theirs, 3, 64, 64) < 1e-5


@pytest.mark.parametrize("width", [1, 2])
def test_bit_resnets_agree_both_ways(width, tmp_path):
    theirs = bit(width)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = vitrail.load(tmp_path / "theirs")
    assert largest_difference(ours, theirs, 3, 64, 96) < 1e-4
    vitrail.save(ours, tmp_path / "ours", to="huggingface")
    back, report = BitForImageClassification.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values()), report
    assert largest_difference(ours, back, 3, 64, 96) < 1e-4


@pytest.mark.parametrize(
    "field",
    [
        {"global_padding": "same"},
        {"num_groups": 16},
        {"hidden_act": "gelu"},
        {"embedding_dynamic_padding": True},
        {"output_stride": 16},
    ],
)
def test_a_bit_that_computes_something_else_is_refused_by_the_name_of_its_field(field, tmp_path):
    theirs = BitForImageClassification(
        BitConfig(depths=[1, 1, 1, 1], hidden_sizes=[256, 512, 1024, 2048], num_labels=7, **field)
    )
    theirs.save_pretrained(tmp_path)
    with pytest.raises(vitrail.VitrailError, match=next(iter(field))):
        vitrail.load(tmp_path)


def test_another_activation_of_the_pooler_is_refused_where_there_is_a_pooler(tmp_path):
    ViTModel(ViTConfig(**TINY, pooler_act="gelu")).save_pretrained(tmp_path / "model")
    with pytest.raises(vitrail.VitrailError, match="pooler_act"):
        vitrail.load(tmp_path / "model")
    theirs = classifier(pooler_act="gelu")
    theirs.save_pretrained(tmp_path / "classifier")
    assert largest_difference(vitrail.load(tmp_path / "classifier"), theirs, 3, 64, 64) < 1e-5


def test_what_a_bare_file_leaves_open_is_said_and_can_be_set(tmp_path, capsys):
    theirs = attentive(classifier(num_attention_heads=6, hidden_act="gelu_new"))
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    vitrail.load(path)
    said = capsys.readouterr().err
    assert "3 heads of 64" in said
    assert "erf GELU" in said
    ours = vitrail.load(path, heads=6, gelu="tanh")
    assert largest_difference(ours, theirs, 3, 64, 64) < 1e-5
    assert largest_difference(vitrail.load(tmp_path), theirs, 3, 64, 64) < 1e-5
    assert capsys.readouterr().err == ""


def test_other_families_are_refused_by_name_with_and_without_their_config(tmp_path):
    tiny = {key: value for key, value in TINY.items() if key != "intermediate_size"}
    models = {
        "distilled DeiT": DeiTForImageClassification(DeiTConfig(**TINY)),
        "(?i)dinov2": Dinov2ForImageClassification(Dinov2Config(**tiny)),
    }
    for family, model in models.items():
        folder = tmp_path / family.strip("(?i)")
        model.save_pretrained(folder)
        for path in (folder, folder / "model.safetensors"):
            with pytest.raises(vitrail.VitrailError, match=family) as refused:
                vitrail.load(path)
            assert "truncated" not in str(refused.value)
    inner = tmp_path / "dinov2-model"
    models["(?i)dinov2"].dinov2.save_pretrained(inner)
    with pytest.raises(vitrail.VitrailError, match="Dinov2"):
        vitrail.load(inner / "model.safetensors")
