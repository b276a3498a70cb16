"""Rewards: the Reward protocol, bundled rewards, and answer extraction."""
