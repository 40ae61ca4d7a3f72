"""The live page: what runs now and why requests wait, from a server, a cluster or a log."""
