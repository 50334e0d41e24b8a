"""`bench serve`: load an OpenAI server over HTTP and measure latency and throughput at the client."""
