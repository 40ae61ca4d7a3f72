"""Many instances behind one endpoint: the controller's live side, native instances, and servers behind HTTP.

Start with `client` (the cluster as one engine), `driver` (its controller, and what instances report), `requests` (a
request, its attempts and retries) and the two backends, `native_backend` and `http_backend`.

1. Placement policies and `headway.control` are those of the simulator; what instances cannot do they declare.
2. One event loop, one message at a time, one settling of the controller after each.
3. A lost instance loses its KV and no request: the next attempt begins with the tokens so far.
4. No torch in here.
"""
