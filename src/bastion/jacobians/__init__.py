"""Jacobians by their products alone: largest singular values, of every part of a network. None is ever stored."""
