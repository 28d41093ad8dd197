"""Products with the Jacobian are those of the dense one, whatever the function does inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cube import Cube, CubeForward, CubeOnce
from torch import Tensor, nn

from bastion.errors import BastionError
from bastion.jacobians.lanczos import largest
from bastion.jacobians.products import Branch, Function, Jacobian


def dense(function: Function, x: Tensor) -> Tensor:
    """(B, m, n)"""
    rows = [
        torch.autograd.functional.jacobian(lambda one: function(one[None].clone())[0].flatten(), each.clone())
        for each in x
    ]
    return torch.stack([row.reshape(row.shape[0], -1) for row in rows])


def check_products(jacobian: Jacobian, right: Tensor) -> None:
    v = torch.randn(len(right), jacobian.inputs, dtype=right.dtype)
    u = torch.randn(len(right), jacobian.outputs, dtype=right.dtype)
    assert torch.allclose(jacobian.apply(v), (right @ v[:, :, None])[:, :, 0], atol=1e-10)
    assert torch.allclose(jacobian.transpose(u), (right.mT @ u[:, :, None])[:, :, 0], atol=1e-10)


def images(n: int = 3) -> Tensor:
    return torch.rand(n, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def network(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*layers).double().eval().requires_grad_(False)


FUNCTIONS: dict[str, Function] = {
    "convolution and BatchNorm": network(nn.Conv2d(2, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Tanh()),
    "in place": network(nn.ReLU(inplace=True), nn.Conv2d(2, 2, 3, padding=1), nn.ELU(inplace=True)),
    "pooling": network(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)),
    "fused attention": lambda x: nn.functional.scaled_dot_product_attention(*[x.flatten(2).mT] * 3),
    "layer norm": network(nn.Flatten(), nn.LayerNorm(72), nn.Linear(72, 5), nn.GELU()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("n", [1, 3])
def test_products_are_those_of_the_dense_jacobian(name: str, n: int) -> None:
    x = images(n)
    before = x.clone()
    jacobian = Jacobian(FUNCTIONS[name], x)
    assert not jacobian.forward_mode
    check_products(jacobian, dense(FUNCTIONS[name], x))
    assert torch.equal(x, before)


CONVOLUTIONS: dict[str, nn.Module] = {
    "stride that leaves pixels over": nn.Conv2d(2, 4, 3, stride=2),
    "stride, padding and dilation of its own by side": nn.Conv2d(2, 4, (3, 2), (3, 2), (2, 1), (2, 1)),
    "depth-wise": nn.Conv2d(2, 6, 3, padding=1, groups=2, bias=False),
    "padding by name": nn.Conv2d(2, 3, 4, padding="same"),
    "reflected": nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
    "one side": nn.Sequential(nn.Flatten(2), nn.Conv1d(2, 3, 5, stride=3, padding=2, dilation=2)),
    "three sides": nn.Sequential(nn.Unflatten(2, (2, 3)), nn.Conv3d(2, 2, (2, 2, 3), stride=(1, 2, 2))),
    "BatchNorm without weights": nn.BatchNorm2d(2, affine=False),
    "BatchNorm after the mean": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(2)),
    "BatchNorm without statistics": nn.Sequential(nn.Flatten(2), nn.BatchNorm1d(2, track_running_stats=False)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_layers_that_are_replaced_keep_their_jacobians(name: str) -> None:
    layer, x = network(CONVOLUTIONS[name]), images(1)
    for module in layer.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and module.running_var is not None:
            module.running_mean.uniform_(-1, 1), module.running_var.uniform_(0.5, 2)
    jacobian = Jacobian(layer, x)
    assert not jacobian.forward_mode
    assert torch.allclose(jacobian.y, layer(x))
    check_products(jacobian, dense(layer, x))


def test_the_branch_is_the_jacobian_without_the_identity() -> None:
    function, x = FUNCTIONS["in place"], images()
    whole = Jacobian(function, x)
    assert whole.is_square
    check_products(Branch(whole), dense(function, x) - torch.eye(72, dtype=torch.float64))
    assert not Jacobian(FUNCTIONS["pooling"], x).is_square


def small_branch(size: float, dtype: torch.dtype = torch.float32) -> tuple[Branch, Tensor, Callable[[int], Tensor]]:
    """F(x) = size · Wx, the singular values of F, and start vectors."""
    draw = torch.Generator().manual_seed(0)
    weight = size * torch.randn(300, 300, generator=draw, dtype=torch.float64) / 300**0.5
    linear = weight.T.to(dtype)
    branch = Branch(Jacobian(lambda z: z + z @ linear, torch.randn(2, 300, generator=draw, dtype=dtype)))

    def start(number: int) -> Tensor:
        return torch.randn(2, 300, generator=torch.Generator().manual_seed(number), dtype=dtype)

    return branch, torch.linalg.svdvals(weight), start


@pytest.mark.parametrize("top", [1, 3])
@pytest.mark.parametrize("size", [1e-5, 1e-6, 1e-7])
def test_the_search_of_a_small_branch_ends_where_rounding_is_the_limit(size: float, top: int) -> None:
    """Products with J are rounded at the size of the identity, which is far larger than F."""
    branch, right, start = small_branch(size)
    found = largest(branch, start, top=top, limit=2000)
    assert (found.products < 200).all()
    assert (found.residuals.amax(1) > 1e-4).all()  # so it is told that it did not converge
    nearest = (found.values[:, :, None] - right).abs().amin(2)
    assert (nearest <= found.residuals * found.values[:, :1]).all()


@pytest.mark.parametrize(("size", "dtype"), [(1e-3, torch.float32), (1e-6, torch.float64)])
def test_the_search_of_a_branch_that_rounding_spares_is_that_of_any_map(size: float, dtype: torch.dtype) -> None:
    branch, right, start = small_branch(size, dtype)
    found = largest(branch, start, top=3)
    assert (found.residuals <= 1e-4).all()
    branch.noise = 0.0
    assert all(map(torch.equal, found, largest(branch, start, top=3)))
    assert torch.allclose(found.values, right[:3].expand(2, 3), rtol=1e-4)


class Wrong(CubeForward):
    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return tangents[0]


@pytest.mark.parametrize(("kind", "forward_mode"), [(CubeForward, True), (Cube, False)])
def test_an_operation_without_one_of_the_two_ways_takes_the_other(kind: Any, forward_mode: bool) -> None:
    mix = network(nn.Conv2d(2, 2, 3, padding=1))
    x = images()
    jacobian = Jacobian(lambda z: z + kind.apply(mix(z)), x)
    assert jacobian.forward_mode is forward_mode
    check_products(jacobian, dense(lambda z: z + mix(z) ** 3, x))


def test_an_operation_without_both_is_one_clear_line() -> None:
    with pytest.raises(BastionError, match=r"block 3: .* neither a second derivative nor forward mode") as caught:
        Jacobian(CubeOnce.apply, images(), "block 3")
    assert "\n" not in str(caught.value)


def test_a_function_that_writes_over_what_its_gradient_needs_is_one_clear_line() -> None:
    with pytest.raises(BastionError, match=r"block 3: no gradient to go back along .*inplace operation"):
        Jacobian(lambda x: x.sigmoid().add_(1), images(), "block 3")


def test_an_example_that_is_not_finite_is_no_reason_to_doubt_the_way_back() -> None:
    x = images()
    x[1] = torch.inf
    jacobian = Jacobian(lambda z: z * z.exp(), x)
    assert not jacobian.forward_mode
    assert jacobian.apply(torch.ones(3, 72, dtype=torch.float64)).isfinite().all(1).tolist() == [True, False, True]


def test_two_ways_that_disagree_are_one_clear_line() -> None:
    with pytest.raises(BastionError, match="block 3: .* forward and reverse mode give different ones"):
        Jacobian(Wrong.apply, images(), "block 3")


def test_a_block_that_mixes_the_examples_of_a_batch_is_named_as_a_cause() -> None:
    mixing = nn.BatchNorm2d(2, track_running_stats=False).double()
    with pytest.raises(BastionError, match="block 3: no Jacobian by image: .* mixes the examples of a batch"):
        Jacobian(mixing, images(), "block 3")


def test_a_function_that_ignores_its_input_has_the_jacobian_zero() -> None:
    for function in (lambda x: x.detach() ** 2, lambda x: 0 * x.detach() + nn.Parameter(torch.ones(6)).double()):
        jacobian = Jacobian(function, images())
        assert not jacobian.apply(torch.rand(3, 72, dtype=torch.float64)).any()
        assert not jacobian.transpose(torch.rand(3, 72, dtype=torch.float64)).any()


def test_a_result_that_is_none_for_each_example_is_refused() -> None:
    with pytest.raises(BastionError, match=r"expected a result for each of 3 examples, got \(1, 2, 6, 6\)"):
        Jacobian(lambda x: x.sum(0, keepdim=True), images())
