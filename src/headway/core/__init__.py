"""The vocabulary that everything else shares: requests, batches, settings, files, logs and errors.

Start with `request`, `batch` and `settings`.

1. Nothing here imports another package of Headway, torch or an event loop.
2. Requests, spans and batches are immutable; a batch carries only what has changed since the one before it.
3. Every error that a user can correct is a `HeadwayError` with one sentence that says what to do.
"""
