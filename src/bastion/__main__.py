"""`python -m bastion`, the same as `bastion`."""

from bastion.cli import main

main()
