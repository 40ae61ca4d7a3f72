"""The OpenAI-compatible HTTP server: parses and checks requests, turns tokens into text, streams. No torch in here.

Start with `app` (the endpoints), `jobs` (a checked request) and `answer` (its tokens as text).

1. Whatever a client sends is bounded in size, time and memory, and refused with the field's name and limit.
2. An accepted request is answered also across restarts of the engine, and with a journal across those of the server.
3. Prompts and answers are never logged.
"""
