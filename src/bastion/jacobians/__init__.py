"""Largest singular values of Jacobians of networks and their parts, by products with vectors; no Jacobian is stored."""
