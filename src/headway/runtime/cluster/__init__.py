"""Many instances behind one endpoint: the controller's live side, native instances, and servers behind HTTP.

Start with `client` (the cluster as one engine), `driver` (the controller's messages) and `native_backend`;
`http_client`, `http_driver` and `http_backend` are the same three over HTTP.

1. Placement policies and `headway.control` are those of the simulator; what instances cannot do they declare.
2. One event loop, one message at a time, one settling of the controller after each.
3. A lost instance loses its KV and no request: the next attempt begins with the tokens so far.
4. No torch in here.
"""
