"""The tables of docs/recipes.md, made from the recipes: `python scripts/recipes_table.py` writes them again."""

from __future__ import annotations

import re
from pathlib import Path

from bastion.recipe import Recipe, load_recipe
from bastion.recipe_files import shipped

PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"
MARKED = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.S)

# Forward and backward passes that the outer loss takes: those of two images if it compares them.
LOSS = {"standard": 1, "adversarial": 1, "trades": 2, "mart": 2, "alp": 2, "rspc": 2}


def passes(recipe: Recipe) -> int:
    """Forward and backward passes for each training image: attack steps, loss, and the loss again at other weights."""
    epochs, perturb = recipe.schedule.epochs, recipe.optimizer.perturb
    attack = recipe.objective.plain().get("attack")
    steps = attack.get("steps", 1) if attack else 0  # fgsm-rs has no steps to give
    again = epochs - perturb.after if perturb else 0
    return round(epochs * steps + (epochs + again) * loss_passes(recipe))


def loss_passes(recipe: Recipe) -> int:
    """Where RSPC's two networks have different aims, two more backward passes."""
    objective = recipe.objective.plain()
    aims = objective.get("minimize", "alignment"), objective.get("maximize")
    return LOSS[objective["name"]] + (2 if aims[1] not in (None, aims[0]) else 0)


def table(folder: str) -> str:
    """A row for each recipe of a folder."""
    rows = ["| recipe | data | model | epochs | passes | expected, % | begins with |", "| --- " * 7 + "|"]
    for name in shipped("recipe"):
        if name.startswith(f"{folder}/"):
            recipe = load_recipe(name)
            cells = (
                f"`{name}`",
                recipe.data.name,
                recipe.model.name,
                str(recipe.schedule.epochs),
                f"{passes(recipe):,}",
                expected(recipe),
                f"`{recipe.init.from_}`" if recipe.init else "",
            )
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def expected(recipe: Recipe) -> str:
    """Accuracies in per cent, then hours or minutes, then what must be known to compare with them."""
    times = {"minutes": "min", "hours": "h"}
    numbers = {key: value for key, value in recipe.expect.items() if isinstance(value, int | float)}
    shares = [f"{key} {100 * value:.4g}" for key, value in numbers.items() if key not in times]
    shares += [f"{numbers[key]:g} {unit}" for key, unit in times.items() if key in numbers]
    return ", ".join(shares) + (f" ({recipe.expect['note']})" if "note" in recipe.expect else "")


def rendered(page: str) -> str:
    return MARKED.sub(lambda found: f"{found[1]}{table(found[2])}{found[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
