"""Masked patch prediction: what is corrupted, what is asked, and what the answers are worth."""

import math
import statistics

import pytest
import torch
import torch.nn.functional as F

import vitrail
from tests.models import small
from vitrail import VitrailError
from vitrail.training.objectives.masked import MaskedPatches, choose, corrupt, draw


def noise(images: int, patches: int) -> torch.Tensor:
    return draw(0, torch.arange(images), patches)


def model(**options):
    """A small ViT without a head, with weights that matter."""
    return small("vit", classes=0, size=64, **options)


# What is corrupted.


def test_exactly_the_share_of_each_image_is_chosen_and_every_patch_equally_often():
    chosen = choose(noise(4000, 196)[:, 0], 0.5)
    assert chosen.shape == (4000, 98)
    assert all(len(set(row.tolist())) == 98 for row in chosen[:50])
    often = torch.bincount(chosen.flatten(), minlength=196) / 4000
    assert (often - 0.5).abs().max() < 5 * math.sqrt(0.25 / 4000)


def test_fifteen_per_cent_and_never_none():
    assert choose(torch.rand(1, 196), 0.15).shape == (1, 29)
    assert choose(torch.rand(1, 4), 0.01).shape == (1, 1)
    assert choose(torch.rand(1, 4), 1.0).shape == (1, 4)


def test_eight_in_ten_are_hidden_one_is_swapped_one_stays():
    patches = torch.arange(1.0, 101).expand(500, 100)[..., None].contiguous()
    drawn = noise(500, 100)
    chosen = choose(drawn[:, 0], 0.5)
    after = corrupt(patches, chosen, torch.full((1,), -1.0), drawn)
    before, now = patches.gather(1, chosen[..., None]), after.gather(1, chosen[..., None])
    n = chosen.numel()
    for share, count in ((0.8, (now == -1).sum()), (0.1, (now == before).sum())):
        assert abs(count / n - share) < 5 * math.sqrt(share * (1 - share) / n)
    swapped = (now != -1) & (now != before)
    assert abs(swapped.sum() / n - 0.1) < 5 * math.sqrt(0.09 / n)
    # Another patch of the same image, any of the 99 others alike.
    assert set(now[swapped].tolist()) == set(range(1, 101))
    distance = ((now - before)[swapped] % 100).long()
    expected = len(distance) / 99
    chi = ((torch.bincount(distance, minlength=100)[1:] - expected) ** 2 / expected).sum()
    assert chi < 99 + 5 * math.sqrt(2 * 99)


def test_what_was_not_chosen_is_not_touched():
    patches = torch.randn(3, 20, 5)
    drawn = noise(3, 20)
    chosen = choose(drawn[:, 0], 0.5)
    after = corrupt(patches, chosen, torch.zeros(5), drawn)
    untouched = torch.ones(3, 20, dtype=torch.bool).scatter(1, chosen, False)
    assert torch.equal(after[untouched], patches[untouched])


# What is asked.


def test_the_mean_color_is_one_of_512():
    task = MaskedPatches(model(), target="mean")
    pixels = torch.zeros(1, 3, 64, 64)
    color = torch.tensor([1.0, 0.5, 0.13])  # levels 7, 4 and 1
    pixels[0, :, 16:32, 32:48] = color[:, None, None]
    truth = task.truth((pixels - 0.5) / 0.5)
    assert truth.shape == (1, 16, 1)
    assert truth[0, 1 * 4 + 2].item() == 7 * 64 + 4 * 8 + 1
    assert truth.sum() == 7 * 64 + 4 * 8 + 1


def test_the_mean_is_that_of_all_pixels_of_the_patch():
    task = MaskedPatches(model(), target="mean")
    pixels = torch.rand(2, 3, 64, 64)
    truth = task.truth((pixels - 0.5) / 0.5)
    patch = pixels[1, :, 48:64, 16:32].double().mean((1, 2))
    red, green, blue = (patch * 8).floor().long().tolist()
    assert truth[1, 3 * 4 + 1].item() == 64 * red + 8 * green + blue


def test_the_cells_of_a_patch_are_asked_row_by_row():
    task = MaskedPatches(model(), target="grid")
    pixels = torch.rand(1, 3, 64, 64)
    truth = task.truth((pixels - 0.5) / 0.5)
    assert truth.shape == (1, 16, 16)
    cell = pixels[0, :, 16 + 4 : 16 + 8, 32 + 12 : 32 + 16].mean((1, 2))  # row 1, column 3
    red, green, blue = (cell * 8).floor().long().tolist()
    assert truth[0, 1 * 4 + 2, 1 * 4 + 3].item() == 64 * red + 8 * green + blue


def test_all_pixels_of_a_patch_are_asked():
    task = MaskedPatches(model(), target="pixels")
    images = torch.randn(2, 3, 64, 64)
    truth = task.truth(images)
    assert truth.shape == (2, 16, 768)
    patch = images[1, :, 16:32, 0:16].permute(1, 2, 0).flatten()
    assert torch.equal(truth[1, 4], patch)


# What the answers are worth.


@pytest.mark.parametrize("target", ["mean", "grid"])
def test_who_knows_nothing_pays_the_logarithm_of_512(target):
    losses = MaskedPatches(model(), target=target)(torch.randn(3, 3, 64, 64), noise(3, 16))
    assert torch.allclose(losses, torch.full((3,), math.log(512)), atol=1e-5)


def test_only_corrupted_positions_count():
    """The loss by hand: the answers at the corrupted positions of the very same corruption."""
    task = MaskedPatches(model(pool="mean"), target="mean").eval()
    torch.nn.init.normal_(task.head.weight)
    images = torch.randn(2, 3, 64, 64)
    drawn = noise(2, 16)
    found = task(images, drawn)
    chosen = choose(drawn[:, 0], 0.5)

    def corrupted(patches):
        return corrupt(patches, chosen, task.mask_token, drawn)

    tokens = task.model.tokens(images, corrupted)[:, task.model.architecture.prefix :]
    answers, truth = task.head(tokens), task.truth(images)
    for i in range(2):
        rows = chosen[i]
        expected = F.cross_entropy(answers[i, rows], truth[i, rows, 0])
        assert found[i].item() == pytest.approx(expected.item(), rel=1e-5)


def test_pixels_are_measured_by_squared_error():
    task = MaskedPatches(model(), target="pixels", share=1.0)
    images = torch.randn(2, 3, 64, 64)
    expected = images.square().mean((1, 2, 3))  # an untrained head says zero
    assert torch.allclose(task(images, noise(2, 16)), expected, rtol=1e-4)


@pytest.mark.parametrize("target", ["mean", "grid", "pixels"])
@pytest.mark.parametrize("kind", ["vit", "vit-gap", "vit-registers", "hybrid-root", "axial-vit"])
def test_it_learns_what_is_behind_the_mask(kind, target):
    torch.manual_seed(0)
    task = MaskedPatches(small(kind, classes=0, size=64), target=target)
    optimizer = torch.optim.Adam(task.parameters(), lr=1e-3 if target == "pixels" else 3e-3)
    stripes = (torch.arange(64) // 32 % 2).float().expand(2, 3, 64, 64) * 1.6 - 0.8
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = task(stripes).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # A patch swapped for another one deceives, so a single loss says little.
    assert statistics.median(losses[-6:]) < 0.8 * losses[0]
    assert task.mask_token.grad is not None
    assert task.mask_token.grad.abs().sum() > 0


def test_a_small_root_hides_smaller_patches():
    hybrid = small("hybrid-small-root", classes=0, size=32)
    images = torch.rand(2, 3, 32, 32) * 2 - 1
    task = MaskedPatches(hybrid, target="pixels")
    assert torch.equal(task.truth(images), MaskedPatches(model8(), target="pixels").truth(images))
    assert task(images).shape == (2,)


def model8():
    return vitrail.create("Ti/8", depth=1, size=32, classes=0)


def test_the_seed_of_an_image_alone_decides_what_is_hidden():
    task = MaskedPatches(model(), target="pixels").eval()
    images = torch.randn(2, 3, 64, 64)
    one, other, alone = (draw(7, torch.tensor(x), 16) for x in ([1, 2], [3, 2], [2]))
    losses, others = task(images, one), task(images, other)
    assert losses[0] != others[0]
    assert losses[1] == others[1]
    torch.testing.assert_close(task(images[1:], alone), losses[1:])
    assert not torch.equal(draw(8, torch.tensor([1, 2]), 16), one)


def test_a_resnet_has_no_patches_to_hide():
    with pytest.raises(VitrailError, match="hides patches of a ViT; ResNet has none"):
        MaskedPatches(small("resnet", classes=0, size=64))


def test_images_that_are_no_whole_number_of_patches_are_one_line():
    hybrid = small("hybrid", classes=0, size=72)
    with pytest.raises(
        VitrailError, match="72 × 72 pixels are not a whole number of patches of 32"
    ):
        MaskedPatches(hybrid)


def test_patches_that_do_not_divide_are_one_line():
    odd = vitrail.create("Ti/14", depth=1, size=56, classes=0)
    with pytest.raises(VitrailError, match="14 pixels do not divide into 4"):
        MaskedPatches(odd, target="grid")
