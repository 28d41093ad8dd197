"""Singular values of Jacobians by products alone: no Jacobian is ever stored."""
