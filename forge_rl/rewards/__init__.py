"""Rewards: the Reward protocol, verifiers, and finding the final answer in a completion."""
