"""What can be seen and changed of a run while it is live, from its own code or by attached clients."""
