"""BatchNorm over all processes is torch's own where there is one; `tests/e2e/test_distributed.py` has two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bastion import BastionError
from bastion.acceleration import for_training
from bastion.attacks import Threat
from bastion.attacks.apgd import APGD
from bastion.training.sync_batchnorm import SyncBatchNorm2d, convert_batchnorms
from bastion.types import Batch


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _outcome(norm: nn.BatchNorm2d, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = norm(x)
    parameters = [parameter for parameter in norm.parameters() if parameter is not None]
    gradients = torch.autograd.grad((y.sin() * torch.arange(y.shape[-1])).sum(), [x, *parameters])
    return [y.detach(), *gradients, *norm.buffers()]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_values_gradients_and_running_statistics(
    alone: None, affine: bool, momentum: float | None, layout: torch.memory_format
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = 3 + 2 * torch.randn(4, 5, 3, 6, dtype=torch.float64, generator=generator).to(memory_format=layout)
    own, shared = (nn.BatchNorm2d(5, affine=affine, momentum=momentum, dtype=torch.float64) for _ in range(2))
    if affine:
        for norm in (own, shared):
            norm.load_state_dict({"weight": torch.arange(1.0, 6), "bias": torch.arange(5.0)}, strict=False)
    convert_batchnorms(shared)
    assert type(shared) is SyncBatchNorm2d
    for _ in range(2):
        for got, expected in zip(_outcome(shared, x), _outcome(own, x), strict=True):
            assert torch.allclose(got, expected, rtol=1e-10, atol=1e-12)


def test_in_half_precision_statistics_stay_exact(alone: None) -> None:
    generator = torch.Generator().manual_seed(0)
    x = 3 + torch.randn(16, 5, 8, 8, generator=generator)
    own, shared = nn.BatchNorm2d(5), nn.BatchNorm2d(5)
    convert_batchnorms(shared)
    exact, coarse = _outcome(own, x), _outcome(shared, x.bfloat16())
    assert [each.dtype for each in coarse[:2]] == [torch.bfloat16] * 2
    for got, expected in zip(coarse, exact, strict=True):
        assert torch.allclose(got.to(expected.dtype), expected, atol=0.02 * float(expected.abs().max()))


def test_attacks_that_stop_at_a_hit_are_refused(alone: None) -> None:
    """Processes would make different numbers of passes, and wait for each other for ever."""
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 5))
    convert_batchnorms(model)
    batch = Batch(torch.arange(4), torch.rand(4, 3, 4, 4), torch.arange(4))
    with for_training(model) as prepared:
        assert APGD(steps=2, keep="best")(prepared, batch, Threat("linf", 0.1), seed=0).shape == batch.x.shape
        with pytest.raises(BastionError, match="apgd: stops where an image is fooled, but processes that share"):
            APGD(steps=2)(prepared, batch, Threat("linf", 0.1), seed=0)


def test_in_eval_mode_it_is_the_ordinary_one(alone: None) -> None:
    own, shared = nn.BatchNorm2d(5), nn.BatchNorm2d(5)
    convert_batchnorms(shared)
    x = torch.arange(40.0).view(2, 5, 2, 2)
    assert torch.equal(shared.eval()(x), own.eval()(x))


def test_other_kinds_are_refused() -> None:
    with pytest.raises(BastionError, match=r"sync_batchnorm: 0 is a BatchNorm1d, which cannot be shared; set it false"):
        convert_batchnorms(nn.Sequential(nn.BatchNorm1d(3)))
