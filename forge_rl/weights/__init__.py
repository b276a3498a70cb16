"""Immutable versions of the policy, from the trainer to the engines."""
