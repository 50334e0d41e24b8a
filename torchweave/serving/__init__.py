"""OpenAI-compatible server: HTTP in this process, the engine in another."""
