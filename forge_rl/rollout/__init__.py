"""Rollouts: what runs next (pure logic), what carries it out, and how an episode is made."""
