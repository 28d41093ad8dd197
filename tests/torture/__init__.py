"""Faults on purpose: commands are killed, stopped and starved of disk at any file call, and must come to the same end.

python -m tests.torture --minutes 20 --seed 0
"""
