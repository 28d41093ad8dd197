"""PSNR and SSIM have their closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from bastion.deepaugment.quality import C1, psnr, ssim


def test_psnr_of_a_known_error() -> None:
    x = torch.full((2, 3, 8, 8), 0.5)
    assert psnr(x, x + 0.1).tolist() == pytest.approx([20.0, 20.0], abs=1e-4)
    assert psnr(x, x).tolist() == [100.0, 100.0]


def test_ssim_of_flat_images_is_that_of_their_means() -> None:
    x, y = (torch.full((1, 3, 9, 9), value, dtype=torch.float64) for value in (0.2, 0.6))
    assert ssim(x, y).item() == pytest.approx((2 * 0.12 + C1) / (0.04 + 0.36 + C1), abs=1e-5)


def test_ssim_knows_the_same_and_the_negative() -> None:
    x = torch.rand(4, 3, 32, 32, dtype=torch.float64)
    assert ssim(x, x).tolist() == pytest.approx([1.0] * 4)
    assert (ssim(x, 1 - x) < -0.8).all()
    assert torch.allclose(ssim(x, x.flip(-1)), ssim(x.flip(-1), x))
    assert not math.isnan(ssim(x[:, :, :3, :3], x[:, :, :3, :3]).sum())
