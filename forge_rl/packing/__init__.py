"""Packing: rows of episodes that share their prompts, and the minibatches that they are dealt to."""
