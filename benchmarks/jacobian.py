"""The largest singular value of a block's Jacobian: by products alone, beside the dense Jacobian and power iteration.

    python -m benchmarks.jacobian --write       # also puts table and picture into docs/jacobian.md
    python -m benchmarks.jacobian --docs        # does so from the last run

Blocks of Vision Transformers with random weights and tokens. Each case runs in a process of its own, on one thread.
Seconds are of the processor, so that other programs on the machine count little; `clock` is stored too. Memory is what
the process takes beyond model and input. `dense` is `torch.func.jacrev` and then `torch.linalg.svdvals`. Power
iteration goes on until its residual is below the tolerance of Lanczos.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bastion import storage
from bastion.jacobians.lanczos import largest
from bastion.jacobians.products import Jacobian
from bastion.models import checkpoint

RESULTS = Path(__file__).parent / "results" / "jacobian.json"
DOCS = Path(__file__).parents[1] / "docs" / "jacobian.md"
PLOT = DOCS.with_name("jacobian-cost.png")
# tokens, width, heads; the last two are ViT-S/16 and ViT-B/16 at 224 pixels
SIZES = {"512": (4, 128, 4), "1024": (8, 128, 4), "2048": (16, 128, 4), "4096": (32, 128, 4), "8192": (64, 128, 4)}
LARGE = {"75648": (197, 384, 6), "151296": (197, 768, 12)}
TOLERANCE = 1e-4
PATIENCE = 20_000  # products of power iteration


def block(size: str) -> tuple[nn.Module, Tensor]:
    tokens, width, heads = (SIZES | LARGE)[size]
    torch.manual_seed(0)
    spec = {"name": "vit/micro", "embed_dim": width, "num_heads": heads, "depth": 1}
    model = checkpoint.build(spec, mean=(0.5,) * 3, std=(0.5,) * 3).eval().requires_grad_(False)
    return model.blocks()[0].module, torch.randn(1, tokens, width)


def dense(module: nn.Module, x: Tensor) -> dict[str, Any]:
    start = time.process_time()
    with sdpa_kernel(SDPBackend.MATH):
        jacobian = torch.func.jacrev(module, chunk_size=256)(x).reshape(x.numel(), x.numel())
    made = time.process_time()
    sigma = torch.linalg.svdvals(jacobian)[0].item()
    return {"sigma": sigma, "jacrev": made - start, "products": x.numel()}


def lanczos(module: nn.Module, x: Tensor, top: int) -> dict[str, Any]:
    jacobian = Jacobian(module, x)
    found = largest(jacobian, _start(x), top=top, tolerance=TOLERANCE)
    residual = found.residuals.max().item()
    return {"sigma": found.values[0, 0].item(), "residual": residual, "products": int(found.products)}


def power(module: nn.Module, x: Tensor) -> dict[str, Any]:
    """v ← JᵀJv, the way of most papers."""
    jacobian, v, products = Jacobian(module, x), _start(x)(0), 0
    while products < PATIENCE:
        v = v / v.norm()
        u = jacobian.apply(v)
        sigma = u.norm()
        back = jacobian.transpose(u / sigma)
        products += 2
        residual = ((back - sigma * v).norm() / sigma).item()
        if residual <= TOLERANCE:
            break
        v = back
    return {"sigma": sigma.item(), "residual": residual, "products": products}


def _start(x: Tensor) -> Callable[[int], Tensor]:
    return lambda number: torch.randn(1, x.numel(), generator=torch.Generator().manual_seed(number))


METHODS: dict[str, Callable[[nn.Module, Tensor], dict[str, Any]]] = {
    "dense": dense,
    "power": power,
    "lanczos": partial(lanczos, top=1),
    "lanczos-5": partial(lanczos, top=5),
}


def run(method: str, size: str) -> dict[str, Any]:
    """In this process."""
    torch.set_num_threads(1)
    module, x = block(size)
    METHODS[method](module, x[:, :2])  # whatever is made once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, clock = time.process_time(), time.perf_counter()
    found = METHODS[method](module, x)
    seconds, clock = time.process_time() - start, time.perf_counter() - clock
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"method": method, "size": int(size), "seconds": seconds, "clock": clock, "megabytes": memory, **found}


def in_own_process(method: str, size: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.jacobian", "--case", method, size]
    made = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(made.stdout.splitlines()[-1])
    print(result, flush=True)
    return result


def table(results: list[dict[str, Any]]) -> str:
    found = {(each["size"], each["method"]): each for each in results}
    lines = [
        "| N·D | dense, s (jacrev) | MB | Lanczos, s | MB | products | ratio | top 5, s | power, products |",
        "| --- " * 9 + "|",
    ]
    for size in dict.fromkeys(each["size"] for each in results):
        one, five, slow, full = (found.get((size, name)) for name in ("lanczos", "lanczos-5", "power", "dense"))
        assert one and five and slow
        left = f"{full['seconds']:.2f} ({full['jacrev']:.2f}) | {full['megabytes']:,.0f}" if full else "– | –"
        ratio = f"{full['seconds'] / one['seconds']:,.0f}×" if full else ""
        lines.append(
            f"| {size:,} | {left} | {one['seconds']:.3f} | {one['megabytes']:.0f} | {one['products']} | {ratio} | "
            f"{five['seconds']:.2f} | {slow['products']:,} |"
        )
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    axes = figure.subplots(1, 2)
    names = {
        "dense": "dense (jacrev, svdvals)",
        "power": "power iteration",
        "lanczos": "Lanczos",
        "lanczos-5": "Lanczos, top 5",
    }
    for method, name in names.items():
        rows = [each for each in results if each["method"] == method]
        sizes = [each["size"] for each in rows]
        axes[0].loglog(sizes, [each["seconds"] for each in rows], "o-", label=name)
        axes[1].loglog(sizes, [max(each["megabytes"], 1) for each in rows], "o-", label=name)
    for panel, title in zip(axes, ("seconds of the processor", "memory in MB"), strict=True):
        panel.set(xlabel="N·D, numbers that go through the block", title=title)
        panel.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=120)


def write_docs(results: list[dict[str, Any]]) -> None:
    """The table and the picture, between the marks of the page."""
    plot(results, PLOT)
    begin, end = "<!-- cost table -->\n", "<!-- end -->"
    head, rest = DOCS.read_text().split(begin)
    picture = f"![Seconds and memory over the size of a block, by method]({PLOT.name})"
    storage.write_text(DOCS, f"{head}{begin}{table(results)}\n\n{picture}\n{end}{rest.split(end, 1)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs=2, metavar=("METHOD", "SIZE"), help="one case in this process")
    parser.add_argument("--sizes", nargs="*", default=[*SIZES, *LARGE])
    parser.add_argument("--write", action="store_true", help=f"to {RESULTS.name} and docs/{DOCS.name}")
    parser.add_argument("--docs", action="store_true", help=f"write docs/{DOCS.name} from {RESULTS.name}, run nothing")
    options = parser.parse_args()
    if options.docs:
        write_docs(json.loads(RESULTS.read_text()))
        return
    if options.case:
        print(json.dumps(run(*options.case)))
        return
    cases = [(method, size) for size in options.sizes for method in METHODS if method != "dense" or size in SIZES]
    results = [in_own_process(*case) for case in cases]
    print(table(results))
    if options.write:
        storage.write_text(RESULTS, json.dumps(results, indent=1) + "\n")
        write_docs(results)


if __name__ == "__main__":
    main()
