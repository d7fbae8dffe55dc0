"""Reward functions for other trainers that ask a running reward server: `trl`, and files for `verl` and `openrlhf`."""
