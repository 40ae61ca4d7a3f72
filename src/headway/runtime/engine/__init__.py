"""The engine of one instance: a core loop that schedules, executes and updates, in a process of its own.

`core` is the loop's body, `service` its sockets, `client` and `engine_child` the server's end, `protocol` the messages
between the two. Nothing in here imports torch.
"""
