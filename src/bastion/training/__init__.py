"""The training loop and its parts."""

import bastion._torchvision  # noqa: F401  (before any module here imports timm)
