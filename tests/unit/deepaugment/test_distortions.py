"""Each distortion does what its name says, to a copy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bastion.deepaugment.distortions import OF_FEATURES, OF_KERNELS, distort, distorted
from bastion.deepaugment.networks import NETWORKS, Network

NAMES = [*OF_KERNELS, *OF_FEATURES]


def _drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_drawn(9))


@pytest.mark.parametrize("seed", range(4))
def test_kernels_are_turned_and_mirrored_as_wholes(seed: int) -> None:
    kernels = _values(6, 5, 3, 3)
    mirrored = OF_KERNELS["mirror"](6, _drawn(seed))(kernels)
    assert any(torch.equal(mirrored, kernels.flip(axis)) for axis in (2, 3))
    rotated = OF_KERNELS["rotate"](6, _drawn(seed))(kernels)
    assert any(torch.equal(rotated, kernels.rot90(turns, (2, 3))) for turns in (1, 2, 3))


def test_blurred_kernels_keep_their_mean_and_lose_spread() -> None:
    kernels = _values(6, 5, 3, 3)
    blurred = OF_KERNELS["blur"](6, _drawn())(kernels)
    assert torch.allclose(blurred.mean((2, 3)), kernels.mean((2, 3)), atol=1e-6)
    assert (blurred.std((2, 3)) < kernels.std((2, 3))).all()


@pytest.mark.parametrize(("side", "kept"), [(3, 3), (5, 9)])
def test_thin_kernels_keep_their_largest_third(side: int, kept: int) -> None:
    kernels = _values(6, 5, side, side)
    thin = OF_KERNELS["thin"](6, _drawn())(kernels)
    assert ((thin != 0).sum((2, 3)) == kept).all() and torch.equal(thin[thin != 0], kernels[thin != 0])
    assert (thin.abs().amax((2, 3)) == kernels.abs().amax((2, 3))).all()


def test_jitter_is_at_most_as_strong_as_the_weights() -> None:
    kernels = 0.01 * _values(30, 30, 3, 3)
    sizes = [(OF_KERNELS["jitter"](30, _drawn(seed))(kernels) - kernels).std() / kernels.std() for seed in range(20)]
    assert 0 < min(sizes) < 0.3 and 0.7 < max(sizes) < 1.05


def _channels_that(change: str, features: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The changed features, and which channels are no more what they were."""
    made = OF_FEATURES[change](features.shape[1], _drawn(seed))(features)
    return made, (made != features).any(dim=(0, 2, 3))


@pytest.mark.parametrize(("name", "factor"), [("negate", -1.0), ("zero", 0.0)])
def test_a_quarter_of_the_channels_is_negated_or_dropped(name: str, factor: float) -> None:
    features = _values(2, 24, 4, 4)
    made, changed = _channels_that(name, features)
    assert changed.sum() == 6 and torch.equal(made[:, changed], factor * features[:, changed])


def test_permuting_moves_channels_and_loses_none() -> None:
    features = _values(2, 24, 4, 4)
    made, changed = _channels_that("permute", features)
    assert changed.sum() == 6
    assert sorted(made[0, :, 0, 0].tolist()) == sorted(features[0, :, 0, 0].tolist())
    assert _channels_that("permute", _values(2, 3, 4, 4))[1].sum() == 2  # of colours, two change places


def test_shifting_rolls_a_quarter_of_the_channels_by_up_to_two_pixels() -> None:
    features = _values(2, 8, 6, 6)
    for seed in range(5):
        made, changed = _channels_that("shift", features, seed)
        rolls = [features.roll((down, right), (2, 3)) for down in range(-2, 3) for right in range(-2, 3)]
        assert any(torch.equal(made[:, changed], each[:, changed]) for each in rolls)
        assert changed.sum() in (0, 2)


def test_scaling_gives_each_channel_a_factor() -> None:
    features = _values(2, 200, 4, 4)
    factors = (OF_FEATURES["scale"](200, _drawn())(features) / features).flatten(2)
    assert torch.allclose(factors, factors[:1, :, :1].expand_as(factors), rtol=1e-4)
    assert abs(factors.log().mean()) < 0.1 and abs(factors[0, :, 0].log().std() - 0.4) < 0.06


def test_dropout_empties_the_same_places_of_every_image() -> None:
    ones = torch.ones(3, 8, 10, 10)
    shares = []
    for seed in range(10):
        made = OF_FEATURES["dropout"](8, _drawn(seed))(ones)
        assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])
        shares.append(1 - made.mean().item())
    assert min(shares) > 0 and max(shares) < 0.25 and max(shares) > 0.1


def test_activations_lie_between_the_features_and_a_nonlinearity() -> None:
    features = _values(2, 8, 4, 4)
    made = [OF_FEATURES["activation"](8, _drawn(seed))(features) for seed in range(20)]
    assert all(each.isfinite().all() and (each - features).abs().max() < 2 * features.abs().max() for each in made)
    assert len({each.numpy().tobytes() for each in made}) == 20


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", NETWORKS)
def test_one_layer_of_the_network_is_distorted(kind: str, name: str, trained: dict[str, Network]) -> None:
    x = torch.rand(2, 3, 32, 32, generator=_drawn())
    source = trained[kind]
    with torch.no_grad():
        plain = source(x)
        outputs = []
        for seed in range(6):
            network = NETWORKS[kind](3)
            network.load_state_dict(source.state_dict())
            distort(network, name, _drawn(seed))
            weights = source.state_dict()
            changed = [key for key, value in network.state_dict().items() if not torch.equal(value, weights[key])]
            assert len(changed) == (name in OF_KERNELS)
            outputs.append(network(x))
    assert sum(not torch.allclose(each, plain, atol=1e-4) for each in outputs) >= 5
    assert all(each.isfinite().all() for each in outputs)


def test_a_distorted_network_is_a_copy_by_the_seed() -> None:
    network, x = NETWORKS["edsr"](3), torch.rand(2, 3, 16, 16)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    with torch.no_grad():
        plain = network(x)
        made = [distorted(network, _drawn(seed))(x) for seed in range(12)]
        assert torch.equal(distorted(network, _drawn(3))(x), made[3])
        assert torch.equal(network(x), plain)
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert len({each.numpy().tobytes() for each in made}) == 12
