"""Image-to-image networks take images of any size, each by itself."""

from __future__ import annotations

import pytest
import torch

from bastion.deepaugment.networks import NETWORKS, Network, Residual


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8), (3, 13, 10)])
@pytest.mark.parametrize("name", NETWORKS)
def test_images_keep_their_shape(name: str, shape: tuple[int, int, int]) -> None:
    x = torch.rand(2, *shape)
    assert NETWORKS[name](shape[0], 8, 1)(x).shape == x.shape


def test_an_image_does_not_depend_on_the_others(trained: dict[str, Network]) -> None:
    x = torch.rand(5, 3, 32, 32, dtype=torch.float64)
    for network in trained.values():
        precise = NETWORKS["edsr" if hasattr(network, "head") else "cae"](3)
        precise.load_state_dict(network.state_dict())
        together = precise.double()(x)
        assert torch.allclose(together, torch.cat([precise(each[None]) for each in x]), atol=1e-12)


def test_codes_are_rounded_to_eighths_and_the_gradient_passes() -> None:
    network = NETWORKS["cae"](3, 8, 1)
    codes = []
    network.get_submodule("decoder").register_forward_pre_hook(lambda _, given: codes.append(8 * given[0]))
    x = torch.rand(2, 3, 32, 32, requires_grad=True)
    network(x).sum().backward()
    assert torch.equal(codes[0], codes[0].round()) and codes[0].shape == (2, 8, 8, 8)
    assert len(codes[0].unique()) > 3 and x.grad is not None and x.grad.any()


def test_the_path_leaves_out_what_is_inside_residual_blocks() -> None:
    for name, network in ((name, kind(3, 8, 2)) for name, kind in NETWORKS.items()):
        inside = {layer for block in network.modules() if isinstance(block, Residual) for layer in block.children()}
        layers = [each for each in network.modules() if isinstance(each, torch.nn.Conv2d | Residual)]
        assert network.path() == [each for each in layers if each not in inside], name
