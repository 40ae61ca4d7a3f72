"""The OpenAI-compatible HTTP server: parses and checks requests, turns tokens into text, streams. No torch in here."""
