"""docs/models.md and the numbers of `bastion list models`: `python scripts/models_table.py` counts them again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bastion.models import models
from bastion.models.model_stats import FILE, ModelStats, count

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
MARKED = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.S)


class Row(NamedTuple):
    """What a paper prints of a model."""

    label: str
    spec: dict[str, Any]
    parameters: float  # millions
    macs: float | None = None  # G; papers call them FLOPs
    why: str = ""  # it is not within 1 %

    def agrees(self, found: ModelStats) -> bool:
        """Within 1 %, or the same at the printed precision; or the row says why not."""
        pairs = [(found.parameters / 1e6, self.parameters), (found.macs / 1e9, self.macs)]
        return bool(self.why) or all(printed is None or _same(got, printed) for got, printed in pairs)


def _same(got: float, printed: float) -> bool:
    decimals = len(f"{printed:g}".partition(".")[2])
    return abs(got / printed - 1) <= 0.01 or abs(got - printed) < 10**-decimals


def row(label: str, name: str, parameters: float, macs: float | None = None, why: str = "", **options: Any) -> Row:
    return Row(label, {"name": name, **options}, parameters, macs, why)


COUNTER = "parameters agree; how the paper counted FLOPs is not said"
PUBLISHED: dict[str, list[Row]] = {
    "thesis": [
        row("DeiT-S", "timm/deit_small_patch16_224", 22.05, 4.61),
        row("CaiT-S12", "cait/s12", 25.61, 4.76),
        row("XCiT-S12", "xcit/s12", 26.25, 4.82),
        row("XCiT-M12", "xcit/m12", 46, 8.54),
        row("XCiT-L12", "xcit/l12", 104, 18.97),
        row("GELU ResNet-50", "timm/resnet50", 25, 4.11, "printed without decimals, cut off", act_layer="gelu"),
        row("WideResNet-50-2", "timm/wide_resnet50_2", 68, 11.47, "printed without decimals; 69 in the text"),
    ],
    "rspc": [
        row("ResNet50", "timm/resnet50", 25.6, 4.1),
        row("DeiT-Ti", "timm/deit_tiny_patch16_224", 5.7, 1.3),
        row("ConViT-Ti", "timm/convit_tiny", 5.7, 1.4, COUNTER),
        row("PVT-Tiny", "pvt/ti", 13.2, 1.9),
        row("RVT-Ti", "rvt/ti", 10.9, 1.3),
        row("FAN-T-Hybrid", "fan/hybrid-t", 7.5, 3.5, COUNTER),
        row("DeiT-S", "timm/deit_small_patch16_224", 22.1, 4.6),
        row("ConViT-S", "timm/convit_small", 27.8, 5.4, COUNTER),
        row("Swin-T", "timm/swin_tiny_patch4_window7_224", 28.3, 4.5),
        row("PVT-Small", "pvt/s", 24.5, 3.8),
        row("T2T-ViT_t-14", "t2t/14", 21.5, 6.1),
        row("RVT-S", "rvt/s", 23.3, 4.7, COUNTER),
        row("FAN-S-Hybrid", "fan/hybrid-s", 25.7, 6.7, "the paper prints the count of 10 classes, which is 25.74"),
        row("DeiT-B", "timm/deit_base_patch16_224", 86.6, 17.6),
        row("ConViT-B", "timm/convit_base", 86.5, 17.7, COUNTER),
        row("Swin-B", "timm/swin_base_patch4_window7_224", 87.8, 15.4),
        row("PVT-Large", "pvt/l", 61.4, 9.8),
        row("T2T-ViT_t-24", "t2t/24", 64.1, 15.0),
        row("RVT-B, 12 masked blocks", "rvt/b", 91.8, 17.7, COUNTER, masked_blocks=12),
        row("RVT-B, as released", "rvt/b", 91.8, 17.7, "the released code masks 5 blocks, the printed count is of 12"),
        row("FAN-B-Hybrid", "fan/hybrid-b", 50.5, 11.3, COUNTER),
    ],
    "rspc-cifar": [
        row("Swin-T", "timm/swin_tiny_patch4_window7_224", 27.6, num_classes=10),
        row("DeiT-S", "timm/deit_small_patch16_224", 21.7, num_classes=10),
        row("ConViT-S", "timm/convit_small", 27.4, num_classes=10),
        row("RVT-S", "rvt/s", 23.0, num_classes=10),
        row("FAN-S-Hybrid", "fan/hybrid-s", 25.7, num_classes=10),
    ],
    "generalization": [
        row("ResNet", "cifar/resnet", 23.52),
        row("PreActResNet", "cifar/preact-resnet", 23.50),
        row("ResNeXt", "cifar/resnext", 9.12),
        row("WideResNet", "cifar/wrn", 55.85),
        row("VGG", "cifar/vgg", 14.72),
        row(
            "DenseNet", "cifar/densenet", 1.12, why="no DenseNet of the usual settings has 1.12 M; this is the nearest"
        ),
        row("ViT", "cifar/vit", 9.78),
        row("MLP-Mixer", "cifar/mixer", 0.68),
        row("PoolFormer", "cifar/poolformer", 11.39),
        row("Swin", "cifar/swin", 27.42),
        row("PVTv2", "cifar/pvtv2", 12.40),
        row("CoAtNet", "cifar/coatnet", 16.99),
        row("CPVT", "cifar/cpvt", 9.49),
        row("ViTAE", "cifar/vitae", 23.18, num_classes=1000),
        row("ViTAE, 10 classes", "cifar/vitae", 23.18, why="the paper's count is with the head of 1000 classes"),
        row("CCT", "cifar/cct", 3.76),
        row("MobileViT", "cifar/mobilevit", 5.00),
        row("BoTNet", "cifar/botnet", 18.82),
        row("CeiT", "cifar/ceit", 5.56),
        row("CvT", "cifar/cvt", 19.54),
        row("LeViT", "cifar/levit", 6.67, why="the design behind 6.67 M is not known; this is LeViT-128S"),
        *(
            row(f"CoAtNet {stages}", "cifar/coatnet", count, stages=stages)
            for stages, count in {
                "CCTT": 16.99,
                "CCTC": 16.65,
                "CTTT": 17.36,
                "CTTC": 17.02,
                "CCCC": 16.02,
                "CCCT": 16.36,
                "CTCC": 16.38,
                "CTCT": 16.73,
            }.items()
        ),
    ],
    "convstem": [
        row("ViT-S", "convstem/vit-s", 22.05, 4.61, stem="patch"),
        row("ViT-S + ConvStem", "convstem/vit-s", 22.78, 4.99),
        row("ViT-M", "convstem/vit-m", 38.85, 8.01, stem="patch"),
        row("ViT-M + ConvStem", "convstem/vit-m", 39.5, 8.38),
        row("ViT-B", "convstem/vit-b", 86.57, 17.58, stem="patch"),
        row("ViT-B + ConvStem", "convstem/vit-b", 87.14, 17.93),
        row("Isotropic ConvNeXt-S", "convstem/iso-s", 22.31, 4.29, stem="patch"),
        row("Isotropic ConvNeXt-S + ConvStem", "convstem/iso-s", 23.04, 4.67),
        row("ConvNeXt-T", "convstem/convnext-t", 28.59, 4.47, stem="patch"),
        row("ConvNeXt-T + ConvStem", "convstem/convnext-t", 28.63, 4.60),
        row("ConvNeXt-S", "convstem/convnext-s", 50.10, 8.70, stem="patch"),
        row("ConvNeXt-S + ConvStem", "convstem/convnext-s", 50.33, 8.79),
        row("ConvNeXt-B", "convstem/convnext-b", 88.59, 15.38, stem="patch"),
        row("ConvNeXt-B + ConvStem", "convstem/convnext-b", 88.75, 15.97),
    ],
}
HEAD = {
    "published": ("model", "spec", "parameters, M", "paper", "", "GMACs", "paper", "", ""),
    "all": ("model", "parameters", "GMACs", "input", "blocks", "attend", "attention", "from"),
}


def table(cells: Iterator[tuple[str, ...]], head: tuple[str, ...]) -> str:
    lines = [head, ("---",) * len(head), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def published(paper: str) -> Iterator[tuple[str, ...]]:
    for each in PUBLISHED[paper]:
        found = count(each.spec)
        options = ", ".join(f"{key}: {value}" for key, value in each.spec.items() if key != "name")
        yield (
            each.label,
            f"`{each.spec['name']}`" + (f" {options}" if options else ""),
            *_beside(found.parameters / 1e6, each.parameters),
            *(_beside(found.macs / 1e9, each.macs) if each.macs else (f"{found.macs / 1e9:.2f}", "", "")),
            each.why,
        )


def _beside(got: float, printed: float) -> tuple[str, str, str]:
    return f"{got:.2f}", f"{printed:g}", f"{100 * (got / printed - 1):+.1f} %"


def everything(found: dict[str, ModelStats]) -> Iterator[tuple[str, ...]]:
    for name, each in found.items():
        size = "×".join(map(str, each.shape))
        yield (
            f"`{name}`",
            f"{each.parameters:,}",
            f"{each.macs / 1e9:.3f}",
            size,
            str(each.blocks),
            str(each.attending),
            each.attention,
            each.paper,
        )


def rendered(page: str, found: dict[str, ModelStats]) -> str:
    tables = {paper: table(published(paper), HEAD["published"]) for paper in PUBLISHED}
    tables["all"] = table(everything(found), HEAD["all"])
    return MARKED.sub(lambda match: f"{match[1]}{tables[match[2]]}{match[3]}", page)


def main() -> None:
    found = {name: count({"name": name}) for name in models.names() if not name.endswith("/*")}
    FILE.write_text(json.dumps({name: each._asdict() for name, each in found.items()}, indent=1) + "\n")
    PAGE.write_text(rendered(PAGE.read_text(), found))


if __name__ == "__main__":
    main()
