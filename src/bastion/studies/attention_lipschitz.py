"""Lipschitz constants of self-attention, measured and bounded (Wang and Ruan 2022, Theorem 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import MinLen
from timm.layers.attention import Attention
from torch import Tensor, nn

from bastion import forward, rng
from bastion.acceleration import saved_bytes
from bastion.forward import frozen
from bastion.jacobians.attention import Heads
from bastion.jacobians.lanczos import largest
from bastion.jacobians.products import GRAPHS, Jacobian
from bastion.memory import check_memory
from bastion.models.cauchy import Attention as CauchyAttention
from bastion.settings import AtLeastOne, Positive, settings
from bastion.studies import studies
from bastion.studies.examples import first_examples
from bastion.types import DataSet, Study, Tapped

TOLERANCE = 1e-4  # of the residual
BASIS = 64  # most Lanczos vectors kept


@studies.register("attention-lipschitz")
@settings
class AttentionLipschitz(Study):
    """Largest singular value of attention's Jacobian at the tokens of images, and an upper bound; one part per block.

    For self-attention as in timm's ViTs and the models of Wang and Ruan, on the first `images` of the test split. NaN
    for a model without such attention.
    """

    images: AtLeastOne = 8
    scales: Annotated[tuple[Positive, ...], MinLen(1)] = (0.25, 0.5, 1.0, 2.0, 4.0)  # factors of the tokens

    revision: ClassVar[int] = 3
    facts: ClassVar[Mapping[str, str]] = {
        "block": "number of the block among the residual blocks, from 0; NaN if there is none",
        "measured": "largest singular value of attention's Jacobian, by image",
        "residual": "largest ‖Jᵀu − σv‖ / σ of all that was measured: bounds its error",
        "reached": "l2 norm of the longest token that enters attention",
        "domain": "largest l2 norm that the LayerNorm can give whose output enters attention; NaN without one",
        "bound": "upper bound of the Lipschitz constant for tokens of norm at most `domain`, so for every image",
        "reached_bound": "upper bound for tokens of norm at most `reached`",
        "scale": "factor that all tokens are multiplied by",
        "scaled": "largest of `measured` at tokens multiplied by each scale",
        "scaled_bound": "upper bound for tokens of norm at most `reached` times the scale",
    }

    @property
    def reads(self) -> Mapping[str, int | None]:
        return {"test": self.images}

    def parts(self, model: nn.Module, data: DataSet) -> int:
        return len(_attentions(model))

    def __call__(self, model: nn.Module, data: DataSet, part: int, *, seed: int) -> dict[str, Tensor]:
        found = _attentions(model)
        if not found:
            return self._nothing()
        number, block, module, heads = found[part]
        batch = first_examples(data, "test", self.images, "attention-lipschitz.images")
        tokens, norm = _inputs(model, block, module, batch.x.to(heads.out.device))
        _check_memory(module, tokens[:1])
        images = zip(torch.split(tokens, 1), torch.split(batch.index.to(tokens.device), 1), strict=True)
        # One image at a time, so that memory does not grow with their number.
        found_by_image = [_stretches(module, own, index, (1.0, *self.scales), seed) for own, index in images]
        measured, residuals = torch.stack(found_by_image, dim=2)  # (1 + scales, B) each
        reached = torch.linalg.vector_norm(tokens, dim=2).amax()
        domain = _layer_norm_radius(norm).to(reached)
        scales = tokens.new_tensor(self.scales)
        bounds = heads.upper_bound(torch.cat([domain[None], reached[None], scales * reached]), tokens.shape[1])
        return {
            "block": torch.tensor(float(number)),
            "measured": measured[0].float(),
            "residual": residuals.amax().float(),
            "reached": reached.float(),
            "domain": domain.float(),
            "bound": bounds[0].float(),
            "reached_bound": bounds[1].float(),
            "scale": scales.float(),
            "scaled": measured[1:].amax(1).float(),
            "scaled_bound": bounds[2:].float(),
            "warning.unconverged": ~(residuals <= TOLERANCE).all(),  # true of NaN too
        }

    def _nothing(self) -> dict[str, Tensor]:
        shapes = {"measured": self.images, "scale": len(self.scales), "scaled": len(self.scales)}
        shapes["scaled_bound"] = shapes["scaled"]
        nothing = {name: torch.full((shapes[name],) if name in shapes else (), torch.nan) for name in self.facts}
        return nothing | {"warning.unconverged": torch.tensor(False)}


def _attentions(model: nn.Module) -> list[tuple[int, nn.Module, nn.Module, Heads]]:
    """For each block with such attention: its number, the block, the attention module and its weights.

    Of blocks that attend between all tokens of an image, as the bound is of tokens (B, N, D).
    """
    found = []
    for number, block in enumerate(model.blocks() if isinstance(model, Tapped) else ()):
        known = ((each, _heads(each)) for each in block.module.modules() if block.attention == "tokens")
        module, heads = next(((each, heads) for each, heads in known if heads), (None, None))
        if module is not None and heads is not None:
            found.append((number, block.module, module, heads))
    return found


def _heads(module: nn.Module) -> Heads | None:
    if isinstance(module, CauchyAttention):
        projection: Any = module.qk
        q, k = _by_head(projection.weight, module.heads, 2).unbind(2)  # queries and keys are interleaved
        bias = _by_head(projection.bias, module.heads, 2)[:, :, 0]
        v = _by_head(module.v.weight, module.heads, 1)[:, :, 0]
        return Heads.of(q, bias, k, v, module.projection.weight.detach(), q.shape[1] ** -0.5)
    attention: Any = module
    if (
        type(module) is Attention
        and _is_plain(attention.q_norm, attention.k_norm, attention.norm)
        and not _gated(module)
    ):
        q, k, v = attention.qkv.weight.detach().view(3, attention.num_heads, -1, attention.qkv.in_features)
        bias = attention.qkv.bias
        bias = q.new_zeros(()) if bias is None else bias.detach().view(3, attention.num_heads, -1)[0]
        return Heads.of(q, bias.expand(q.shape[:2]), k, v, attention.proj.weight.detach(), attention.scale)
    return None


def _gated(module: nn.Module) -> bool:
    return getattr(module, "gate", None) is not None  # timm 1.0.26 has no such attribute


def _by_head(rows: Tensor, heads: int, together: int) -> Tensor:
    """(H, d, together, …)"""
    return rows.detach().view(heads, -1, together, *rows.shape[1:])


def _is_plain(*modules: nn.Module) -> bool:
    return all(isinstance(module, nn.Identity) for module in modules)


def _inputs(model: nn.Module, block: nn.Module, module: nn.Module, x: Tensor) -> tuple[Tensor, nn.LayerNorm | None]:
    """(B, N, D): the input of the module when the model runs on x; and the block's LayerNorm whose output it is."""
    seen: list[Tensor] = []
    normalised: dict[nn.LayerNorm, Tensor] = {}
    hooks = [module.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].clone()))]
    for norm in block.modules():
        if isinstance(norm, nn.LayerNorm):
            hooks.append(norm.register_forward_hook(lambda own, _, output: normalised.update({own: output.clone()})))
    try:
        with torch.no_grad():
            forward.logits(model, x)
    finally:
        for hook in hooks:
            hook.remove()
    before = [norm for norm, output in normalised.items() if torch.equal(output, seen[-1])]
    return seen[-1], before[0] if before else None


def _check_memory(module: nn.Module, tokens: Tensor) -> None:
    """Raise an error if the vectors and the graphs of one image do not fit."""
    vectors = 2 * BASIS * tokens.numel() * tokens.element_size()
    with frozen(module):
        graphs = GRAPHS * saved_bytes(module, tokens, module)
    check_memory(
        vectors + graphs,
        tokens.device,
        f"attention-lipschitz: {2 * BASIS} vectors of {tokens.numel():,} numbers",
        "free some, or leave the study out",
    )


def _stretches(module: nn.Module, tokens: Tensor, index: Tensor, scales: Sequence[float], seed: int) -> Tensor:
    """(2, scales): largest singular values of the module's Jacobian at an image's tokens (1, N, D), times each scale;
    and their residuals."""
    start = rng.normal(seed, index, "attention-lipschitz", (tokens.numel(),), dtype=tokens.dtype)
    columns = []
    with frozen(module):
        for scale in scales:
            jacobian = Jacobian(module, scale * tokens, "attention-lipschitz")
            found = largest(jacobian, lambda _: start, tolerance=TOLERANCE, basis=BASIS)
            columns.append(torch.cat([found.values[0], found.residuals[0]]))
    return torch.stack(columns, dim=1)


def _layer_norm_radius(norm: nn.LayerNorm | None) -> Tensor:
    """Largest l2 norm of a LayerNorm's output: at most √D when normalised, then weight and bias are applied."""
    if norm is None or norm.weight is None:
        return torch.tensor(torch.nan)
    bias = torch.zeros_like(norm.weight) if norm.bias is None else norm.bias
    radius: Tensor = norm.weight.abs().amax() * norm.weight.numel() ** 0.5 + torch.linalg.vector_norm(bias)
    return radius.detach()
