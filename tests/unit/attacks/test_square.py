"""The Square Attack keeps its schedule and its patterns, and never gives up what it has."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import Linear, MakeLinear, unaccelerated
from tests.oracles import nearest
from torch import Tensor

from bastion import Threat, journal
from bastion.attacks.engine import attack
from bastion.attacks.losses import margin
from bastion.attacks.square import MovedSquares, PaintedSquares, Square, Squares, pattern
from bastion.forward import misclassified
from bastion.threat import Norm, project
from bastion.types import Batch

NORMS: list[Norm] = ["linf", "l2", "l1"]
EPS: dict[Norm, float] = {"linf": 0.05, "l2": 0.4, "l1": 2.0}
FROM = (0, 11, 51, 201, 501, 1001, 2001, 4001)


@pytest.mark.parametrize(
    ("size", "odd", "sides"),
    [
        (32, False, (29, 20, 14, 10, 7, 5, 4, 3)),
        (32, True, (29, 21, 15, 11, 7, 5, 5, 3)),
        (224, False, (200, 142, 100, 71, 50, 35, 25, 18)),
        (224, True, (201, 143, 101, 71, 51, 35, 25, 19)),
    ],
)
def test_squares_shrink_by_the_schedule_of_autoattack(size: int, odd: bool, sides: tuple[int, ...]) -> None:
    got = Square().sides(size, size, odd=odd)
    assert len(got) == 5000
    changes = [0, *((got.diff() != 0).nonzero()[:, 0] + 1).tolist()]
    assert [int(got[query]) for query in FROM] == list(sides)
    assert set(changes) <= set(FROM)  # of two equal sides in a row there is no change to see


@pytest.mark.parametrize("queries", [1, 20, 500, 3000])
@pytest.mark.parametrize("rescale", [True, False])
def test_squares_shrink_as_the_references_do(queries: int, rescale: bool) -> None:
    base = pytest.importorskip("pyautoattack.square")
    made = base.SquareAttack(None, n_queries=queries, resc_schedule=rescale)
    expected = [max(round((made.p_selection(query) * 19 * 13) ** 0.5), 1) for query in range(queries)]
    got = Square(queries=queries, rescale=rescale).sides(19, 13, odd=False)
    assert got.tolist() == [min(side, 13) for side in expected]


@pytest.mark.parametrize(("power", "name"), [(2, "L2"), (4, "L1")])
@pytest.mark.parametrize("side", [1, 2, 3, 4, 5, 7, 16, 29])
def test_the_pattern_is_the_references(power: int, name: str, side: int) -> None:
    base = pytest.importorskip("pyautoattack.square")
    made = base.SquareAttack(None, norm=name, device="cpu")
    with torch.random.fork_rng():
        torch.manual_seed(2)  # draws 0.61: …
        expected = made.eta(side).T  # … so it is transposed
    assert torch.allclose(pattern(side, power), expected.double(), atol=1e-6)
    assert torch.linalg.vector_norm(pattern(side, power), 2 if power == 2 else 1).item() == pytest.approx(1)


def _history(model: Linear, batch: Batch, threat: Threat, settings: Square) -> tuple[Tensor, Tensor, Tensor]:
    """Kept margins (queries + 1, B), the points asked about, and those kept."""
    kind = PaintedSquares if threat.norm == "linf" else MovedSquares
    margins, asked, kept = [], [], []

    class Traced(kind):  # type: ignore[misc, valid-type]
        def update(self, state: Squares, logits: Tensor, gradient: Tensor) -> None:
            asked.append(state.x.clone())
            super().update(state, logits, gradient)
            margins.append(state.kept_margin.clone())
            kept.append(state.kept.clone())

    attack(unaccelerated(model, 256), batch, threat, lambda classes: Traced(settings, threat, 0), name="traced")
    return torch.stack(margins), torch.stack(asked), torch.stack(kept)


@pytest.mark.parametrize("norm", NORMS)
def test_the_kept_margin_falls_and_is_the_kept_points(make_linear: MakeLinear, norm: Norm) -> None:
    model, batch = make_linear(classes=4, n=6, shape=(3, 12, 10))
    threat = Threat(norm, 0.3 * nearest(norm, model, batch).min().item())  # nobody is fooled: all runs to the end
    margins, asked, kept = _history(model, batch, threat, Square(queries=60))
    assert len(margins) == 61
    assert (margins.diff(dim=0) <= 0).all() and (margins[-1] < margins[0]).all()
    for row in range(6):
        assert threat.contains(batch.x[row].expand_as(asked[:, row]), asked[:, row]).all()
        assert torch.allclose(-margin(model(kept[:, row]), batch.y[row].expand(61)), margins[:, row])
    lowest = torch.stack([-margin(model(points), batch.y) for points in asked]).cummin(0).values
    assert torch.allclose(margins, lowest)


@pytest.mark.parametrize("norm", NORMS)
def test_with_the_same_draws_the_reference_asks_about_the_same_points(
    make_linear: MakeLinear, monkeypatch: pytest.MonkeyPatch, norm: Norm
) -> None:
    """Its l1 projection, which is in float32, is replaced: what it leaves of a cleared pixel would be amplified."""
    base = pytest.importorskip("pyautoattack.square")
    from benchmarks.draws import SameDraws

    def exact(x: Tensor, offset: Tensor, eps: float) -> Tensor:
        return project("l1", x, x + offset, eps) - x - offset

    monkeypatch.setattr(base, "L1_projection", exact)
    model, batch = make_linear(classes=4, n=6, shape=(3, 16, 16))
    batch = batch._replace(index=torch.zeros_like(batch.index))
    threat = Threat(norm, 0.3 * nearest(norm, model, batch).min().item())
    asked: list[Tensor] = []

    def watched(x: Tensor) -> Tensor:
        asked.append(x.clone())
        return model(x)

    SameDraws.of(watched, threat, queries=300).perturb(batch.x, batch.y)
    _, ours, _ = _history(model, batch, threat, Square(queries=300))
    theirs = torch.stack(asked[1:-1])  # without the images, and the look at what came out
    assert theirs.shape == ours.shape == (301, *batch.x.shape)
    # Radii differ by 1e-7 of themselves, and the rest of a radius grows again; other squares would differ by eps.
    assert (theirs - ours).abs().max() < 1e-2 * threat.eps


def test_linf_points_stand_at_the_faces_of_the_ball_and_change_a_square(make_linear: MakeLinear) -> None:
    model, batch = make_linear(classes=4, n=6, shape=(3, 12, 10))
    threat = Threat("linf", 0.3 * nearest("linf", model, batch).min().item())
    _, asked, kept = _history(model, batch, threat, Square(queries=40))
    faces = torch.stack([(batch.x + sign * threat.eps).clamp(0, 1) for sign in (-1, 1)])
    assert ((asked[:, None] - faces).abs().amin(1) < 1e-12).all()
    stripes = (asked[0] - batch.x).sign()
    assert torch.equal(stripes, stripes[:, :, :1].expand_as(stripes))  # the start has one sign a column
    sides = Square(queries=40).sides(12, 10, odd=False)
    seen = torch.zeros(12, 10, dtype=torch.bool)
    for query in range(40):
        changed = (asked[query + 1] != kept[query]).any(1)  # (B, H, W)
        for image in changed:
            rows, columns = image.any(1).nonzero()[:, 0], image.any(0).nonzero()[:, 0]
            if len(rows):
                assert rows.max() - rows.min() < sides[query] and columns.max() - columns.min() < sides[query]
            seen |= image
    assert seen.all()  # the last row and column too


@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_l2_and_l1_points_use_the_whole_radius(norm: Norm) -> None:
    """Far from the walls of the box."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 300, generator=generator, dtype=torch.float64)
    x = torch.full((4, 3, 10, 10), 0.5, dtype=torch.float64)
    model = Linear(weight, torch.tensor([1e3, 0, 0, 0], dtype=torch.float64))
    threat = Threat(norm, EPS[norm] / 4)
    _, asked, _ = _history(
        model, Batch(torch.arange(4), x, torch.zeros(4, dtype=torch.int64)), threat, Square(queries=30)
    )
    reach = torch.stack([threat.distance(x, points) for points in asked])
    if norm == "l2":
        assert torch.allclose(reach, torch.full_like(reach, threat.eps), rtol=1e-9)
    else:
        assert (reach <= threat.eps + 1e-9).all() and (reach[0] > 0.99 * threat.eps).all()


@pytest.mark.parametrize("norm", NORMS)
def test_it_never_fools_beyond_the_nearest_point(make_linear: MakeLinear, norm: Norm) -> None:
    model, batch = make_linear(classes=6, n=24)
    away = nearest(norm, model, batch)
    threat = Threat(norm, away.median().item() * {"linf": 2, "l2": 3, "l1": 4}[norm])
    x = Square(queries=150)(model, batch, threat, seed=0)
    fooled = misclassified(model(x), batch.y)
    assert threat.contains(batch.x, x).all()
    assert (away[fooled] <= threat.eps).all()
    assert fooled.sum() >= 8  # and it does find some


@pytest.mark.parametrize("norm", NORMS)
def test_a_model_that_answers_always_the_same_is_asked_to_the_end(norm: Norm) -> None:
    weight, bias = torch.zeros(3, 90, dtype=torch.float64), torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)
    batch = Batch(torch.arange(3), torch.rand(3, 3, 6, 5, dtype=torch.float64), torch.zeros(3, dtype=torch.int64))
    with journal.opened() as notes:
        assert torch.equal(Square(queries=17)(Linear(weight, bias), batch, Threat(norm, EPS[norm]), seed=0), batch.x)
    assert set(notes.forwards.values()) == {1 + 1 + 17}  # the image, the start, the queries
    assert set(notes.backwards.values()) == {0}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(3, 3, 2), (1, 1, 1), (1, 1, 7), (2, 9, 4), (3, 4, 33)], ids=str)
def test_any_shape_of_image_will_do(make_linear: MakeLinear, norm: Norm, shape: tuple[int, int, int]) -> None:
    model, batch = make_linear(classes=3, n=5, shape=shape)
    threat = Threat(norm, EPS[norm])
    x = Square(queries=25, restarts=2)(model, batch, threat, seed=0)
    assert x.isfinite().all() and threat.contains(batch.x, x).all()
    before, after = (margin(model(points), batch.y) for points in (batch.x, x))
    assert (after >= before).all() and (after > before).any()


def test_examples_restarts_and_seeds_have_their_own_squares(make_linear: MakeLinear) -> None:
    model, batch = make_linear(classes=3, n=2, shape=(1, 8, 8))
    batch = batch._replace(x=batch.x[:1].repeat(2, 1, 1, 1), y=batch.y[:1].repeat(2))  # one image, two numbers
    threat = Threat("linf", 0.2 * nearest("linf", model, batch).min().item())
    asked = _history(model, batch, threat, Square(queries=5))[1]
    assert all(not torch.equal(points[0], points[1]) for points in asked)
    results = [Square(queries=0, restarts=runs)(model, batch, threat, seed=s) for runs, s in ((1, 0), (1, 1), (9, 0))]
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
