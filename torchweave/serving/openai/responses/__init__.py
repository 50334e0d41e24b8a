"""OpenAI's Responses API, translated to chat requests: bodies, items of the input and the output, events, stored responses."""
