"""Code that runs inside sandbox sessions, sent there as text: it imports the standard library only."""
