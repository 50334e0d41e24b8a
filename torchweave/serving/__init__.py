"""An OpenAI server over the engine: HTTP in this process, the generation loop in another."""
