"""`Card`: what a model is rebuilt from, besides its weights. No torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator

CARD = "card.json"


class Card(BaseModel):
    """What is needed to rebuild a model besides its weights."""

    format: Literal[1, 2] = 2  # 1: without logits and checksum
    model: dict[str, Any]  # what the registry builds the backbone from
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shape: tuple[int, int, int]
    resize: Literal["bilinear", "bicubic"] | None = None
    parameters: int = Field(ge=0, le=10**15)
    weights: str = Field(pattern="^[0-9a-f]{4,64}$")  # `digest` of the model; names the file
    logits: tuple[tuple[float, ...], ...] = ()  # of two fixed images, compared when the model is loaded
    # `digest` of the networks that the objective trained beside the model; names their file
    networks: str | None = Field(None, pattern="^[0-9a-f]{64}$")
    about: dict[str, Any] = {}

    @field_validator("model")
    @classmethod
    def _check_name(cls, model: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(model.get("name"), str):
            raise ValueError("its name must be text")
        return model
