"""What forge_rl needs of the operating system: private folders, child processes without secrets, safe terminals."""
