"""The one training loop and what it is made of."""

import bastion._torchvision  # noqa: F401  (before any module here imports timm)
