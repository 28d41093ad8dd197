"""A batch that is not what models and attacks expect is refused at the door."""

from __future__ import annotations

import math

import pytest
import torch

from bastion import BastionError
from bastion.types import Batch

X, Y, I = torch.rand(4, 3, 5, 5), torch.tensor([0, 1, 2, 0]), torch.arange(10, 14)  # noqa: E741


def _with(value: float) -> torch.Tensor:
    x = X.clone()
    x[2, 0, 0, 0] = value
    return x


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            Batch(I, _with(1.01), Y),
            r"here: image 12 has pixels outside \[0, 1\] or NaN .*the model normalises by itself",
        ),
        (Batch(I, _with(-0.01), Y), "image 12 has pixels outside"),
        (Batch(I, _with(math.nan), Y), "image 12 has pixels outside"),
        (Batch(I, X * 255, Y), r"batch range .* give raw pixels divided by 255"),
        (Batch(I, (X * 255).byte(), Y), r"must be float32 or float64 of shape \(B, C, H, W\), got torch.uint8"),
        (Batch(I, X[0], Y), "must be float32 or float64 of shape"),
        (Batch(I, X, Y + 1), "labels must be integers from 0 to 2, got torch.int64 from 1 to 3"),
        (Batch(I, X, Y - 1), "labels must be integers from 0 to 2"),
        (Batch(I, X, Y.float()), "labels must be integers from 0 to 2, got torch.float32"),
        (Batch(I, X, torch.rand(4, 5)), r"soft labels, .* of shape \(4, 3\), got torch.float32 \(4, 5\)"),
        (Batch(I, X, Y[:3]), "4 images, but labels of shape"),
        (Batch(I, X, Y[0]), "4 images, but labels of shape"),
        (Batch(I[:, None], X, Y), r"integers of shape \(4,\), got torch.int64 \(4, 1\)"),
        (Batch(I.float(), X, Y), "got torch.float32"),
        (Batch(I, X, 2 * torch.eye(3)[Y]), "soft labels must be shares of the classes"),
        (Batch(I, X, torch.full((4, 3), math.nan)), "soft labels must be shares of the classes"),
        (Batch(I, X, torch.tensor([[2.0, -1.0, 0.0]]).expand(4, 3)), "soft labels must be shares of the classes"),
    ],
)
def test_bad_batches_are_refused(batch: Batch, message: str) -> None:
    with pytest.raises(BastionError, match=message):
        batch.check(3, "here")


@pytest.mark.parametrize(
    "x",
    [
        X,
        X.contiguous(memory_format=torch.channels_last),
        X.double(),
        X[:, :, ::2, ::2],
        X.transpose(2, 3),
        X[:0],
        X.round(),
    ],
    ids=["plain", "channels-last", "double", "strided", "transposed", "empty", "0 and 1"],
)
def test_good_batches_of_any_layout_pass(x: torch.Tensor) -> None:
    batch = Batch(I[: len(x)], x, Y[: len(x)])
    assert all(a is b for a, b in zip(batch.check(3, "here"), batch, strict=True))
    Batch(I, X, torch.eye(3)[Y]).check(3, "here")


def test_select_takes_masks_and_positions() -> None:
    batch = Batch(I, X, Y)
    assert batch.select(Y == 0).index.tolist() == [10, 13]
    assert batch.select(torch.tensor([3, 1])).index.tolist() == [13, 11]


def test_logits_travel_with_the_images_that_they_are_of() -> None:
    batch = Batch(torch.arange(4), torch.rand(4, 1, 2, 2), torch.zeros(4, dtype=torch.int64), torch.rand(4, 3))
    assert batch.logits is not None
    cut = batch.select(torch.tensor([2, 0]))
    assert cut.logits is not None and torch.equal(cut.logits, batch.logits[[2, 0]])
    assert batch.at(1 - batch.x).logits is None and batch.to("cpu").logits is batch.logits
    assert Batch(*batch[:3]).select(batch.index < 2).logits is None


def test_chunks_make_the_batch_again() -> None:
    batch = Batch(torch.arange(5), torch.rand(5, 1, 2, 2), torch.arange(5))
    parts = batch.chunk(2)
    assert [len(part.x) for part in parts] == [3, 2]
    assert all(torch.equal(*pair) for pair in zip(Batch.cat(parts)[:3], batch[:3], strict=True))
