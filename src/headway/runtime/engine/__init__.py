"""The engine of one instance: a core loop that schedules, executes and updates, in a process of its own.

Start with `core` (the loop's body), `service` (its sockets) and `client` (the server's end).

1. A prompt is sent once; no later message grows with its length.
2. The loop never waits for a client.
3. Nothing in here imports torch.
"""
