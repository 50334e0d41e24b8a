"""`bench serve`: load on an OpenAI server over HTTP, measured as the one who asks sees it."""
