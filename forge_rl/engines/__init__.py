"""Engines: torchtitan trains, vLLM decodes, each behind an interface of `protocol.py`."""

ENGINE_DIED = 71
"""Exit status of a process whose child engine process died."""
ENGINE_STALLED = 72
"""Exit status of a process whose engine hung in a step."""
EXIT_MEANINGS = {
    ENGINE_DIED: "its vLLM engine process died",
    ENGINE_STALLED: "hung: a step of its vLLM engine took longer than --generator.stall-s",
}
"""Exit statuses in words."""
