"""Engines: torchtitan trains, vLLM decodes, each behind an interface of `protocol.py`."""

ENGINE_DIED = 71
"""Exit status of a process whose child engine process died."""
ENGINE_STALLED = 72
"""Exit status of a process whose engine hung in a step."""
SERVER_GONE = 73
"""Exit status of a process whose engine, in a server that others run, is gone."""
EXIT_MEANINGS = {
    ENGINE_DIED: "its vLLM engine process died",
    ENGINE_STALLED: "hung: a step of its vLLM engine took longer than --generator.stall-s",
    SERVER_GONE: "the server of its engine is gone",
}
"""Exit statuses in words."""
