"""What forge_rl needs of the operating system and of asyncio: private folders, child processes without secrets, safe
terminals, groups of tasks.
"""
