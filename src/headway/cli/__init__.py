"""The command line: one module a command, imported only when the command is asked for.

Start with `main`, which lists the commands.

1. What a user can correct is one line on stderr and exit status 2, never a traceback.
2. A command that needs an extra says which before it begins.
"""
