"""Rewards: what an answer is worth, from 0 to 1."""
